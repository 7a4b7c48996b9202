// Clusters of blocks (compute capability 9.0): blocks that run at the same time, wait for each other
// in hardware and write into each other's shared memory.
#pragma once

#include <cstddef>
#include <cstdint>

namespace annulus::cuda {

#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900

__device__ __forceinline__ int cluster_rank() {
  unsigned rank;
  asm volatile("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
  return static_cast<int>(rank);
}

// The barrier of all threads of a cluster, in two halves: what a thread wrote before it arrived is
// seen by all after they waited. Whole warps only.
__device__ __forceinline__ void cluster_arrive() {
  asm volatile("barrier.cluster.arrive.release.aligned;" ::: "memory");
}
__device__ __forceinline__ void cluster_wait() {
  asm volatile("barrier.cluster.wait.acquire.aligned;" ::: "memory");
}

// Where a block of this cluster has what lies at `shared` (an address of shared_address) in this one.
__device__ __forceinline__ std::uint32_t address_in_block(std::uint32_t shared, int rank) {
  std::uint32_t address;
  asm volatile("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(address) : "r"(shared), "r"(rank));
  return address;
}
// Stores, and nobody waits for it: the bytes arrive at a SharedBarrier of the block that is written to.
__device__ __forceinline__ void send_to_block(std::uint32_t address, uint2 v,
                                              std::uint32_t barrier) {
  asm volatile(
      "st.async.shared::cluster.mbarrier::complete_tx::bytes.v2.b32 [%0], {%1, %2}, [%3];" ::"r"(
          address),
      "r"(v.x), "r"(v.y), "r"(barrier)
      : "memory");
}
__device__ __forceinline__ void send_to_block(std::uint32_t address, float v,
                                              std::uint32_t barrier) {
  asm volatile(
      "st.async.shared::cluster.mbarrier::complete_tx::bytes.f32 [%0], %1, [%2];" ::"r"(address),
      "f"(v), "r"(barrier)
      : "memory");
}

#endif

// What a launch in clusters needs; `attribute` is written and must live as long as the result.
inline cudaLaunchConfig_t cluster_launch(unsigned blocks, unsigned threads, unsigned cluster,
                                         std::size_t shared_bytes, cudaStream_t stream,
                                         cudaLaunchAttribute& attribute) {
  attribute.id = cudaLaunchAttributeClusterDimension;
  attribute.val.clusterDim = {cluster, 1, 1};
  return {dim3(blocks), dim3(threads), shared_bytes, stream, &attribute, 1};
}

}  // namespace annulus::cuda
