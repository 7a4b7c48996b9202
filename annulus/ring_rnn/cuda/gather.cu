// After the loops: sums over the parts that blocks of threads left, in fixed order. Forward: angle
// and amplitude. Backward: dA, dJ0, dJ1, dalpha, and the weights' gradients where their depth was
// split.
#include "annulus/core/checked.h"
#include "annulus/core/dispatch.h"
#include "annulus/cuda/check.h"
#include "annulus/cuda/reduce.cuh"
#include "annulus/ring_rnn/cuda/tensor.cuh"

namespace annulus::ring_rnn::cuda::tensor {

namespace {

constexpr int kThreads = 1024;
constexpr int kManyWeights = 4;        // of a thread that adds up parts of dW, ...
constexpr int kManyWeightsFrom = 256;  // ... from this N on: smaller ones would be too few blocks

__global__ void __launch_bounds__(kThreads) readout_kernel(const __grid_constant__ Readout a) {
  const Layout& s = a.layout;
  const std::int64_t index = static_cast<std::int64_t>(blockIdx.x) * kThreads + threadIdx.x;
  if (index >= s.T * s.B) return;
  const std::int64_t t = index / s.B;
  const std::int64_t b = index % s.B;
  float x = 0, y = 0;
  for (int part = 0; part < s.row_parts; ++part) {
    const float2 v = *reinterpret_cast<const float2*>(
        a.vectors + ((t * s.row_parts + part) * s.padded_b + b) * 2);
    x += v.x;
    y += v.y;
  }
  put<float>(a.angle, x == 0 && y == 0 ? 0.0f : atan2f(y, x), b, t);
  put<float>(a.amplitude, hypotf(x, y), b, t);
}

// s . u_k of one sample and step: a share of the parts of the splits that had channel k, which lie
// equally far apart.
__device__ __forceinline__ float dot(const Gather& gather, std::int64_t t, int channel,
                                     std::int64_t b, int share, int shares) {
  const Layout& s = gather.weights.layout;
  const DotParts& parts = gather.dot_parts;
  const int count = s.tiles * (parts.splits / parts.channel_splits);
  const std::int64_t slots = parts.of_step(s);
  const std::int64_t pitch = static_cast<std::int64_t>(s.channels) * s.padded_b;
  const std::int64_t step = pitch * parts.channel_splits * parts.warps;
  const int first = count * share / shares;
  const int last = count * (share + 1) / shares;
  const float* from = gather.dots + (t * slots * s.channels + channel) * s.padded_b + b +
                      channel % parts.channel_splits * parts.warps * pitch + first * step;
  float sum = 0;
#pragma unroll 8
  for (int i = first; i < last; ++i, from += step) {
    for (int part = 0; part < parts.warps; ++part) sum += from[part * pitch];
  }
  return sum;
}

// Single numbers are sums over everything: each has kSlices blocks of threads.
constexpr int kSlices = Gather::kSlices;
enum Single { kSumJ0, kSumJ1, kSumAlpha, kSingles };

// Sums f(i, j) over a slice of the rows i and all columns j; thread 0 of the block that comes last gets
// the sum of all slices, in their order. Without a division a number: 64-bit ones took ten times as
// long as the numbers.
template <class F>
__device__ __forceinline__ bool whole_sum(const Gather& gather, Single which, int slice,
                                          std::int64_t rows, std::int64_t columns, double& total,
                                          F&& f) {
  __shared__ double scratch[kThreads / 32];
  constexpr int kAcross = 128, kDown = kThreads / kAcross, kAtOnce = 8;
  const std::int64_t last = rows * (slice + 1) / kSlices;
  double sum = 0;
  for (std::int64_t j = threadIdx.x % kAcross; j < columns; j += kAcross) {
    std::int64_t i = rows * slice / kSlices + threadIdx.x / kAcross;
    for (; i + (kAtOnce - 1) * kDown < last; i += kAtOnce * kDown) {
      double v[kAtOnce];  // all on their way before the first is used
#pragma unroll
      for (int k = 0; k < kAtOnce; ++k) v[k] = f(i + k * kDown, j);
#pragma unroll
      for (int k = 0; k < kAtOnce; ++k) sum += v[k];
    }
    for (; i < last; i += kDown) sum += f(i, j);
  }
  sum = block_sum<kThreads>(sum, scratch);
  bool comes_last = false;
  if (threadIdx.x == 0) {
    double* const parts = gather.slice_sums + which * kSlices;
    __stcg(parts + slice, sum);
    __threadfence();
    comes_last = atomicAdd(gather.slice_counters + which, 1u) == kSlices - 1;
    if (comes_last) {
      __threadfence();
      total = 0;
      for (int i = 0; i < kSlices; ++i) total += __ldcg(parts + i);
    }
  }
  return comes_last;
}

// Blocks of threads of each kind.
struct GatherBlocks {
  std::int64_t alpha = 0, actions = 0, weights = 0;
  int dot_shares = 1;             // threads that share an s . u_k
  std::int64_t weights_each = 0;  // blocks of a channel
  int weights_of_thread = 1;
};

// dWa and dWo, whose depth was split. A thread has Each numbers of a channel: many of its loads are on
// their way at once. In 32 bits: see depth_splits().
template <unsigned Each>
__device__ void add_parts(const WeightGradients& w, const GatherBlocks& blocks, unsigned block) {
  const Layout& s = w.layout;
  const auto N = static_cast<unsigned>(s.N);
  const auto of_channel = static_cast<unsigned>(blocks.weights_each);
  const unsigned first = block % of_channel * (kThreads * Each) + threadIdx.x;
  const int channel = w.first_channel + static_cast<int>(block / of_channel);
  const std::int64_t side = static_cast<std::int64_t>(w.sides) * 128;
  const float* parts[Each];
  float sums[Each] = {};
#pragma unroll
  for (unsigned e = 0; e < Each; ++e) {
    const unsigned index = min(first + e * kThreads, N * N - 1);
    parts[e] = w.parts + (channel * side + index / N) * side + index % N;
  }
#pragma unroll 4
  for (int z = 0; z < w.depth_splits; ++z) {
#pragma unroll
    for (unsigned e = 0; e < Each; ++e) sums[e] += parts[e][z * s.channels * side * side];
  }
#pragma unroll
  for (unsigned e = 0; e < Each; ++e) {
    const unsigned index = first + e * kThreads;
    if (index < N * N) put_weight_gradient(w, channel, index / N, index % N, sums[e]);
  }
}

template <class T>
__global__ void __launch_bounds__(kThreads)
    gather_kernel(const __grid_constant__ Gather gather,
                  const __grid_constant__ GatherBlocks blocks) {
  const Layout& s = gather.weights.layout;
  const Args& a = gather.weights.args;
  const DotParts& dot_parts = gather.dot_parts;
  std::int64_t block = blockIdx.x;
  // The single numbers first: they take longest.
  if (block < kSingles * kSlices) {
    const int slice = static_cast<int>(block % kSlices);
    const auto add_up = [&](Single which, const auto& to, std::int64_t rows, std::int64_t columns,
                            auto&& f) {
      double total;
      if (whole_sum(gather, which, slice, rows, columns, total, f)) {
        put_at<T>(to.data, to.wide, 0, static_cast<float>(total));
      }
    };
    switch (static_cast<Single>(block / kSlices)) {
      case kSumJ0:
        if (!a.dJ0) return;
        return add_up(kSumJ0, a.dJ0, s.T, s.B, [&](std::int64_t t, std::int64_t b) {
          float g = 0, v = 0;
#pragma unroll 4
          for (int part = 0; part < s.row_parts; ++part) {
            const std::int64_t at = (t * s.row_parts + part) * s.padded_b + b;
            g += gather.g_sums[at];
            v += gather.s_sums[at];
          }
          return static_cast<double>(g) * static_cast<double>(v);
        });
      case kSumJ1: {
        // All parts at once, in the order they lie in memory; those of other channels were never made.
        const int had = dot_parts.splits / dot_parts.channel_splits * dot_parts.warps;  // of a tile
        if (!a.dJ1) return;
        return add_up(
            kSumJ1, a.dJ1, s.T * s.tiles * had, s.padded_b, [&](std::int64_t i, std::int64_t b) {
              const auto which = static_cast<unsigned>(i) % static_cast<unsigned>(had);
              const auto tile = static_cast<unsigned>(i) / static_cast<unsigned>(had);
              const auto parts = static_cast<unsigned>(dot_parts.warps);
              const std::int64_t split =
                  which / parts * static_cast<unsigned>(dot_parts.channel_splits);
              const std::int64_t part =
                  (static_cast<std::int64_t>(tile) * dot_parts.splits + split) * dot_parts.warps +
                  which % parts;
              return static_cast<double>(gather.dots[part * s.channels * s.padded_b + b]);
            });
      }
      default:
        if (!a.dalpha || a.alpha_per_neuron) return;
        return add_up(kSumAlpha, a.dalpha, s.B, s.N, [&](std::int64_t b, std::int64_t i) {
          return static_cast<double>(gather.alpha_sums[b * s.padded_n + i]);
        });
    }
  }
  block -= kSingles * kSlices;
  if (block < blocks.alpha) {
    const std::int64_t i = block * kThreads + threadIdx.x;
    if (i >= s.N) return;
    double sum = 0;
    for (std::int64_t b = 0; b < s.B; ++b) {
      sum += static_cast<double>(gather.alpha_sums[b * s.padded_n + i]);
    }
    put_either<T>(a.dalpha, static_cast<float>(sum), i);
    return;
  }
  block -= blocks.alpha;
  if (block < blocks.actions) {
    // Threads share a number of many parts: a thread each would leave most of the GPU without any.
    __shared__ float parts[kThreads];
    const int dots = kThreads / blocks.dot_shares;
    const int share = static_cast<int>(threadIdx.x) / dots;
    const int local = static_cast<int>(threadIdx.x) % dots;
    const std::int64_t index = block * dots + local;
    const bool inside = index < s.T * a.K * s.B;
    const std::int64_t b = index % s.B;
    const std::int64_t rest = index / s.B;
    const int channel = static_cast<int>(rest % a.K) + 1;
    const std::int64_t t = rest / a.K;
    const bool counts = inside && live(a, b, t);
    parts[threadIdx.x] = counts ? dot(gather, t, channel, b, share, blocks.dot_shares) : 0.0f;
    __syncthreads();
    if (share > 0 || !inside) return;
    float sum = 0;
    for (int i = 0; i < blocks.dot_shares; ++i) sum += parts[i * dots + local];
    put<T>(a.dA, sum, b, t, channel - 1);
    return;
  }
  block -= blocks.actions;
  if (blocks.weights_of_thread == 1) {
    add_parts<1>(gather.weights, blocks, static_cast<unsigned>(block));
  } else {
    add_parts<kManyWeights>(gather.weights, blocks, static_cast<unsigned>(block));
  }
}

}  // namespace

void run_readout(const Readout& readout, const Launch& launch) {
  const std::int64_t blocks = ceil_div(readout.layout.T * readout.layout.B, kThreads);
  readout_kernel<<<static_cast<unsigned>(blocks), kThreads, 0, launch.stream>>>(readout);
  check_launch(launch.op, "readout of the ring loop");
}

void run_gather(const Gather& gather, const Launch& launch) {
  const WeightGradients& w = gather.weights;
  const Layout& s = w.layout;
  const Args& a = w.args;
  GatherBlocks blocks;
  if (a.dalpha && a.alpha_per_neuron) blocks.alpha = ceil_div(s.N, kThreads);
  if (a.dA) {
    const int parts = s.tiles * (gather.dot_parts.splits / gather.dot_parts.channel_splits);
    blocks.dot_shares = parts >= 32 ? 8 : parts >= 8 ? 2 : 1;
    blocks.actions = ceil_div(s.T * a.K * s.B, kThreads / blocks.dot_shares);
  }
  if (w.depth_splits > 1) {
    if (s.N >= kManyWeightsFrom) blocks.weights_of_thread = kManyWeights;
    blocks.weights_each = ceil_div(s.N * s.N, kThreads * blocks.weights_of_thread);
    blocks.weights = (w.last_channel - w.first_channel) * blocks.weights_each;
  }
  const auto grid =
      static_cast<unsigned>(kSingles * kSlices + blocks.alpha + blocks.actions + blocks.weights);
  visit_floating(w.dtype, [&]<class T>() {
    if constexpr (!std::is_same_v<T, double>) {
      gather_kernel<T><<<grid, kThreads, 0, launch.stream>>>(gather, blocks);
    }
  });
  check_launch(launch.op, "gradients of the ring loop");
}

}  // namespace annulus::ring_rnn::cuda::tensor
