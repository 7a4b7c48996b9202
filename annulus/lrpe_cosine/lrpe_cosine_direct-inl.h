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
// store.
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

  void next_token() {
    x1 += x_step;
    x2 += x_step;
    y1 += y_step;
    y2 += y_step;
  }
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

// The two components of a vector once turned.
template <Turn2 kTurn>
HWY_INLINE simd_t first_of(simd_t a, [[maybe_unused]] simd_t b, simd_t s, simd_t c) {
  const simd_t ac = ops::mul(a, c);
  if constexpr (kTurn == Turn2::kSpread) return ac;
  if constexpr (kTurn == Turn2::kRotate) return ops::neg_mul_add(b, s, ac);
  return ops::mul_add(b, s, ac);
}
template <Turn2 kTurn>
HWY_INLINE simd_t second_of(simd_t a, [[maybe_unused]] simd_t b, simd_t s, simd_t c) {
  if constexpr (kTurn == Turn2::kSpread) return ops::mul(a, s);
  if constexpr (kTurn == Turn2::kRotate) return ops::mul_add(b, c, ops::mul(a, s));
  return ops::neg_mul_add(a, s, ops::mul(b, c));
}

// kVectors (an even number) vectors of x and of their pairs, turned: all of them of y1, then all of y2.
// Where there are two in and two out, x may be y: nothing is written before all is read.
template <Turn2 kTurn, class Io, int kVectors, class T>
HWY_INLINE void apply_vectors(const simd_t (&s)[kVectors], const simd_t (&c)[kVectors], const T* x1,
                              const T* x2, T* y1, T* y2) {
  const auto lanes = static_cast<std::int64_t>(simd::lanes());
  if constexpr (kTurn == Turn2::kGather) {
    ANNULUS_UNROLL
    for (int u = 0; u < kVectors; u += 2) {
      simd_t a0, a1, b0, b1;
      Io::load2(x1 + u * lanes, a0, a1);
      Io::load2(x2 + u * lanes, b0, b1);
      Io::store2(first_of<kTurn>(a0, b0, s[u], c[u]), first_of<kTurn>(a1, b1, s[u + 1], c[u + 1]),
                 y1 + u * lanes);
    }
  } else {
    simd_t a[kVectors];
    simd_t b[kVectors];
    ANNULUS_UNROLL
    for (int u = 0; u < kVectors; u += 2) {
      Io::load2(x1 + u * lanes, a[u], a[u + 1]);
      if constexpr (kTurn == Turn2::kSpread) {
        b[u] = b[u + 1] = a[u];  // not used
      } else {
        Io::load2(x2 + u * lanes, b[u], b[u + 1]);
      }
    }
    ANNULUS_UNROLL
    for (int u = 0; u < kVectors; u += 2) {
      Io::store2(first_of<kTurn>(a[u], b[u], s[u], c[u]),
                 first_of<kTurn>(a[u + 1], b[u + 1], s[u + 1], c[u + 1]), y1 + u * lanes);
    }
    ANNULUS_UNROLL
    for (int u = 0; u < kVectors; u += 2) {
      Io::store2(second_of<kTurn>(a[u], b[u], s[u], c[u]),
                 second_of<kTurn>(a[u + 1], b[u + 1], s[u + 1], c[u + 1]), y2 + u * lanes);
    }
  }
}

inline constexpr int kAhead = 8;  // tokens

// The columns [k, k + kVectors vectors) of a token's rows, of one sequence or two.
template <Turn2 kTurn, class Io, int kSequences, int kVectors, class T>
HWY_INLINE void apply_columns(const simd_t (&s)[kVectors], const simd_t (&c)[kVectors],
                              const TokenRows<T>& rows, std::int64_t k) {
  if constexpr (kTurn != Turn2::kSpread) {
    // Four rows are read in turn, more than the core follows by itself (Neoverse-V1, two cores, 4096
    // tokens, backward, cold: f32 4.0 ms without, 3.0 with; bf16 3.4, 3.0; forward no difference).
    const std::int64_t ahead = k + kAhead * rows.x_step;
    __builtin_prefetch(rows.x1 + ahead, 0, 0);
    __builtin_prefetch(rows.x2 + ahead, 0, 0);
    if constexpr (kSequences == 2) {
      __builtin_prefetch(rows.x1 + rows.x_next + ahead, 0, 0);
      __builtin_prefetch(rows.x2 + rows.x_next + ahead, 0, 0);
    }
  }
  apply_vectors<kTurn, Io>(s, c, rows.x1 + k, rows.x2 + k, rows.y1 + k, rows.y2 + k);
  if constexpr (kSequences == 2) {
    const std::int64_t x = rows.x_next + k;
    const std::int64_t y = rows.y_next + k;
    apply_vectors<kTurn, Io>(s, c, rows.x1 + x, rows.x2 + x, rows.y1 + y, rows.y2 + y);
  }
}

