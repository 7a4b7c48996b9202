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

// The direct path: no activation, dense columns. `Io` is the way two vectors come and go:
// Highway's, or Arm's own conversions of bfloat16.
struct PlainIo {
  template <class T, class V>
  static HWY_INLINE void load2(const T* p, V& v0, V& v1) {
    v0 = simd::load(p);
    v1 = simd::load(p + simd::lanes());
  }
  template <class T, class V>
  static HWY_INLINE void store2(V v0, V v1, T* p) {
    simd::store(v0, p);
    simd::store(v1, p + simd::lanes());
  }
};

#if ANNULUS_HAVE_HWY && HWY_ARCH_ARM_A64 && HWY_TARGET == HWY_NEON
// bfcvtn: one instruction where the portable rounding takes seven. Written as assembly because the
// file is compiled for every Arm core; the caller asks the CPU first. Both vectors leave in one
// store: Neoverse-V1 makes 0.67 stores a cycle, whether of 8 bytes or of 16, and stores are what
// this kernel waits for.
struct Bf16Io {
  template <class V>
  static HWY_INLINE void load2(const bfloat16* p, V& v0, V& v1) {
    const uint16x8_t raw = vld1q_u16(reinterpret_cast<const std::uint16_t*>(p));
    v0.raw = vreinterpretq_f32_u32(vshll_n_u16(vget_low_u16(raw), 16));
    v1.raw = vreinterpretq_f32_u32(vshll_n_u16(vget_high_u16(raw), 16));
  }
  template <class V>
  static HWY_INLINE void store2(V v0, V v1, bfloat16* p) {
    uint16x8_t r;
    asm(".arch_extension bf16\n\tbfcvtn %0.4h, %1.4s\n\tbfcvtn2 %0.8h, %2.4s"
        : "=&w"(r)
        : "w"(v0.raw), "w"(v1.raw));
    vst1q_u16(reinterpret_cast<std::uint16_t*>(p), r);
  }
};
#endif

enum class Turn2 { kSpread, kRotate, kGather, kRotateBack };  // 1->2, 2->2, 2->1, 2->2

// The same tokens of one sequence, or of two: first row of each tensor, and the step from token to token.
template <class T>
struct TokenRows {
  const T *x1, *x2;
  T *y1, *y2;
  std::int64_t x_step, y_step;
  std::int64_t x_next, y_next;  // to the second sequence, where two are turned at once
};

// One element, as the vectors do it.
template <Turn2 kTurn, class T>
HWY_INLINE void turn_scalar(const T* x1, const T* x2, T* y1, T* y2, std::int64_t i, float s,
                            float c) {
  const auto a = static_cast<float>(x1[i]);
  if constexpr (kTurn == Turn2::kSpread) {
    y1[i] = T(a * c);
    y2[i] = T(a * s);
  } else {
    const auto b = static_cast<float>(x2[i]);
    if constexpr (kTurn == Turn2::kRotate) {
      y1[i] = T(ops::one_mul_add(-b, s, a * c));
      y2[i] = T(ops::one_mul_add(b, c, a * s));
    } else {
      y1[i] = T(ops::one_mul_add(b, s, a * c));
      if constexpr (kTurn == Turn2::kRotateBack) y2[i] = T(ops::one_mul_add(-a, s, b * c));
    }
  }
}

// Two vectors of x (and their pairs), turned.
template <Turn2 kTurn, class Io, class T>
HWY_INLINE void apply_vectors(simd_t s0, simd_t c0, simd_t s1, simd_t c1, const T* x1, const T* x2,
                              T* y1, T* y2) {
  simd_t a0, a1;
  Io::load2(x1, a0, a1);
  if constexpr (kTurn == Turn2::kSpread) {
    Io::store2(ops::mul(a0, c0), ops::mul(a1, c1), y1);
    Io::store2(ops::mul(a0, s0), ops::mul(a1, s1), y2);
  } else {
    simd_t b0, b1;
    Io::load2(x2, b0, b1);
    if constexpr (kTurn == Turn2::kRotate) {
      Io::store2(ops::neg_mul_add(b0, s0, ops::mul(a0, c0)),
                 ops::neg_mul_add(b1, s1, ops::mul(a1, c1)), y1);
      Io::store2(ops::mul_add(b0, c0, ops::mul(a0, s0)), ops::mul_add(b1, c1, ops::mul(a1, s1)),
                 y2);
    } else {
      Io::store2(ops::mul_add(b0, s0, ops::mul(a0, c0)), ops::mul_add(b1, s1, ops::mul(a1, c1)),
                 y1);
      if constexpr (kTurn == Turn2::kRotateBack) {
        Io::store2(ops::neg_mul_add(a0, s0, ops::mul(b0, c0)),
                   ops::neg_mul_add(a1, s1, ops::mul(b1, c1)), y2);
      }
    }
  }
}

