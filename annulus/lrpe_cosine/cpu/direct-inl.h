// The direct path: no activation, dense columns. A row stays in registers from x to y, and its sines and cosines
// are made on the way. It is compiled a type a file (direct_f32.cpp and so on), since each instruction set has
// dozens of loops for each type; where there are no vectors there is no direct path.
#if defined(ANNULUS_LRPE_COSINE_DIRECT_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef ANNULUS_LRPE_COSINE_DIRECT_INL_H_
#undef ANNULUS_LRPE_COSINE_DIRECT_INL_H_
#else
#define ANNULUS_LRPE_COSINE_DIRECT_INL_H_
#endif

#include <algorithm>
#include <cstdint>
#include <span>

#include "annulus/core/dispatch.h"
#include "annulus/cpu/simd-inl.h"
#include "annulus/lrpe_cosine/cpu/apply-inl.h"
#include "annulus/lrpe_cosine/cpu/phases-inl.h"

HWY_BEFORE_NAMESPACE();
namespace annulus::lrpe_cosine::HWY_NAMESPACE {

enum class Direction { kForward, kBackward };

// Tokens of a tile, of one sequence or of two: first row of each tensor (x2, y2: none where nullptr) and steps in
// elements, from token to token and to the second sequence.
struct Tile {
  const Segments& segments;
  std::span<const Run> runs;
  std::int64_t sines;  // from a row of cosines to its sines
  const void *x1, *x2;
  void *y1, *y2;
  std::int64_t x_step, y_step, x_next, y_next;
  int sequences;
  Direction direction;
};

#if ANNULUS_SIMD
void turn_tile_f32(const Tile& tile);
void turn_tile_f16(const Tile& tile);
void turn_tile_bf16(const Tile& tile);
#endif

// Whether no `width` columns lie on more than two segments.
inline bool on_two_at_most(const Segments& segments, std::int64_t width) {
  for (int i = 1; i + 1 < segments.count; ++i) {
    if (segments.at[i].length < width) return false;
  }
  return true;
}

// What turns tiles of a type, nullptr where this path cannot go through a row: a pair of vectors at least must be on
// two segments at most. fp64 has none: a row is short work beside its sines and cosines.
using TurnTile = void (*)(const Tile& tile);
inline TurnTile direct_path([[maybe_unused]] DType dtype, const Segments& segments) {
  if (!on_two_at_most(segments, 2 * static_cast<std::int64_t>(simd::lanes()))) return nullptr;
#if ANNULUS_SIMD
  if (dtype == DType::kF32) return turn_tile_f32;
  if (dtype == DType::kF16) return turn_tile_f16;
  if (dtype == DType::kBF16) return turn_tile_bf16;
#endif
  return nullptr;
}

#if ANNULUS_SIMD

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

  TokenRows moved(std::int64_t x, std::int64_t y) const {
    TokenRows r = *this;
    r.x1 += x;
    r.x2 += x;
    r.y1 += y;
    r.y2 += y;
    return r;
  }
  TokenRows from(std::int64_t column) const { return moved(column, column); }
  TokenRows skipping(std::int64_t tokens) const { return moved(tokens * x_step, tokens * y_step); }
  void next_token() { *this = skipping(1); }
};

// One element, as the vectors do it.
template <Turn2 kTurn, class T>
HWY_INLINE void turn_scalar(const T* x1, const T* x2, T* y1, T* y2, std::int64_t i, float s,
                            float c) {
  const auto a = static_cast<float>(x1[i]);
  const float b = kIn<kTurn> == 2 ? static_cast<float>(x2[i]) : a;
  y1[i] = stored<T>(first_of<kTurn>(a, b, s, c));
  if constexpr (kOut<kTurn> == 2) y2[i] = stored<T>(second_of<kTurn>(a, b, s, c));
}

