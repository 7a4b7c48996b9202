// Sines and cosines for the CPU kernel.
//
// fp32 and narrower. A phase is a coarse position (a multiple of 32, the anchor) plus a fine one
// (0..31). The fine rows are made once per call and head, an anchor's row once per 32 tokens, both
// to full fp32 accuracy from the exact phase; an element's sine and cosine are then one complex
// product, 4 operations instead of about 25:
//     cos(a + f) = cos a cos f - sin a sin f,    sin(a + f) = sin a cos f + cos a sin f
// Positions, not places in the call, decide the split, so prefill and decode give the same bits.
// The product is off by at most 1.5e-7 of the length of the pair (x1, x2), which keeps fp32's 2e-7;
// but close to a zero of the sine that is more than a 16-bit ulp of the value itself. A row that
// holds such an element (one in forty of 128 columns in bf16, if phases are spread evenly) is found beforehand, by 16 bits of its phases, and
// made in a buffer of its own with those elements from the exact phase.
//
// fp64: every element from 128 bits of phase, by the reference's own function.
#if defined(ANNULUS_LRPE_COSINE_ROWS_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef ANNULUS_LRPE_COSINE_ROWS_INL_H_
#undef ANNULUS_LRPE_COSINE_ROWS_INL_H_
#else
#define ANNULUS_LRPE_COSINE_ROWS_INL_H_
#endif

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <limits>
#include <type_traits>

#include "annulus/core/checked.h"
#include "annulus/cpu/simd-inl.h"
#include "annulus/lrpe_cosine/lrpe_cosine_plan.h"
#include "annulus/lrpe_cosine/phase.h"

HWY_BEFORE_NAMESPACE();
namespace annulus::lrpe::HWY_NAMESPACE {

namespace simd = annulus::cpu::HWY_NAMESPACE;

inline constexpr int kFineBits = 5;
inline constexpr std::int64_t kFine = std::int64_t{1} << kFineBits;
// Rows are padded so that whole vectors (two of up to 16 lanes) may be read and written past their
// end.
inline constexpr std::int64_t kRowPad = 32;

// a b + c and c - a b, by the vector unit's own instruction for single numbers too: every path of a
// target rounds alike, so a layout never changes a bit.
namespace ops {
#if ANNULUS_HAVE_HWY
namespace hn = hwy::HWY_NAMESPACE;
template <class V>
HWY_INLINE V mul(V a, V b) {
  return hn::Mul(a, b);
}
template <class V>
HWY_INLINE V mul_add(V a, V b, V c) {
  return hn::MulAdd(a, b, c);
}
template <class V>
HWY_INLINE V neg_mul_add(V a, V b, V c) {
  return hn::NegMulAdd(a, b, c);
}
// Whether any |v| is below the limit; a NaN counts as one that is, so that it hides nothing.
HWY_INLINE bool some_below(simd::VF v, float limit) {
  const simd::F32 d;
  return !hn::AllTrue(d, hn::Ge(hn::Abs(v), hn::Set(d, limit)));
}
// The first n lanes of a (none where n <= 0), the others of b.
HWY_INLINE simd::VF splice(std::int64_t n, simd::VF a, simd::VF b) {
  const auto first =
      hn::FirstN(simd::F32(), static_cast<std::size_t>(std::max<std::int64_t>(n, 0)));
  return hn::IfThenElse(first, a, b);
}
template <class Real>
HWY_INLINE Real one_mul_add(Real a, Real b, Real c) {
  const hn::CappedTag<Real, 1> d;
  return hn::GetLane(hn::MulAdd(hn::Set(d, a), hn::Set(d, b), hn::Set(d, c)));
}
#else
inline float mul(float a, float b) { return a * b; }
inline bool some_below(float v, float limit) { return !(std::abs(v) >= limit); }
inline float splice(std::int64_t n, float a, float b) { return n > 0 ? a : b; }
template <class Real>
inline Real one_mul_add(Real a, Real b, Real c) {
#if defined(__FP_FAST_FMA)
  return std::fma(a, b, c);
#else
  return a * b + c;
#endif
}
inline float mul_add(float a, float b, float c) { return one_mul_add(a, b, c); }
inline float neg_mul_add(float a, float b, float c) { return one_mul_add(-a, b, c); }
#endif
}  // namespace ops

// The columns of one axis: `length` of them from `column` on, kept from `slot` on in every row
// buffer.
struct Segment {
  int axis = 0;
  std::int64_t column = 0, length = 0, slot = 0;
};

struct Segments {
  int count = 0;
  Segment at[LrpeGrid::kMaxAxes];
  std::int64_t width = 0;  // of a row buffer
};

inline Segments make_segments(const Plan& plan) {
  Segments s;
  for (int j = 0; j < plan.axes; ++j) {
    const std::int64_t column = j * plan.E;
    const std::int64_t length = std::min(plan.E, plan.C - column);
    if (length <= 0) break;
    s.at[s.count++] = {j, column, length, s.width};
    s.width += round_up(length, kRowPad);
  }
  return s;
}

// What depends on theta alone: per row of theta, padded to `width` = round_up(E, kRowPad) entries.
template <class Real>
struct ThetaTables;
template <>
struct ThetaTables<float> {
  std::int64_t width = 0;
  std::uint64_t* step = nullptr;  // [rows][width]
  // [rows][kFine][2][width], cosines then sines. One head's 32 rows lie together (32 KiB at E =
  // 128): as two tables a power of two apart they fight for the same sets of a 4-way first-level
  // cache. kRowPad entries before and after them may be read.
  float* fine = nullptr;

