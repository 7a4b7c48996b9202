// The direct path: no activation, dense columns. A row stays in registers from x to y, and its sines and cosines
// are made on the way.
#if defined(ANNULUS_LRPE_COSINE_DIRECT_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef ANNULUS_LRPE_COSINE_DIRECT_INL_H_
#undef ANNULUS_LRPE_COSINE_DIRECT_INL_H_
#else
#define ANNULUS_LRPE_COSINE_DIRECT_INL_H_
#endif

#include <algorithm>
#include <cstdint>
#include <type_traits>

#include "annulus/cpu/simd-inl.h"
#include "annulus/lrpe_cosine/lrpe_cosine_apply-inl.h"
#include "annulus/lrpe_cosine/lrpe_cosine_rows-inl.h"

HWY_BEFORE_NAMESPACE();
namespace annulus::lrpe::HWY_NAMESPACE {

// `Io` is the way two vectors come and go: Highway's, or Arm's own conversions of bfloat16.
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

// The same where the columns lie on two axes: the first `split` on segment i, whose columns begin `before`
// columns earlier, the others on segment i + 1.
template <Turn2 kTurn, class Io, bool kWatch, int kSequences, class T>
HWY_INLINE void turn_edge(const TokenPhase& p, const TokenPhase& q, std::int64_t before,
                          std::int64_t split, const T* x1, const T* x2, T* y1, T* y2,
                          std::int64_t x_next, std::int64_t y_next,
                          [[maybe_unused]] ops::Far& far) {
  const auto lanes = static_cast<std::int64_t>(simd::lanes());
  simd_t s0, c0, s1, c1, s2, c2, s3, c3;
  compose_vector(p, before, s0, c0);
  compose_vector(p, before + lanes, s1, c1);
  compose_vector(q, -split, s2, c2);
  compose_vector(q, -split + lanes, s3, c3);
  if constexpr (kWatch) {
    // At position 0 the product is exact: no second look, though the sines are 0.
    if (p.position != 0) {
      far = ops::still_far(far, ops::mul(c0, s0), kNearZero<T>);
      far = ops::still_far(far, ops::mul(c1, s1), kNearZero<T>);
    }
    if (q.position != 0) {
      far = ops::still_far(far, ops::mul(c2, s2), kNearZero<T>);
      far = ops::still_far(far, ops::mul(c3, s3), kNearZero<T>);
    }
  }
  s0 = ops::splice(split, s0, s2);
  c0 = ops::splice(split, c0, c2);
  s1 = ops::splice(split - lanes, s1, s3);
  c1 = ops::splice(split - lanes, c1, c3);
  apply_vectors<kTurn, Io>(s0, c0, s1, c1, x1, x2, y1, y2);
  if constexpr (kSequences == 2) {
    apply_vectors<kTurn, Io>(s0, c0, s1, c1, x1 + x_next, x2 + x_next, y1 + y_next, y2 + y_next);
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

// The same for axes whose columns do not fill whole vectors: vectors are counted from the start of the row, and
// some hold the end of one segment and the start of the next. Each segment by itself, its last vectors
// overlapping, leaves lines of y half written for a while, and again the core fetches them: 13.7 ms instead of 7.6
// for a 3-D forward of 4096 tokens in fp32, one thread.
template <Turn2 kTurn, class Io, int kSequences, class T, class PhasesT>
HWY_NOINLINE void turn_tile_across(const Segments& segments, const PhasesT& phases,
                                   TokenRows<T> rows, int tokens) {
  constexpr bool kWatch = PhasesT::kExactNearZero;
  const auto step = 2 * static_cast<std::int64_t>(simd::lanes());
  for (int token = 0; token < tokens; ++token) {
    ops::Far far = ops::all_far();
    std::int64_t k = 0;  // column
    for (int i = 0; i < segments.count; ++i) {
      const std::int64_t column = segments.at[i].column;
      const std::int64_t end = column + segments.at[i].length;
      const float* ac = phases.at(i, token).anchor_cos;
      const float* as = phases.at(i, token).anchor_sin;
      const float* fc = phases.at(i, token).fine_cos;
      const float* fs = phases.at(i, token).fine_sin;
      const ops::Far before = far;
      for (; k + step <= end; k += step) {
        turn_vectors<kTurn, Io, kWatch, kSequences>(
            ac, as, fc, fs, k - column, rows.x1 + column, rows.x2 + column, rows.y1 + column,
            rows.y2 + column, rows.x_next, rows.y_next, far);
      }
      if (kWatch && !phases.watched(i, token)) far = before;
      if (k < end) {
        turn_edge<kTurn, Io, kWatch, kSequences>(
            phases.at(i, token), phases.at(i + 1, token), k - column, end - k, rows.x1 + k,
            rows.x2 + k, rows.y1 + k, rows.y2 + k, rows.x_next, rows.y_next, far);
        k += step;
      }
    }
    if (kWatch && ops::some_near(far)) {
      for (int i = 0; i < segments.count; ++i) {
        if (!phases.watched(i, token)) continue;
        const Segment& g = segments.at[i];
        for (std::int64_t n = 0; n < kSequences; ++n) {
          const std::int64_t x = g.column + n * rows.x_next;
          const std::int64_t y = g.column + n * rows.y_next;
          mend<kTurn>(phases, i, token, g.length, rows.x1 + x, rows.x2 + x, rows.y1 + y,
                      rows.y2 + y);
        }
      }
    }
    rows.x1 += rows.x_step;
    rows.x2 += rows.x_step;
    rows.y1 += rows.y_step;
    rows.y2 += rows.y_step;
  }
}

// Whether that is the better way, and possible: whole vectors in all, none of them on three segments. In place the
// second look must come before the first (turn_tile), but where there is none, any way will do.
inline bool goes_across(const Segments& segments, bool watched_in_place) {
  const auto step = 2 * static_cast<std::int64_t>(simd::lanes());
  std::int64_t columns = 0;
  bool uneven = false;
  for (int i = 0; i < segments.count; ++i) {
    if (segments.at[i].length < step) return false;
    columns += segments.at[i].length;
    uneven |= columns % step != 0;
  }
  return uneven && columns % step == 0 && !watched_in_place;
}

template <Turn2 kTurn, class Io, int kSequences, class T, class PhasesT>
inline void turn_tile_best(const Segments& segments, const PhasesT& phases,
                           const TokenRows<T>& rows, int tokens) {
  const bool in_place = rows.x1 == rows.y1;
  if (goes_across(segments, PhasesT::kExactNearZero && in_place)) {
    turn_tile_across<kTurn, Io, kSequences>(segments, phases, rows, tokens);
  } else {
    turn_tile<kTurn, Io, kSequences>(segments, phases, rows, tokens);
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
      turn_tile_best<Turn2::kRotate, Io, kSequences>(segments, phases, rows, tokens);
    } else {
      turn_tile_best<Turn2::kSpread, Io, kSequences>(segments, phases, rows, tokens);
    }
  } else if (two_out) {
    turn_tile_best<Turn2::kRotateBack, Io, kSequences>(segments, phases, rows, tokens);
  } else {
    turn_tile_best<Turn2::kGather, Io, kSequences>(segments, phases, rows, tokens);
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
