// The loop over steps for networks of at most 128 neurons (64 with three terms) on compute capability
// 9.0: samples do not depend on each other, and all weights fit into a few multiprocessors, so nobody
// waits for the grid.
//
// A cluster of blocks owns 8 or 16 samples for all steps; a block of it owns 32 neurons, and its
// weights stay where they are used: in the registers of its 16 warps, then in shared memory, the rest
// in L2. A step is
//   products   a warp multiplies 16 neurons x 16 of the depth of every channel by the samples
//              (mma.sync with the weights as left operand) and adds them up: scaled by c in f32 or,
//              with one term, with X scaled by c, as the sum of two bf16, in the tensor cores;
//   sum        over the warps of the depth, through shared memory, in fixed order;
//   epilogue   one thread an element, whose state never leaves its register;
//   exchange   the new X into the shared memory of all blocks of the cluster, where the bytes arrive at
//              a barrier of the block's own: nobody waits for anything but what is multiplied next.
// A sample's numbers depend neither on how many samples share its cluster nor on K.
#pragma once

#include "annulus/cuda/check.h"
#include "annulus/cuda/cluster.cuh"
#include "annulus/ring_rnn/cuda/cluster/products.cuh"

namespace annulus::ring_rnn::cuda::tensor {

#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
// X of the next step, of one sample and a block's neurons, one a lane: into every block of the
// cluster.
template <int Terms, int Samples>
__device__ __forceinline__ void exchange(int blocks, ClusterShared<Terms, Samples>& shared,
                                         int rank, int sample, int parity, float v) {
  const int lane = static_cast<int>(threadIdx.x) & 31;
  __nv_bfloat16 term[Terms];
  split_bf16<Terms>(v, term);
  const int deep = rank * (kClusterNeurons / 16) + lane / 16;
  const std::uint32_t barrier = shared_address(shared.arrived + parity);
#pragma unroll
  for (int i = 0; i < Terms; ++i) {
    // Four neighbours' numbers in each of their lanes; each lane serves another block.
    const unsigned own = __bfloat16_as_ushort(term[i]);
    const unsigned other = __shfl_xor_sync(~0u, own, 1);
    const unsigned pair = (lane & 1) ? other | own << 16 : own | other << 16;
    const unsigned pair_other = __shfl_xor_sync(~0u, pair, 2);
    const uint2 four = (lane & 2) ? make_uint2(pair_other, pair) : make_uint2(pair, pair_other);
    const std::uint32_t at =
        shared_address(shared.x[parity][i] + (deep * Samples + sample) * 16 + lane % 16 / 4 * 4);
    const int block = lane & 3;
    static_assert(kMostBlocks == 4);
    if (block < blocks) {
      send_to_block(address_in_block(at, block), four, address_in_block(barrier, block));
    }
  }
  const float sum = warp_sum(v);
  if (lane < blocks) {
    const std::uint32_t at = shared_address(&shared.sums[parity][sample].x + rank);
    send_to_block(address_in_block(at, lane), sum, address_in_block(barrier, lane));
  }
}

// Bytes of it that arrive at a block.
template <int Terms, int Samples>
__device__ __forceinline__ unsigned exchanged_bytes(int blocks) {
  return static_cast<unsigned>(blocks * Samples) * (kClusterNeurons * Terms * 2 + 4);
}
#endif  // 9.0

template <int Terms, int Samples, class Element>
__global__ void __launch_bounds__(kClusterThreads, 1)
    cluster_kernel(const __grid_constant__ ClusterLoop<Element> loop) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  extern __shared__ uint4 shared_words[];
  const int blocks = loop.tiling.blocks;
  const int channels = loop.layout.channels;
  auto& shared = *reinterpret_cast<ClusterShared<Terms, Samples>*>(shared_words);
  const int rank = cluster_rank();
  const int thread = static_cast<int>(threadIdx.x);
  const int warp = thread >> 5;
  const int lane = thread & 31;
  const std::int64_t first_row = static_cast<std::int64_t>(blockIdx.x / blocks) * Samples;
  const bool has_element = warp < Samples;

