// What the loops of sm80 and sm90 share: work items, the epilogue of a step, and the barriers of blocks
// between them.
#pragma once

#include "annulus/cuda/mma.cuh"
#include "annulus/cuda/persistent.cuh"
#include "annulus/cuda/reduce.cuh"
#include "annulus/cuda/rows.cuh"
#include "annulus/ring_rnn/cuda/format.cuh"
#include "annulus/ring_rnn/cuda/sm90/row_tiles.cuh"
#include "annulus/ring_rnn/cuda/tensor.cuh"

namespace annulus::ring_rnn::cuda::tensor {

// Which samples, columns and part of the sum.
struct WorkItem {
  int batch_tile, tile, split;
  int first_chunk, last_chunk;
  std::uint32_t channel_pattern;  // bits of its channels in every mask word
};

__device__ __forceinline__ WorkItem work_item(const StepTiling& s, std::int64_t item) {
  WorkItem p;
  const auto i = static_cast<unsigned>(item);  // items fit in 32 bits: tile() sees to it
  const auto splits = static_cast<unsigned>(s.splits());
  p.split = static_cast<int>(i % splits);
  const unsigned rest = i / splits;
  p.tile = static_cast<int>(rest % static_cast<unsigned>(s.tiles));
  p.batch_tile = static_cast<int>(rest / static_cast<unsigned>(s.tiles));
  const auto part = static_cast<unsigned>(p.split / s.channel_splits);
  const auto parts = static_cast<unsigned>(s.chunk_splits);
  p.first_chunk = static_cast<int>(part * static_cast<unsigned>(s.chunks) / parts);
  p.last_chunk = static_cast<int>((part + 1) * static_cast<unsigned>(s.chunks) / parts);
  p.channel_pattern = 0;
  for (int k = p.split % s.channel_splits; k < 32; k += s.channel_splits) {
    p.channel_pattern |= 1u << k;
  }
  return p;
}

// ---- parts of s . u_k

// Parts of one channel, by row of the padded batch: those of warp `columns` of the `Warps` that share rows.
template <int Warps>
__device__ __forceinline__ float* dots_of(const BackwardPass& loop, const StepTiling& s,
                                          std::int64_t time, const WorkItem& item, int columns,
                                          int channel) {
  const std::int64_t slots = static_cast<std::int64_t>(s.tiles) * s.splits() * Warps;
  const std::int64_t slot =
      (static_cast<std::int64_t>(item.tile) * s.splits() + item.split) * Warps + columns;
  return loop.dots +
         ((time * slots + slot) * loop.layout.channels + channel) * loop.layout.padded_b;
}

// s of rows `row`, `row` + 8 and columns `col`, `col` + 1: one term, as pairs of columns.
__device__ __forceinline__ uint2 state_words(const Layout& s, const std::uint16_t* states,
                                             std::int64_t time, std::int64_t row, int col,
                                             int term) {
  const std::uint16_t* plane = states + term * s.T * s.padded_b * s.padded_n;
  const auto word = [&](std::int64_t r) {
    return __ldg(reinterpret_cast<const std::uint32_t*>(plane + state_at(s, time, r, col)));
  };
  return make_uint2(word(row), word(row + 8));
}
__device__ __forceinline__ float4 quad_of(std::uint32_t low, std::uint32_t high) {
  return make_float4(__uint_as_float(low << 16), __uint_as_float(low & 0xffff0000u),
                     __uint_as_float(high << 16), __uint_as_float(high & 0xffff0000u));
}

// The same numbers, the sum of all terms.
template <int Terms>
__device__ __forceinline__ float4 state_quad(const Layout& s, const std::uint16_t* states,
                                             std::int64_t time, std::int64_t row, int col) {
  float4 v = make_float4(0, 0, 0, 0);
#pragma unroll
  for (int term = Terms - 1; term >= 0; --term) {
    const uint2 words = state_words(s, states, time, row, col, term);
    const float4 part = quad_of(words.x, words.y);
    v.x += part.x;
    v.y += part.y;
    v.z += part.z;
    v.w += part.w;
  }
  return v;
}

// ---- the epilogue of a step

// How many of `Columns` columns from `col` on there are.
template <int Columns>
__device__ __forceinline__ int columns_of(std::int64_t N, int col) {
  return static_cast<int>(max(min(N - col, std::int64_t{Columns}), std::int64_t{0}));
}

// Sixteen lanes hold a row, four columns each.
__device__ __forceinline__ float sum_row(float v) { return warp_sum<16>(v); }

// The sum over all columns of row `row` of X of this parity: parts of the tiles in fixed order.
__device__ __forceinline__ float whole_row(const Layout& s, const GridOperands& x, std::int64_t row,
                                           int parity) {
  const float* part = x.row_sums + static_cast<std::int64_t>(parity) * s.tiles * s.padded_b + row;
  float sum = 0;
  for (int tile = static_cast<int>(threadIdx.x) & 15; tile < s.tiles; tile += 16) {
    sum += part[tile * s.padded_b];
  }
  return sum_row(sum);
}

// X of the next step: its terms, and the part of the row's sum.
template <class Format>
__device__ __forceinline__ void publish(const Layout& s, const GridOperands& x, std::int64_t row,
                                        int tile, int col, const float (&v)[4], int parity) {
  const std::int64_t plane = s.padded_b * s.padded_n / 2;  // words
  constexpr int kTerms = Format::kTerms;
  std::uint32_t word[2][kTerms];
  if constexpr (Format::kScaled) {
    float most = 0;
#pragma unroll
    for (int e = 0; e < 4; ++e) most = isfinite(v[e]) ? fmaxf(most, fabsf(v[e])) : most;
#pragma unroll
    for (int mask = 1; mask < 16; mask <<= 1) {
      most = fmaxf(most, __shfl_xor_sync(~0u, most, mask));
    }
    const RowScale scale(most);
    Format::split(v[0] * scale.factor, v[1] * scale.factor, word[0]);
    Format::split(v[2] * scale.factor, v[3] * scale.factor, word[1]);
    if ((threadIdx.x & 15) == 0) {
      x.x_scales[(static_cast<std::int64_t>(parity) * s.tiles + tile) * s.padded_b + row] =
          scale.inverse;
    }
  } else {
    Format::split(v[0], v[1], word[0]);
    Format::split(v[2], v[3], word[1]);
  }
  if (Format::kFactorsOnX && x.x_rows != nullptr) {
    *reinterpret_cast<uint2*>(x.x_rows + parity * 2 * plane + row * s.padded_n + col) =
        make_uint2(word[0][0], word[1][0]);
  } else {
    std::uint32_t* base = x.x_fragments + parity * kTerms * plane;
#pragma unroll
    for (int pair = 0; pair < 2; ++pair) {
      const std::int64_t at = operand_word(row, col + 2 * pair, s.padded_n);
#pragma unroll
      for (int term = 0; term < kTerms; ++term) base[term * plane + at] = word[pair][term];
    }
  }
  const float sum = sum_row((v[0] + v[1]) + (v[2] + v[3]));
  if ((threadIdx.x & 15) == 0) {
    x.row_sums[(static_cast<std::int64_t>(parity) * s.tiles + tile) * s.padded_b + row] = sum;
  }
}

// The rows of a tile that the blocks of a split finish: whole pairs.
struct RowShare {
  int first, last;

