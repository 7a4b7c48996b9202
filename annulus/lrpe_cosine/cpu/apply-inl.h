// What is done with a row once its sines and cosines are there: load, activate, turn, store. Row
// functions over Segment-shaped buffers in float or double. The direct path, without buffers, is in
// cpu/direct-inl.h.
//
// How a turned value is stored: as the nearest float or float16, but as a bfloat16 by cutting it off.
//
// Cutting off is one operation for two vectors where rounding to nearest takes two conversions, of which the
// Arm cores measured make one a cycle, or seven operations each. To keep it as good as rounding, every phase for
// a bfloat16 tensor is 1 + ln 2 / 256 times too long: a value of mantissa 1 <= m < 2 is then raised by 0.35 m units
// in the last place before the cut takes off 0 to 1. The result is one of the two neighbours of the fp32
// value, at most 0.7 ulp away (1 below the normal numbers), 0.305 ulp rms (rounding to nearest: 0.5 and 0.289) and
// right on average: the mean of m over all scales is 1 / ln 2. What bfloat16 holds exactly (a token at position 0)
// stays exact, and values up to the largest finite one stay finite (the next half ulp, which rounding to nearest
// would bring down to it, becomes infinite).
#if defined(ANNULUS_LRPE_COSINE_APPLY_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef ANNULUS_LRPE_COSINE_APPLY_INL_H_
#undef ANNULUS_LRPE_COSINE_APPLY_INL_H_
#else
#define ANNULUS_LRPE_COSINE_APPLY_INL_H_
#endif

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstdint>
#include <limits>
#include <type_traits>

#include "annulus/core/dispatch.h"
#include "annulus/cpu/simd-inl.h"
#include "annulus/lrpe_cosine/cpu/rows-inl.h"

