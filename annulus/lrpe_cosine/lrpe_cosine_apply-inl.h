// What is done with a row once its sines and cosines are there: load, activate, turn, store. Row
// functions over Segment-shaped buffers in float or double, and the direct path that keeps a row in
// registers from x to y.
#if defined(ANNULUS_LRPE_COSINE_APPLY_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef ANNULUS_LRPE_COSINE_APPLY_INL_H_
#undef ANNULUS_LRPE_COSINE_APPLY_INL_H_
#else
#define ANNULUS_LRPE_COSINE_APPLY_INL_H_
#endif

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <limits>
#include <type_traits>

#include "annulus/cpu/simd-inl.h"
#include "annulus/lrpe_cosine/lrpe_cosine_rows-inl.h"

HWY_BEFORE_NAMESPACE();
namespace annulus::lrpe::HWY_NAMESPACE {

// Row pointers of the two components, columns `step` apart.
template <class T>
struct Pair {
  T* first;
  T* second;
  std::int64_t step;
};

enum class Direction { kForward, kBackward };

template <class T, class Real>
inline void load_row(const T* p, std::int64_t step, std::int64_t n, Real* out) {
  std::int64_t i = 0;
  if constexpr (!std::is_same_v<Real, double>) {
    const auto lanes = static_cast<std::int64_t>(simd::lanes());
    for (; step == 1 && i + lanes <= n; i += lanes) simd::store(simd::load(p + i), out + i);
  }
  for (; i < n; ++i) out[i] = static_cast<Real>(p[i * step]);
}

template <class T, class Real>
inline void store_row(const Real* in, std::int64_t n, T* p, std::int64_t step) {
  std::int64_t i = 0;
  if constexpr (!std::is_same_v<Real, double>) {
    const auto lanes = static_cast<std::int64_t>(simd::lanes());
    for (; step == 1 && i + lanes <= n; i += lanes) simd::store(simd::load(in + i), p + i);
  }
  for (; i < n; ++i) p[i * step] = T(in[i]);
}

// (y1, y2) = (x1, x2) turned by the phase; x2 = nullptr is 0.
template <class Real>
inline void rotate_row(const Real* x1, const Real* x2, const Real* c, const Real* s, std::int64_t n,
                       Real* y1, Real* y2) {
  if (x2 == nullptr) {
    for (std::int64_t i = 0; i < n; ++i) {
      y1[i] = x1[i] * c[i];
      y2[i] = x1[i] * s[i];
    }
  } else {
    for (std::int64_t i = 0; i < n; ++i) {
      y1[i] = x1[i] * c[i] - x2[i] * s[i];
      y2[i] = x1[i] * s[i] + x2[i] * c[i];
    }
  }
}

// (g1, g2) turned back by the phase, in place.
template <class Real>
inline void rotate_back_row(Real* g1, Real* g2, const Real* c, const Real* s, std::int64_t n) {
  for (std::int64_t i = 0; i < n; ++i) {
    const Real a = g1[i];
    const Real b = g2[i];
    g1[i] = a * c[i] + b * s[i];
    g2[i] = b * c[i] - a * s[i];
  }
}

// sum0 += q, sum1 += within q with q = x1 g2 - x2 g1.
template <class Real>
inline void add_moments(const Real* x1, const Real* x2, const Real* g1, const Real* g2, Real within,
                        std::int64_t n, Real* sum0, Real* sum1) {
  for (std::int64_t i = 0; i < n; ++i) {
    Real q = x1[i] * g2[i];
    if (x2 != nullptr) q -= x2[i] * g1[i];
    sum0[i] += q;
    sum1[i] += within * q;
  }
}

template <class Real>
inline Real max_with_nan(Real a, Real b) {
  return b > a || std::isnan(b) ? b : a;  // a NaN, once there, stays: b > NaN is false
}

// v = exp(v - high), one maximum per column.
inline void exp_minus(float* v, const float* high, std::int64_t n) {
  std::int64_t i = 0;
#if ANNULUS_HAVE_HWY
  namespace hn = hwy::HWY_NAMESPACE;
  const auto lanes = static_cast<std::int64_t>(simd::lanes());
  for (; i + lanes <= n; i += lanes) {
    simd::store(simd::exp(hn::Sub(simd::load(v + i), simd::load(high + i))), v + i);
  }
#endif
  for (; i < n; ++i) v[i] = std::exp(v[i] - high[i]);
}
inline void exp_minus(double* v, const double* high, std::int64_t n) {
  for (std::int64_t i = 0; i < n; ++i) v[i] = std::exp(v[i] - high[i]);
}

// v = 1 / (1 + exp(-v)) in place; the row is padded, so whole vectors may be touched.
inline void sigmoid_row(float* v, std::int64_t n) {
#if ANNULUS_HAVE_HWY
  namespace hn = hwy::HWY_NAMESPACE;
  const simd::F32 d;
  const auto one = hn::Set(d, 1.0f);
  const auto lanes = static_cast<std::int64_t>(simd::lanes());
  for (std::int64_t i = 0; i < n; i += lanes) {
    simd::store(hn::Div(one, hn::Add(one, simd::exp(hn::Neg(simd::load(v + i))))), v + i);
  }
#else
  for (std::int64_t i = 0; i < n; ++i) v[i] = 1.0f / (1.0f + std::exp(-v[i]));
#endif
}
inline void sigmoid_row(double* v, std::int64_t n) {
  for (std::int64_t i = 0; i < n; ++i) v[i] = 1.0 / (1.0 + std::exp(-v[i]));
}

// Softmax over one token's features, which lie in several segments.
template <class Real>
inline void softmax_features(const Segments& segments, Real* x) {
  Real high = -std::numeric_limits<Real>::infinity();
  for (int i = 0; i < segments.count; ++i) {
    const Segment& g = segments.at[i];
    for (std::int64_t k = 0; k < g.length; ++k) high = max_with_nan(high, x[g.slot + k]);
  }
  Real sum = 0;
  for (int i = 0; i < segments.count; ++i) {
    const Segment& g = segments.at[i];
    for (std::int64_t k = 0; k < g.length; ++k) {
      x[g.slot + k] = std::exp(x[g.slot + k] - high);
      sum += x[g.slot + k];
    }
  }
  const Real scale = 1 / sum;
  for (int i = 0; i < segments.count; ++i) {
    const Segment& g = segments.at[i];
    for (std::int64_t k = 0; k < g.length; ++k) x[g.slot + k] *= scale;
  }
}

// x = f(x). `high` and `scale` are the column statistics of softmax over tokens, indexed by column.
template <class Real>
inline void activate(LrpeActivation f, const Segments& segments, Real* x, const Real* high,
                     const Real* scale) {
  if (f == LrpeActivation::kNone) return;
  if (f == LrpeActivation::kSoftmaxFeatures) return softmax_features(segments, x);
  for (int i = 0; i < segments.count; ++i) {
    const Segment& g = segments.at[i];
    Real* v = x + g.slot;
    if (f == LrpeActivation::kRelu) {
      for (std::int64_t k = 0; k < g.length; ++k) v[k] = v[k] <= 0 ? Real{0} : v[k];  // NaN stays
    } else if (f == LrpeActivation::kSigmoid) {
      sigmoid_row(v, g.length);
    } else if (f == LrpeActivation::kSilu) {
      for (std::int64_t k0 = 0; k0 < g.length; k0 += kRowPad) {
        Real s[kRowPad];
        std::copy_n(v + k0, kRowPad, s);
        sigmoid_row(s, kRowPad);
        const std::int64_t n = std::min(kRowPad, g.length - k0);
        for (std::int64_t k = 0; k < n; ++k) v[k0 + k] *= s[k];
      }
    } else {
      exp_minus(v, high + g.column, g.length);
      for (std::int64_t k = 0; k < g.length; ++k) v[k] *= scale[g.column + k];
    }
  }
}

// g = dx from g, the activated row xb and the raw row x. `dot` is sum(p g) of each column (softmax
// over tokens).
template <class Real>
inline void activation_backward(LrpeActivation f, const Segments& segments, Real* x, const Real* xb,
                                const Real* dot, Real* g_row) {
  Real row_dot = 0;
  if (f == LrpeActivation::kSoftmaxFeatures) {
    for (int i = 0; i < segments.count; ++i) {
      const Segment& g = segments.at[i];
      for (std::int64_t k = g.slot; k < g.slot + g.length; ++k) row_dot += xb[k] * g_row[k];
    }
  }
  for (int i = 0; i < segments.count; ++i) {
    const Segment& g = segments.at[i];
    Real* d = g_row + g.slot;
    Real* v = x + g.slot;
    const Real* b = xb + g.slot;
    switch (f) {
      case LrpeActivation::kRelu:
        for (std::int64_t k = 0; k < g.length; ++k) d[k] = v[k] <= 0 ? Real{0} : d[k];
        break;
      case LrpeActivation::kSigmoid:
        for (std::int64_t k = 0; k < g.length; ++k) d[k] *= b[k] * (1 - b[k]);
        break;
      case LrpeActivation::kSilu:
        // s + x s (1 - s), with x s = xb.
        for (std::int64_t k0 = 0; k0 < g.length; k0 += kRowPad) {
          sigmoid_row(v + k0, kRowPad);
          const std::int64_t n = std::min(kRowPad, g.length - k0);
          for (std::int64_t k = k0; k < k0 + n; ++k) d[k] *= v[k] + b[k] * (1 - v[k]);
        }
        break;
      case LrpeActivation::kSoftmaxFeatures:
        for (std::int64_t k = 0; k < g.length; ++k) d[k] = b[k] * (d[k] - row_dot);
        break;
      case LrpeActivation::kSoftmaxTokens:
        for (std::int64_t k = 0; k < g.length; ++k) d[k] = b[k] * (d[k] - dot[g.column + k]);
        break;
      case LrpeActivation::kNone:
        break;
    }
  }
}

// The direct path. `Store` is the way a vector leaves: Highway's, or Arm's own conversion to
// bfloat16.
struct PlainStore {
  template <class V, class T>
  static HWY_INLINE void store(V v, T* p) {
    simd::store(v, p);
  }
};

#if ANNULUS_HAVE_HWY && HWY_ARCH_ARM_A64
// bfcvtn: one instruction where the portable rounding takes seven. Written as assembly because the
// file is compiled for every Arm core; the caller asks the CPU first.
struct Bf16Store {
  template <class V>
  static HWY_INLINE void store(V v, bfloat16* p) {
    uint16x4_t r;
    asm(".arch_extension bf16\n\tbfcvtn %0.4h, %1.4s" : "=w"(r) : "w"(v.raw));
    vst1_u16(reinterpret_cast<std::uint16_t*>(p), r);
  }
};
#endif

#if ANNULUS_HAVE_HWY
namespace ops {
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
}  // namespace ops
#else
namespace ops {
inline float mul(float a, float b) { return a * b; }
inline float mul_add(float a, float b, float c) { return a * b + c; }
inline float neg_mul_add(float a, float b, float c) { return c - a * b; }
}  // namespace ops
#endif

enum class Turn2 { kSpread, kRotate, kGather, kRotateBack };  // 1->2, 2->2, 2->1, 2->2

template <Turn2 kTurn, class Store, class T>
HWY_INLINE void turn_vectors(const T* x1, const T* x2, const float* c, const float* s,
                             std::int64_t n, T* y1, T* y2) {
  const auto lanes = static_cast<std::int64_t>(simd::lanes());
  for (std::int64_t i = 0; i + lanes <= n; i += lanes) {
    const auto vc = simd::load(c + i);
    const auto vs = simd::load(s + i);
    const auto a = simd::load(x1 + i);
    if constexpr (kTurn == Turn2::kSpread) {
      Store::store(ops::mul(a, vc), y1 + i);
      Store::store(ops::mul(a, vs), y2 + i);
    } else {
      const auto b = simd::load(x2 + i);
      if constexpr (kTurn == Turn2::kRotate) {
        Store::store(ops::neg_mul_add(b, vs, ops::mul(a, vc)), y1 + i);
        Store::store(ops::mul_add(b, vc, ops::mul(a, vs)), y2 + i);
      } else {
        Store::store(ops::mul_add(b, vs, ops::mul(a, vc)), y1 + i);
        if constexpr (kTurn == Turn2::kRotateBack) {
          Store::store(ops::neg_mul_add(a, vs, ops::mul(b, vc)), y2 + i);
        }
      }
    }
  }
}

// Whole vectors in place, the rest through a small buffer.
template <Turn2 kTurn, class Store, class T>
inline void turn_row(const T* x1, const T* x2, const float* c, const float* s, std::int64_t n,
                     T* y1, T* y2) {
  turn_vectors<kTurn, Store>(x1, x2, c, s, n, y1, y2);
  const auto lanes = static_cast<std::int64_t>(simd::lanes());
  const std::int64_t done = n / lanes * lanes;
  const std::int64_t rest = n - done;
  if (rest == 0) return;
  constexpr bool kTwoIn = kTurn != Turn2::kSpread;
  constexpr bool kTwoOut = kTurn != Turn2::kGather;
  T in1[kRowPad] = {};
  T in2[kRowPad] = {};
  T out1[kRowPad];
  T out2[kRowPad];
  std::copy_n(x1 + done, rest, in1);
  if constexpr (kTwoIn) std::copy_n(x2 + done, rest, in2);
  turn_vectors<kTurn, Store>(in1, in2, c + done, s + done, lanes, out1, out2);
  std::copy_n(out1, rest, y1 + done);
  if constexpr (kTwoOut) std::copy_n(out2, rest, y2 + done);
}

template <class Store, class T>
inline void turn_pair(const Pair<T>& in, const Pair<T>& out, std::int64_t column, const float* c,
                      const float* s, std::int64_t n, Direction direction) {
  const T* x1 = in.first + column;
  const T* x2 = in.second ? in.second + column : nullptr;
  T* y1 = out.first + column;
  T* y2 = out.second ? out.second + column : nullptr;
  if (direction == Direction::kForward) {
    if (x2 == nullptr) {
      turn_row<Turn2::kSpread, Store>(x1, x2, c, s, n, y1, y2);
    } else {
      turn_row<Turn2::kRotate, Store>(x1, x2, c, s, n, y1, y2);
    }
  } else if (y2 == nullptr) {
    turn_row<Turn2::kGather, Store>(x1, x2, c, s, n, y1, y2);
  } else {
    turn_row<Turn2::kRotateBack, Store>(x1, x2, c, s, n, y1, y2);
  }
}

template <class T>
inline void apply_direct(const Pair<T>& in, const Pair<T>& out, std::int64_t column, const float* c,
                         const float* s, std::int64_t n, Direction direction,
                         [[maybe_unused]] bool hardware_bf16) {
#if ANNULUS_HAVE_HWY && HWY_ARCH_ARM_A64
  if constexpr (std::is_same_v<T, bfloat16>) {
    if (hardware_bf16) return turn_pair<Bf16Store>(in, out, column, c, s, n, direction);
  }
#endif
  turn_pair<PlainStore>(in, out, column, c, s, n, direction);
}

// fp64 has no vectors here: the row is short work beside its sines and cosines.
inline void apply_direct(const Pair<double>& in, const Pair<double>& out, std::int64_t column,
                         const double* c, const double* s, std::int64_t n, Direction direction,
                         bool) {
  for (std::int64_t i = 0; i < n; ++i) {
    const double a = in.first[column + i];
    const double b = in.second ? in.second[column + i] : 0.0;
    const double sign = direction == Direction::kForward ? 1.0 : -1.0;
    out.first[column + i] = in.second ? a * c[i] - sign * b * s[i] : a * c[i];
    if (out.second) {
      out.second[column + i] = in.second ? sign * a * s[i] + b * c[i] : a * s[i];
    }
  }
}

}  // namespace annulus::lrpe::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#endif  // toggling guard
