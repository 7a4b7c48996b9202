// The gradients of the weights for compute capability 9.0: what cuda/sm80/dweights.cu computes,
//   dV_k[i, j] = sum over (t, b) of (c_k g)[tb, i] s[tb, j]
// by wgmma. A block of threads owns 64 i x 128 j of several channels at once: two groups of four
// consumer warps have two or three channels each, and one more thread is the producer. g and s come from L2 once
// for all of these channels; with a tile for each channel alone, L2 would be the limit. 64 i and not
// 128, because g is f32 and s is not: twice the channels cost less than twice the rows of g.
//
// Rows tb come 32 at a time (a row tile, one stage of the pipeline), laid out in memory as
// they are needed here: s as the right operand of wgmma; g as f32, or as bf16 where there is one term:
// with f32, shared memory would be the limit. c is multiplied onto g on the way into the registers that
// are wgmma's left operand: in f32 or, with one term, as the sum of two bf16.
//
// What a channel's sum is does not depend on the other channels: rows are grouped by their position.
// The blocks are persistent: while the consumers write a tile out, the next one's rows are fetched.
//
// Other blocks of the same launch make s . u_k where the loop did not
// (cuda/sm90/late_dots.cuh).
#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <string>

#include "annulus/cuda/check.h"
#include "annulus/cuda/reduce.cuh"
#include "annulus/ring_rnn/cuda/format.cuh"
#include "annulus/ring_rnn/cuda/sm90/dweights.cuh"
#include "annulus/ring_rnn/cuda/sm90/late_dots.cuh"

namespace annulus::ring_rnn::cuda::tensor {

namespace {

using namespace dweights;

#if ANNULUS_DEVICE_HOPPER

// Which rows of the tile a consumer thread has.
struct ConsumerThread {
  int lane, warp, group;  // warp of the group

  __device__ ConsumerThread() {
    lane = static_cast<int>(threadIdx.x) & 31;
    warp = (static_cast<int>(threadIdx.x) >> 5) & 3;
    group = static_cast<int>(threadIdx.x) >> 7;
  }
  // Row of the tile that the thread's accumulators 4 n + 2 half, + 1 belong to. The rows of f32 are
  // dealt out in pairs, so that a thread's two are one load.
  template <bool Narrow>
  __device__ __forceinline__ int row(int half) const {
    return warp * 16 + (Narrow ? (lane >> 2) + half * 8 : (lane >> 2) * 2 + half);
  }
};

// g of a thread's two rows i and four rows tb of a step, as it lies in shared memory, ...
template <bool Narrow>
struct Raw {
  uint4 word;  // bf16: pairs of tb, each for the one and the other i

  __device__ __forceinline__ void load(const std::byte* g, const ConsumerThread& who, int step) {
    const int k = step * 16 + (who.lane >> 4) * 8 + (who.lane & 7);
    const int piece = who.warp * 2 + ((who.lane >> 3) & 1);
    word = ldmatrix_transposed(g + k * 128 + ((piece ^ (k & 7)) * 16));
  }
};
template <>
struct Raw<false> {
  float2 pair[4];  // f32: both i of a tb

