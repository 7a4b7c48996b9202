// Rows of sines and cosines for the CPU kernel: one row per (head, token), used for every batch.
//
// fp32 and narrower. A phase is a coarse position (a multiple of 16) plus a fine one (0..15). The
// fine rows are made once per call and head, the coarse ones once per 16 tokens, both to full fp32
// accuracy from the exact phase; a token's row is then one complex product, 4 operations instead of
// about 25:
//     cos(a + f) = cos a cos f - sin a sin f,    sin(a + f) = sin a cos f + cos a sin f
// Positions, not places in the call, decide the split, so prefill and decode give the same bits.
// The product is off by at most 1.5e-7 of the length of the pair (x1, x2), which keeps fp32's 2e-7;
// but close to a zero of the sine that is more than a 16-bit ulp of the value itself. Those few
// elements (2 % of rows hold one) are found by |sin cos| and computed again from the exact phase.
// Tried: the polynomial for every element, 2.6x slower in 1-D on two Neoverse-V1 cores.
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

inline constexpr int kFineBits = 4;
inline constexpr std::int64_t kFine = std::int64_t{1} << kFineBits;
// Rows are padded so that whole vectors (up to 16 lanes) may be read and written past their end.
inline constexpr std::int64_t kRowPad = 16;

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
  float* fine_cos = nullptr;      // [rows][kFine][width]
  float* fine_sin = nullptr;
};
template <>
struct ThetaTables<double> {
  std::int64_t width = 0;
  Turn* step = nullptr;      // [rows][width]
  double* poison = nullptr;  // 0, or NaN where theta is not finite
};