// The segment that holds a column.
inline int segment_of(const Segments& segments, std::int64_t column) {
  int i = 0;
  while (column >= segments.at[i].column + segments.at[i].length) ++i;
  return i;
}

// One vector of columns from `column` on, whichever segments they lie on.
template <class PhasesT>
HWY_INLINE void compose_anywhere(const Segments& segments, const PhasesT& phases, int token,
                                 std::int64_t column, simd_t& s, simd_t& c) {
  const auto lanes = static_cast<std::int64_t>(simd::lanes());
  const int i = segment_of(segments, column);
  const Segment& g = segments.at[i];
  const std::int64_t here = g.column + g.length - column;  // columns on this segment
  if (here >= lanes) return compose_vector(phases.at(i, token), column - g.column, s, c);
  float sines[kRowPad], cosines[kRowPad];
  for (std::int64_t q = 0; q < lanes; ++q) {
    const int at = segment_of(segments, column + q);
    compose(phases.at(at, token), column + q - segments.at[at].column, sines[q], cosines[q]);
  }
  s = simd::load(sines);
  c = simd::load(cosines);
}

// Rows that stand alone are worth a loop of their own where arithmetic is the limit: in 16 bits (2-D 64 x 64
// and 3-D 16 x 16 x 16 on two Neoverse-V1 cores take 10 and 17 % less; in fp32, 3 and 8 % more).
template <class T>
inline constexpr bool kAloneApart = sizeof(T) == 2;

// A vector of sines and cosines: of two rows, or of the first alone.
template <bool kAlone>
HWY_INLINE void phase_vector(const float* ac, const float* as, const float* fc, const float* fs,
                             simd_t& s, simd_t& c) {
  if constexpr (kAlone) {
    c = simd::load(ac);
    s = simd::load(as);
  } else {
    compose_vector(ac, as, fc, fs, s, c);
  }
}

// kVectors vectors from column k on: at `offset` of one segment, or anywhere.
template <Turn2 kTurn, class Io, int kSequences, int kVectors, bool kAlone, class T>
HWY_INLINE void turn_block(const float* ac, const float* as, const float* fc, const float* fs,
                           std::int64_t offset, const TokenRows<T>& rows, std::int64_t k) {
  const auto lanes = static_cast<std::int64_t>(simd::lanes());
  simd_t s[kVectors];
  simd_t c[kVectors];
  ANNULUS_UNROLL
  for (int u = 0; u < kVectors; ++u) {
    const std::int64_t q = offset + u * lanes;
    phase_vector<kAlone>(ac + q, as + q, fc + q, fs + q, s[u], c[u]);
  }
  apply_columns<kTurn, Io, kSequences>(s, c, rows, k);
}
// ... or on two segments, p up to column `edge` and q from there on, whose columns begin at p0 and q0.
template <Turn2 kTurn, class Io, int kSequences, int kVectors, bool kAlone, class T>
HWY_INLINE void turn_block_edge(const TokenPhase& p, std::int64_t p0, const TokenPhase& q,
                                std::int64_t q0, std::int64_t edge, const TokenRows<T>& rows,
                                std::int64_t k) {
  const auto lanes = static_cast<std::int64_t>(simd::lanes());
  simd_t s[kVectors];
  simd_t c[kVectors];
  ANNULUS_UNROLL
  for (int u = 0; u < kVectors; ++u) {
    const std::int64_t at = k + u * lanes;
    const bool behind = at >= edge;
    const std::int64_t offset = at - (behind ? q0 : p0);
    phase_vector<kAlone>((behind ? q.anchor_cos : p.anchor_cos) + offset,
                         (behind ? q.anchor_sin : p.anchor_sin) + offset,
                         (behind ? q.fine_cos : p.fine_cos) + offset,
                         (behind ? q.fine_sin : p.fine_sin) + offset, s[u], c[u]);
    if (!behind && at + lanes > edge) {
      simd_t s1, c1;  // what lies beside a segment is padding: read, and spliced away
      const std::int64_t o = at - q0;
      phase_vector<kAlone>(q.anchor_cos + o, q.anchor_sin + o, q.fine_cos + o, q.fine_sin + o, s1,
                           c1);
      s[u] = ops::splice(edge - at, s[u], s1);
      c[u] = ops::splice(edge - at, c[u], c1);
    }
  }
  apply_columns<kTurn, Io, kSequences>(s, c, rows, k);
}
template <Turn2 kTurn, class Io, int kSequences, int kVectors, class T, class PhasesT>
HWY_INLINE void turn_block_anywhere(const Segments& segments, const PhasesT& phases, int token,
                                    const TokenRows<T>& rows, std::int64_t k) {
  const auto lanes = static_cast<std::int64_t>(simd::lanes());
  simd_t s[kVectors];
  simd_t c[kVectors];
  ANNULUS_UNROLL
  for (int u = 0; u < kVectors; ++u) {
    compose_anywhere(segments, phases, token, k + u * lanes, s[u], c[u]);
  }
  apply_columns<kTurn, Io, kSequences>(s, c, rows, k);
}