  __device__ __forceinline__ void load(const std::byte* g, const ConsumerThread& who, int step) {
    const int q = who.lane & 3;
    const int column = who.lane >> 2;
    const int piece = (who.warp * 4 + (column >> 1)) ^ (q * 2);
    const std::byte* at = g + (step * 16 + q * 4) * 256 + piece * 16 + (column & 1) * 8;
#pragma unroll
    for (int e = 0; e < 4; ++e) pair[e] = *reinterpret_cast<const float2*>(at + e * 256);
  }
};

// ... and times c, as the left operand of wgmma.
__device__ __forceinline__ void scale(const Raw<true>& raw, const uint4& c, uint4 (&x)[1]) {
  const Scale front{c.x, c.z}, back{c.y, c.w};  // of two tb each
  x[0] = make_uint4(scaled_pair(raw.word.x, front), scaled_pair(raw.word.y, front),
                    scaled_pair(raw.word.z, back), scaled_pair(raw.word.w, back));
}
template <int Terms>
__device__ __forceinline__ void scale(const Raw<false>& raw, const uint4& c, uint4 (&x)[Terms]) {
  const float factor[4] = {__uint_as_float(c.x), __uint_as_float(c.y), __uint_as_float(c.z),
                           __uint_as_float(c.w)};
  float v[4][2];  // [tb][i]
#pragma unroll
  for (int e = 0; e < 4; ++e) {
    v[e][0] = factor[e] * raw.pair[e].x;
    v[e][1] = factor[e] * raw.pair[e].y;
  }
  std::uint32_t word[4][Terms];
#pragma unroll
  for (int w = 0; w < 4; ++w) {
    split_finite_pair<Terms>(v[(w >> 1) * 2][w & 1], v[(w >> 1) * 2 + 1][w & 1], word[w]);
  }
#pragma unroll
  for (int term = 0; term < Terms; ++term) {
    x[term] = make_uint4(word[0][term], word[1][term], word[2][term], word[3][term]);
  }
}

template <int Terms>
__device__ __forceinline__ void keep_if(uint4 (&x)[Terms], bool keep) {
  const std::uint32_t mask = keep ? ~0u : 0u;
#pragma unroll
  for (int term = 0; term < Terms; ++term) {
    x[term].x &= mask;
    x[term].y &= mask;
    x[term].z &= mask;
    x[term].w &= mask;
  }
}

// Two neighbours of the result.
template <class T>
struct alignas(2 * sizeof(T)) Pair {
  T low, high;
};

template <class T, bool Narrow>
__device__ __forceinline__ void store_tile(T* to, std::int64_t stride_i, std::int64_t stride_j,
                                           std::int64_t limit, const Item& item,
                                           const ConsumerThread& who, const float (&acc)[64]) {
  const int j = item.j0 + (who.lane & 3) * 2;
  const bool pairs = stride_j == 1 && stride_i % 2 == 0 &&
                     reinterpret_cast<std::uintptr_t>(to) % sizeof(Pair<T>) == 0 &&
                     item.j0 + kTileJ <= limit;
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const int i = item.i0 + who.row<Narrow>(half);
    if (i >= limit) continue;
    T* row = to + i * stride_i + j * stride_j;
    if (pairs) {
#pragma unroll
      for (int n = 0; n < 16; ++n) {
        *reinterpret_cast<Pair<T>*>(row + n * 8) = {T(acc[4 * n + 2 * half]),
                                                    T(acc[4 * n + 2 * half + 1])};
      }
    } else {
#pragma unroll
      for (int n = 0; n < 16; ++n) {
#pragma unroll
        for (int e = 0; e < 2; ++e) {
          if (j + n * 8 + e < limit) row[(n * 8 + e) * stride_j] = T(acc[4 * n + 2 * half + e]);
        }
      }
    }
  }
}

// Where put_weight_gradient would put it, or to the parts, many at a time.
template <bool Narrow>
__device__ __forceinline__ void store_channel(const WeightGradients& a, const Item& item,
                                              int channel, const ConsumerThread& who,
                                              const float (&acc)[64]) {
  if (a.depth_splits > 1) {
    const std::int64_t side = static_cast<std::int64_t>(a.sides) * 128;
    float* part = a.parts + (static_cast<std::int64_t>(item.split) * a.layout.channels + channel) *
                                side * side;
    store_tile<float, Narrow>(part, side, 1, side, item, who, acc);
    return;
  }
  const auto& dWa = a.args.dWa;
  const auto& dWo = a.args.dWo;
  const bool own = channel == 0;  // weights of its own
  const std::int64_t stride_i = own ? dWo.stride[0] : dWa.stride[1];
  const std::int64_t stride_j = own ? dWo.stride[1] : dWa.stride[2];
  const std::int64_t first = own ? 0 : (channel - 1) * dWa.stride[0];
  void* data = own ? dWo.data : dWa.data;
  visit_narrow(a.dtype, [&]<class T>() {
    store_tile<T, Narrow>(static_cast<T*>(data) + first, stride_i, stride_j, a.args.N, item, who,
                          acc);
  });
}

// A stage as a consumer group sees it.
template <int Terms>
struct Stage {
  using C = Config<Terms>;
  const std::byte* g;
  const uint4* c;         // of the thread's rows and the group's first channel
  std::uint32_t operand;  // the low word of s
  std::uint32_t bits;     // bit u kGroups: channel u of the group is not all zero

