// The loop over steps on tensor cores: one kernel, launched once for all steps (with barriers
// between the blocks of threads, which are then all on the GPU at once) or once a phase of a step.
// cuda/tiling.h says how the work is divided; the two directions differ in what happens
// before the first step and after each product, which a Direction supplies:
//
//   kDots        does the product also give s . u_k?
//   begin        X of the first step, four columns of a row
//   ahead        what the epilogue needs besides the product
//   finish       from both of them, X of the step after it
//   prefetch     brings what `ahead` reads nearer (Hopper)
#pragma once

#include "annulus/cuda/mma.cuh"
#include "annulus/ring_rnn/cuda/launch.cuh"
#include "annulus/ring_rnn/cuda/step.cuh"

namespace annulus::ring_rnn::cuda::tensor {

inline constexpr int kWarpRows = 64;  // a warp owns 64 rows x 32 columns
inline constexpr int kDotWarps = 2;   // that share rows of a tile

// Walks over the blocks of weights a block of threads multiplies by: steps, its work items, chunks, its
// active channels. The producer walks ahead of the consumer on the same way.
template <class Direction>
struct Walk {
  using Loop = Sm80Loop<Direction>;
  std::int64_t step, item;
  WorkItem work;
  int chunk, channel;
  bool done;

  __device__ void start(const Loop& loop, std::int64_t first_item) {
    step = loop.first;
    item = first_item;
    done = loop.first >= loop.last || item >= loop.tiling.items();
    if (done) return;
    work = work_item(loop.tiling, item);
    chunk = work.first_chunk;
    channel = -1;
    next(loop, first_item);
  }
  // The next active channel after `channel`, of this or a later chunk, item or step.
  __device__ void next(const Loop& loop, std::int64_t first_item) {
    const Sm80Tiling& s = loop.tiling;
    const int words = loop.layout.mask_words;
    while (true) {
      if (chunk < work.last_chunk) {
        const std::uint32_t* mask =
            loop.coefficients.active + (loop.time(step) * s.batch_tiles + work.batch_tile) * words;
        for (int word = (channel + 1) >> 5; word < words; ++word) {
          std::uint32_t bits = __ldg(mask + word) & work.channel_pattern;
          if (word == (channel + 1) >> 5) bits &= ~0u << ((channel + 1) & 31);
          if (bits != 0) {
            channel = word * 32 + __ffs(static_cast<int>(bits)) - 1;
            return;
          }
        }
        channel = -1;
        ++chunk;
        continue;
      }
      item += gridDim.x;
      if (item >= s.items()) {
        item = first_item;
        if (++step >= loop.last) {
          done = true;
          return;
        }
      }
      work = work_item(s, item);
      chunk = work.first_chunk;
      channel = -1;
    }
  }
  // The block's number in memory.
  __device__ std::int64_t block(const Loop& loop) const {
    return (static_cast<std::int64_t>(work.tile) * loop.tiling.chunks + chunk) *
               loop.layout.channels +
           channel;
  }
  // Its index where all blocks stay in shared memory.
  __device__ int resident_block(const Sm80Tiling& s) const {
    return (chunk - work.first_chunk) * s.resident_channels + channel / s.channel_splits;
  }
};

template <class Format>
__device__ __forceinline__ void load_block(const Pass& loop, std::int64_t block,
                                           std::byte* shared) {
  constexpr int kBytes = block_bytes(Format::kTerms);
  const std::byte* from = reinterpret_cast<const std::byte*>(loop.weights) + block * kBytes;
  for (int i = static_cast<int>(threadIdx.x) * 16; i < kBytes;
       i += static_cast<int>(blockDim.x) * 16) {
    copy_async_16(shared + i, from + i);
  }
}

// What a warp owns: 64 rows, 32 columns of the tile.
struct Warp {
  int lane, row_group, column_group;
  __device__ Warp() {
    lane = static_cast<int>(threadIdx.x) & 31;
    const int warp = static_cast<int>(threadIdx.x) >> 5;
    row_group = warp >> 1;
    column_group = warp & 1;
  }
};

// Fragments of X: one chunk of m, all terms.
template <class Format>
struct Fragments {
  static constexpr int kDeep = depth_of(Format::kTerms) / 16;
  uint4 x[kDeep][Format::kTerms][4];  // four tiles of 16 rows
  float scale[4][2];  // F16: of the rows that a lane has of the product, as load_scales