  float* fine_cos(std::int64_t row, std::int64_t f) const {
    return fine + 2 * (row * kFine + f) * width;
  }
  float* fine_sin(std::int64_t row, std::int64_t f) const { return fine_cos(row, f) + width; }

  // [rows][kFine][width]: the place of each phase in its quarter turn, for types that look for zeros.
  std::uint16_t* near = nullptr;
  std::uint16_t* fine_near(std::int64_t row, std::int64_t f) const {
    return near + (row * kFine + f) * width;
  }
};
template <>
struct ThetaTables<double> {
  std::int64_t width = 0;
  Turn* step = nullptr;      // [rows][width]
  double* poison = nullptr;  // 0, or NaN where theta is not finite
};

// turn += step << bits, for n of them; arrays are padded to kRowPad.
template <int kBits>
inline void advance_turns(const std::uint64_t* step, std::int64_t n, std::uint64_t* turn) {
#if ANNULUS_HAVE_HWY
  namespace hn = hwy::HWY_NAMESPACE;
  const hn::ScalableTag<std::uint64_t> d;
  const auto lanes = static_cast<std::int64_t>(hn::Lanes(d));
  for (std::int64_t k = 0; k < n; k += lanes) {
    hn::StoreU(hn::Add(hn::LoadU(d, turn + k), hn::ShiftLeft<kBits>(hn::LoadU(d, step + k))), d,
               turn + k);
  }
#else
  for (std::int64_t k = 0; k < n; ++k) turn[k] += step[k] << kBits;
#endif
}

// sin and cos of n turns to fp32 accuracy; arrays are padded to kRowPad. Not inlined, so that its constants
// find registers.
HWY_NOINLINE void sincos_row(const std::uint64_t* turn, std::int64_t n, float* s, float* c) {
#if ANNULUS_HAVE_HWY
  namespace hn = hwy::HWY_NAMESPACE;
  using P = SinCosF32;
  const simd::F32 d;
  const hn::RebindToSigned<simd::F32> di;
  const hn::RebindToUnsigned<simd::F32> du;
  const hn::ScalableTag<std::uint64_t> du64;
  const auto lanes = static_cast<std::int64_t>(hn::Lanes(d));
  const auto lanes64 = static_cast<std::int64_t>(hn::Lanes(du64));
  for (std::int64_t i = 0; i < n; i += lanes) {
    const auto t0 = hn::LoadU(du64, turn + i);
    const auto t1 = hn::LoadU(du64, turn + i + lanes64);
    // Upper halves: of the turn, whose top bits name the quadrant, and of the turn times 4, which
    // as a signed number is what is left over the nearest quarter turn.
    const auto high = hn::ConcatOdd(du, hn::BitCast(du, t1), hn::BitCast(du, t0));
    const auto rest = hn::ConcatOdd(du, hn::BitCast(du, hn::ShiftLeft<2>(t1)),
                                    hn::BitCast(du, hn::ShiftLeft<2>(t0)));
    const auto u =
        hn::Mul(hn::ConvertTo(d, hn::BitCast(di, rest)), hn::Set(d, 0x1p-31f));  // -1 .. 1
    const auto u2 = hn::Mul(u, u);
    auto ps = hn::MulAdd(u2, hn::Set(d, P::kSin3), hn::Set(d, P::kSin2));
    ps = hn::MulAdd(u2, ps, hn::Set(d, P::kSin1));
    ps = hn::Mul(u, hn::MulAdd(u2, ps, hn::Set(d, P::kSin0)));
    auto pc = hn::MulAdd(u2, hn::Set(d, P::kCos3), hn::Set(d, P::kCos2));
    pc = hn::MulAdd(u2, pc, hn::Set(d, P::kCos1));
    pc = hn::MulAdd(u2, pc, hn::Set(d, P::kCos0));
    pc = hn::MulAdd(u2, pc, hn::Set(d, 1.0f));

    const auto quadrant = hn::Add(high, hn::Set(du, 1u << 29));  // in the top two bits
    const auto sign = hn::Set(du, 1u << 31);
    const auto odd = hn::MaskFromVec(
        hn::BitCast(d, hn::BroadcastSignBit(hn::BitCast(di, hn::ShiftLeft<1>(quadrant)))));
    const auto sin_sign = hn::And(quadrant, sign);
    const auto cos_sign = hn::And(hn::Add(quadrant, hn::Set(du, 1u << 30)), sign);
    hn::StoreU(hn::Xor(hn::IfThenElse(odd, pc, ps), hn::BitCast(d, sin_sign)), d, s + i);
    hn::StoreU(hn::Xor(hn::IfThenElse(odd, ps, pc), hn::BitCast(d, cos_sign)), d, c + i);
  }
#else
  for (std::int64_t i = 0; i < n; ++i) sincos_turn(turn[i], s[i], c[i]);
#endif
}

// Below this |value| the product's error may pass 0.4 ulp of the stored type: 1.5e-7 / (0.4 ulp).
template <class T>
inline constexpr float kNearZero = 0.0f;
template <>
inline constexpr float kNearZero<bfloat16> = 1.2e-4f;
template <>
inline constexpr float kNearZero<float16> = 8.0e-4f;

// The same question in whole numbers, asked of all phases of a row: the place of a phase in its quarter
// turn, in 2^-16 of one, is the sum of those of its anchor and its fine part; either is cut off, so
// the sum is low by less than 2. |sin cos| < limit needs a place within 2 limit / pi quarter turns
// of a whole one (the 1.01 holds the curvature and the rounding of sin and cos). kNearHalf is added
// to the anchor's place: what is near then lies below kNearWindow.
template <class T>
inline constexpr int kNearHalf = static_cast<int>(kNearZero<T> * 65536 * 0.6366198f * 1.01f) + 3;
template <class T>
inline constexpr int kNearWindow = 2 * kNearHalf<T> - 2;
inline std::uint16_t place_in_quarter(std::uint64_t turn) {
  return static_cast<std::uint16_t>(turn << 2 >> 48);
}
// Whether the sum of two places is below `window` in any of n columns; rows are padded.
inline bool any_near(const std::uint16_t* a, const std::uint16_t* b, std::int64_t n, int window) {
#if ANNULUS_HAVE_HWY
  namespace hn = hwy::HWY_NAMESPACE;
  const hn::ScalableTag<std::uint16_t> d;
  const auto lanes = static_cast<std::int64_t>(hn::Lanes(d));
  auto least = hn::Set(d, 0xffff);
  for (std::int64_t k = 0; k < n; k += lanes) {
    least = hn::Min(least, hn::Add(hn::LoadU(d, a + k), hn::LoadU(d, b + k)));
  }
  return !hn::AllFalse(d, hn::Lt(least, hn::Set(d, static_cast<std::uint16_t>(window))));
#else
  bool near = false;
  for (std::int64_t k = 0; k < n; ++k) near |= static_cast<std::uint16_t>(a[k] + b[k]) < window;
  return near;
#endif
}

// Where the phases of one segment of one token come from: the product of two rows. Where it is `alone`,
// the first row is the phase itself and the second is phase zero, (1, 0), which changes no bit of it.
struct TokenPhase {
  const float *anchor_cos, *anchor_sin, *fine_cos, *fine_sin;
};

// (anchor) * (fine), for a vector of columns and for one of them, rounded alike.
using simd_t = decltype(simd::load(static_cast<const float*>(nullptr)));
HWY_INLINE void compose_vector(const float* anchor_cos, const float* anchor_sin,
                               const float* fine_cos, const float* fine_sin, simd_t& s, simd_t& c) {
  const auto ac = simd::load(anchor_cos);
  const auto as = simd::load(anchor_sin);
  const auto fc = simd::load(fine_cos);
  const auto fs = simd::load(fine_sin);
  c = ops::neg_mul_add(as, fs, ops::mul(ac, fc));
  s = ops::mul_add(ac, fs, ops::mul(as, fc));
}
HWY_INLINE void compose_vector(const TokenPhase& p, std::int64_t k, simd_t& s, simd_t& c) {
  compose_vector(p.anchor_cos + k, p.anchor_sin + k, p.fine_cos + k, p.fine_sin + k, s, c);
}
inline void compose(const TokenPhase& p, std::int64_t k, float& s, float& c) {
  c = ops::one_mul_add(-p.anchor_sin[k], p.fine_sin[k], p.anchor_cos[k] * p.fine_cos[k]);
  s = ops::one_mul_add(p.anchor_cos[k], p.fine_sin[k], p.anchor_sin[k] * p.fine_cos[k]);
}

// The phases of up to kTile consecutive tokens. The anchors they use are kept in a ring: a run of
// 64 tokens meets at most 5 of them on an axis (an extent of 33 alternates between two), so none
// is overwritten while a token of the tile points at it.
inline constexpr int kTile = 64;
inline constexpr int kRing = 8;

template <class T, class Real = compute_t<T>>
class Phases;

template <class T>
class Phases<T, float> {
 public:
  static constexpr bool kExactNearZero = kNearZero<T> > 0;
  // Rows with an element near zero that a tile may hold; it ends where there is no room for another.
  static constexpr int kMended = kExactNearZero ? 8 : 0;
  static_assert(kMended == 0 || kMended >= LrpeGrid::kMaxAxes);
  // Scratch per worker for rows of `width`: floats, turns and places in the quarter turn.
  static std::int64_t reals(std::int64_t width) { return 2 * (kRing + 1 + kMended) * width; }
  static std::int64_t turns(std::int64_t width) { return width; }
  static std::int64_t places(std::int64_t width) { return kExactNearZero ? kRing * width : 0; }