  Stage() = default;
  __device__ __forceinline__ Stage(const Shared<Terms>& shared, const ConsumerThread& who, int at,
                                   std::uint32_t all_bits) {
    g = shared.g + at * C::kG;
    c = reinterpret_cast<const uint4*>(shared.c + at * C::kC + who.group * kRowTileFactorBytes) +
        (who.lane & 3);
    operand = mn_major_low(shared.states + at * C::kStates, C::kBlock);
    bits = all_bits >> who.group;
    bits = uniform(bits);
  }
  __device__ __forceinline__ bool active(int u) const {
    return ((bits >> (u * C::kGroups)) & 1u) != 0;
  }
  __device__ __forceinline__ const uint4& c_of(int u, int step) const {
    return c[u * C::kGroups * (kRowTileFactorBytes / 16) + step * 4];
  }
};

template <int Terms>
__device__ __forceinline__ void multiply_step(float (&d)[64], const uint4 (&x)[Terms],
                                              std::uint32_t operand, int step, bool add) {
#pragma unroll
  for (int p = 0; p < products_of(Terms); ++p) {
    wgmma<bfloat16, Major::kMN>(
        d, x[term_of_x<Terms>(p)],
        mn_major(operand + (term_of_v<Terms>(p) * Config<Terms>::kPlane >> 4), step), add || p > 0);
  }
}

// One term. The left operands of all channels of a step are made while the other group's are
// multiplied. A branch around wgmma would make the compiler wait for each: a channel whose c are all
// zero is multiplied as zeros by zeros instead (g and s might not be finite).
// `stage_before_is_done` is called once nothing of the stage before is in use.
template <class F>
__device__ __forceinline__ void multiply_stage(const Stage<1>& stage, std::uint32_t zeros,
                                               const ConsumerThread& who,
                                               float (&acc)[Config<1>::kEach][64],
                                               uint4 (&x)[Config<1>::kEach][1],
                                               F&& stage_before_is_done) {
  using C = Config<1>;
#pragma unroll
  for (int step = 0; step < kRows / 16; ++step) {
    Raw<true> raw;
    raw.load(stage.g, who, step);
    uint4 c[C::kEach];
#pragma unroll
    for (int u = 0; u < C::kEach; ++u) c[u] = stage.c_of(u, step);
    wgmma_wait<0>();  // x is no longer read
    if (step == 0) stage_before_is_done();
#pragma unroll
    for (int u = 0; u < C::kEach; ++u) {
      scale(raw, c[u], x[u]);
      keep_if(x[u], stage.active(u));
    }
    wgmma_fence();
#pragma unroll
    for (int u = 0; u < C::kEach; ++u) {
      multiply_step<1>(acc[u], x[u], stage.active(u) ? stage.operand : zeros, step, true);
    }
    wgmma_commit();
  }
}

// Channels of the first group, as bits of a stage's.
template <int Terms>
constexpr std::uint32_t kOwnChannels = (1u | 1u << Config<Terms>::kGroups |
                                        1u << 2 * Config<Terms>::kGroups) &
                                       ((1u << Config<Terms>::kChannels) - 1);

// Waits for the next stage; its bits.
template <int Terms>
__device__ __forceinline__ std::uint32_t next_stage(const Shared<Terms>& shared,
                                                    PipelineStage& from) {
  const int at = from.at;
  shared.ring.wait(from);
  from.next(Config<Terms>::kStages);
  return __shfl_sync(~0u, shared.bits[at], 0);
}

// An item with one term: its sums stay in the tensor cores' registers.
__device__ __forceinline__ void add_item(const Shared<1>& shared, const ConsumerThread& who,
                                         PipelineStage& from, float (&acc)[Config<1>::kEach][64]) {
  const std::uint32_t zeros = mn_major_low(shared.zeros, Config<1>::kBlock);
  uint4 x[Config<1>::kEach][1];
  int before = -1;  // a stage that wgmma may still read, as it may x
  const auto release_before = [&] {
    if (before >= 0) shared.ring.release(before);
  };
  while (true) {
    const int at = from.at;
    const std::uint32_t bits = next_stage(shared, from);
    const Stage<1> stage(shared, who, at, bits);
    if ((stage.bits & kOwnChannels<1>) == 0) {
      wgmma_wait<0>();
      release_before();
      shared.ring.release(at);
      before = -1;
      if (bits == 0) return;
      continue;
    }
    multiply_stage(stage, zeros, who, acc, x, release_before);
    before = at;
  }
}

// An item with two or three terms. The tensor core truncates a sum where it should round it, each time
// it adds: over B T = 5120 rows of random signs dW would be too small by 2.5e-5, and by more the more
// rows there are. So it adds the 32 rows of a stage, and the registers add the rest: what would be a
// third channel's sums are the stage's. A left operand takes longer to make than to multiply (loads
// from shared memory wait behind those of wgmma), so what it is made of is loaded before the products
// that it is made beside, over the end of a stage, too; while a group adds, the other one multiplies.
// `always` is true, which the compiler does not know: it moves nothing across such a branch, and
// would make an operand between two products instead of beside both. H200, N 2048, K 16, bf16x3: 3.42
// ms; without the loads ahead 3.64, without the branches 3.66; a test for infinity with each operand
// is 5 %, and groups that take turns by barriers gain nothing.
template <int Terms>
__device__ __forceinline__ void add_item(const Shared<Terms>& shared, const ConsumerThread& who,
                                         PipelineStage& from, bool always,
                                         float (&acc)[Config<Terms>::kEach][64]) {
  static_assert(Config<Terms>::kEach == 2 && kRows == 32);
  Stage<Terms> next;
  int next_at = 0;
  // The next stage that has something for this group; false at the item's end.
  const auto look_ahead = [&] {
    while (true) {
      next_at = from.at;
      const std::uint32_t bits = next_stage(shared, from);
      next = Stage<Terms>(shared, who, next_at, bits);
      if ((next.bits & kOwnChannels<Terms>) != 0) return true;
      shared.ring.release(next_at);
      if (bits == 0) return false;
    }
  };
  uint4 x[2][Terms];  // of a stage's first and last 16 rows
  Raw<false> raw;     // what the next of them is made of
  uint4 c;
  const auto load = [&](const Stage<Terms>& of, int u, int step) {
    raw.load(of.g, who, step);
    c = of.c_of(u, step);
  };
  const auto load_next = [&](int step) { load(next, next.active(0) ? 0 : 1, step); };
  bool more = look_ahead();
  if (more) {
    load_next(0);
    scale(raw, c, x[0]);
    load_next(1);
  }
  while (more) {
    const Stage<Terms> stage = next;
    const int at = next_at;
#pragma unroll
    for (int u = 0; u < 2; ++u) {
      if (!stage.active(u)) continue;
      const bool other = u == 0 && stage.active(1);  // it comes next
      float part[64];
      wgmma_fence();
      multiply_step<Terms>(part, x[0], stage.operand, 0, false);
      wgmma_commit();
      if (always) scale(raw, c, x[1]);
      if (other) {
        load(stage, 1, 0);
      } else {
        more = look_ahead();
        if (more) load_next(0);
      }
      wgmma_fence();
      multiply_step<Terms>(part, x[1], stage.operand, 1, true);
      wgmma_commit();
      wgmma_wait<1>();  // x[0] is no longer read
      if (always) scale(raw, c, x[0]);
      if (other) {
        load(stage, 1, 1);
      } else if (more) {
        load_next(1);
      }
      wgmma_wait<0>();
#pragma unroll
      for (int e = 0; e < 64; ++e) acc[u][e] += part[e];
    }
    shared.ring.release(at);
  }
}

// A group of four warps: channels group, group + kGroups, ... of an item's, so that few channels are
// spread over all groups.
template <int Terms>
__device__ void consume(const Sm90WeightGradients& a, const Shared<Terms>& shared) {
  using C = Config<Terms>;
  const ConsumerThread who;
  const auto items = static_cast<unsigned>(items_of<Terms>(a));
  PipelineStage from;
  for (unsigned index = blockIdx.x; index < items; index += a.blocks) {
    float acc[C::kEach][64] = {};
    if constexpr (Terms == 1) {
      add_item(shared, who, from, acc);
    } else {
      add_item(shared, who, from, a.blocks != 0, acc);
    }
    const Item item = item_of<Terms>(a, index);
#pragma unroll
    for (int u = 0; u < C::kEach; ++u) {
      const int channel = who.group + u * C::kGroups;
      if (channel < item.channels) {
        store_channel<C::kNarrow>(a, item, item.first_channel + channel, who, acc[u]);
      }
    }
  }
}

#endif  // ANNULUS_DEVICE_HOPPER

template <int Terms>
__global__ void __launch_bounds__(Config<Terms>::kThreads, 1)
    sm90_dweights_kernel(const __grid_constant__ Sm90WeightGradients a) {
#if ANNULUS_DEVICE_HOPPER
  using C = Config<Terms>;
  extern __shared__ __align__(1024) std::byte shared_bytes[];
  if (blockIdx.x >= a.blocks) {
    const late_dots::Shared<Terms> shared(shared_bytes);
    if (threadIdx.x == 0) {
      shared.init();
      fence_barriers();
    }
    __syncthreads();
    const late_dots::Item item(a.layout, blockIdx.x - a.blocks);
    if (uniform_warp() >= late_dots::kGroups * 4) {
      give_registers<kProducerRegisters>();
      if (threadIdx.x == late_dots::kGroups * 128) late_dots::produce<Terms>(a, shared, item);
    } else {
      take_registers<kConsumerRegisters>();
      late_dots::consume<Terms>(a, shared, item);
    }
    return;
  }
  const Shared<Terms> shared(shared_bytes);
  if (threadIdx.x == 0) {
    // Every lane releases a stage: see Consumer::leave_group(). (No slower than one of a warp.)
    shared.ring.init(C::kStages, 1, C::kGroups * 128);
    fence_barriers();
  }
  for (int i = static_cast<int>(threadIdx.x); i < C::kZeros / 16; i += C::kThreads) {
    reinterpret_cast<uint4*>(shared.zeros)[i] = make_uint4(0, 0, 0, 0);
  }
  fence_shared_writes();
  __syncthreads();
  if (uniform_warp() >= C::kGroups * 4) {
    give_registers<kProducerRegisters>();
    if (threadIdx.x == C::kGroups * 128) produce<Terms>(a, shared);
  } else {
    take_registers<kConsumerRegisters>();
    consume<Terms>(a, shared);
  }
#else
  __trap();  // not built for this GPU: better than to return with nothing done
#endif
}

}  // namespace