  // X of a step may come when the one before is being multiplied, so that there are two barriers. The
  // one after it cannot: it is made of what this block sends when it is done with X and its sums.
  const auto expect = [&](int parity) {
    shared.arrived[parity].arrive_expecting(exchanged_bytes<Terms, Samples>(blocks));
  };
  if (thread == 0) {
    for (int i = 0; i < 2; ++i) shared.arrived[i].init(1);
    fence_barriers();
    for (int i = 0; i < 2; ++i) expect(i);
  }
  if (thread < 2 * Samples) {  // sums of blocks that there are not
    shared.sums[thread / Samples][thread % Samples] = make_float4(0, 0, 0, 0);
  }
  // Blocks of the cluster may not be written to before they run and have done this.
  cluster_arrive();
  ClusterProducts<Terms, Samples> products(loop, loop.tiling, shared, rank);
  Factors<Terms, Samples, Element::Pass::kBackward> factors(loop, first_row);
  factors.load(loop.time(loop.first), 0);
  bool unusual = factors.store(shared, 0, 0);
  Element element(loop, first_row + warp, rank * kClusterNeurons + lane, rank);
  const float v = has_element ? element.begin(loop) : 0.0f;
  unusual = __syncthreads_or(unusual);
  cluster_wait();
  if (has_element) exchange<Terms, Samples>(blocks, shared, rank, warp, 0, v);

  for (std::int64_t step = loop.first; step < loop.last; ++step) {
    const std::int64_t time = loop.time(step);
    const int parity = static_cast<int>(step - loop.first) & 1;
    const bool more = step + 1 < loop.last;
    // What the epilogue needs, and c of the next step, is loaded while X is on its way.
    if (more) factors.load(loop.time(step + 1), 0);
    if (has_element) element.load(loop, time);
    // (To acquire what the cluster wrote and not just the block, as the letter of PTX has it, would
    // empty the first cache in every step. What is waited for arrives in this block's own memory.)
    shared.arrived[parity].wait(static_cast<unsigned>((step - loop.first) >> 1) & 1);
    if constexpr (part_buffers(Terms) == 1) __syncthreads();
    if (thread == 0 && step + 2 < loop.last) expect(parity);
    products.add(!unusual, parity, 0);
    // More channels than are staged: one part after another. What was on its way comes again.
    for (int first = kStagedChannels; first < channels; first += kStagedChannels) {
      __syncthreads();
      factors.load(time, first);
      unusual = __syncthreads_or(factors.store(shared, parity, first));
      products.add(!unusual, parity, first);
      if (more && first + kStagedChannels >= channels) factors.load(loop.time(step + 1), 0);
    }
    products.store(parity);
    unusual = __syncthreads_or(more && factors.store(shared, parity ^ 1, 0));
    if (has_element) {
      const float4 sums = shared.sums[parity][warp];
      const float next = element.finish(loop, time, products.total(warp, lane, parity),
                                        sums.x + sums.y + sums.z + sums.w);
      if (more) exchange<Terms, Samples>(blocks, shared, rank, warp, parity ^ 1, next);
    }
  }
  if (has_element) element.end(loop);
#else
  __trap();  // not built for this GPU: better than to return with nothing done
#endif
}

template <class Element>
void launch_cluster(const ClusterLoop<Element>& loop, const Launch& launch) {
  const LaunchSize& s = loop.tiling.launch;
  with_terms(loop.layout.terms, [&]<int Terms>() {
    auto* const kernel = loop.tiling.samples == 8 ? cluster_kernel<Terms, 8, Element>
                                                  : cluster_kernel<Terms, 16, Element>;
    cudaLaunchAttribute attribute;
    const cudaLaunchConfig_t config = cluster_launch(static_cast<unsigned>(s.grid), kClusterThreads,
                                                     static_cast<unsigned>(loop.tiling.blocks),
                                                     s.shared_bytes, launch.stream, attribute);
    allow_shared(launch.op, "shared memory of the ring loop in clusters", kernel,
                 s.most_shared_bytes);  // always: see launch.cuh
    throw_on_error(cudaLaunchKernelEx(&config, kernel, loop), launch.op,
                   "launch of the ring loop in clusters");
  });
}

}  // namespace annulus::ring_rnn::cuda::tensor