  Phases(const Segments& segments, const ThetaTables<float>& tables, float* scratch,
         std::uint64_t* turns, std::uint16_t* places)
      : segments_(segments), tables_(tables), ring_(scratch), turn_(turns), place_(places) {
    // The row after the ring is phase zero: (1, 0) whether taken as anchor or as fine.
    zero_cos_ = scratch + 2 * kRing * segments.width;
    zero_sin_ = zero_cos_ + segments.width;
    mended_ = zero_sin_ + segments.width;
    std::fill_n(zero_cos_, segments.width, 1.0f);
    std::fill_n(zero_sin_, segments.width, 0.0f);
  }

  void start_head(std::int64_t theta_row) {
    row_ = theta_row;
    for (auto& k : known_) k = false;
    // The padding of a row starts an eighth of a turn from every zero, so that it seldom looks near one.
    for (int i = 0; i < segments_.count; ++i) {
      const Segment& g = segments_.at[i];
      std::fill(turn_ + g.slot + g.length, turn_ + g.slot + round_up(g.length, kRowPad),
                1ull << 61);
    }
  }

  void start_tile() { mended_rows_ = 0; }
  bool has_room() const { return !kExactNearZero || mended_rows_ + segments_.count <= kMended; }

  void set_zero_phase(int token) {
    for (int i = 0; i < segments_.count; ++i) {
      const std::int64_t slot = segments_.at[i].slot;
      set_alone(i, token, zero_cos_ + slot, zero_sin_ + slot);
    }
    all_alone_[token] = true;
  }

