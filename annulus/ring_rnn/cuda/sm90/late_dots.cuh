// s . u_k of all steps at once, after the backward loop, where that runs in clusters: a step there is
// short, and nothing of u_k = g V_k is needed for the next one. (Within the loop, whose warps would
// also have to add their parts up, it made N 128, K 16, T 20, B 256 take 172 us instead of 95 on an H200,
// and takes 10 here. Larger networks multiply for the loop what is multiplied here.)
//
// Two groups of four warps have 64 rows tb each, a part of the channels, and all columns, 64 at a
// time: g as left operand in registers, V_k in shared memory, where one producer thread brings its blocks.
#pragma once

#include <cstddef>
#include <cstdint>

#include "annulus/cuda/pipeline.cuh"
#include "annulus/cuda/reduce.cuh"
#include "annulus/cuda/tma.cuh"
#include "annulus/cuda/wgmma.cuh"
#include "annulus/ring_rnn/cuda/step.cuh"

namespace annulus::ring_rnn::cuda::tensor::late_dots {

inline constexpr int kGroups = 2;
inline constexpr int kRows = 64;     // of a group
inline constexpr int kChannels = 6;  // of a block of threads, at most

template <int Terms>
struct Config {
  static constexpr int kBlock = hopper_block_bytes(Terms);
  static constexpr int kStages = Terms == 1 ? 12 : Terms == 2 ? 8 : 6;
  static constexpr int kMostChunks = Terms == 3 ? 1 : 2;  // see cluster_blocks()
  static constexpr int kSharedBytes = kStages * kBlock + Pipeline::bytes(kStages);
};

__host__ __device__ inline int channel_groups(const Layout& s) {
  return (s.channels + kChannels - 1) / kChannels;
}
__host__ __device__ inline std::int64_t items_of(const Layout& s) {
  const std::int64_t pairs = (s.T * (s.padded_b / kRows) + kGroups - 1) / kGroups;
  return pairs * channel_groups(s);
}

#if ANNULUS_DEVICE_HOPPER

template <int Terms>
struct Shared {
  using C = Config<Terms>;
  std::byte* weights;  // [stage][term][64 n][64 m], swizzled
  Pipeline ring;

  __device__ explicit Shared(std::byte* base)
      : weights(base), ring(base + C::kStages * C::kBlock, C::kStages) {}
  __device__ void init() const { ring.init(C::kStages, 1, kGroups * 128); }
};

// Both sides walk over its weights in the same order: channels, tiles, chunks.
struct Item {
  std::int64_t first_row;  // tb
  int first_channel, last_channel;

