// Sines and cosines for the CPU kernel.
//
// fp32 and narrower. A phase is a coarse position (a multiple of 32, the anchor) plus a fine one (0..31; on a
// grid with an axis of more than 32 a multiple of 64 and 0..63). The fine rows are made once per call and head
// (here), an anchor's row once for all its tokens (cpu/phases-inl.h), both to full fp32 accuracy from the
// exact phase; an element's sine and cosine are then one complex product, 4 operations instead of about 25:
//     cos(a + f) = cos a cos f - sin a sin f,    sin(a + f) = sin a cos f + cos a sin f
// Positions, not places in the call, decide the split, so prefill and decode give the same bits. Where the coarse
// position is 0 the fine row is the phase; a grid, whose calls are never split, has 64 of them to have more of that.
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
#include "annulus/core/dtype.h"
#include "annulus/cpu/simd-inl.h"
#include "annulus/lrpe_cosine/phase.h"
#include "annulus/lrpe_cosine/plan.h"

HWY_BEFORE_NAMESPACE();
namespace annulus::lrpe_cosine::HWY_NAMESPACE {

namespace simd = annulus::cpu::HWY_NAMESPACE;
using simd_t = decltype(simd::load(static_cast<const float*>(nullptr)));

// What the phases for tensors of a type know of it (cpu/apply-inl.h says why).
struct Rounding {
  float scale = 1.0f;  // they are multiplied by it
  // Below this |value| the product's error e may cost more than is left of the one ulp that is promised: 0.307 of
  // bfloat16's (cutting off uses the rest), e = 2.5e-7 / (0.307 2^-8); half of float16's,
  // e = 2.1e-7 / (0.5 2^-11) and a little. Such values are made from the exact phase.
  float near_zero = 0.0f;
};
inline Rounding rounding_of(DType dtype) {
  switch (dtype) {
    case DType::kBF16:
      return {1.0f + 0.69314718f / 256, 2.1e-4f};
    case DType::kF16:
      return {1.0f, 9.0e-4f};
    default:
      return {};
  }
}

inline constexpr int kFineBits = 5;
inline constexpr int kGridFineBits = 6;
inline std::int64_t longest_axis(const Plan& plan) {
  return *std::max_element(plan.extent, plan.extent + plan.axes);
}
inline int fine_bits_of(const Plan& plan) {
  const bool grid = plan.axes > 1 && !plan.position_ids.defined() &&
                    longest_axis(plan) > std::int64_t{1} << kFineBits;
  return grid ? kGridFineBits : kFineBits;
}
// Rows are padded so that whole vectors (two of up to 16 lanes) may be read and written past their
// end.
inline constexpr std::int64_t kRowPad = 32;

// a b + c and c - a b, of vectors and of single numbers: those by the vector unit's own instruction too, so that
// every path of a target rounds alike and a layout never changes a bit.
namespace ops {
#if ANNULUS_SIMD
namespace hn = hwy::HWY_NAMESPACE;
#endif
template <class V>
HWY_INLINE V mul_add(V a, V b, V c) {
#if ANNULUS_SIMD
  if constexpr (std::is_floating_point_v<V>) {
    const hn::CappedTag<V, 1> d;
    return hn::GetLane(hn::MulAdd(hn::Set(d, a), hn::Set(d, b), hn::Set(d, c)));
  } else {
    return hn::MulAdd(a, b, c);
  }
#elif defined(__FP_FAST_FMA)
  return std::fma(a, b, c);
#else
  // In double, where the product of floats is exact: rounding it would cost fp32 its 2e-7.
  return static_cast<V>(static_cast<double>(a) * static_cast<double>(b) + static_cast<double>(c));
#endif
}
template <class V>
HWY_INLINE V neg_mul_add(V a, V b, V c) {
  if constexpr (std::is_floating_point_v<V>) {
    return mul_add(-a, b, c);
  } else {
    return NegMulAdd(a, b, c);  // Highway's
  }
}
#if ANNULUS_SIMD
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
#else
inline bool some_below(float v, float limit) { return !(std::abs(v) >= limit); }
#endif
}  // namespace ops

// A pair of components (a, b) turned by a phase, or back; the cosine form's b is 0, and in its gradient the second
// result is not asked for.
enum class Turn2 { kSpread, kRotate, kGather, kRotateBack };  // 1->2, 2->2, 2->1, 2->2
template <Turn2 kTurn, class V>
HWY_INLINE V first_of(V a, [[maybe_unused]] V b, V s, V c) {
  const V ac = a * c;
  if constexpr (kTurn == Turn2::kSpread) return ac;
  if constexpr (kTurn == Turn2::kRotate) return ops::neg_mul_add(b, s, ac);
  return ops::mul_add(b, s, ac);
}
template <Turn2 kTurn, class V>
HWY_INLINE V second_of(V a, [[maybe_unused]] V b, V s, V c) {
  if constexpr (kTurn == Turn2::kSpread) return a * s;
  if constexpr (kTurn == Turn2::kRotate) return ops::mul_add(b, c, a * s);
  return ops::neg_mul_add(a, s, b * c);
}

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