  void set_positions(int token, const std::int64_t* position) {
    all_alone_[token] = true;
    for (int i = 0; i < segments_.count; ++i) {
      const std::int64_t p = position[segments_.at[i].axis];
      const std::int64_t anchor = p & ~(kFine - 1);
      if (!known_[i] || anchor_[i] != anchor) move_anchor(i, anchor);
      const float* fine_cos = tables_.fine_cos(row_, p - anchor);
      const float* fine_sin = tables_.fine_sin(row_, p - anchor);
      if (anchor == 0) {  // as on most axes of a grid, which are short
        set_alone(i, token, fine_cos, fine_sin);
      } else {
        at_[i][token] = {anchor_cos(i), anchor_sin(i), fine_cos, fine_sin};
        alone_[i][token] = false;
      }
      if constexpr (kExactNearZero) {
        // At position 0 the product is exact.
        if (p != 0 && any_near(anchor_place(i), tables_.fine_near(row_, p - anchor),
                               segments_.at[i].length, kNearWindow<T>)) {
          mend(i, token, p);
        }
      }
      all_alone_[token] = all_alone_[token] && alone_[i][token];
    }
  }

  const TokenPhase& at(int i, int token) const { return at_[i][token]; }
  bool alone(int i, int token) const { return alone_[i][token]; }
  bool all_alone(int token) const { return all_alone_[token]; }  // all segments of the token