  __device__ RowShare(const StepTiling& s, const WorkItem& p) {
    const int each = (s.rows + s.splits() - 1) / s.splits();
    const int even = (each + 1) / 2 * 2;
    first = min(p.split * even, s.rows);
    last = min(first + even, s.rows);
  }
};

// The rows that a warp finishes, two at a time, over all items of its block: those of the split, a
// half of the warp each. Both halves are always there, so that warps stay together, and the compiler
// knows it.
class RowWalk {
 public:
  __device__ RowWalk(const StepTiling& s, int warps)
      : s_(s), warps_(warps), warp_(uniform_warp()), item_(blockIdx.x) {
    enter();
  }
  __device__ bool done() const { return item_ >= s_.items(); }
  __device__ void next() {
    pair_ += warps_ * 2;
    if (pair_ < last_) return;
    item_ += gridDim.x;
    enter();
  }
  __device__ int tile() const { return work_.tile; }
  // Where in `partial` the tile's first part is.
  __device__ std::int64_t first_part() const { return item_ - work_.split; }
  // Row of the tile.
  __device__ int local() const { return pair_ + ((static_cast<int>(threadIdx.x) >> 4) & 1); }
  __device__ std::int64_t row() const {  // of the padded batch
    return static_cast<std::int64_t>(work_.batch_tile) * s_.rows + local();
  }
  __device__ int column() const {  // the first of this lane's four
    return tile() * kTile + (static_cast<int>(threadIdx.x) & 15) * 4;
  }

 private:
  __device__ void enter() {
    for (; item_ < s_.items(); item_ += gridDim.x) {
      work_ = work_item(s_, item_);
      const RowShare share(s_, work_);
      last_ = share.last;
      pair_ = share.first + warp_ * 2;
      if (pair_ < last_) return;
    }
  }