void run_dweights(Sm90WeightGradients a, int multiprocessors, const Launch& launch) {
  const char* const op = launch.op;
  with_terms(a.layout.state_terms, [&]<int Terms>() {
    constexpr int kBytes =
        std::max(Config<Terms>::kSharedBytes, late_dots::Config<Terms>::kSharedBytes);
    static_assert(Config<Terms>::kGroups == late_dots::kGroups);
    allow_shared(op, "shared memory of the weights' gradient", sm90_dweights_kernel<Terms>, kBytes);
    const std::int64_t items = items_of<Terms>(a);
    const std::int64_t dots = a.dots == nullptr ? 0 : late_dots::items_of(a.layout);
    if (items > INT32_MAX || dots > INT32_MAX - multiprocessors) {
      throw NotSupported("[" + std::string(op) +
                         "] weights and steps must make fewer than 2^31 tiles but make " +
                         std::to_string(items) + " and " + std::to_string(dots));
    }
    a.blocks = static_cast<unsigned>(std::min<std::int64_t>(items, multiprocessors));
    const std::int64_t grid = a.blocks + dots;
    if (grid == 0) return;
    sm90_dweights_kernel<Terms>
        <<<static_cast<unsigned>(grid), Config<Terms>::kThreads, kBytes, launch.stream>>>(a);
  });
  check_launch(op, "gradient of the ring's weights");
}

}  // namespace annulus::ring_rnn::cuda::tensor