HWY_BEFORE_NAMESPACE();
namespace annulus::lrpe_cosine::HWY_NAMESPACE {

// One value; its phase has the scale above.
template <class T, class Real>
HWY_INLINE T stored(Real v) {
  return T(v);
}
template <>
HWY_INLINE bfloat16 stored<bfloat16, float>(float v) {
  // A NaN from arithmetic is quiet, so that its upper half is one too.
  return std::bit_cast<bfloat16>(static_cast<std::uint16_t>(std::bit_cast<std::uint32_t>(v) >> 16));
}

#if ANNULUS_SIMD

// The compiler must have the vector in a register here.
template <class V>
HWY_INLINE void in_register([[maybe_unused]] V& v) {
#if HWY_ARCH_ARM_A64
  asm volatile("" : "+w"(v.raw));
#endif
}

// Two vectors as they will lie in memory, to be held until a whole line of them is there. Constructors are
// written out: one made by the compiler would not be of this instruction set.
template <class T>
struct Two {
  simd_t v0, v1;
  HWY_INLINE Two() {}
  HWY_INLINE void set(simd_t a, simd_t b) {
    v0 = a;
    v1 = b;
  }
  HWY_INLINE void finish() {}
  HWY_INLINE void store(T* p) const {
    simd::store(v0, p);
    simd::store(v1, p + simd::lanes());
  }
};

// Of 16 bits two vectors become one.
template <class T>
requires(sizeof(T) == 2) struct Two<T> {
  using D = hwy::HWY_NAMESPACE::Repartition<std::uint16_t, simd::F32>;
  hwy::HWY_NAMESPACE::Vec<D> v;
  HWY_INLINE Two() {}
  HWY_INLINE void set(simd_t a, simd_t b) {
    namespace hn = hwy::HWY_NAMESPACE;
    if constexpr (std::is_same_v<T, bfloat16>) {
      v = hn::ConcatOdd(D(), hn::BitCast(D(), b), hn::BitCast(D(), a));
    } else {
      const hn::Rebind<hwy::float16_t, simd::F32> half;
      const hn::Half<D> bits;
      v = hn::Combine(D(), hn::BitCast(bits, hn::DemoteTo(half, b)),
                      hn::BitCast(bits, hn::DemoteTo(half, a)));
    }
  }
  HWY_INLINE void finish() { in_register(v); }
  HWY_INLINE void store(T* p) const {
    hwy::HWY_NAMESPACE::StoreU(v, D(), reinterpret_cast<std::uint16_t*>(p));
  }
};

#endif  // ANNULUS_SIMD

// Rows of a tensor of any type in and out of buffers of Real; columns are `step` apart.
template <class Real>
struct RowAccess {
  void (*load)(const void* from, std::int64_t step, std::int64_t n, Real* to);
  void (*store)(const Real* from, std::int64_t n, void* to, std::int64_t step);
};

template <class T, class Real>
void load_row(const void* from, std::int64_t step, std::int64_t n, Real* to) {
  const T* p = static_cast<const T*>(from);
  std::int64_t i = 0;
#if ANNULUS_SIMD
  if constexpr (!std::is_same_v<Real, double>) {
    const auto lanes = static_cast<std::int64_t>(simd::lanes());
    if (step == 1) {
      for (; i <= n - 4 * lanes; i += 4 * lanes) {
        ANNULUS_UNROLL
        for (int u = 0; u < 4; ++u) simd::store(simd::load(p + i + u * lanes), to + i + u * lanes);
      }
      for (; i <= n - lanes; i += lanes) simd::store(simd::load(p + i), to + i);
      if (i < n && n >= lanes) {  // the last overlaps the one before
        simd::store(simd::load(p + n - lanes), to + n - lanes);
        return;
      }
    }
  }
#endif
  for (; i < n; ++i) to[i] = static_cast<Real>(p[i * step]);
}

template <class T, class Real>
void store_row(const Real* from, std::int64_t n, void* to, std::int64_t step) {
  T* p = static_cast<T*>(to);
  std::int64_t i = 0;
#if ANNULUS_SIMD
  if constexpr (!std::is_same_v<Real, double>) {
    const auto lanes = static_cast<std::int64_t>(simd::lanes());
    if (step == 1) {
      const auto two = [&](std::int64_t at) {
        Two<T> v;
        v.set(simd::load(from + at), simd::load(from + at + lanes));
        v.store(p + at);
      };
      for (; i <= n - 4 * lanes; i += 4 * lanes) {
        two(i);
        two(i + 2 * lanes);
      }
      for (; i <= n - 2 * lanes; i += 2 * lanes) two(i);
      if (i < n && n >= 2 * lanes) return two(n - 2 * lanes);
    }
  }
#endif
  for (; i < n; ++i) p[i * step] = stored<T>(from[i]);
}

template <class Real>
RowAccess<Real> row_access(DType dtype) {
  return visit_floating(dtype, []<class T>() -> RowAccess<Real> {
    if constexpr (std::is_same_v<compute_t<T>, Real>) {
      return {load_row<T, Real>, store_row<T, Real>};
    } else {
      return {};
    }
  });
}

// (y1, y2) = (x1, x2) turned; they may be the same rows. Rows are padded: whole vectors may be touched.
template <Turn2 kTurn>
inline void turn_row(const float* x1, const float* x2, const float* c, const float* s,
                     std::int64_t n, float* y1, float* y2) {
  const auto lanes = static_cast<std::int64_t>(simd::lanes());
  for (std::int64_t i = 0; i < n; i += lanes) {
    const simd_t a = simd::load(x1 + i), b = kTurn == Turn2::kSpread ? a : simd::load(x2 + i);
    const simd_t vc = simd::load(c + i), vs = simd::load(s + i);
    simd::store(first_of<kTurn>(a, b, vs, vc), y1 + i);
    simd::store(second_of<kTurn>(a, b, vs, vc), y2 + i);
  }
}
template <Turn2 kTurn>
inline void turn_row(const double* x1, const double* x2, const double* c, const double* s,
                     std::int64_t n, double* y1, double* y2) {
  for (std::int64_t i = 0; i < n; ++i) {
    const double a = x1[i], b = kTurn == Turn2::kSpread ? a : x2[i];
    y1[i] = first_of<kTurn>(a, b, s[i], c[i]);
    y2[i] = second_of<kTurn>(a, b, s[i], c[i]);
  }
}

// sum += s q with q = x1 g2 - x2 g1.
template <class Real>
inline void add_moments(const Real* x1, const Real* x2, const Real* g1, const Real* g2, double s,
                        std::int64_t n, double* sum) {
  for (std::int64_t i = 0; i < n; ++i) {
    Real q = x1[i] * g2[i];
    if (x2 != nullptr) q -= x2[i] * g1[i];
    sum[i] += s * static_cast<double>(q);
  }
}

template <class Real>
inline Real max_with_nan(Real a, Real b) {
  return b > a || std::isnan(b) ? b : a;  // a NaN, once there, stays: b > NaN is false
}

// v = exp(v - high), one maximum per column.
template <class Real>
inline void exp_minus(Real* v, const Real* high, std::int64_t n) {
  std::int64_t i = 0;
#if ANNULUS_SIMD
  if constexpr (std::is_same_v<Real, float>) {
    const auto lanes = static_cast<std::int64_t>(simd::lanes());
    for (; i + lanes <= n; i += lanes) {
      simd::store(simd::exp(hwy::HWY_NAMESPACE::Sub(simd::load(v + i), simd::load(high + i))),
                  v + i);
    }
  }
#endif
  for (; i < n; ++i) v[i] = std::exp(v[i] - high[i]);
}

// v = 1 / (1 + exp(-v)) in place, of whichever sign without an overflow: with e = exp(-|v|) it is 1 / (1 + e), or
// e / (1 + e) below zero. The row is padded, so whole vectors may be touched.
template <class Real>
inline void sigmoid_row(Real* v, std::int64_t n) {
  std::int64_t i = 0;
#if ANNULUS_SIMD
  if constexpr (std::is_same_v<Real, float>) {
    namespace hn = hwy::HWY_NAMESPACE;
    const simd::F32 d;
    const auto one = hn::Set(d, 1.0f);
    for (; i < n; i += static_cast<std::int64_t>(simd::lanes())) {
      const auto x = simd::load(v + i);
      const auto e = simd::exp(hn::Neg(hn::Abs(x)));
      simd::store(hn::Div(hn::IfThenElse(hn::Lt(x, hn::Zero(d)), e, one), hn::Add(one, e)), v + i);
    }
  }
#endif
  for (; i < n; ++i) {
    const Real e = std::exp(-std::abs(v[i]));
    v[i] = (v[i] < 0 ? e : Real{1}) / (1 + e);
  }
}

// Softmax over one token's features, which lie in several segments.
template <class Real>
inline void softmax_features(const Segments& segments, Real* x) {
  Real high = -std::numeric_limits<Real>::infinity();
  for (const Segment& g : segments) {
    for (std::int64_t k = 0; k < g.length; ++k) high = max_with_nan(high, x[g.slot + k]);
  }
  double sum = 0;  // one after the other, of any number of them
  for (const Segment& g : segments) {
    for (std::int64_t k = 0; k < g.length; ++k) {
      x[g.slot + k] = std::exp(x[g.slot + k] - high);
      sum += x[g.slot + k];
    }
  }
  const auto scale = static_cast<Real>(1 / sum);
  for (const Segment& g : segments) {
    for (std::int64_t k = 0; k < g.length; ++k) x[g.slot + k] *= scale;
  }
}

// x = f(x). `high` and `scale` are the column statistics of softmax over tokens, indexed by column.
template <class Real>
inline void activate(LrpeActivation f, const Segments& segments, Real* x, const Real* high,
                     const Real* scale) {
  if (f == LrpeActivation::kNone) return;
  if (f == LrpeActivation::kSoftmaxFeatures) return softmax_features(segments, x);
  for (const Segment& g : segments) {
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
    double sum = 0;
    for (const Segment& g : segments) {
      for (std::int64_t k = g.slot; k < g.slot + g.length; ++k) {
        sum += static_cast<double>(xb[k]) * static_cast<double>(g_row[k]);
      }
    }
    row_dot = static_cast<Real>(sum);
  }
  for (const Segment& g : segments) {
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

}  // namespace annulus::lrpe_cosine::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#endif  // toggling guard