// Columns [begin, end), one at a time: what is left over of a row.
template <Turn2 kTurn, int kSequences, class T, class PhasesT>
HWY_NOINLINE void turn_scalars(const Segments& segments, const PhasesT& phases, int token,
                               const TokenRows<T>& rows, std::int64_t begin, std::int64_t end) {
  for (std::int64_t k = begin; k < end; ++k) {
    const int i = segment_of(segments, k);
    float s = 0;
    float c = 0;
    compose(phases.at(i, token), k - segments.at[i].column, s, c);
    turn_scalar<kTurn>(rows.x1, rows.x2, rows.y1, rows.y2, k, s, c);
    if constexpr (kSequences == 2) {
      turn_scalar<kTurn>(rows.x1 + rows.x_next, rows.x2 + rows.x_next, rows.y1 + rows.y_next,
                         rows.y2 + rows.y_next, k, s, c);
    }
  }
}

// How many vectors make a block: a cache line of y where the registers allow. A core that sees a line
// written whole does not fetch it first, even where the lines of four rows come in turn; with half a line
// of each at a time it fetches every one (Neoverse-V1, one thread, this loop by itself over two sequences of
// 4096 tokens in fp32: 12.4 ms with half lines, 2.5 with whole ones, which is what a copy takes).
inline constexpr int kMaxLanes =
#if ANNULUS_HAVE_HWY
    static_cast<int>(hwy::HWY_NAMESPACE::MaxLanes(simd::F32()));
#else
    1;
#endif
template <Turn2 kTurn, class T>
inline constexpr int kBlockVectors =
    std::clamp<int>(64 / static_cast<int>(sizeof(T)) / kMaxLanes, 2,
                    // Sines, cosines and both components of x live at once.
                    kTurn == Turn2::kRotate || kTurn == Turn2::kRotateBack ? 4 : 8);

// A tile of one sequence or two whose segments are whole blocks. It is a leaf that keeps everything in
// registers: a store to anywhere else between two rows of y (a spilled register is enough) ends the core's
// write streaming too. For the same reason the phases are not stored in a row of their own but made on the
// way, four operations an element.
template <Turn2 kTurn, class Io, int kSequences, class T, class PhasesT>
HWY_NOINLINE void turn_tile_even(const Segments& segments, const PhasesT& phases, TokenRows<T> rows,
                                 int tokens) {
  constexpr int kVectors = kBlockVectors<kTurn, T>;
  const std::int64_t block = kVectors * static_cast<std::int64_t>(simd::lanes());
  for (int token = 0; token < tokens; ++token) {
    std::int64_t k = 0;
    for (int i = 0; i < segments.count; ++i) {
      // Pointers, one by one: a struct would be copied to the stack.
      const float* ac = phases.at(i, token).anchor_cos;
      const float* as = phases.at(i, token).anchor_sin;
      const float* fc = phases.at(i, token).fine_cos;
      const float* fs = phases.at(i, token).fine_sin;
      const std::int64_t length = segments.at[i].length;
      if (kAloneApart<T> && phases.alone(i, token)) {
        for (std::int64_t q = 0; q < length; q += block, k += block) {
          turn_block<kTurn, Io, kSequences, kVectors, true>(ac, as, fc, fs, q, rows, k);
        }
      } else {
        for (std::int64_t q = 0; q < length; q += block, k += block) {
          turn_block<kTurn, Io, kSequences, kVectors, false>(ac, as, fc, fs, q, rows, k);
        }
      }
    }
    rows.next_token();
  }
}