  // Not through the read-only cache: other blocks write X while this kernel runs.
  template <class Loop>
  __device__ void load(const Loop& loop, const Warp& w, int batch_tile, int chunk, int parity) {
    const std::int64_t wide = loop.layout.padded_n / 16;
    const std::int64_t plane = loop.layout.padded_b / 16 * wide;
    const uint4* base =
        reinterpret_cast<const uint4*>(loop.x_fragments) + parity * Format::kTerms * plane * 32;
    const std::int64_t row16 =
        (static_cast<std::int64_t>(batch_tile) * loop.tiling.rows + w.row_group * kWarpRows) / 16;
#pragma unroll
    for (int d = 0; d < kDeep; ++d) {
#pragma unroll
      for (int term = 0; term < Format::kTerms; ++term) {
#pragma unroll
        for (int m = 0; m < 4; ++m) {
          x[d][term][m] =
              base[((term * plane) + (row16 + m) * wide + chunk * kDeep + d) * 32 + w.lane];
        }
      }
    }
    if constexpr (Format::kScaled) {
      static_assert(depth_of(Format::kTerms) == kTile);  // a chunk is a tile of the step before
      const float* from =
          loop.x_scales +
          (static_cast<std::int64_t>(parity) * loop.tiling.tiles + chunk) * loop.layout.padded_b +
          row16 * 16 + (w.lane >> 2);
#pragma unroll
      for (int m = 0; m < 4; ++m) {
        scale[m][0] = from[m * 16];
        scale[m][1] = from[m * 16 + 8];
      }
    }
  }
};

// part = X V of one block of weights.
template <class Format>
__device__ __forceinline__ void multiply_block(const Fragments<Format>& f, const std::byte* shared,
                                               const Warp& w, float (&part)[4][4][4]) {
  constexpr int kDeep = Fragments<Format>::kDeep;
  const uint4* v = reinterpret_cast<const uint4*>(shared);
#pragma unroll
  for (int d = 0; d < kDeep; ++d) {
    uint4 b[Format::kTerms][2];
#pragma unroll
    for (int term = 0; term < Format::kTerms; ++term) {
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        b[term][h] = v[((term * kDeep + d) * 4 + w.column_group * 2 + h) * 32 + w.lane];
      }
    }
#pragma unroll
    for (int p = 0; p < products_of(Format::kTerms); ++p) {
      const int tx = term_of_x<Format::kTerms>(p);
      const int tv = term_of_v<Format::kTerms>(p);
#pragma unroll
      for (int m = 0; m < 4; ++m) {
#pragma unroll
        for (int h = 0; h < 2; ++h) {
          const uint4& x = f.x[d][tx][m];
          if (d == 0 && p == 0) {
            mma_first<typename Format::Element>(part[m][2 * h], x, b[tv][h].x, b[tv][h].y);
            mma_first<typename Format::Element>(part[m][2 * h + 1], x, b[tv][h].z, b[tv][h].w);
          } else {
            mma<typename Format::Element>(part[m][2 * h], x, b[tv][h].x, b[tv][h].y);
            mma<typename Format::Element>(part[m][2 * h + 1], x, b[tv][h].z, b[tv][h].w);
          }
        }
      }
    }
  }
}

// c of the eight rows a lane holds numbers of: row 16 m + 8 h + g.
template <class Loop>
__device__ __forceinline__ void load_scales(const Loop& loop, const Warp& w, std::int64_t time,
                                            int batch_tile, int channel, float (&c)[4][2]) {
  const Layout& layout = loop.layout;
  const float* from = loop.coefficients.c + (time * layout.channels + channel) * layout.padded_b +
                      static_cast<std::int64_t>(batch_tile) * loop.tiling.rows +
                      w.row_group * kWarpRows + (w.lane >> 2);
#pragma unroll
  for (int m = 0; m < 4; ++m) {
    c[m][0] = __ldg(from + m * 16);
    c[m][1] = __ldg(from + m * 16 + 8);
  }
}