// How many pairs of vectors make a block: a cache line of y (two where one pair is more). A core that sees a line
// written whole does not fetch it first, even where the lines of four rows come in turn; with half a line of each at
// a time it fetches every one
// (Neoverse-V1, one thread, this loop by itself over two sequences of 4096 tokens in fp32: 12.4 ms with half
// lines, 2.5 with whole ones, which is what a copy takes).
inline constexpr int kMaxLanes = static_cast<int>(hwy::HWY_NAMESPACE::MaxLanes(simd::F32()));
template <class T>
inline constexpr int kBlockPairs = std::clamp<int>(32 / static_cast<int>(sizeof(T)) / kMaxLanes, 1,
                                                   4);

// Where four rows are read in turn, more than the core follows by itself: tokens ahead, to the third-level cache.
// (Neoverse-V1, two cores, 4096 tokens, cold. The f32 backward's loop by itself: 2.55 ms without, 2.8 to the
// first level, 2.2 to the second or third. All of it in 1-D, 2-D, 3-D: 2.84, 2.70, 2.77 to the second level, 8
// tokens ahead; 2.83, 2.52, 2.40 to the third, 12 ahead. The f32 forward in 1-D, to the second level: 2.83
// instead of 2.58.) Rows of 16 bits, of which a cache line takes as long to compute as two of f32, are fetched to the
// second level, 8 ahead: the loops by themselves, forward 0.96 instead of 1.09, backward 1.13 instead of 1.36 (1.17
// to the third level, 12 ahead).
template <class T>
inline constexpr int kAhead = sizeof(T) == 2 ? 8 : 12;
template <class T>
inline constexpr int kToLevel = sizeof(T) == 2 ? 2
                                               : 1;  // as __builtin_prefetch counts: 1 is the third
template <Turn2 kTurn, int kSequences, class T>
HWY_INLINE void fetch_ahead(const TokenRows<T>& rows, std::int64_t k) {
  if constexpr (kIn<kTurn> == 2 || sizeof(T) == 2) {
    const std::int64_t ahead = k + kAhead<T> * rows.x_step;
    ANNULUS_UNROLL
    for (int q = 0; q < kSequences; ++q) {
      __builtin_prefetch(rows.x1 + q * rows.x_next + ahead, 0, kToLevel<T>);
      if constexpr (kIn<kTurn> == 2) {
        __builtin_prefetch(rows.x2 + q * rows.x_next + ahead, 0, kToLevel<T>);
      }
    }
  }
}

// The same address or number, of which the compiler knows no history: it would keep one register for every vector of
// a block and put others on the stack between the rows.
template <class V>
HWY_INLINE V here(V v) {
#if defined(__GNUC__)
  asm("" : "+r"(v));
#endif
  return v;
}

