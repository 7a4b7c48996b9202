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
    auto ps = hn::MulAdd(u2, hn::Set(d, P::kSin[3]), hn::Set(d, P::kSin[2]));
    ps = hn::MulAdd(u2, ps, hn::Set(d, P::kSin[1]));
    ps = hn::Mul(u, hn::MulAdd(u2, ps, hn::Set(d, P::kSin[0])));
    auto pc = hn::MulAdd(u2, hn::Set(d, P::kCos[3]), hn::Set(d, P::kCos[2]));
    pc = hn::MulAdd(u2, pc, hn::Set(d, P::kCos[1]));
    pc = hn::MulAdd(u2, pc, hn::Set(d, P::kCos[0]));
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

// The current row for storage type T computing in Real.
template <class T, class Real = compute_t<T>>
class PhaseRow;

template <class T>
class PhaseRow<T, float> {
 public:
  // Scratch of `floats(width)` floats and `width` turns.
  static std::int64_t reals(std::int64_t width) { return 4 * width; }
  static std::int64_t turns(std::int64_t width) { return width; }

  PhaseRow(const Segments& segments, const ThetaTables<float>& tables, float* scratch,
           std::uint64_t* turns)
      : segments_(segments), tables_(tables), turn_(turns) {
    anchor_cos_ = scratch;
    anchor_sin_ = scratch + segments.width;
    cos_ = scratch + 2 * segments.width;
    sin_ = scratch + 3 * segments.width;
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

  // Tokens without a position.
  void set_zero_phase() {
    std::fill_n(cos_, segments_.width, 1.0f);
    std::fill_n(sin_, segments_.width, 0.0f);
    for (auto& k : known_) k = false;
  }

  void move(const Segment& g, std::int64_t position) {
    const int j = g.axis;
    if (known_[j] && position_[j] == position) return;
    const std::int64_t anchor = position & ~(kFine - 1);
    const std::uint64_t* step = tables_.step + row_ * tables_.width;
    if (!known_[j] || anchor_[j] != anchor) {
      std::uint64_t* turn = turn_ + g.slot;
      if (known_[j] && anchor == anchor_[j] + kFine) {
        for (std::int64_t k = 0; k < g.length; ++k) turn[k] += step[k] << kFineBits;
      } else {
        for (std::int64_t k = 0; k < g.length; ++k) turn[k] = turn_at(step[k], anchor);
      }
      sincos_row(turn, g.length, anchor_sin_ + g.slot, anchor_cos_ + g.slot);
    }
    known_[j] = true;
    anchor_[j] = anchor;
    position_[j] = position;
    const std::int64_t fine = (row_ * kFine + (position - anchor)) * tables_.width;
    float* c = cos_ + g.slot;
    float* s = sin_ + g.slot;
    if (compose_row(anchor_cos_ + g.slot, anchor_sin_ + g.slot, tables_.fine_cos + fine,
                    tables_.fine_sin + fine, g.length, kNearZero<T>, c, s)) {
      for (std::int64_t k = 0; k < g.length; ++k) {
        if (std::abs(c[k] * s[k]) < kNearZero<T>)
          sincos_turn(turn_at(step[k], position), s[k], c[k]);
      }
    }
  }

  const float* cos() const { return cos_; }
  const float* sin() const { return sin_; }

 private:
  const Segments& segments_;
  const ThetaTables<float>& tables_;
  std::uint64_t* turn_;
  float *anchor_cos_, *anchor_sin_, *cos_, *sin_;
  std::int64_t row_ = 0;
  std::int64_t position_[LrpeGrid::kMaxAxes] = {};
  std::int64_t anchor_[LrpeGrid::kMaxAxes] = {};
  bool known_[LrpeGrid::kMaxAxes] = {};
};

template <>
class PhaseRow<double, double> {
 public:
  static std::int64_t reals(std::int64_t width) { return 2 * width; }
  static std::int64_t turns(std::int64_t) { return 0; }

  PhaseRow(const Segments& segments, const ThetaTables<double>& tables, double* scratch,
           std::uint64_t*)
      : segments_(segments), tables_(tables), cos_(scratch), sin_(scratch + segments.width) {}

  void start_head(std::int64_t theta_row) { row_ = theta_row; }

  void set_zero_phase() {
    std::fill_n(cos_, segments_.width, 1.0);
    std::fill_n(sin_, segments_.width, 0.0);
  }

  void move(const Segment& g, std::int64_t position) {
    const Turn* step = tables_.step + row_ * tables_.width;
    const double* poison = tables_.poison + row_ * tables_.width;
    for (std::int64_t k = 0; k < g.length; ++k) {
      double s = 0;
      double c = 0;
      sincos_turn(turn_at(step[k], position), s, c);
      cos_[g.slot + k] = c + poison[k];
      sin_[g.slot + k] = s + poison[k];
    }
  }

  const double* cos() const { return cos_; }
  const double* sin() const { return sin_; }

 private:
  const Segments& segments_;
  const ThetaTables<double>& tables_;
  double *cos_, *sin_;
  std::int64_t row_ = 0;
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