// Parts of s . u_k: rows of the product dotted with the same rows of s, which lie in shared memory
// as the lanes hold the product. The first chunk of a part stores, later ones add: one lane alone
// ever writes to an address, so the order is fixed.
template <class Format, class Loop>
__device__ __forceinline__ void add_dots(const Loop& loop, const Warp& w, std::int64_t time,
                                         const WorkItem& work, int channel, bool first,
                                         const float4* s_tile, const float (&part)[4][4][4],
                                         const float (&scale)[4][2]) {
  float* to = dots_of<kDotWarps>(loop, loop.tiling, time, work, w.column_group, channel) +
              static_cast<std::int64_t>(work.batch_tile) * loop.tiling.rows +
              w.row_group * kWarpRows + (w.lane >> 2);
#pragma unroll
  for (int m = 0; m < 4; ++m) {
    float low = 0, high = 0;
#pragma unroll
    for (int n = 0; n < 4; ++n) {
      const float4 v = s_tile[(m * 4 + n) * blockDim.x + threadIdx.x];
      low = fmaf(part[m][n][1], v.y, fmaf(part[m][n][0], v.x, low));
      high = fmaf(part[m][n][3], v.w, fmaf(part[m][n][2], v.z, high));
    }
#pragma unroll
    for (int mask = 1; mask < 4; mask <<= 1) {
      low += __shfl_xor_sync(~0u, low, mask);
      high += __shfl_xor_sync(~0u, high, mask);
    }
    if constexpr (Format::kScaled) {
      low *= scale[m][0];
      high *= scale[m][1];
    }
    if ((w.lane & 3) == 0) {
      if (first) {
        to[m * 16] = low;
        to[m * 16 + 8] = high;
      } else {
        atomicAdd(to + m * 16, low);
        atomicAdd(to + m * 16 + 8, high);
      }
    }
  }
}

// s of the tile, as the lanes hold the product.
template <class Format, class Loop>
__device__ __forceinline__ void load_tile(const Loop& loop, std::int64_t time, const WorkItem& p,
                                          const Warp& w, float4* s_tile) {
  const std::int64_t row = static_cast<std::int64_t>(p.batch_tile) * loop.tiling.rows +
                           w.row_group * kWarpRows + (w.lane >> 2);
  const int col = p.tile * kTile + w.column_group * 32 + (w.lane & 3) * 2;
  for (int i = 0; i < 16; ++i) {
    s_tile[i * static_cast<int>(blockDim.x) + static_cast<int>(threadIdx.x)] =
        state_quad<Format::kStateTerms>(loop.layout, loop.states, time, row + (i >> 2) * 16,
                                        col + (i & 3) * 8);
  }
}

// The sum of a split, as one item of `partial`.
template <class Loop>
__device__ __forceinline__ void store_partial(const Loop& loop, const Warp& w, std::int64_t item,
                                              const float (&acc)[4][4][4]) {
  float* to = loop.partial + item * loop.tiling.rows * kTile +
              (w.row_group * kWarpRows + (w.lane >> 2)) * kTile + w.column_group * 32 +
              (w.lane & 3) * 2;
#pragma unroll
  for (int m = 0; m < 4; ++m) {
#pragma unroll
    for (int n = 0; n < 4; ++n) {
      float* at = to + m * 16 * kTile + n * 8;
      *reinterpret_cast<float2*>(at) = make_float2(acc[m][n][0], acc[m][n][1]);
      *reinterpret_cast<float2*>(at + 8 * kTile) = make_float2(acc[m][n][2], acc[m][n][3]);
    }
  }
}