// A token's columns [k, k + 2 kPairs vectors), of one sequence or two. `phase(u, s0, c0, s1, c1)` makes the sines
// and cosines of pair u of vectors. Each is used while it is fresh, which this core likes (it starts 4
// operations a cycle on operands just made, 2 on others), and results wait in registers until lines are whole.
// Nothing is written before all is read, so where there are two in and two out, x may be y.
template <Turn2 kTurn, int kSequences, int kPairs, class T, class Phase>
HWY_INLINE void turn_columns(const Phase& phase, const TokenRows<T>& rows, std::int64_t k) {
  const auto lanes = static_cast<std::int64_t>(simd::lanes());
  fetch_ahead<kTurn, kSequences>(rows, k);
  const T* x[kSequences][kIn<kTurn>];
  T* p[kSequences][kOut<kTurn>];
  ANNULUS_UNROLL
  for (int q = 0; q < kSequences; ++q) {
    x[q][0] = here(rows.x1 + q * rows.x_next + k);
    if constexpr (kIn<kTurn> == 2) x[q][1] = here(rows.x2 + q * rows.x_next + k);
    p[q][0] = here(rows.y1 + q * rows.y_next + k);
    if constexpr (kOut<kTurn> == 2) p[q][1] = here(rows.y2 + q * rows.y_next + k);
  }
  Two<T> y[kSequences][kOut<kTurn>][kPairs];
  ANNULUS_UNROLL
  for (int u = 0; u < kPairs; ++u) {
    const std::int64_t at = 2 * u * lanes;
    simd_t s0, c0, s1, c1;
    phase(u, s0, c0, s1, c1);
    ANNULUS_UNROLL
    for (int q = 0; q < kSequences; ++q) {
      simd_t a0, a1, b0, b1;
      simd::load2(x[q][0] + at, a0, a1);
      if constexpr (kIn<kTurn> == 2) {
        simd::load2(x[q][1] + at, b0, b1);
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
      ANNULUS_UNROLL
      for (int u = 0; u < kPairs; ++u) y[q][o][u].store(p[q][o] + 2 * u * lanes);
    }
  }
}

// Where a block's phases come from, and for its columns from `edge` on, which lie on the next segment, from where else.
struct BlockSource {
  Source first, second;
  std::int64_t edge;
};

// The rows of a token's phases at a block's first column, and those of its second source.
template <bool kAlone>
struct BlockRows {
  const float *fine, *fine_sin, *anchor, *anchor_sin;

  HWY_INLINE void operator()(int u, simd_t& s0, simd_t& c0, simd_t& s1, simd_t& c1) const {
    const auto lanes = static_cast<std::int64_t>(simd::lanes());
    vector(2 * u * lanes, s0, c0);
    vector((2 * u + 1) * lanes, s1, c1);
  }
  HWY_INLINE void vector(std::int64_t at, simd_t& s, simd_t& c) const {
    if constexpr (kAlone) {
      c = simd::load(fine + at);
      s = simd::load(fine_sin + at);
    } else {
      compose_vector(anchor + at, anchor_sin + at, fine + at, fine_sin + at, s, c);
    }
  }
};

// The same with an edge in the block. (Made beforehand, the pairs on two segments and with addresses chosen instead of
// paths, a forward of 16 x 16 x 16 tokens in bf16, E = 43, took 1.45 ms instead of 1.42 and a backward 1.79 instead of 1.60:
// too many addresses for the registers.)
template <bool kAlone>
struct SeamRows {
  BlockRows<kAlone> first, second;
  std::int64_t edge;

  HWY_INLINE void operator()(int u, simd_t& s0, simd_t& c0, simd_t& s1, simd_t& c1) const {
    const auto lanes = static_cast<std::int64_t>(simd::lanes());
    const std::int64_t at = 2 * u * lanes;
    if (at >= edge) return second(u, s0, c0, s1, c1);
    first(u, s0, c0, s1, c1);
    if (edge < at + 2 * lanes) {
      // What lies before a segment's row, or after it, is another's or padding: read, and spliced away.
      simd_t t0, d0, t1, d1;
      second(u, t0, d0, t1, d1);
      s0 = ops::splice(edge - at, s0, t0);
      c0 = ops::splice(edge - at, c0, d0);
      s1 = ops::splice(edge - at - lanes, s1, t1);
      c1 = ops::splice(edge - at - lanes, c1, d1);
    }
  }
};

// What a leaf below goes through: runs of tokens, and for each its blocks' sources.
struct Program {
  static constexpr int kMost = 128;
  int runs = 0, blocks = 0;  // of each run
  int tokens[kMost];
  BlockSource source[kMost];
};

// Blocks of kPairs pairs of vectors, one after the other from the rows' first column on. It is a leaf that keeps
// everything in registers: a store to anywhere else between two rows of y (a spilled register is enough) ends
// the core's write streaming too. For the same reason it goes through many tokens, and the phases are not stored in a
// row of their own but made on the way, four operations an element. One flat loop over the blocks of a row,
// whatever axes they lie on: with a loop over axes around it, each of two blocks, the loop by itself took 1.24 ms
// instead of 1.03 for 64 x 64 tokens in bf16 on two Neoverse-V1 cores.
template <Turn2 kTurn, int kSequences, int kPairs, bool kAlone, bool kSeams, class T>
HWY_NOINLINE void turn_blocks(const Program& program, std::int64_t sines, TokenRows<T> rows) {
  const std::int64_t block = 2 * kPairs * static_cast<std::int64_t>(simd::lanes());
  const BlockSource* begin = program.source;
  const int* run_end = program.tokens + program.runs;
  const std::int64_t blocks = program.blocks;
  for (const int* run = program.tokens; run != run_end; ++run) {
    const std::int64_t tokens = *run;
    const BlockSource* end = here(begin + blocks);
    for (std::int64_t token = 0; token < tokens; ++token) {
      std::int64_t k = 0;
      for (const BlockSource* from = begin; from != end; ++from, k += block) {
        k = here(k);
        const float* fine = here(from->first.fine + token * from->first.step);
        const float* anchor = here(from->first.anchor);
        const BlockRows<kAlone> first{fine, here(fine + sines), anchor, here(anchor + sines)};
        if (!kSeams || from->edge >= block) {
          turn_columns<kTurn, kSequences, kPairs>(first, rows, k);
        } else {
          const float* fine2 = here(from->second.fine + token * from->second.step);
          const float* anchor2 = here(from->second.anchor);
          const SeamRows<kAlone> both{
              first, {fine2, here(fine2 + sines), anchor2, here(anchor2 + sines)}, from->edge};
          turn_columns<kTurn, kSequences, kPairs>(both, rows, k);
        }
      }
      rows.next_token();
    }
    begin = end;
  }
}

inline int segment_of(const Segments& segments, std::int64_t column) {
  int i = 0;
  while (column >= segments.at[i].column + segments.at[i].length) ++i;
  return i;
}

// A tile of one sequence or two. The columns are cut in blocks counted from the start of the row, of which some hold
// the end of one segment and the start of the next. (Each segment by itself would leave lines of y half written
// for a while.)
template <Turn2 kTurn, int kSequences, class T>
class TileTurn {
 public:
  explicit TileTurn(const Tile& tile)
      : segments_(tile.segments), runs_(tile.runs), sines_(tile.sines) {
    for (const Run& run : runs_) alone_ &= run.alone;
  }

  void operator()(const TokenRows<T>& rows) {
    const Segment& last = segments_.at[segments_.count - 1];
    const std::int64_t columns = last.column + last.length;
    const std::int64_t pair = 2 * static_cast<std::int64_t>(simd::lanes());
    constexpr int kPairs = kBlockPairs<T>;
    std::int64_t k = turn_as_blocks<kPairs>(0, columns, rows);
    if constexpr (kPairs > 1) k = turn_as_blocks<1>(k, columns, rows);
    if (k < columns && columns >= pair && rows.x1 != rows.y1) {  // the last overlaps the one before
      k = turn_as_blocks<1>(columns - pair, columns, rows);
    }
    if (k < columns) turn_one_by_one(k, columns, rows);
  }

 private:
  // Columns [k, end) as far as they make whole blocks; returns where those end.
  template <int kPairs>
  std::int64_t turn_as_blocks(std::int64_t k, std::int64_t end, const TokenRows<T>& rows) {
    const std::int64_t width = 2 * kPairs * static_cast<std::int64_t>(simd::lanes());
    if (!on_two_at_most(segments_, width)) return k;
    Program program;
    while (k + width <= end) {
      constexpr std::int64_t kAtOnce = 16;
      program.blocks = static_cast<int>(std::min((end - k) / width, kAtOnce));
      TokenRows<T> at = rows.from(k);
      std::int64_t tokens = 0;
      for (const Run& run : runs_) {
        if ((program.runs + 1) * program.blocks > Program::kMost) {
          turn<kPairs>(program, at);
          at = at.skipping(tokens);
          tokens = 0;
        }
        BlockSource* sources = program.source + program.runs * program.blocks;
        for (int b = 0; b < program.blocks; ++b) sources[b] = source_of(run, k + b * width, width);
        program.tokens[program.runs++] = run.tokens;
        tokens += run.tokens;
      }
      turn<kPairs>(program, at);
      k += program.blocks * width;
    }
    return k;
  }
  template <int kPairs>
  void turn(Program& program, const TokenRows<T>& rows) {
    visit_bool(alone_, [&]<bool kAlone>() {
      visit_bool(seams_, [&]<bool kSeams>() {
        turn_blocks<kTurn, kSequences, kPairs, kAlone, kSeams>(program, sines_, rows);
      });
    });
    program.runs = 0;
    seams_ = false;
  }

  BlockSource source_of(const Run& run, std::int64_t k, std::int64_t width) {
    const int i = segment_of(segments_, k);
    const Segment& g = segments_.at[i];
    BlockSource from{};
    from.first = run.at[i].from(k - g.column);
    from.edge = g.column + g.length - k;
    if (from.edge < width) {
      const Segment& h = segments_.at[i + 1];
      from.second = run.at[i + 1].from(k - h.column);
      seams_ = true;
    }
    return from;
  }

  // Columns that are no block.
  void turn_one_by_one(std::int64_t k, std::int64_t end, TokenRows<T> rows) {
    for (const Run& run : runs_) {
      for (int token = 0; token < run.tokens; ++token, rows.next_token()) {
        for (std::int64_t c = k; c < end; ++c) {
          const int i = segment_of(segments_, c);
          const Source from = run.at[i].from(c - segments_.at[i].column);
          float sine, cosine;
          const float* fine = from.fine + token * from.step;
          compose(from.anchor[0], from.anchor[sines_], fine[0], fine[sines_], sine, cosine);
          for (int q = 0; q < kSequences; ++q) {
            turn_scalar<kTurn>(rows.x1 + q * rows.x_next, rows.x2 + q * rows.x_next,
                               rows.y1 + q * rows.y_next, rows.y2 + q * rows.y_next, c, sine,
                               cosine);
          }
        }
      }
    }
  }

  const Segments& segments_;
  std::span<const Run> runs_;
  std::int64_t sines_;
  bool alone_ = true;
  bool seams_ = false;  // of the blocks in the program
};

template <int kSequences, class T>
void turn_sequences(const Tile& tile) {
  // A component that is not there is never touched; any pointer does for the arithmetic on it.
  const auto* x1 = static_cast<const T*>(tile.x1);
  auto* y1 = static_cast<T*>(tile.y1);
  const TokenRows<T> rows{x1,          tile.x2 != nullptr ? static_cast<const T*>(tile.x2) : x1,
                          y1,          tile.y2 != nullptr ? static_cast<T*>(tile.y2) : y1,
                          tile.x_step, tile.y_step,
                          tile.x_next, tile.y_next};
  if (tile.direction == Direction::kForward) {
    if (tile.x2 != nullptr) {
      TileTurn<Turn2::kRotate, kSequences, T>{tile}(rows);
    } else {
      TileTurn<Turn2::kSpread, kSequences, T>{tile}(rows);
    }
  } else if (tile.y2 != nullptr) {
    TileTurn<Turn2::kRotateBack, kSequences, T>{tile}(rows);
  } else {
    TileTurn<Turn2::kGather, kSequences, T>{tile}(rows);
  }
}

template <class T>
void turn_tile(const Tile& tile) {
  if (tile.sequences == 2) return turn_sequences<2, T>(tile);
  turn_sequences<1, T>(tile);
}

#endif  // ANNULUS_SIMD

}  // namespace annulus::lrpe_cosine::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#endif  // toggling guard
