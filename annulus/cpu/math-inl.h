// Functions of vectors of float to about one unit in the last place, for every input: infinities as
// C++ has them, a NaN stays a NaN. Included like simd-inl.h.
#if defined(ANNULUS_CPU_MATH_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef ANNULUS_CPU_MATH_INL_H_
#undef ANNULUS_CPU_MATH_INL_H_
#else
#define ANNULUS_CPU_MATH_INL_H_
#endif

#include "annulus/cpu/simd-inl.h"

#if ANNULUS_HAVE_HWY

HWY_BEFORE_NAMESPACE();
namespace annulus::cpu::HWY_NAMESPACE {

// 1 / (1 + exp(-x)).
HWY_INLINE VF sigmoid(VF x) {
  const F32 d;
  const VF one = hn::Set(d, 1.0f);
  return hn::Div(one, hn::Add(one, exp(hn::Neg(x))));
}

HWY_INLINE VF tanh(VF x) {
  const F32 d;
  const VF one = hn::Set(d, 1.0f);
  const VF magnitude = hn::Abs(x);
  // Below 5/8 x + x^3 P(x^2), P of least maximum error there (4e-9); above it nothing cancels in
  // 1 - 2 / (exp(2 x) + 1).
  const VF square = hn::Mul(x, x);
  VF p = hn::Set(d, -0.00571704338f);
  p = hn::MulAdd(p, square, hn::Set(d, 0.0206505857f));
  p = hn::MulAdd(p, square, hn::Set(d, -0.0537434976f));
  p = hn::MulAdd(p, square, hn::Set(d, 0.133314913f));
  p = hn::MulAdd(p, square, hn::Set(d, -0.333332839f));
  const VF small = hn::MulAdd(hn::Mul(p, square), x, x);
  const VF e = exp(hn::Add(magnitude, magnitude));
  const VF large = hn::Sub(one, hn::Div(hn::Set(d, 2.0f), hn::Add(e, one)));
  return hn::IfThenElse(hn::Lt(magnitude, hn::Set(d, 0.625f)), small, hn::CopySign(large, x));
}

// Distribution function and density of the standard normal law: gelu(x) = x cdf(x). With a = |x|,
//   cdf(-a) = exp(-a^2 / 2) t P(t),   t = 1 / (1 + 0.3 a),
// P of least maximum relative error over 0 <= a <= 14.5 (4e-9), beyond which the result is 0 in
// f32. The rounding of a^2 is put back: it would cost the exponential 3e-6 far out.
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
  VF e = exp(hn::Mul(square, hn::Set(d, -0.5f)));
  e = hn::NegMulAdd(hn::Mul(rest, half), e, e);
  const VF t = hn::Div(one, hn::MulAdd(a, hn::Set(d, 0.3f), one));
  VF p = hn::Set(d, -0.0206234516868f);
  p = hn::MulAdd(p, t, hn::Set(d, 0.112435522004f));
  p = hn::MulAdd(p, t, hn::Set(d, -0.228213393824f));
  p = hn::MulAdd(p, t, hn::Set(d, 0.191784271999f));
  p = hn::MulAdd(p, t, hn::Set(d, -0.079423283697f));
  p = hn::MulAdd(p, t, hn::Set(d, 0.0961567275553f));
  p = hn::MulAdd(p, t, hn::Set(d, 0.0783896835145f));
  p = hn::MulAdd(p, t, hn::Set(d, 0.110235417996f));
  p = hn::MulAdd(p, t, hn::Set(d, 0.11957181463f));
  p = hn::MulAdd(p, t, hn::Set(d, 0.119686689779f));
  const VF below = hn::Mul(hn::Mul(e, t), p);
  const VF cdf = hn::IfThenElse(hn::Lt(x, hn::Zero(d)), below, hn::Sub(one, below));
  const auto number = hn::Eq(x, x);
  return {hn::IfThenElse(number, cdf, x),
          hn::IfThenElse(number, hn::Mul(e, hn::Set(d, 0.398942280401f)), x)};
}

}  // namespace annulus::cpu::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#endif  // ANNULUS_HAVE_HWY

#endif  // toggling guard