template <class Format, class Direction>
__global__ void __launch_bounds__(256, 1)
    sm80_kernel(const __grid_constant__ Sm80Loop<Direction> loop) {
  extern __shared__ uint4 shared_words[];
  std::byte* const stages = reinterpret_cast<std::byte*>(shared_words);
  constexpr int kBytes = block_bytes(Format::kTerms);
  const Sm80Tiling& s = loop.tiling;
  const int channels = loop.layout.channels;
  float4* const s_tile = reinterpret_cast<float4*>(stages + s.weight_blocks * kBytes);
  const Warp w;
  const std::int64_t first_item = blockIdx.x;

  // Weights do not depend on the state: loading starts before everything else, and from one step
  // into the next across the barrier.
  using Way = Walk<Direction>;
  Way ahead;
  int loaded = 0;  // blocks requested so far
  if (loop.phases & kMultiply) {
    if (s.resident) {
      const WorkItem p = work_item(s, first_item);
      for (int chunk = p.first_chunk; chunk < p.last_chunk; ++chunk) {
        for (int k = p.split % s.channel_splits; k < channels; k += s.channel_splits) {
          load_block<Format>(
              loop, (static_cast<std::int64_t>(p.tile) * s.chunks + chunk) * channels + k,
              stages +
                  ((chunk - p.first_chunk) * s.resident_channels + k / s.channel_splits) * kBytes);
        }
      }
      copy_async_commit();
    } else {
      ahead.start(loop, first_item);
      for (; loaded < kStages - 1; ++loaded) {
        if (!ahead.done) {
          load_block<Format>(loop, ahead.block(loop), stages + loaded * kBytes);
          ahead.next(loop, first_item);
        }
        copy_async_commit();
      }
    }
  }

  const int warps = static_cast<int>(blockDim.x >> 5);
  const auto sync = [] { __syncthreads(); };
  StepBarriers<decltype(sync)> barriers(s, loop.counters, sync);
  if (loop.phases & kBegin) begin_items<Format, Direction>(loop, warps);
  if (loop.together) barriers.samples();
  if (s.resident && (loop.phases & kMultiply)) {
    copy_async_wait<0>();
    __syncthreads();
  }

  Way here;
  if (loop.phases & kMultiply) here.start(loop, first_item);
  int used = 0;
  for (std::int64_t step = loop.first; step < loop.last; ++step) {
    const std::int64_t time = loop.time(step);
    const int parity = loop.parity(time);
    if (loop.phases & kMultiply) {
      for (std::int64_t item = first_item; item < s.items(); item += gridDim.x) {
        const WorkItem p = work_item(s, item);
        if constexpr (Direction::kDots) {
          __syncthreads();  // the tile of the item before has been used
          load_tile<Format>(loop, time, p, w, s_tile);
          __syncthreads();
        }
        float acc[4][4][4] = {};
        Fragments<Format> f;
        int chunk = -1;
        float c[4][2];
        if (!here.done && here.step == step && here.item == item) {
          load_scales(loop, w, time, p.batch_tile, here.channel, c);
        }
        while (!here.done && here.step == step && here.item == item) {
          const std::byte* block;
          if (s.resident) {
            block = stages + here.resident_block(s) * kBytes;
          } else {
            copy_async_wait<kStages - 2>();
            __syncthreads();  // this block is here for all threads, and the one before is done with
            if (!ahead.done) {
              load_block<Format>(loop, ahead.block(loop), stages + loaded % kStages * kBytes);
              ahead.next(loop, first_item);
            }
            copy_async_commit();
            ++loaded;
            block = stages + used % kStages * kBytes;
            ++used;
          }
          if (here.chunk != chunk) {
            chunk = here.chunk;
            f.load(loop, w, p.batch_tile, chunk, parity);
          }
          const int channel = here.channel;
          here.next(loop, first_item);
          float c_next[4][2];
          if (!here.done && here.step == step && here.item == item) {
            load_scales(loop, w, time, p.batch_tile, here.channel, c_next);
          }
          float part[4][4][4];
          multiply_block<Format>(f, block, w, part);
          if constexpr (Format::kScaled) {
#pragma unroll
            for (int m = 0; m < 4; ++m) {
              c[m][0] *= f.scale[m][0];
              c[m][1] *= f.scale[m][1];
            }
          }
#pragma unroll
          for (int m = 0; m < 4; ++m) {
#pragma unroll
            for (int n = 0; n < 4; ++n) {
#pragma unroll
              for (int e = 0; e < 4; ++e) {
                acc[m][n][e] = fmaf(c[m][e >> 1], part[m][n][e], acc[m][n][e]);
              }
            }
          }
          if constexpr (Direction::kDots) {
            add_dots<Format>(loop, w, time, p, channel, chunk == p.first_chunk, s_tile, part,
                             f.scale);
          }
#pragma unroll
          for (int m = 0; m < 4; ++m) {
            c[m][0] = c_next[m][0];
            c[m][1] = c_next[m][1];
          }
        }
        store_partial(loop, w, item, acc);
      }
    }
    if (loop.phases & kFinish) {
      Epilogue<Format, Direction, Sm80Loop<Direction>> epilogue(loop, time, parity, warps);
      if (loop.together) barriers.tile();
      epilogue.run();
    }
    if (loop.together && step + 1 < loop.last) barriers.samples();
  }
}

template <class Direction>
void run_loop(const Sm80Loop<Direction>& loop, const Launch& launch) {
  with_format(loop.layout.terms, loop.layout.f16,
              [&]<class Format>() { launch_loop(sm80_kernel<Format, Direction>, loop, launch); });
}

}  // namespace annulus::ring_rnn::cuda::tensor
