// What the portable and the Hopper loop share: where a block of threads works, the ends of a step,
// and the meetings of blocks between them.
#pragma once

#include "annulus/cuda/grid_barrier.cuh"
#include "annulus/cuda/mma.cuh"
#include "annulus/cuda/reduce.cuh"
#include "annulus/ring_rnn/ring_rnn_cuda_tensor.cuh"

namespace annulus::ring::cuda::tensor {

// Where a block of threads works: which samples, columns and part of the sum.
struct Place {
  int batch_tile, tile, split;
  int first_chunk, last_chunk;
  std::uint32_t channel_pattern;  // bits of its channels in every mask word
};

__device__ __forceinline__ Place place_of(const Shape& s, std::int64_t item) {
  Place p;
  const auto i = static_cast<unsigned>(item);  // items fit in 32 bits: cut() sees to it
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

// Parts of one channel, by row of the padded batch. `columns` tells apart warps that share rows.
__device__ __forceinline__ float* dots_of(const Loop& loop, std::int64_t time, const Place& place,
                                          int columns, int channel) {
  const Shape& s = loop.shape;
  const std::int64_t slots = static_cast<std::int64_t>(s.tiles) * s.splits() * s.dot_parts;
  const std::int64_t slot =
      (static_cast<std::int64_t>(place.tile) * s.splits() + place.split) * s.dot_parts + columns;
  return loop.dots + ((time * slots + slot) * s.channels + channel) * s.padded_b;
}

// s of rows `row`, `row` + 8 and columns `col`, `col` + 1: one term, as pairs of columns.
__device__ __forceinline__ uint2 state_words(const Loop& loop, std::int64_t time, std::int64_t row,
                                             int col, int term) {
  const Shape& s = loop.shape;
  const std::int64_t plane = s.T * s.padded_b * s.padded_n;
  const std::uint16_t* at =
      loop.states + term * plane + (time * s.padded_b + row) * s.padded_n + col;
  return make_uint2(__ldg(reinterpret_cast<const std::uint32_t*>(at)),
                    __ldg(reinterpret_cast<const std::uint32_t*>(at + 8 * s.padded_n)));
}
__device__ __forceinline__ float4 quad_of(std::uint32_t low, std::uint32_t high) {
  return make_float4(__uint_as_float(low << 16), __uint_as_float(low & 0xffff0000u),
                     __uint_as_float(high << 16), __uint_as_float(high & 0xffff0000u));
}

// The same numbers, the sum of all terms.
template <int Terms>
__device__ __forceinline__ float4 state_quad(const Loop& loop, std::int64_t time, std::int64_t row,
                                             int col) {
  float4 v = make_float4(0, 0, 0, 0);
#pragma unroll
  for (int term = Terms - 1; term >= 0; --term) {
    const uint2 words = state_words(loop, time, row, col, term);
    const float4 part = quad_of(words.x, words.y);
    v.x += part.x;
    v.y += part.y;
    v.z += part.z;
    v.w += part.w;
  }
  return v;
}

// ---- the ends of a step

// Sixteen lanes hold a row, four columns each.
__device__ __forceinline__ float sum_row(float v) { return annulus::cuda::warp_sum<16>(v); }

// The sum over all columns of row `row` of X of this parity: parts of the tiles in fixed order.
__device__ __forceinline__ float whole_row(const Loop& loop, std::int64_t row, int parity) {
  const Shape& s = loop.shape;
  const float* part =
      loop.row_sums + static_cast<std::int64_t>(parity) * s.tiles * s.padded_b + row;
  float sum = 0;
  for (int tile = static_cast<int>(threadIdx.x) & 15; tile < s.tiles; tile += 16) {
    sum += part[tile * s.padded_b];
  }
  return sum_row(sum);
}

// X of the next step: its terms as fragments, and the part of the row's sum.
template <int Terms>
__device__ __forceinline__ void publish(const Loop& loop, std::int64_t row, int tile, int col,
                                        const float (&v)[4], int parity) {
  const Shape& s = loop.shape;
  const std::int64_t plane = s.padded_b * s.padded_n / 2;  // words
  std::uint32_t* base = loop.operand + parity * Terms * plane;
#pragma unroll
  for (int pair = 0; pair < 2; ++pair) {
    std::uint32_t word[Terms];
    annulus::cuda::split_pair<Terms>(v[2 * pair], v[2 * pair + 1], word);
    const std::int64_t at = operand_word(row, col + 2 * pair, s.padded_n);
#pragma unroll
    for (int term = 0; term < Terms; ++term) base[term * plane + at] = word[term];
  }
  const float sum = sum_row((v[0] + v[1]) + (v[2] + v[3]));
  if ((threadIdx.x & 15) == 0) {
    loop.row_sums[(static_cast<std::int64_t>(parity) * s.tiles + tile) * s.padded_b + row] = sum;
  }
}

// Calls f(row of the padded batch, row of the tile, first of four columns) for the rows that the
// split finishes: every lane of a warp at once, two rows a warp.
template <class F>
__device__ __forceinline__ void for_each_row(const Shape& s, const Place& p, int warps, F&& f) {
  const int each = (s.rows + s.splits() - 1) / s.splits();
  const int even = (each + 1) / 2 * 2;  // whole warps
  const int first = p.split * even;
  const int last = min(first + even, s.rows);
  const int lane = static_cast<int>(threadIdx.x) & 31;
  for (int row = first + static_cast<int>(threadIdx.x >> 5) * 2 + (lane >> 4); row < last;
       row += warps * 2) {
    f(static_cast<std::int64_t>(p.batch_tile) * s.rows + row, row,
      p.tile * kTile + (lane & 15) * 4);
  }
}

// X of the first step.
template <int Terms, class Direction>
__device__ __forceinline__ void begin_items(const Loop& loop, int warps) {
  const Shape& s = loop.shape;
  const int parity = Direction::parity(loop, Direction::kBackward ? loop.last - 1 : loop.first);
  for (std::int64_t item = blockIdx.x; item < s.items(); item += gridDim.x) {
    const Place p = place_of(s, item);
    for_each_row(s, p, warps, [&](std::int64_t row, int, int col) {
      float v[4];
      Direction::begin(loop, row, col, v);
      publish<Terms>(loop, row, p.tile, col, v, parity);
    });
  }
}

// The parts of the sums added up, and X of the next step made of them.
template <int Terms, class Direction>
__device__ __forceinline__ void finish_items(const Loop& loop, std::int64_t time, int parity,
                                             int warps) {
  const Shape& s = loop.shape;
  for (std::int64_t item = blockIdx.x; item < s.items(); item += gridDim.x) {
    const Place p = place_of(s, item);
    const std::int64_t parts = item - p.split;  // the tile's first item
    for_each_row(s, p, warps, [&](std::int64_t row, int local, int col) {
      const float* from = loop.partial + parts * s.rows * kTile +
                          static_cast<std::int64_t>(local) * kTile + (col - p.tile * kTile);
      float4 sum = make_float4(0, 0, 0, 0);
      const std::int64_t stride = static_cast<std::int64_t>(s.rows) * kTile;
#pragma unroll 4
      for (int i = 0; i < s.splits(); ++i) {
        const float4 v = *reinterpret_cast<const float4*>(from + i * stride);
        sum.x += v.x;
        sum.y += v.y;
        sum.z += v.z;
        sum.w += v.w;
      }
      const float row_sum = whole_row(loop, row, parity);
      const float total[4] = {sum.x, sum.y, sum.z, sum.w};
      float v[4];
      Direction::finish(loop, time, row, p.tile, col, total, row_sum, v);
      publish<Terms>(loop, row, p.tile, col, v, parity ^ 1);
    });
  }
}

// ---- meetings

// Blocks of threads wait for each other: those of a tile after its parts are made, those of the same
// samples after X of the next step is. `Sync` makes the threads of the block that take part wait.
template <class Sync>
class Meeting {
 public:
  __device__ Meeting(const Loop& loop, Sync sync) : sync_(sync) {
    const Shape& s = loop.shape;
    const Place home = place_of(s, blockIdx.x);
    // One item a block: only the blocks of the same samples matter. Several: they may be of any
    // samples, and the first counter serves all.
    const bool one_each = s.items() <= gridDim.x;
    constexpr int kStride = annulus::cuda::GroupBarrier::kStride;
    unsigned* const mine =
        loop.counters + static_cast<std::int64_t>(home.batch_tile) * (s.tiles + 1) * kStride;
    samples_ = one_each ? mine : loop.counters;
    samples_party_ = one_each ? static_cast<unsigned>(s.tiles * s.splits()) : gridDim.x;
    tile_ = mine + (home.tile + 1) * kStride;
    tile_party_ = static_cast<unsigned>(s.splits());
  }
  __device__ void samples() { meet(samples_, samples_target_ += samples_party_); }
  __device__ void tile() {
    if (tile_party_ == 1) return sync_();
    meet(tile_, tile_target_ += tile_party_);
  }

 private:
  // As GroupBarrier::wait, for a part of the block's threads.
  __device__ void meet(unsigned* counter, unsigned target) {
    sync_();
    if (threadIdx.x == 0) {
      annulus::cuda::add_release(counter, 1);
      while (static_cast<int>(annulus::cuda::load_acquire(counter) - target) < 0) {
      }
    }
    sync_();
  }

  Sync sync_;
  unsigned *samples_, *tile_;
  unsigned samples_party_, tile_party_;
  unsigned samples_target_ = 0, tile_target_ = 0;
};

}  // namespace annulus::ring::cuda::tensor