  // The whole row of a token.
  void row(int token, float* c, float* s) const {
    for (int i = 0; i < segments_.count; ++i) {
      const Segment& g = segments_.at[i];
      compose_row(at_[i][token], g.length, c + g.slot, s + g.slot);
    }
  }

 private:
  float* anchor_cos(int i) const {
    return ring_ + 2 * current_[i] * segments_.width + segments_.at[i].slot;
  }
  float* anchor_sin(int i) const { return anchor_cos(i) + segments_.width; }
  std::uint16_t* anchor_place(int i) const {
    return place_ + current_[i] * segments_.width + segments_.at[i].slot;
  }

  static void compose_row(const TokenPhase& p, std::int64_t n, float* c, float* s) {
    const auto lanes = static_cast<std::int64_t>(simd::lanes());
    for (std::int64_t k = 0; k < n; k += lanes) {
      simd_t vc, vs;
      compose_vector(p, k, vs, vc);
      simd::store(vc, c + k);
      simd::store(vs, s + k);
    }
  }

  void move_anchor(int i, std::int64_t anchor) {
    const Segment& g = segments_.at[i];
    const std::uint64_t* step = tables_.step + row_ * tables_.width;
    std::uint64_t* turn = turn_ + g.slot;
    if (known_[i] && anchor == wrapping_add(anchor_[i], kFine)) {
      advance_turns<kFineBits>(step, g.length, turn);
    } else {
      for (std::int64_t k = 0; k < g.length; ++k) turn[k] = turn_at(step[k], anchor);
    }
    current_[i] = (current_[i] + 1) % kRing;
    sincos_row(turn, g.length, anchor_sin(i), anchor_cos(i));
    if constexpr (kExactNearZero) {
      std::uint16_t* place = anchor_place(i);
      for (std::int64_t k = 0; k < round_up(g.length, kRowPad); ++k) {
        place[k] = static_cast<std::uint16_t>(place_in_quarter(turn[k]) + kNearHalf<T>);
      }
    }
    known_[i] = true;
    anchor_[i] = anchor;
  }

  // Segment i of the token as a row of its own, exact where the product is too coarse.
  HWY_NOINLINE void mend(int i, int token, std::int64_t position) {
    const Segment& g = segments_.at[i];
    float* c = mended_ + 2 * mended_rows_++ * segments_.width + g.slot;
    float* s = c + segments_.width;
    compose_row(at_[i][token], g.length, c, s);
    const std::uint64_t* step = tables_.step + row_ * tables_.width;
    const auto lanes = static_cast<std::int64_t>(simd::lanes());
    for (std::int64_t k0 = 0; k0 < g.length; k0 += lanes) {
      const auto product = ops::mul(simd::load(c + k0), simd::load(s + k0));
      if (!ops::some_below(product, kNearZero<T>)) continue;
      for (std::int64_t k = k0; k < std::min(k0 + lanes, g.length); ++k) {
        if (std::abs(c[k] * s[k]) < kNearZero<T>)
          sincos_turn(turn_at(step[k], position), s[k], c[k]);
      }
    }
    set_alone(i, token, c, s);
  }

  void set_alone(int i, int token, const float* cosine, const float* sine) {
    const std::int64_t slot = segments_.at[i].slot;
    at_[i][token] = {cosine, sine, zero_cos_ + slot, zero_sin_ + slot};
    alone_[i][token] = true;
  }