  const StepTiling& s_;
  int warps_, warp_;
  int pair_, last_;  // rows of the tile: the first of two, and where those of the split end
  std::int64_t item_;
  WorkItem work_;
};

// X of the first step.
template <class Format, class Direction, class Loop>
__device__ __forceinline__ void begin_items(const Loop& loop, int warps) {
  const int parity = loop.parity(loop.time(loop.first));
  for (RowWalk walk(loop.tiling, warps); !walk.done(); walk.next()) {
    float v[4];
    Direction::begin(loop, walk.row(), walk.column(), v);
    publish<Format>(loop.layout, loop, walk.row(), walk.tile(), walk.column(), v, parity);
  }
}

// The epilogue of a step: the parts of the sums added up, and X of the next step made of them. What does
// not depend on the sums is loaded by the constructor, which runs before the barrier of the tile's blocks:
// one after the other these loads took longer than the products of a small network.
template <class Format, class Direction, class Loop>
class Epilogue {
 public:
  __device__ Epilogue(const Loop& loop, std::int64_t time, int parity, int warps)
      : loop_(loop), time_(time), parity_(parity), walk_(loop.tiling, warps) {
    if (!walk_.done()) load();
  }
  __device__ void run() {
    const StepTiling& s = loop_.tiling;
    while (!walk_.done()) {
      const int tile = walk_.tile();
      const int col = walk_.column();
      const float* from = loop_.partial + walk_.first_part() * s.rows * kTile +
                          static_cast<std::int64_t>(walk_.local()) * kTile + (col - tile * kTile);
      float total[4] = {};
      const std::int64_t stride = static_cast<std::int64_t>(s.rows) * kTile;
      int i = 0;
      for (; i + 8 <= s.splits(); i += 8) add_parts<8>(from + i * stride, stride, total);
      if (i + 4 <= s.splits()) {
        add_parts<4>(from + i * stride, stride, total);
        i += 4;
      }
      for (; i < s.splits(); ++i) add_parts<1>(from + i * stride, stride, total);
      float v[4];
      Direction::finish(loop_, time_, walk_.row(), tile, col, ahead_, total, row_sum_, v);
      publish<Format>(loop_.layout, loop_, walk_.row(), tile, col, v, parity_ ^ 1);
      walk_.next();
      if (!walk_.done()) load();
    }
  }

 private:
  // All of them on their way before the first is used.
  template <int Count>
  static __device__ __forceinline__ void add_parts(const float* from, std::int64_t stride,
                                                   float (&total)[4]) {
    float4 v[Count];
#pragma unroll
    for (int i = 0; i < Count; ++i) v[i] = *reinterpret_cast<const float4*>(from + i * stride);
#pragma unroll
    for (int i = 0; i < Count; ++i) {
      total[0] += v[i].x;
      total[1] += v[i].y;
      total[2] += v[i].z;
      total[3] += v[i].w;
    }
  }
  __device__ void load() {
    ahead_ = Direction::ahead(loop_, time_, walk_.row(), walk_.column());
    row_sum_ = whole_row(loop_.layout, loop_, walk_.row(), parity_);
  }

  const Loop& loop_;
  std::int64_t time_;
  int parity_;
  RowWalk walk_;
  typename Direction::Ahead ahead_;
  float row_sum_;
};

// ---- barriers

// Blocks of threads wait for each other: those of a tile after its parts are made, those of the same
// samples after X of the next step is. `Sync` makes the threads of the block that take part wait.
template <class Sync>
class StepBarriers {
 public:
  __device__ StepBarriers(const StepTiling& s, unsigned* counters, Sync sync) : sync_(sync) {
    const WorkItem home = work_item(s, blockIdx.x);
    // One item a block: only the blocks of the same samples matter. Several: they may be of any
    // samples, and the first counter serves all.
    const bool one_each = s.items() <= gridDim.x;
    constexpr int kStride = GroupBarrier::kStride;
    unsigned* const mine =
        counters + static_cast<std::int64_t>(home.batch_tile) * (s.tiles + 1) * kStride;
    samples_ = {one_each ? mine : counters,
                one_each ? static_cast<unsigned>(s.tiles * s.splits()) : gridDim.x};
    tile_party_ = static_cast<unsigned>(s.splits());
    tile_ = {mine + (home.tile + 1) * kStride, tile_party_};
  }
  __device__ void samples() { samples_.wait(sync_); }
  __device__ void tile() {
    if (tile_party_ == 1) return sync_();
    tile_.wait(sync_);
  }

 private:
  Sync sync_;
  GroupBarrier samples_, tile_;
  unsigned tile_party_;
};

}  // namespace annulus::ring_rnn::cuda::tensor