// Two vectors of columns from k on, of kSequences sequences `x_next` and `y_next` apart: their phase, x, and
// out. `far`: no |sin cos| was near zero so far.
template <Turn2 kTurn, class Io, bool kWatch, int kSequences, class T>
HWY_INLINE void turn_vectors(const float* ac, const float* as, const float* fc, const float* fs,
                             std::int64_t k, const T* x1, const T* x2, T* y1, T* y2,
                             [[maybe_unused]] std::int64_t x_next,
                             [[maybe_unused]] std::int64_t y_next, [[maybe_unused]] ops::Far& far) {
  const std::int64_t k1 = k + static_cast<std::int64_t>(simd::lanes());
  simd_t s0, c0, s1, c1;
  compose_vector(ac + k, as + k, fc + k, fs + k, s0, c0);
  compose_vector(ac + k1, as + k1, fc + k1, fs + k1, s1, c1);
  if constexpr (kWatch) {
    far = ops::still_far(far, ops::mul(c0, s0), kNearZero<T>);
    far = ops::still_far(far, ops::mul(c1, s1), kNearZero<T>);
  }
  apply_vectors<kTurn, Io>(s0, c0, s1, c1, x1 + k, x2 + k, y1 + k, y2 + k);
  if constexpr (kSequences == 2) {
    apply_vectors<kTurn, Io>(s0, c0, s1, c1, x1 + x_next + k, x2 + x_next + k, y1 + y_next + k,
                             y2 + y_next + k);
  }
}

// Elements [begin, end) of segment i, one at a time: what is left over of a row.
template <Turn2 kTurn, class T, class PhasesT>
HWY_NOINLINE void turn_scalars(const PhasesT& phases, int i, int token, std::int64_t begin,
                               std::int64_t end, const T* x1, const T* x2, T* y1, T* y2) {
  for (std::int64_t k = begin; k < end; ++k) {
    float s = 0;
    float c = 0;
    compose(phases.at(i, token), k, s, c);
    if (PhasesT::kExactNearZero && phases.watched(i, token) && phases.coarse(s, c)) {
      phases.exact(i, token, k, s, c);
    }
    turn_scalar<kTurn>(x1, x2, y1, y2, k, s, c);
  }
}

// The vectors of segment i that hold an element too close to a zero, again and one element at a
// time.
template <Turn2 kTurn, class T, class PhasesT>
HWY_NOINLINE void mend(const PhasesT& phases, int i, int token, std::int64_t n, const T* x1,
                       const T* x2, T* y1, T* y2) {
  const auto lanes = static_cast<std::int64_t>(simd::lanes());
  for (std::int64_t k = 0; k < n; k += lanes) {
    simd_t s, c;
    compose_vector(phases.at(i, token), k, s, c);
    if (!ops::some_near(ops::still_far(ops::all_far(), ops::mul(c, s), kNearZero<T>))) continue;
    turn_scalars<kTurn>(phases, i, token, k, std::min(k + lanes, n), x1, x2, y1, y2);
  }
}