  static constexpr int kMaxSegments = LrpeGrid::kMaxAxes;
  const Segments& segments_;
  const ThetaTables<float>& tables_;
  float* ring_;
  std::uint64_t* turn_;
  std::uint16_t* place_;
  float *zero_cos_, *zero_sin_, *mended_;
  int mended_rows_ = 0;
  TokenPhase at_[kMaxSegments][kTile] = {};
  bool alone_[kMaxSegments][kTile] = {};
  bool all_alone_[kTile] = {};
  std::int64_t row_ = 0;
  std::int64_t anchor_[kMaxSegments] = {};
  int current_[kMaxSegments] = {};
  bool known_[kMaxSegments] = {};
};

template <>
class Phases<double, double> {
 public:
  static std::int64_t reals(std::int64_t) { return 0; }
  static std::int64_t turns(std::int64_t) { return 0; }
  static std::int64_t places(std::int64_t) { return 0; }

  Phases(const Segments& segments, const ThetaTables<double>& tables, double*, std::uint64_t*,
         std::uint16_t*)
      : segments_(segments), tables_(tables) {}

  void start_head(std::int64_t theta_row) { row_ = theta_row; }
  void start_tile() {}
  bool has_room() const { return true; }
  void set_zero_phase(int token) { placed_[token] = false; }
  void set_positions(int token, const std::int64_t* position) {
    std::copy_n(position, LrpeGrid::kMaxAxes, position_[token]);
    placed_[token] = true;
  }

  void row(int token, double* c, double* s) const {
    for (int i = 0; i < segments_.count; ++i) {
      const Segment& g = segments_.at[i];
      for (std::int64_t k = 0; k < g.length; ++k) {
        double& sk = s[g.slot + k] = 0.0;
        double& ck = c[g.slot + k] = 1.0;
        if (!placed_[token]) continue;
        const std::int64_t entry = row_ * tables_.width + k;
        sincos_turn(turn_at(tables_.step[entry], position_[token][g.axis]), sk, ck);
        sk += tables_.poison[entry];
        ck += tables_.poison[entry];
      }
    }
  }

 private:
  const Segments& segments_;
  const ThetaTables<double>& tables_;
  std::int64_t row_ = 0;
  std::int64_t position_[kTile][LrpeGrid::kMaxAxes] = {};
  bool placed_[kTile] = {};
};

// Fills the tables of one row of theta, given as doubles. `fine_rows` says which of the kFine rows
// any token of the call will use: a single decoded token needs one.
inline void fill_tables(const ThetaTables<float>& t, std::int64_t row, const double* theta,
                        std::int64_t E, unsigned fine_rows, std::uint64_t* turn) {
  std::uint64_t* step = t.step + row * t.width;
  for (std::int64_t k = 0; k < t.width; ++k) {
    step[k] = k < E && std::isfinite(theta[k]) ? turn_step64(theta[k]) : 0;
  }
  for (std::int64_t f = 0; f < kFine; ++f) {
    float* c = t.fine_cos(row, f);
    float* s = t.fine_sin(row, f);
    if (!(fine_rows >> f & 1u)) continue;
    for (std::int64_t k = 0; k < t.width; ++k) turn[k] = turn_at(step[k], f);
    sincos_row(turn, t.width, s, c);
    if (t.near != nullptr) {
      for (std::int64_t k = 0; k < t.width; ++k) t.fine_near(row, f)[k] = place_in_quarter(turn[k]);
    }
    for (std::int64_t k = 0; k < E; ++k) {
      if (!std::isfinite(theta[k])) c[k] = s[k] = std::numeric_limits<float>::quiet_NaN();
    }
  }
}

inline void fill_tables(const ThetaTables<double>& t, std::int64_t row, const double* theta,
                        std::int64_t E, unsigned, std::uint64_t*) {
  for (std::int64_t k = 0; k < E; ++k) {
    const bool finite = std::isfinite(theta[k]);
    t.step[row * t.width + k] = finite ? turn_step(theta[k]) : Turn{};
    t.poison[row * t.width + k] = finite ? 0.0 : std::numeric_limits<double>::quiet_NaN();
  }
}

}  // namespace annulus::lrpe::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#endif  // toggling guard
