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
template <class Real>
HWY_INLINE Real one_mul_add(Real a, Real b, Real c) {
  const hn::CappedTag<Real, 1> d;
  return hn::GetLane(hn::MulAdd(hn::Set(d, a), hn::Set(d, b), hn::Set(d, c)));
}
#else
inline float mul(float a, float b) { return a * b; }
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

// (y1, y2) = (x1, x2) turned by the phase; x2 = nullptr is 0. Rows are padded: whole vectors may be
// touched.
inline void rotate_row(const float* x1, const float* x2, const float* c, const float* s,
                       std::int64_t n, float* y1, float* y2) {
  const auto lanes = static_cast<std::int64_t>(simd::lanes());
  for (std::int64_t i = 0; i < n; i += lanes) {
    const auto a = simd::load(x1 + i);
    const auto vc = simd::load(c + i);
    const auto vs = simd::load(s + i);
    if (x2 == nullptr) {
      simd::store(ops::mul(a, vc), y1 + i);
      simd::store(ops::mul(a, vs), y2 + i);
    } else {
      const auto b = simd::load(x2 + i);
      simd::store(ops::neg_mul_add(b, vs, ops::mul(a, vc)), y1 + i);
      simd::store(ops::mul_add(b, vc, ops::mul(a, vs)), y2 + i);
    }
  }
}
inline void rotate_row(const double* x1, const double* x2, const double* c, const double* s,
                       std::int64_t n, double* y1, double* y2) {
  for (std::int64_t i = 0; i < n; ++i) {
    const double a = x1[i];
    const double b = x2 ? x2[i] : 0.0;
    y1[i] = x2 ? ops::one_mul_add(-b, s[i], a * c[i]) : a * c[i];
    y2[i] = x2 ? ops::one_mul_add(b, c[i], a * s[i]) : a * s[i];
  }
}