// A token with any segments: blocks are counted from the start of the row, and some hold the end of one
// segment and the start of the next. (Each segment by itself would leave lines of y half written for a while.)
template <Turn2 kTurn, class Io, int kSequences, bool kAlone, class T, class PhasesT>
HWY_INLINE void turn_token_any(const Segments& segments, const PhasesT& phases,
                               const TokenRows<T>& rows, int token) {
  constexpr int kVectors = kBlockVectors<kTurn, T>;
  const auto lanes = static_cast<std::int64_t>(simd::lanes());
  const std::int64_t block = kVectors * lanes;
  const std::int64_t pair = 2 * lanes;
  const Segment& last = segments.at[segments.count - 1];
  const std::int64_t columns = last.column + last.length;
  const bool in_place = rows.x1 == rows.y1;
  std::int64_t k = 0;
  for (int i = 0; i < segments.count && k + block <= columns; ++i) {
    const std::int64_t column = segments.at[i].column;
    const std::int64_t end = column + segments.at[i].length;
    const TokenPhase& p = phases.at(i, token);
    for (; k + block <= end; k += block) {
      turn_block<kTurn, Io, kSequences, kVectors, kAlone>(p.anchor_cos, p.anchor_sin, p.fine_cos,
                                                          p.fine_sin, k - column, rows, k);
    }
    if (k >= end || k + block > columns) continue;
    const Segment& next = segments.at[i + 1];
    if (k + block <= next.column + next.length) {
      turn_block_edge<kTurn, Io, kSequences, kVectors, kAlone>(p, column, phases.at(i + 1, token),
                                                               next.column, end, rows, k);
    } else {
      turn_block_anywhere<kTurn, Io, kSequences, kVectors>(segments, phases, token, rows, k);
    }
    k += block;
  }
  for (; k + pair <= columns; k += pair) {
    turn_block_anywhere<kTurn, Io, kSequences, 2>(segments, phases, token, rows, k);
  }
  if (k < columns && k > 0 && !in_place) {  // the last vectors overlap the ones before
    turn_block_anywhere<kTurn, Io, kSequences, 2>(segments, phases, token, rows, columns - pair);
  } else if (k < columns) {
    turn_scalars<kTurn, kSequences>(segments, phases, token, rows, k, columns);
  }
}
template <Turn2 kTurn, class Io, int kSequences, class T, class PhasesT>
HWY_NOINLINE void turn_tile_any(const Segments& segments, const PhasesT& phases, TokenRows<T> rows,
                                int tokens) {
  for (int token = 0; token < tokens; ++token) {
    if (kAloneApart<T> && phases.all_alone(token)) {
      turn_token_any<kTurn, Io, kSequences, true>(segments, phases, rows, token);
    } else {
      turn_token_any<kTurn, Io, kSequences, false>(segments, phases, rows, token);
    }
    rows.next_token();
  }
}

template <Turn2 kTurn, class Io, int kSequences, class T, class PhasesT>
inline void turn_tile(const Segments& segments, const PhasesT& phases, const TokenRows<T>& rows,
                      int tokens) {
  const std::int64_t block = kBlockVectors<kTurn, T> * static_cast<std::int64_t>(simd::lanes());
  bool even = true;
  for (int i = 0; i < segments.count; ++i) even &= segments.at[i].length % block == 0;
  if (even) {
    turn_tile_even<kTurn, Io, kSequences>(segments, phases, rows, tokens);
  } else {
    turn_tile_any<kTurn, Io, kSequences>(segments, phases, rows, tokens);
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
