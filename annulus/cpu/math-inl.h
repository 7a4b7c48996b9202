// Functions of vectors of float to about one unit in the last place, subnormal results included;
// infinities as C++ has them. Included like simd-inl.h.
#if defined(ANNULUS_CPU_MATH_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef ANNULUS_CPU_MATH_INL_H_
#undef ANNULUS_CPU_MATH_INL_H_
#else
#define ANNULUS_CPU_MATH_INL_H_
#endif

#include "annulus/cpu/simd-inl.h"

#if ANNULUS_SIMD

HWY_BEFORE_NAMESPACE();
namespace annulus::cpu::HWY_NAMESPACE {

// By Horner's rule, the highest power first.
template <class... Coefficients>
HWY_INLINE VF polynomial(VF x, float highest, Coefficients... others) {
  VF p = hn::Set(F32(), highest);
  ((p = hn::MulAdd(p, x, hn::Set(F32(), others))), ...);
  return p;
}

// exp(x) for x <= 0 (and no NaN), of which the others are made: x = n ln 2 + r, |r| <= ln 2 / 2, and
// exp(r) = 1 + r + r^2 P(r), P of least maximum relative error (3e-9). n is rounded by adding 1.5 2^23,
// so that it stands in the lowest bits, from where a shift puts it into the exponent: 64 too high,
// which a last multiplication takes back, and rounds subnormal results as it should.
HWY_INLINE VF exp_negative(VF x) {
  const F32 d;
  const hn::RebindToUnsigned<F32> du;  // a sum that wraps, for a NaN, is defined
  const VF magic = hn::Set(d, 12582912.0f + 64.0f);
  const VF bounded = hn::Max(x, hn::Set(d, -104.0f));
  const VF shifted = hn::MulAdd(bounded, hn::Set(d, 1.44269504f), magic);
  const VF n = hn::Sub(shifted, magic);
  // The upper part of ln 2 has 15 bits: its product with n is exact.
  VF r = hn::NegMulAdd(n, hn::Set(d, 0.693145752f), bounded);
  r = hn::NegMulAdd(n, hn::Set(d, 1.42860682e-6f), r);
  VF p = polynomial(r, 0.00138145401f, 0.00836874511f, 0.0416683908f, 0.166665204f, 0.499999934f);
  p = hn::MulAdd(p, hn::Mul(r, r), r);
  p = hn::Add(p, hn::Set(d, 1.0f));
  const auto exponent = hn::ShiftLeft<23>(hn::BitCast(du, shifted));
  const VF scaled = hn::BitCast(d, hn::Add(hn::BitCast(du, p), exponent));
  return hn::Mul(scaled, hn::Set(d, 0x1p-64f));
}

// 2^t for -126 <= t <= 127 (and no NaN), for weights of a softmax, which are many and need not be more exact than the scores
// they come from: relative error 1.1e-7. t = n + r, |r| <= 1/2, n rounded as above.
HWY_INLINE VF exp2_weight(VF t) {
  const F32 d;
  const hn::RebindToUnsigned<F32> du;
  const VF magic = hn::Set(d, 12582912.0f);
  const VF shifted = hn::Add(t, magic);
  const VF r = hn::Sub(t, hn::Sub(shifted, magic));
  const VF p =
      polynomial(r, 0.0013264727f, 0.009671513f, 0.055507336f, 0.24022242f, 0.693147f, 1.0f);
  return hn::BitCast(d, hn::Add(hn::BitCast(du, p), hn::ShiftLeft<23>(hn::BitCast(du, shifted))));
}

// The same and its like for several vectors at once, a step for all of them after the other: the chain of one is longer than
// what a core looks ahead. Even and odd powers apart, so that it is not longer still; three terms less where the result is rounded
// to bfloat16 (relative error 7.5e-5; else 1.5e-7).
//
// x = 2^(c x - m) for whole m: |m| < 2^20, shift = 1.5 2^23 - m, and c x - m between -125 and 127 for x >= least, which smaller x
// are taken for unless kBounded says that there are none. No bit of a large c x is lost: it is never rounded, and `rest` is what c
// has beyond a float.
template <bool kCoarse, bool kBounded, int kCount>
HWY_INLINE void exp2_from(VF (&x)[kCount], VF c, [[maybe_unused]] VF rest, VF shift, VF least) {
  const F32 d;
  const hn::RebindToUnsigned<F32> du;
  const auto set = [](float v) HWY_ATTR { return hn::Set(F32(), v); };
  VF n[kCount], p[kCount];
  ANNULUS_UNROLL
  for (int i = 0; i < kCount && !kBounded; ++i) x[i] = hn::Max(x[i], least);
  ANNULUS_UNROLL
  for (int i = 0; i < kCount; ++i) n[i] = hn::MulAdd(x[i], c, shift);
  ANNULUS_UNROLL
  for (int i = 0; i < kCount; ++i) {  // x is what is too much in n: odd coefficients are negative
    const VF more = hn::NegMulAdd(x[i], c, hn::Sub(n[i], shift));
    x[i] = kCoarse ? more : hn::NegMulAdd(x[i], rest, more);
    const VF square = hn::Mul(x[i], x[i]);
    if constexpr (kCoarse) {
      p[i] = hn::MulAdd(hn::MulAdd(x[i], set(-0.05517167f), set(0.24261114f)), square,
                        hn::MulAdd(x[i], set(-0.69326097f), set(0.99992806f)));
    } else {
      p[i] = hn::MulAdd(x[i], set(-0.0013264727f), set(0.009671513f));
      p[i] = hn::MulAdd(p[i], square, hn::MulAdd(x[i], set(-0.055507336f), set(0.24022242f)));
      p[i] = hn::MulAdd(p[i], square, hn::MulAdd(x[i], set(-0.693147f), set(1.0f)));
    }
  }
  ANNULUS_UNROLL
  for (int i = 0; i < kCount; ++i) {
    x[i] = hn::BitCast(d, hn::Add(hn::BitCast(du, p[i]), hn::ShiftLeft<23>(hn::BitCast(du, n[i]))));
  }
}

// x = exp(x) for x <= 88; what is less than -87 is taken for that.
template <bool kCoarse, int kCount>
HWY_INLINE void exp_all(VF (&x)[kCount]) {
  const F32 d;
  const hn::RebindToUnsigned<F32> du;
  const auto set = [](float v) HWY_ATTR { return hn::Set(F32(), v); };
  const VF magic = set(12582912.0f);
  VF n[kCount], p[kCount];
  ANNULUS_UNROLL
  for (int i = 0; i < kCount; ++i) x[i] = hn::Max(x[i], set(-87.0f));
  ANNULUS_UNROLL
  for (int i = 0; i < kCount; ++i) n[i] = hn::MulAdd(x[i], set(1.44269504f), magic);
  ANNULUS_UNROLL
  for (int i = 0; i < kCount; ++i) {
    x[i] = hn::NegMulAdd(hn::Sub(n[i], magic), set(0.69314718f), x[i]);
    const VF square = hn::Mul(x[i], x[i]);
    if constexpr (kCoarse) {
      p[i] = hn::MulAdd(x[i], set(0.16662812f), set(0.50394106f));
    } else {
      p[i] = hn::MulAdd(x[i], set(0.0083125252f), set(0.041890115f));
      p[i] = hn::MulAdd(p[i], square, hn::MulAdd(x[i], set(0.16667114f), set(0.49999231f)));
    }
    p[i] = hn::MulAdd(p[i], square, hn::Add(x[i], set(1.0f)));
  }
  ANNULUS_UNROLL
  for (int i = 0; i < kCount; ++i) {
    x[i] = hn::BitCast(d, hn::Add(hn::BitCast(du, p[i]), hn::ShiftLeft<23>(hn::BitCast(du, n[i]))));
  }
}

// 1 / (1 + exp(-x)), and 1 minus it, neither by a difference. Not for a NaN.
struct Sigmoid {
  VF value, rest;
};
HWY_INLINE Sigmoid sigmoid(VF x) {
  const F32 d;
  const VF one = hn::Set(d, 1.0f);
  const VF e = exp_negative(hn::Neg(hn::Abs(x)));
  const VF above = hn::Div(one, hn::Add(one, e));  // of |x|
  const VF below = hn::Mul(e, above);
  const auto negative = hn::Lt(x, hn::Zero(d));
  return {hn::IfThenElse(negative, below, above), hn::IfThenElse(negative, above, below)};
}

HWY_INLINE VF tanh(VF x) {
  const F32 d;
  const VF one = hn::Set(d, 1.0f);
  const VF magnitude = hn::Abs(x);
  // Below 5/8 (and for a NaN) x + x^3 P(x^2), P of least maximum error there (4e-9); above it with
  // e = exp(-2 |x|) nothing cancels in (1 - e) / (1 + e).
  const VF square = hn::Mul(x, x);
  VF p = polynomial(square, -0.00571704338f, 0.0206505857f, -0.0537434976f, 0.133314913f,
                    -0.333332839f);
  const VF small = hn::MulAdd(hn::Mul(p, square), x, x);
  const VF e = exp_negative(hn::Mul(magnitude, hn::Set(d, -2.0f)));
  const VF large = hn::Div(hn::Sub(one, e), hn::Add(one, e));
  return hn::IfThenElse(hn::Ge(magnitude, hn::Set(d, 0.625f)), hn::CopySign(large, x), small);
}

// Distribution function and density of the standard normal law: gelu(x) = x cdf(x). With a = |x|,
//   cdf(-a) = exp(-a^2 / 2) t P(t),   t = 1 / (1 + 0.3 a),
// P of least maximum relative error over 0 <= a <= 14.5 (4e-9), beyond which the result is 0 in
// f32. The rounding of a^2 is put back: it would cost the exponential 3e-6 far out. Not for a NaN.
struct Normal {
  VF cdf, density;
};
HWY_INLINE Normal normal(VF x) {
  const F32 d;
  const VF one = hn::Set(d, 1.0f);
  const VF half = hn::Set(d, 0.5f);
  const VF a = hn::Min(hn::Abs(x), hn::Set(d, 14.5f));
  const VF square = hn::Mul(a, a);
  const VF rest = hn::MulSub(a, a, square);
  VF e = exp_negative(hn::Mul(square, hn::Set(d, -0.5f)));
  e = hn::NegMulAdd(hn::Mul(rest, half), e, e);
  const VF t = hn::Div(one, hn::MulAdd(a, hn::Set(d, 0.3f), one));
  VF p = polynomial(t, -0.0206234516868f, 0.112435522004f, -0.228213393824f, 0.191784271999f,
                    -0.079423283697f, 0.0961567275553f, 0.0783896835145f, 0.110235417996f,
                    0.11957181463f, 0.119686689779f);
  const VF below = hn::Mul(hn::Mul(e, t), p);
  const VF cdf = hn::IfThenElse(hn::Lt(x, hn::Zero(d)), below, hn::Sub(one, below));
  return {cdf, hn::Mul(e, hn::Set(d, 0.398942280401f))};
}

}  // namespace annulus::cpu::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#endif  // ANNULUS_SIMD

#endif  // toggling guard