  __device__ Item(const Layout& s, std::int64_t index) {
    const std::int64_t groups = channel_groups(s);
    const std::int64_t group = index % groups;
    first_row = index / groups * (kGroups * kRows);
    first_channel = static_cast<int>(s.channels * group / groups);
    last_channel = static_cast<int>(s.channels * (group + 1) / groups);
  }
};

template <int Terms>
__device__ void produce(const Sm90WeightGradients& a, const Shared<Terms>& shared,
                        const Item& item) {
  using C = Config<Terms>;
  const Layout& s = a.layout;
  const Pipeline& ring = shared.ring;
  PipelineStage to = ring.producer();
  for (int channel = item.first_channel; channel < item.last_channel; ++channel) {
    for (int block = 0; block < s.tiles * a.chunks; ++block) {
      ring.acquire(to);
      ring.expect(to, C::kBlock);
      copy_bulk(shared.weights + to.at * C::kBlock,
                reinterpret_cast<const std::byte*>(a.weights) +
                    (std::int64_t{block} * s.channels + channel) * C::kBlock,
                C::kBlock, ring.full + to.at);
      to.next(C::kStages);
    }
  }
}

// g of a warp's 16 rows, one chunk of columns, as left operands.
template <int Terms>
__device__ __forceinline__ void load_g(const Sm90WeightGradients& a, std::int64_t step,
                                       std::int64_t row, int col, uint4 (&x)[Terms][4]) {
  const Layout& s = a.layout;
  const auto words = [&](std::int64_t r, int c, std::uint32_t(&word)[Terms]) {
    if constexpr (Terms == 1) {
      word[0] = *reinterpret_cast<const std::uint32_t*>(
          reinterpret_cast<const std::uint16_t*>(a.g) + step + row_tile_narrow(s, r, c));
    } else {
      const float2 v = *reinterpret_cast<const float2*>(reinterpret_cast<const float*>(a.g) + step +
                                                        row_tile_wide(s, r, c));
      split_pair<Terms>(v.x, v.y, word);
    }
  };
#pragma unroll
  for (int d = 0; d < 4; ++d) {
    std::uint32_t word[4][Terms];
#pragma unroll
    for (int w = 0; w < 4; ++w) words(row + (w & 1) * 8, col + d * 16 + (w >> 1) * 8, word[w]);
#pragma unroll
    for (int term = 0; term < Terms; ++term) {
      x[term][d] = make_uint4(word[0][term], word[1][term], word[2][term], word[3][term]);
    }
  }
}

// s of a thread's rows and columns of a tile: with one term as pairs of bf16, which lose nothing.
template <int Terms>
struct States {
  float4 v[8];
  __device__ __forceinline__ void load(const WeightGradients& a, std::int64_t time,
                                       std::int64_t row, int col) {
#pragma unroll
    for (int n = 0; n < 8; ++n)
      v[n] = state_quad<Terms>(a.layout, a.states, time, row, col + n * 8);
  }
  __device__ __forceinline__ float4 quad(int n) const { return v[n]; }
};
template <>
struct States<1> {
  uint2 words[8];
  __device__ __forceinline__ void load(const WeightGradients& a, std::int64_t time,
                                       std::int64_t row, int col) {
#pragma unroll
    for (int n = 0; n < 8; ++n) {
      words[n] = state_words(a.layout, a.states, time, row, col + n * 8, 0);
    }
  }
  __device__ __forceinline__ float4 quad(int n) const { return quad_of(words[n].x, words[n].y); }
};

template <int Terms>
__device__ void consume(const Sm90WeightGradients& a, const Shared<Terms>& shared,
                        const Item& item) {
  using C = Config<Terms>;
  const Layout& s = a.layout;
  const int lane = static_cast<int>(threadIdx.x) & 31;
  const int warp = static_cast<int>(threadIdx.x) >> 5;  // 16 rows each, over both groups
  const std::int64_t row = item.first_row + warp * 16 + (lane >> 2);  // and the one 8 below
  const std::int64_t rows = s.T * s.padded_b;
  const bool inside = row < rows;  // or the other group has the last rows
  const std::int64_t time = inside ? row / s.padded_b : 0;
  const std::int64_t b = inside ? row % s.padded_b : lane >> 2;
  const int col = (lane & 3) * 2;

  uint4 x[C::kMostChunks][Terms][4];
  States<Terms> states[C::kMostChunks];  // as many tiles as chunks
#pragma unroll
  for (int i = 0; i < C::kMostChunks; ++i) {
    if (i >= a.chunks) break;
    load_g<Terms>(a, time * s.padded_b * s.padded_n, b, i * kHopperDepth + col, x[i]);
    states[i].load(a, time, b, i * kTile + col);
  }

  PipelineStage from;
  for (int channel = item.first_channel; channel < item.last_channel; ++channel) {
#pragma unroll
    for (int tile = 0; tile < C::kMostChunks; ++tile) {
      if (tile >= s.tiles) break;
      float low = 0, high = 0;
      float part[32];
#pragma unroll
      for (int chunk = 0; chunk < C::kMostChunks; ++chunk) {
        if (chunk >= a.chunks) break;
        // One term adds the chunks up in the tensor core; more add them in f32, which rounds.
        const bool fresh = Terms > 1 || chunk == 0;
        const bool complete = Terms > 1 || chunk + 1 == a.chunks;
        const int stage = from.at;
        shared.ring.wait(from);
        const std::uint32_t operand = uniform(k_major_low(shared.weights + stage * C::kBlock));
        wgmma_fence();
#pragma unroll
        for (int p = 0; p < products_of(Terms); ++p) {
#pragma unroll
          for (int d = 0; d < 4; ++d) {
            wgmma<bfloat16>(part, x[chunk][term_of_x<Terms>(p)][d],
                            k_major(operand + (term_of_v<Terms>(p) * kHopperPlane >> 4), d),
                            !fresh || p > 0 || d > 0);
          }
        }
        wgmma_commit();
        from.next(C::kStages);
        wgmma_wait<0>();
        shared.ring.release(stage);
        if (!complete) continue;
#pragma unroll
        for (int n = 0; n < 8; ++n) {
          const float4 v = states[tile].quad(n);
          low = fmaf(part[4 * n + 1], v.y, fmaf(part[4 * n], v.x, low));
          high = fmaf(part[4 * n + 3], v.w, fmaf(part[4 * n + 2], v.z, high));
        }
      }
      low = warp_sum<4>(low);
      high = warp_sum<4>(high);
      if (inside && (lane & 3) == 0) {
        float* to = a.dots + ((time * s.tiles + tile) * s.channels + channel) * s.padded_b + b;
        to[0] = low;
        to[8] = high;
      }
    }
  }
}

#endif  // ANNULUS_DEVICE_HOPPER

}  // namespace annulus::ring_rnn::cuda::tensor::late_dots