  const Segment* begin() const { return at; }
  const Segment* end() const { return at + count; }
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

// What depends on theta alone: for the `columns` of it that are used, per row padded to `width` entries.
template <class Real>
struct ThetaTables;
template <>
struct ThetaTables<float> {
  std::int64_t columns = 0, width = 0;
  std::uint64_t* step = nullptr;  // [rows][width]
  int fine_bits = kFineBits;
  std::int64_t fine_count() const { return std::int64_t{1} << fine_bits; }
  // [rows][fine_count][2][width], cosines then sines. One head's 32 rows lie together (32 KiB at E =
  // 128): as two tables a power of two apart they fight for the same sets of a 4-way first-level
  // cache. kRowPad entries before and after them may be read.
  float* fine = nullptr;
  // Which of them any token of the call will use: one decoded token needs one.
  std::uint64_t fine_rows = 0;

  float* fine_cos(std::int64_t row, std::int64_t f) const {
    return fine + 2 * ((row << fine_bits) + f) * width;
  }
  float* fine_sin(std::int64_t row, std::int64_t f) const { return fine_cos(row, f) + width; }

  // [rows][fine_count][width]: the place of each phase in its quarter turn, for types that look for zeros.
  std::uint16_t* near = nullptr;
  std::uint16_t* fine_near(std::int64_t row, std::int64_t f) const {
    return near + ((row << fine_bits) + f) * width;
  }
};
template <>
struct ThetaTables<double> {
  std::int64_t columns = 0, width = 0;
  Turn* step = nullptr;      // [rows][width]
  double* poison = nullptr;  // 0, or NaN where theta is not finite
};

// turn += step << bits, for n of them; arrays are padded to kRowPad.
inline void advance_turns(const std::uint64_t* step, int bits, std::int64_t n,
                          std::uint64_t* turn) {
#if ANNULUS_SIMD
  namespace hn = hwy::HWY_NAMESPACE;
  const hn::ScalableTag<std::uint64_t> d;
  const auto lanes = static_cast<std::int64_t>(hn::Lanes(d));
  for (std::int64_t k = 0; k < n; k += lanes) {
    hn::StoreU(hn::Add(hn::LoadU(d, turn + k), hn::ShiftLeftSame(hn::LoadU(d, step + k), bits)), d,
               turn + k);
  }
#else
  for (std::int64_t k = 0; k < n; ++k) turn[k] += step[k] << bits;
#endif
}

// sin and cos of n turns to fp32 accuracy, times `scale`; a zero is +0, as in a product of two rows. Arrays are padded
// to kRowPad. Not inlined, so that its constants find registers.
HWY_NOINLINE inline void sincos_row(const std::uint64_t* turn, std::int64_t n, float scale,
                                    float* s, float* c) {
#if ANNULUS_SIMD
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
    const auto sine = hn::Xor(hn::IfThenElse(odd, pc, ps), hn::BitCast(d, sin_sign));
    const auto cosine = hn::Xor(hn::IfThenElse(odd, ps, pc), hn::BitCast(d, cos_sign));
    hn::StoreU(ops::mul_add(sine, hn::Set(d, scale), hn::Zero(d)), d, s + i);
    hn::StoreU(ops::mul_add(cosine, hn::Set(d, scale), hn::Zero(d)), d, c + i);
  }
#else
  for (std::int64_t i = 0; i < n; ++i) {
    sincos_turn(turn[i], s[i], c[i]);
    s[i] = ops::mul_add(s[i], scale, 0.0f);
    c[i] = ops::mul_add(c[i], scale, 0.0f);
  }
#endif
}