// sin and cos of n turns to fp32 accuracy; arrays are padded to kRowPad.
inline void sincos_row(const std::uint64_t* turn, std::int64_t n, float* s, float* c) {
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

// (c, s) = (ac, as) * (fc, fs) as complex numbers. Says whether some |sin| or |cos| may be below
// `near`.
inline bool compose_row(const float* ac, const float* as, const float* fc, const float* fs,
                        std::int64_t n, float near, float* c, float* s) {
#if ANNULUS_HAVE_HWY
  namespace hn = hwy::HWY_NAMESPACE;
  const simd::F32 d;
  const auto lanes = static_cast<std::int64_t>(hn::Lanes(d));
  const auto limit = hn::Set(d, near);
  auto low = hn::Set(d, 1.0f);
  for (std::int64_t i = 0; i < n; i += lanes) {
    const auto vac = hn::LoadU(d, ac + i);
    const auto vas = hn::LoadU(d, as + i);
    const auto vfc = hn::LoadU(d, fc + i);
    const auto vfs = hn::LoadU(d, fs + i);
    const auto vc = hn::NegMulAdd(vas, vfs, hn::Mul(vac, vfc));
    const auto vs = hn::MulAdd(vac, vfs, hn::Mul(vas, vfc));
    hn::StoreU(vc, d, c + i);
    hn::StoreU(vs, d, s + i);
    low = hn::Min(low, hn::Abs(hn::Mul(vc, vs)));
  }
  return near > 0 && !hn::AllFalse(d, hn::Lt(low, limit));
#else
  float low = 1.0f;
  for (std::int64_t i = 0; i < n; ++i) {
    c[i] = ac[i] * fc[i] - as[i] * fs[i];
    s[i] = as[i] * fc[i] + ac[i] * fs[i];
    low = std::min(low, std::abs(c[i] * s[i]));
  }
  return low < near;
#endif
}

// Below this |value| the product's error may pass 0.4 ulp of the stored type: 1.5e-7 / (0.4 ulp).
template <class T>
inline constexpr float kNearZero = 0.0f;
template <>
inline constexpr float kNearZero<bfloat16> = 1.2e-4f;
template <>
inline constexpr float kNearZero<float16> = 8.0e-4f;

// The rows of up to kTile consecutive tokens, for storage type T computing in Real. A segment's row
// is kept once and pointed at for as long as its axis does not move, in a ring of kTile + 1 rows:
// one more than a tile can use, so the row a tile begins with is never overwritten within it.
//
// A tile, rather than a token, is what is applied to each sequence of the batch in turn: writing to
// two sequences alternately, row by row, breaks the CPU's write streaming unless every row starts
// on a cache line (on Neoverse-V1 12.4 ms where this order takes 3.4).
inline constexpr int kTile = 16;

template <class Real>
struct RowRing {
  Real *cos = nullptr, *sin = nullptr;  // [kTile + 1][padded length]
  std::int64_t stride = 0;
  int current = 0;

  void advance() { current = (current + 1) % (kTile + 1); }
  Real* c() const { return cos + current * stride; }
  Real* s() const { return sin + current * stride; }
};

template <class T, class Real = compute_t<T>>
class PhaseTile {
 public:
  // Scratch per worker, in Reals and in turns.
  static std::int64_t reals(std::int64_t width) { return (2 * (kTile + 1) + 2) * width; }
  static std::int64_t turns(std::int64_t width) { return width; }

  PhaseTile(const Segments& segments, const ThetaTables<Real>& tables, Real* scratch,
            std::uint64_t* turns)
      : segments_(segments), tables_(tables), turn_(turns) {
    anchor_cos_ = scratch;
    anchor_sin_ = scratch + segments.width;
    Real* p = scratch + 2 * segments.width;
    for (int i = 0; i < segments.count; ++i) {
      RowRing<Real>& r = ring_[i];
      r.stride = round_up(segments.at[i].length, kRowPad);
      r.cos = p;
      r.sin = p + (kTile + 1) * r.stride;
      p += 2 * (kTile + 1) * r.stride;
    }
  }

  void start_head(std::int64_t theta_row) {
    row_ = theta_row;
    for (auto& k : known_) k = false;
    // The padding of a row stays an eighth of a turn from every zero, so it never asks for a second
    // look.
    for (int i = 0; i < segments_.count; ++i) {
      const Segment& g = segments_.at[i];
      std::fill(turn_ + g.slot + g.length, turn_ + g.slot + round_up(g.length, kRowPad),
                1ull << 61);
    }
  }

  // Row `token` of the tile: without a position, or at one per axis.
  void set_zero_phase(int token) {
    for (int i = 0; i < segments_.count; ++i) {
      if (!known_[i] || !zero_[i]) {
        ring_[i].advance();
        std::fill_n(ring_[i].c(), ring_[i].stride, Real{1});
        std::fill_n(ring_[i].s(), ring_[i].stride, Real{0});
        known_[i] = zero_[i] = true;
      }
      point(i, token);
    }
  }

  void set_positions(int token, const std::int64_t* position) {
    for (int i = 0; i < segments_.count; ++i) {
      const std::int64_t p = position[segments_.at[i].axis];
      if (!known_[i] || zero_[i] || position_[i] != p) {
        ring_[i].advance();
        make_row(i, p);
        known_[i] = true;
        zero_[i] = false;
        position_[i] = p;
      }
      point(i, token);
    }
  }

  // Row `token` of segment i.
  const Real* cos(int i, int token) const { return cos_[i][token]; }
  const Real* sin(int i, int token) const { return sin_[i][token]; }

 private:
  void point(int i, int token) {
    cos_[i][token] = ring_[i].c();
    sin_[i][token] = ring_[i].s();
  }

  void make_row(int i, std::int64_t position) {
    const Segment& g = segments_.at[i];
    const std::int64_t first = row_ * tables_.width;
    Real* c = ring_[i].c();
    Real* s = ring_[i].s();
    if constexpr (std::is_same_v<Real, double>) {
      for (std::int64_t k = 0; k < g.length; ++k) {
        sincos_turn(turn_at(tables_.step[first + k], position), s[k], c[k]);
        c[k] += tables_.poison[first + k];
        s[k] += tables_.poison[first + k];
      }
    } else {
      const std::int64_t anchor = position & ~(kFine - 1);
      const std::uint64_t* step = tables_.step + first;
      if (!known_[i] || zero_[i] || anchor_[i] != anchor) move_anchor(i, anchor);
      const std::int64_t fine = (row_ * kFine + (position - anchor)) * tables_.width;
      if (compose_row(anchor_cos_ + g.slot, anchor_sin_ + g.slot, tables_.fine_cos + fine,
                      tables_.fine_sin + fine, g.length, kNearZero<T>, c, s)) {
        for (std::int64_t k = 0; k < g.length; ++k) {
          if (std::abs(c[k] * s[k]) < kNearZero<T>) {
            sincos_turn(turn_at(step[k], position), s[k], c[k]);
          }
        }
      }
    }
  }

  void move_anchor(int i, std::int64_t anchor) {
    const Segment& g = segments_.at[i];
    const std::uint64_t* step = tables_.step + row_ * tables_.width;
    std::uint64_t* turn = turn_ + g.slot;
    if (known_[i] && !zero_[i] && anchor == anchor_[i] + kFine) {
      for (std::int64_t k = 0; k < g.length; ++k) turn[k] += step[k] << kFineBits;
    } else {
      for (std::int64_t k = 0; k < g.length; ++k) turn[k] = turn_at(step[k], anchor);
    }
    sincos_row(turn, g.length, anchor_sin_ + g.slot, anchor_cos_ + g.slot);
    anchor_[i] = anchor;
  }

  static constexpr int kMaxSegments = LrpeGrid::kMaxAxes;
  const Segments& segments_;
  const ThetaTables<Real>& tables_;
  std::uint64_t* turn_;
  Real *anchor_cos_, *anchor_sin_;
  RowRing<Real> ring_[kMaxSegments];
  const Real* cos_[kMaxSegments][kTile] = {};
  const Real* sin_[kMaxSegments][kTile] = {};
  std::int64_t row_ = 0;
  std::int64_t position_[kMaxSegments] = {};
  std::int64_t anchor_[kMaxSegments] = {};
  bool known_[kMaxSegments] = {};
  bool zero_[kMaxSegments] = {};
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
    if (!(fine_rows >> f & 1u)) continue;
    float* c = t.fine_cos + (row * kFine + f) * t.width;
    float* s = t.fine_sin + (row * kFine + f) * t.width;
    for (std::int64_t k = 0; k < t.width; ++k) turn[k] = turn_at(step[k], f);
    sincos_row(turn, t.width, s, c);
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