// (g1, g2) turned back by the phase, in place.
inline void rotate_back_row(float* g1, float* g2, const float* c, const float* s, std::int64_t n) {
  const auto lanes = static_cast<std::int64_t>(simd::lanes());
  for (std::int64_t i = 0; i < n; i += lanes) {
    const auto a = simd::load(g1 + i);
    const auto b = simd::load(g2 + i);
    const auto vc = simd::load(c + i);
    const auto vs = simd::load(s + i);
    simd::store(ops::mul_add(b, vs, ops::mul(a, vc)), g1 + i);
    simd::store(ops::neg_mul_add(a, vs, ops::mul(b, vc)), g2 + i);
  }
}
inline void rotate_back_row(double* g1, double* g2, const double* c, const double* s,
                            std::int64_t n) {
  for (std::int64_t i = 0; i < n; ++i) {
    const double a = g1[i];
    const double b = g2[i];
    g1[i] = ops::one_mul_add(b, s[i], a * c[i]);
    g2[i] = ops::one_mul_add(-a, s[i], b * c[i]);
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

// One element at a time, for what is left over of a row.
template <Turn2 kTurn, class T>
HWY_INLINE void turn_scalars(const T* x1, const T* x2, const float* c, const float* s,
                             std::int64_t begin, std::int64_t end, T* y1, T* y2) {
  for (std::int64_t i = begin; i < end; ++i) {
    const auto a = static_cast<float>(x1[i]);
    if constexpr (kTurn == Turn2::kSpread) {
      y1[i] = T(a * c[i]);
      y2[i] = T(a * s[i]);
    } else {
      const auto b = static_cast<float>(x2[i]);
      if constexpr (kTurn == Turn2::kRotate) {
        y1[i] = T(ops::one_mul_add(-b, s[i], a * c[i]));
        y2[i] = T(ops::one_mul_add(b, c[i], a * s[i]));
      } else {
        y1[i] = T(ops::one_mul_add(b, s[i], a * c[i]));
        if constexpr (kTurn == Turn2::kRotateBack) {
          y2[i] = T(ops::one_mul_add(-a, s[i], b * c[i]));
        }
      }
    }
  }
}

// The same tokens of one sequence: first row of each tensor, and the step from token to token.
template <class T>
struct TokenRows {
  const T *x1, *x2;
  T *y1, *y2;
  std::int64_t x_step, y_step;
};

// A tile of one sequence. It is a leaf, and keeps everything in registers, because of the hardware:
// a store to anywhere else between two rows of y (a spilled register is enough) ends the core's
// write streaming, and every line of y is then fetched before it is overwritten. Measured on
// Neoverse-V1: 12.8 ms with such stores, 3.4 without.
template <Turn2 kTurn, class Store, class T, class Phases>
HWY_NOINLINE void turn_tile(const Segments& segments, const Phases& phases, TokenRows<T> rows,
                            int tokens) {
  const auto lanes = static_cast<std::int64_t>(simd::lanes());
  for (int token = 0; token < tokens; ++token) {
    for (int i = 0; i < segments.count; ++i) {
      const std::int64_t column = segments.at[i].column;
      const std::int64_t n = segments.at[i].length;
      const float* c = phases.cos(i, token);
      const float* s = phases.sin(i, token);
      const T* x1 = rows.x1 + column;
      const T* x2 = rows.x2 + column;
      T* y1 = rows.y1 + column;
      T* y2 = rows.y2 + column;
      turn_vectors<kTurn, Store>(x1, x2, c, s, n, y1, y2);
      const std::int64_t done = n / lanes * lanes;
      if (done == n) continue;
      // The last vector may overlap the one before, unless the rotation is in place.
      if (done > 0 && rows.x1 != rows.y1) {
        const std::int64_t last = n - lanes;
        turn_vectors<kTurn, Store>(x1 + last, x2 + last, c + last, s + last, lanes, y1 + last,
                                   y2 + last);
      } else {
        turn_scalars<kTurn>(x1, x2, c, s, done, n, y1, y2);
      }
    }
    rows.x1 += rows.x_step;
    rows.x2 += rows.x_step;
    rows.y1 += rows.y_step;
    rows.y2 += rows.y_step;
  }
}

template <class Store, class T, class Phases>
inline void turn_tile_as(const Segments& segments, const Phases& phases, TokenRows<T> rows,
                         int tokens, Direction direction) {
  // A component that is not there is never touched; any pointer does for the arithmetic on it.
  const bool two_in = rows.x2 != nullptr;
  const bool two_out = rows.y2 != nullptr;
  if (!two_in) rows.x2 = rows.x1;
  if (!two_out) rows.y2 = rows.y1;
  if (direction == Direction::kForward) {
    if (two_in) {
      turn_tile<Turn2::kRotate, Store>(segments, phases, rows, tokens);
    } else {
      turn_tile<Turn2::kSpread, Store>(segments, phases, rows, tokens);
    }
  } else if (two_out) {
    turn_tile<Turn2::kRotateBack, Store>(segments, phases, rows, tokens);
  } else {
    turn_tile<Turn2::kGather, Store>(segments, phases, rows, tokens);
  }
}

template <class T, class Phases>
inline void apply_tile(const Segments& segments, const Phases& phases, const TokenRows<T>& rows,
                       int tokens, Direction direction, [[maybe_unused]] bool hardware_bf16) {
#if ANNULUS_HAVE_HWY && HWY_ARCH_ARM_A64
  if constexpr (std::is_same_v<T, bfloat16>) {
    if (hardware_bf16) {
      return turn_tile_as<Bf16Store>(segments, phases, rows, tokens, direction);
    }
  }
#endif
  turn_tile_as<PlainStore>(segments, phases, rows, tokens, direction);
}

// y2 = a s + b c with the product that rotate_row and rotate_back_row round first.
inline double second(Direction direction, double a, double b, double c, double s) {
  return direction == Direction::kForward ? ops::one_mul_add(b, c, a * s)
                                          : ops::one_mul_add(a, s, b * c);
}

// fp64 has no vectors here: a row is short work beside its sines and cosines.
template <class Phases>
inline void apply_tile(const Segments& segments, const Phases& phases, TokenRows<double> rows,
                       int tokens, Direction direction, bool) {
  for (int token = 0; token < tokens; ++token) {
    for (int i = 0; i < segments.count; ++i) {
      const Segment& g = segments.at[i];
      for (std::int64_t k = 0; k < g.length; ++k) {
        const double c = phases.cos(i, token)[k];
        const double s =
            direction == Direction::kForward ? phases.sin(i, token)[k] : -phases.sin(i, token)[k];
        const std::int64_t at = token * rows.x_step + g.column + k;
        const std::int64_t to = token * rows.y_step + g.column + k;
        const double a = rows.x1[at];
        const double b = rows.x2 ? rows.x2[at] : 0.0;
        rows.y1[to] = rows.x2 ? ops::one_mul_add(-b, s, a * c) : a * c;
        if (rows.y2) rows.y2[to] = rows.x2 ? second(direction, a, b, c, s) : a * s;
      }
    }
  }
}

}  // namespace annulus::lrpe::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#endif  // toggling guard
