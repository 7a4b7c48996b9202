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

#include "annulus/cpu/simd-inl.h"
#include "annulus/lrpe_cosine/lrpe_cosine_apply-inl.h"
#include "annulus/lrpe_cosine/lrpe_cosine_phases-inl.h"
#include "annulus/lrpe_cosine/lrpe_cosine_stored-inl.h"

HWY_BEFORE_NAMESPACE();
namespace annulus::lrpe::HWY_NAMESPACE {

enum class Turn2 { kSpread, kRotate, kGather, kRotateBack };  // 1->2, 2->2, 2->1, 2->2
template <Turn2 kTurn>
inline constexpr int kIn = kTurn == Turn2::kSpread ? 1 : 2;
template <Turn2 kTurn>
inline constexpr int kOut = kTurn == Turn2::kGather ? 1 : 2;

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
    y1[i] = stored<T>(a * c);
    y2[i] = stored<T>(a * s);
  } else {
    const auto b = static_cast<float>(x2[i]);
    if constexpr (kTurn == Turn2::kRotate) {
      y1[i] = stored<T>(ops::one_mul_add(-b, s, a * c));
      y2[i] = stored<T>(ops::one_mul_add(b, c, a * s));
    } else {
      y1[i] = stored<T>(ops::one_mul_add(b, s, a * c));
      if constexpr (kTurn == Turn2::kRotateBack) y2[i] = stored<T>(ops::one_mul_add(-a, s, b * c));
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

// How many pairs of vectors make a block: a cache line of y (two where one pair is more). A core that sees a line written whole does not fetch it first,
// even where the lines of four rows come in turn; with half a line of each at a time it fetches every one
// (Neoverse-V1, one thread, this loop by itself over two sequences of 4096 tokens in fp32: 12.4 ms with half
// lines, 2.5 with whole ones, which is what a copy takes).
inline constexpr int kMaxLanes =
#if ANNULUS_HAVE_HWY
    static_cast<int>(hwy::HWY_NAMESPACE::MaxLanes(simd::F32()));
#else
    1;
#endif
template <class T>
inline constexpr int kBlockPairs = std::clamp<int>(32 / static_cast<int>(sizeof(T)) / kMaxLanes, 1,
                                                   4);

// Where four rows are read in turn, more than the core follows by itself: tokens ahead, to the third-level cache.
// (Neoverse-V1, two cores, 4096 tokens, cold. The f32 backward's loop by itself: 2.55 ms without, 2.8 to the
// first level, 2.2 to the second or third. All of it in 1-D, 2-D, 3-D: 2.84, 2.70, 2.77 to the second level, 8
// tokens ahead; 2.83, 2.52, 2.40 to the third, 12 ahead. The f32 forward in 1-D, to the second level: 2.83
// instead of 2.58.)
inline constexpr int kAhead = 12;
template <Turn2 kTurn, int kSequences, class T>
HWY_INLINE void fetch_ahead(const TokenRows<T>& rows, std::int64_t k) {
  if constexpr (kIn<kTurn> == 2) {
    const std::int64_t ahead = k + kAhead * rows.x_step;
    __builtin_prefetch(rows.x1 + ahead, 0, 1);
    __builtin_prefetch(rows.x2 + ahead, 0, 1);
    if constexpr (kSequences == 2) {
      __builtin_prefetch(rows.x1 + rows.x_next + ahead, 0, 1);
      __builtin_prefetch(rows.x2 + rows.x_next + ahead, 0, 1);
    }
  }
}

// A token's columns [k, k + 2 kPairs vectors), of one sequence or two. `phase(at, s, c)` makes the sines and
// cosines of the vector at column `at`. Each is used while it is fresh, which this core likes (it starts 4
// operations a cycle on operands just made, 2 on others), and results wait in registers until lines are whole.
// Nothing is written before all is read, so where there are two in and two out, x may be y.
template <Turn2 kTurn, int kSequences, int kPairs, class T, class Phase>
HWY_INLINE void turn_columns(const Phase& phase, const TokenRows<T>& rows, std::int64_t k) {
  const auto lanes = static_cast<std::int64_t>(simd::lanes());
  fetch_ahead<kTurn, kSequences>(rows, k);
  Two<T> y[kSequences][kOut<kTurn>][kPairs];
  ANNULUS_UNROLL
  for (int u = 0; u < kPairs; ++u) {
    const std::int64_t at = k + 2 * u * lanes;
    simd_t s0, c0, s1, c1;
    phase(at, s0, c0);
    phase(at + lanes, s1, c1);
    ANNULUS_UNROLL
    for (int q = 0; q < kSequences; ++q) {
      simd_t a0, a1, b0, b1;
      simd::load2(rows.x1 + q * rows.x_next + at, a0, a1);
      if constexpr (kIn<kTurn> == 2) {
        simd::load2(rows.x2 + q * rows.x_next + at, b0, b1);
      } else {
        b0 = a0;  // not used
        b1 = a1;
      }
      y[q][0][u].set(first_of<kTurn>(a0, b0, s0, c0), first_of<kTurn>(a1, b1, s1, c1));
      if constexpr (kOut<kTurn> == 2) {
        y[q][1][u].set(second_of<kTurn>(a0, b0, s0, c0), second_of<kTurn>(a1, b1, s1, c1));
      }
    }
    // GCC would load all phases first and convert late, for which there are no registers.
    ANNULUS_UNROLL
    for (int q = 0; q < kSequences; ++q) {
      ANNULUS_UNROLL
      for (int o = 0; o < kOut<kTurn>; ++o) y[q][o][u].finish();
    }
    asm volatile("" ::: "memory");
  }
  ANNULUS_UNROLL
  for (int q = 0; q < kSequences; ++q) {
    ANNULUS_UNROLL
    for (int o = 0; o < kOut<kTurn>; ++o) {
      T* p = (o == 0 ? rows.y1 : rows.y2) + q * rows.y_next + k;
      ANNULUS_UNROLL
      for (int u = 0; u < kPairs; ++u) y[q][o][u].store(p + 2 * u * lanes);
    }
  }
}

// A vector of sines and cosines: of two rows, or of the first alone.
template <bool kAlone>
HWY_INLINE void phase_vector(const float* anchor, const float* fine, std::int64_t sines, simd_t& s,
                             simd_t& c) {
  if constexpr (kAlone) {
    c = simd::load(anchor);
    s = simd::load(anchor + sines);
  } else {
    compose_vector(anchor, fine, sines, s, c);
  }
}

// Phases of columns that lie on one segment, ...
template <bool kAlone>
struct OnSegment {
  const float *anchor, *fine;
  std::int64_t sines, column;  // the segment's first

  HWY_INLINE void operator()(std::int64_t at, simd_t& s, simd_t& c) const {
    phase_vector<kAlone>(anchor + (at - column), fine + (at - column), sines, s, c);
  }
};

// ... on two, p up to column `edge` and q from there on, whose columns begin at p0 and q0, ...
template <bool kAlone>
struct OnTwoSegments {
  TokenPhase p, q;
  std::int64_t sines, p0, q0, edge;

  HWY_INLINE void operator()(std::int64_t at, simd_t& s, simd_t& c) const {
    const bool behind = at >= edge;
    const std::int64_t offset = at - (behind ? q0 : p0);
    phase_vector<kAlone>((behind ? q.anchor : p.anchor) + offset,
                         (behind ? q.fine : p.fine) + offset, sines, s, c);
    if (!behind && at + static_cast<std::int64_t>(simd::lanes()) > edge) {
      // What lies before a segment's row is another's, or padding: read, and spliced away.
      simd_t s1, c1;
      phase_vector<kAlone>(q.anchor + (at - q0), q.fine + (at - q0), sines, s1, c1);
      s = ops::splice(edge - at, s, s1);
      c = ops::splice(edge - at, c, c1);
    }
  }
};

// ... and on any number.
inline int segment_of(const Segments& segments, std::int64_t column) {
  int i = 0;
  while (column >= segments.at[i].column + segments.at[i].length) ++i;
  return i;
}
template <class PhasesT>
struct Anywhere {
  const Segments& segments;
  const PhasesT& phases;
  int token;

  void one(std::int64_t at, float& s, float& c) const {
    const int i = segment_of(segments, at);
    const std::int64_t offset = at - segments.at[i].column;
    const TokenPhase& p = phases.at(i, token);
    compose(p.anchor + offset, p.fine + offset, phases.sines(), s, c);
  }
  HWY_INLINE void operator()(std::int64_t at, simd_t& s, simd_t& c) const {
    const auto lanes = static_cast<std::int64_t>(simd::lanes());
    const int i = segment_of(segments, at);
    const Segment& g = segments.at[i];
    if (at + lanes <= g.column + g.length) {
      const TokenPhase& p = phases.at(i, token);
      return compose_vector(p.anchor + (at - g.column), p.fine + (at - g.column), phases.sines(), s,
                            c);
    }
    float sines[kRowPad], cosines[kRowPad];
    for (std::int64_t q = 0; q < lanes; ++q) one(at + q, sines[q], cosines[q]);
    s = simd::load(sines);
    c = simd::load(cosines);
  }
};

// Columns [begin, end) of a token wherever they lie: what is left over of a row, or a block on three segments.
// Apart from the loops over tiles, which have no registers to spare for it.
template <Turn2 kTurn, int kSequences, class T, class PhasesT>
HWY_NOINLINE void turn_rest(const Segments& segments, const PhasesT& phases, int token,
                            TokenRows<T> rows, std::int64_t begin, std::int64_t end) {
  const std::int64_t pair = 2 * static_cast<std::int64_t>(simd::lanes());
  const Anywhere<PhasesT> phase{segments, phases, token};
  std::int64_t k = begin;
  for (; k + pair <= end; k += pair) turn_columns<kTurn, kSequences, 1>(phase, rows, k);
  const bool in_place = rows.x1 == rows.y1;
  if (k < end && end >= pair && !in_place) {  // the last vectors overlap the ones before
    return turn_columns<kTurn, kSequences, 1>(phase, rows, end - pair);
  }
  for (; k < end; ++k) {
    float s = 0;
    float c = 0;
    phase.one(k, s, c);
    for (int q = 0; q < kSequences; ++q) {
      turn_scalar<kTurn>(rows.x1 + q * rows.x_next, rows.x2 + q * rows.x_next,
                         rows.y1 + q * rows.y_next, rows.y2 + q * rows.y_next, k, s, c);
    }
  }
}

// The columns of a segment of whole blocks.
template <Turn2 kTurn, int kSequences, bool kAlone, class T>
HWY_INLINE void turn_segment(const TokenPhase& p, std::int64_t sines, const Segment& g,
                             const TokenRows<T>& rows) {
  constexpr int kPairs = kBlockPairs<T>;
  const std::int64_t block = 2 * kPairs * static_cast<std::int64_t>(simd::lanes());
  const OnSegment<kAlone> phase{p.anchor, p.fine, sines, g.column};
  for (std::int64_t k = g.column; k < g.column + g.length; k += block) {
    turn_columns<kTurn, kSequences, kPairs>(phase, rows, k);
  }
}

// A tile of one sequence or two whose segments are whole blocks. It is a leaf that keeps everything in
// registers: a store to anywhere else between two rows of y (a spilled register is enough) ends the core's
// write streaming too. For the same reason the phases are not stored in a row of their own but made on the
// way, four operations an element.
template <Turn2 kTurn, int kSequences, class T, class PhasesT>
HWY_NOINLINE void turn_tile_even(const Segments& segments, const PhasesT& phases, TokenRows<T> rows,
                                 int tokens) {
  for (int token = 0; token < tokens; ++token) {
    for (int i = 0; i < segments.count; ++i) {
      if (phases.alone(i, token)) {
        turn_segment<kTurn, kSequences, true>(phases.at(i, token), phases.sines(), segments.at[i],
                                              rows);
      } else {
        turn_segment<kTurn, kSequences, false>(phases.at(i, token), phases.sines(), segments.at[i],
                                               rows);
      }
    }
    rows.next_token();
  }
}

// A tile with any segments: blocks are counted from the start of the row, and some hold the end of one
// segment and the start of the next. (Each segment by itself would leave lines of y half written for a while.)
template <Turn2 kTurn, int kSequences, bool kAlone, class T, class PhasesT>
HWY_NOINLINE void turn_tile_any(const Segments& segments, const PhasesT& phases, TokenRows<T> rows,
                                int tokens) {
  constexpr int kPairs = kBlockPairs<T>;
  const std::int64_t block = 2 * kPairs * static_cast<std::int64_t>(simd::lanes());
  const Segment& last = segments.at[segments.count - 1];
  const std::int64_t columns = last.column + last.length;
  for (int token = 0; token < tokens; ++token) {
    std::int64_t k = 0;
    for (int i = 0; i < segments.count && k + block <= columns; ++i) {
      const Segment& g = segments.at[i];
      const std::int64_t end = g.column + g.length;
      const TokenPhase p = phases.at(i, token);
      const OnSegment<kAlone> here{p.anchor, p.fine, phases.sines(), g.column};
      for (; k + block <= end; k += block) {
        turn_columns<kTurn, kSequences, kPairs>(here, rows, k);
      }
      if (k >= end || k + block > columns) continue;
      const Segment& next = segments.at[i + 1];
      if (k + block <= next.column + next.length) {
        const OnTwoSegments<kAlone> edge{
            p, phases.at(i + 1, token), phases.sines(), g.column, next.column, end};
        turn_columns<kTurn, kSequences, kPairs>(edge, rows, k);
      } else {
        turn_rest<kTurn, kSequences>(segments, phases, token, rows, k, k + block);
      }
      k += block;
    }
    if (k < columns) turn_rest<kTurn, kSequences>(segments, phases, token, rows, k, columns);
    rows.next_token();
  }
}

template <Turn2 kTurn, int kSequences, class T, class PhasesT>
inline void turn_tile(const Segments& segments, const PhasesT& phases, const TokenRows<T>& rows,
                      int tokens) {
  const std::int64_t block = 2 * kBlockPairs<T> * static_cast<std::int64_t>(simd::lanes());
  bool even = true;
  for (int i = 0; i < segments.count; ++i) even &= segments.at[i].length % block == 0;
  if (even) {
    turn_tile_even<kTurn, kSequences>(segments, phases, rows, tokens);
  } else if (phases.all_alone()) {
    turn_tile_any<kTurn, kSequences, true>(segments, phases, rows, tokens);
  } else {
    turn_tile_any<kTurn, kSequences, false>(segments, phases, rows, tokens);
  }
}

template <int kSequences, class T, class PhasesT>
inline void apply_tile(const Segments& segments, const PhasesT& phases, TokenRows<T> rows,
                       int tokens, Direction direction) {
  // A component that is not there is never touched; any pointer does for the arithmetic on it.
  const bool two_in = rows.x2 != nullptr;
  const bool two_out = rows.y2 != nullptr;
  if (!two_in) rows.x2 = rows.x1;
  if (!two_out) rows.y2 = rows.y1;
  if (direction == Direction::kForward) {
    if (two_in) {
      turn_tile<Turn2::kRotate, kSequences>(segments, phases, rows, tokens);
    } else {
      turn_tile<Turn2::kSpread, kSequences>(segments, phases, rows, tokens);
    }
  } else if (two_out) {
    turn_tile<Turn2::kRotateBack, kSequences>(segments, phases, rows, tokens);
  } else {
    turn_tile<Turn2::kGather, kSequences>(segments, phases, rows, tokens);
  }
}

}  // namespace annulus::lrpe::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#endif  // toggling guard