// A tile of one sequence. It is a leaf that keeps everything in registers, because of the hardware:
// a store to anywhere else between two rows of y (a spilled register is enough), or rows of two
// sequences in turn, end the core's write streaming, and every line of y is then fetched before it
// is overwritten. Measured on Neoverse-V1, 4096 tokens in fp32: 12.8 ms with such stores, 3.4
// without. For the same reason the phases are made again for each sequence, four operations an
// element, rather than stored in a row of their own.
template <Turn2 kTurn, class Io, int kSequences, class T, class PhasesT>
HWY_NOINLINE void turn_tile(const Segments& segments, const PhasesT& phases, TokenRows<T> rows,
                            int tokens) {
  constexpr bool kWatch = PhasesT::kExactNearZero;
  const auto step = 2 * static_cast<std::int64_t>(simd::lanes());  // columns of turn_vectors
  const bool in_place = rows.x1 == rows.y1;
  const auto for_sequences = [&rows](auto&& f) {
    f(std::int64_t{0}, std::int64_t{0});
    if constexpr (kSequences == 2) f(rows.x_next, rows.y_next);
  };
  for (int token = 0; token < tokens; ++token) {
    for (int i = 0; i < segments.count; ++i) {
      const std::int64_t n = segments.at[i].length;
      const std::int64_t column = segments.at[i].column;
      const T* x1 = rows.x1 + column;
      const T* x2 = rows.x2 + column;
      T* y1 = rows.y1 + column;
      T* y2 = rows.y2 + column;
      // Pointers, one by one: a struct would be copied to the stack.
      const float* ac = phases.at(i, token).anchor_cos;
      const float* as = phases.at(i, token).anchor_sin;
      const float* fc = phases.at(i, token).fine_cos;
      const float* fs = phases.at(i, token).fine_sin;
      // In place x is gone once it is turned, so the second look comes first.
      if (kWatch && in_place && phases.any_coarse(i, token)) {
        turn_scalars<kTurn>(phases, i, token, 0, n, x1, x2, y1, y2);
        continue;
      }
      ops::Far far = ops::all_far();
      std::int64_t k = 0;
      for (; k + 2 * step <= n; k += 2 * step) {
        turn_vectors<kTurn, Io, kWatch, kSequences>(ac, as, fc, fs, k, x1, x2, y1, y2, rows.x_next,
                                                    rows.y_next, far);
        turn_vectors<kTurn, Io, kWatch, kSequences>(ac, as, fc, fs, k + step, x1, x2, y1, y2,
                                                    rows.x_next, rows.y_next, far);
      }
      for (; k + step <= n; k += step) {
        turn_vectors<kTurn, Io, kWatch, kSequences>(ac, as, fc, fs, k, x1, x2, y1, y2, rows.x_next,
                                                    rows.y_next, far);
      }
      if (k < n && k > 0 && !in_place) {  // the last vectors overlap the ones before
        turn_vectors<kTurn, Io, kWatch, kSequences>(ac, as, fc, fs, n - step, x1, x2, y1, y2,
                                                    rows.x_next, rows.y_next, far);
      } else if (k < n) {
        for_sequences([&](std::int64_t x, std::int64_t y) {
          turn_scalars<kTurn>(phases, i, token, k, n, x1 + x, x2 + x, y1 + y, y2 + y);
        });
      }
      if (kWatch && !in_place && ops::some_near(far) && phases.watched(i, token)) {
        for_sequences([&](std::int64_t x, std::int64_t y) {
          mend<kTurn>(phases, i, token, n, x1 + x, x2 + x, y1 + y, y2 + y);
        });
      }
    }
    rows.x1 += rows.x_step;
    rows.x2 += rows.x_step;
    rows.y1 += rows.y_step;
    rows.y2 += rows.y_step;
  }
}

template <class Io, int kSequences, class T, class PhasesT>
inline void turn_tile_as(const Segments& segments, const PhasesT& phases, TokenRows<T> rows,
                         int tokens, Direction direction) {
  // A component that is not there is never touched; any pointer does for the arithmetic on it.
  const bool two_in = rows.x2 != nullptr;
  const bool two_out = rows.y2 != nullptr;
  if (!two_in) rows.x2 = rows.x1;
  if (!two_out) rows.y2 = rows.y1;
  if (direction == Direction::kForward) {
    if (two_in) {
      turn_tile<Turn2::kRotate, Io, kSequences>(segments, phases, rows, tokens);
    } else {
      turn_tile<Turn2::kSpread, Io, kSequences>(segments, phases, rows, tokens);
    }
  } else if (two_out) {
    turn_tile<Turn2::kRotateBack, Io, kSequences>(segments, phases, rows, tokens);
  } else {
    turn_tile<Turn2::kGather, Io, kSequences>(segments, phases, rows, tokens);
  }
}

template <int kSequences, class T, class PhasesT>
inline void apply_tile(const Segments& segments, const PhasesT& phases, const TokenRows<T>& rows,
                       int tokens, Direction direction, [[maybe_unused]] bool hardware_bf16) {
#if ANNULUS_HAVE_HWY && HWY_ARCH_ARM_A64 && HWY_TARGET == HWY_NEON
  if constexpr (std::is_same_v<T, bfloat16>) {
    if (hardware_bf16) {
      return turn_tile_as<Bf16Io, kSequences>(segments, phases, rows, tokens, direction);
    }
  }
#endif
  turn_tile_as<PlainIo, kSequences>(segments, phases, rows, tokens, direction);
}

}  // namespace annulus::lrpe::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#endif  // toggling guard