// The place of a phase in its quarter turn, in 2^-16 of one.
inline std::uint16_t place_in_quarter(std::uint64_t turn) {
  return static_cast<std::uint16_t>(turn << 2 >> 48);
}

// Elements too close to a zero for 32 bits of phase, from all 64 of them.
HWY_NOINLINE inline void mend_row(const std::uint64_t* step, std::int64_t position, std::int64_t n,
                                  float near_zero, float scale, float* s, float* c) {
  const auto lanes = static_cast<std::int64_t>(simd::lanes());
  for (std::int64_t k0 = 0; k0 < n; k0 += lanes) {
    if (!ops::some_below(simd::load(c + k0) * simd::load(s + k0), near_zero)) continue;
    for (std::int64_t k = k0; k < std::min(k0 + lanes, n); ++k) {
      if (std::abs(c[k] * s[k]) < near_zero) {
        sincos_turn(turn_at(step[k], position), s[k], c[k]);
        // Never -0, which the product of two rows would not be.
        s[k] = s[k] * scale + 0.0f;
        c[k] = c[k] * scale + 0.0f;
      }
    }
  }
}

// Fills the tables of one row of theta, given as doubles. The fine rows carry the rounding's scale, and are exact
// near zero.
inline void fill_tables(const ThetaTables<float>& t, std::int64_t row, const double* theta,
                        const Rounding& rounding, std::uint64_t* turn) {
  std::uint64_t* step = t.step + row * t.width;
  bool finite = true;
  for (std::int64_t k = 0; k < t.width; ++k) {
    const bool there = k < t.columns && std::isfinite(theta[k]);
    finite &= there || k >= t.columns;
    step[k] = there ? turn_step64(theta[k]) : 0;
  }
  std::fill_n(turn, t.width, 0);
  for (std::int64_t f = 0; f < t.fine_count(); ++f) {
    if (f > 0) advance_turns(step, 0, t.width, turn);
    if (!(t.fine_rows >> f & 1u)) continue;
    float* c = t.fine_cos(row, f);
    float* s = t.fine_sin(row, f);
    sincos_row(turn, t.width, rounding.scale, s, c);
    if (t.near != nullptr) {
      for (std::int64_t k = 0; k < t.width; ++k) t.fine_near(row, f)[k] = place_in_quarter(turn[k]);
    }
    if (rounding.near_zero > 0) {
      mend_row(step, f, t.columns, rounding.near_zero, rounding.scale, s, c);
    }
    for (std::int64_t k = 0; k < t.columns && !finite; ++k) {
      if (!std::isfinite(theta[k])) c[k] = s[k] = std::numeric_limits<float>::quiet_NaN();
    }
  }
}

inline void fill_tables(const ThetaTables<double>& t, std::int64_t row, const double* theta,
                        const Rounding&, std::uint64_t*) {
  for (std::int64_t k = 0; k < t.columns; ++k) {
    const bool finite = std::isfinite(theta[k]);
    t.step[row * t.width + k] = finite ? turn_step(theta[k]) : Turn{};
    t.poison[row * t.width + k] = finite ? 0.0 : std::numeric_limits<double>::quiet_NaN();
  }
}

}  // namespace annulus::lrpe_cosine::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#endif  // toggling guard
