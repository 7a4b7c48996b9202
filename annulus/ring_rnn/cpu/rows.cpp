// The element-wise work of the ring RNN on rows of a state: activation and leak, and their gradients. f32 by Highway; f64, and f32 where there are no vectors, in plain loops.

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "annulus/ring_rnn/cpu/rows.cpp"
#if ANNULUS_HAVE_HWY && ANNULUS_HWY_DISPATCH
#include <hwy/foreach_target.h>  // compiles this file once per instruction set
#endif

#include <algorithm>
#include <cmath>
#include <type_traits>

#include "annulus/cpu/math-inl.h"
#include "annulus/cpu/simd-inl.h"
#include "annulus/ring_rnn/cpu/rows.h"

HWY_BEFORE_NAMESPACE();
namespace annulus::ring_rnn::cpu::HWY_NAMESPACE {

namespace simd = annulus::cpu::HWY_NAMESPACE;

// F(y) and F'(y) of one element.
template <class Real>
struct Value {
  Real f, slope;
};
template <class Real>
inline Value<Real> activate(RingRnnActivation f, Real y) {
  constexpr Real kHalfRoot = Real(0.70710678118654752440);  // 1 / sqrt(2)
  switch (f) {
    case RingRnnActivation::kRelu:
      return {y <= 0 ? Real(0) : y, y > 0 ? Real(1) : Real(0)};  // a NaN stays one
    case RingRnnActivation::kGelu: {
      const Real cdf = Real(0.5) * std::erfc(-y * kHalfRoot);
      return {y * cdf, cdf + y * Real(0.39894228040143267794) * std::exp(Real(-0.5) * y * y)};
    }
    case RingRnnActivation::kTanh: {
      const Real r = std::tanh(y);
      return {r, Real(1) - r * r};
    }
    case RingRnnActivation::kSilu: {
      const Real p = Real(1) / (Real(1) + std::exp(-y));
      return {y * p, p * (Real(1) + y * (Real(1) - p))};
    }
  }
  return {y, Real(1)};
}

template <class Real>
void step_plain(RingRnnActivation f, std::int64_t n, Real constant, const Real* drive,
                const Real* alpha, const Real* keep, const Real* s, Real* y, Real* r) {
  for (std::int64_t i = 0; i < n; ++i) {
    y[i] += constant;
    if (drive != nullptr) y[i] += drive[i];
    if (r != nullptr) r[i] = keep[i] * s[i] + alpha[i] * activate(f, y[i]).f;
  }
}
template <class Real>
void back_plain(RingRnnActivation f, std::int64_t n, const Real* alpha, const Real* keep,
                const Real* y, const Real* s, Real* l, Real* g, Real* moment) {
  for (std::int64_t i = 0; i < n; ++i) {
    const Value<Real> v = activate(f, y[i]);
    g[i] = alpha[i] * v.slope * l[i];
    if (moment != nullptr) moment[i] = l[i] * (v.f - s[i]);
    l[i] *= keep[i];
  }
}
#if ANNULUS_SIMD

namespace hn = hwy::HWY_NAMESPACE;
using simd::F32;
using simd::VF;

// A NaN stays one: in gelu and silu it is a factor.
template <RingRnnActivation F>
HWY_INLINE void value_and_slope(VF y, VF& f, VF& slope) {
  const F32 d;
  const VF one = hn::Set(d, 1.0f);
  if constexpr (F == RingRnnActivation::kRelu) {
    f = hn::IfThenZeroElse(hn::Le(y, hn::Zero(d)), y);
    slope = hn::IfThenElseZero(hn::Gt(y, hn::Zero(d)), one);
  } else if constexpr (F == RingRnnActivation::kGelu) {
    const simd::Normal v = simd::normal(y);
    f = hn::Mul(y, v.cdf);
    slope = hn::MulAdd(y, v.density, v.cdf);
  } else if constexpr (F == RingRnnActivation::kTanh) {
    f = simd::tanh(y);
    slope = hn::NegMulAdd(f, f, one);
  } else {
    const simd::Sigmoid p = simd::sigmoid(y);
    f = hn::Mul(y, p.value);
    slope = hn::Mul(p.value, hn::MulAdd(y, p.rest, one));
  }
}
template <RingRnnActivation F>
HWY_INLINE VF value(VF y) {
  VF f, unused;
  value_and_slope<F>(y, f, unused);
  return f;
}

template <class Call>
HWY_INLINE void visit_activation(RingRnnActivation f, Call&& call) {
  switch (f) {
    case RingRnnActivation::kRelu:
      return call.template operator()<RingRnnActivation::kRelu>();
    case RingRnnActivation::kGelu:
      return call.template operator()<RingRnnActivation::kGelu>();
    case RingRnnActivation::kTanh:
      return call.template operator()<RingRnnActivation::kTanh>();
    case RingRnnActivation::kSilu:
      return call.template operator()<RingRnnActivation::kSilu>();
  }
}

// f(i) for the vectors of a padded row, kFlight of them from element i on at a time: an activation is
// one long chain of instructions, and what a core looks ahead holds too few of them (Neoverse-V1, ns
// an element, one, two and four at a time: gelu 3.3, 2.8, 2.4; silu 2.1, 1.8, 1.5).
inline constexpr int kFlight =
    std::min<int>(4, static_cast<int>(kPad) / static_cast<int>(hn::MaxLanes(F32())));
template <class Call>
HWY_INLINE void for_vectors(std::int64_t n, Call&& f) {
  const auto lanes = static_cast<std::int64_t>(simd::lanes());
  for (std::int64_t i = 0; i < n; i += kFlight * lanes) f(i);
}

// The row functions touch whole vectors: rows are padded.
void step_float(RingRnnActivation f, std::int64_t n, float constant, const float* drive,
                const float* alpha, const float* keep, const float* s, float* y, float* r) {
  const F32 d;
  const auto lanes = static_cast<std::int64_t>(simd::lanes());
  const VF c = hn::Set(d, constant);
  const auto finished = [&](std::int64_t k) {
    VF v = hn::Add(hn::LoadU(d, y + k), c);
    if (drive != nullptr) v = hn::Add(v, hn::LoadU(d, drive + k));
    hn::StoreU(v, d, y + k);
    return v;
  };
  if (r == nullptr) {
    for (std::int64_t i = 0; i < n; i += lanes) finished(i);
    return;
  }
  visit_activation(f, [&]<RingRnnActivation F>() {
    for_vectors(n, [&](std::int64_t i) {
      VF v[kFlight];
      ANNULUS_UNROLL
      for (int u = 0; u < kFlight; ++u) v[u] = finished(i + u * lanes);
      ANNULUS_UNROLL
      for (int u = 0; u < kFlight; ++u) v[u] = value<F>(v[u]);
      ANNULUS_UNROLL
      for (int u = 0; u < kFlight; ++u) {
        const std::int64_t k = i + u * lanes;
        const VF old = hn::Mul(hn::LoadU(d, keep + k), hn::LoadU(d, s + k));
        hn::StoreU(hn::MulAdd(hn::LoadU(d, alpha + k), v[u], old), d, r + k);
      }
    });
  });
}

void back_float(RingRnnActivation f, std::int64_t n, const float* alpha, const float* keep,
                const float* y, const float* s, float* l, float* g, float* moment) {
  const F32 d;
  const auto lanes = static_cast<std::int64_t>(simd::lanes());
  visit_activation(f, [&]<RingRnnActivation F>() {
    for_vectors(n, [&](std::int64_t i) {
      VF value[kFlight], slope[kFlight];
      ANNULUS_UNROLL
      for (int u = 0; u < kFlight; ++u) {
        value_and_slope<F>(hn::LoadU(d, y + i + u * lanes), value[u], slope[u]);
      }
      ANNULUS_UNROLL
      for (int u = 0; u < kFlight; ++u) {
        const std::int64_t k = i + u * lanes;
        const VF vl = hn::LoadU(d, l + k);
        hn::StoreU(hn::Mul(hn::Mul(hn::LoadU(d, alpha + k), slope[u]), vl), d, g + k);
        hn::StoreU(hn::Mul(hn::LoadU(d, keep + k), vl), d, l + k);
        if (moment != nullptr) {
          hn::StoreU(hn::Mul(vl, hn::Sub(value[u], hn::LoadU(d, s + k))), d, moment + k);
        }
      }
    });
  });
}

#endif

template <class Real>
const StateRows<Real>* plain_rows() {
  static const StateRows<Real> rows = {annulus::cpu::rows<Real>(), step_plain<Real>,
                                       back_plain<Real>};
  return &rows;
}
const StateRows<float>* float_rows() {
#if ANNULUS_SIMD
  static const StateRows<float> rows = {annulus::cpu::rows<float>(), step_float, back_float};
  return &rows;
#else
  return plain_rows<float>();
#endif
}
const StateRows<double>* double_rows() { return plain_rows<double>(); }

}  // namespace annulus::ring_rnn::cpu::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace annulus::ring_rnn::cpu {

ANNULUS_CPU_EXPORT(float_rows);
ANNULUS_CPU_EXPORT(double_rows);

template <>
const StateRows<float>& state_rows<float>() {
  return *ANNULUS_CPU_CALL(float_rows)();
}
template <>
const StateRows<double>& state_rows<double>() {
  return *ANNULUS_CPU_CALL(double_rows)();
}

}  // namespace annulus::ring_rnn::cpu
#endif
