// A barrier of blocks that are on the GPU together: a group of them, or the whole grid. One counter
// in global memory goes up by one a block and a wait; one thread a block spins on it.
//
// A block that waits for one that is not running waits for ever, so kernels that use this are only
// ever started by launch_cooperative, which has the driver refuse a grid that does not fit.
#pragma once

#include <cuda_runtime.h>

#include <algorithm>
#include <cstdint>
#include <type_traits>

namespace annulus::cuda {

__device__ __forceinline__ void add_release(unsigned* p, unsigned value) {
  asm volatile("red.release.gpu.global.add.u32 [%0], %1;" ::"l"(p), "r"(value) : "memory");
}
__device__ __forceinline__ unsigned load_acquire(const unsigned* p) {
  unsigned value;
  asm volatile("ld.acquire.gpu.global.u32 %0, [%1];" : "=r"(value) : "l"(p) : "memory");
  return value;
}

class GroupBarrier {
 public:
  // Counters of two groups lie a cache line apart: 32 of these.
  static constexpr int kStride = 32;

  // `counter` is 0 before the kernel starts; `blocks` share it, and each waits equally often.
  __device__ GroupBarrier(unsigned* counter, unsigned blocks)
      : counter_(counter), blocks_(blocks) {}

  // What any thread of the group wrote before is seen by all of them after. Called by all threads
  // of a block. The first __syncthreads orders the block's writes before thread 0's release, which
  // carries them along; its acquire and the second do the same for the reads that follow.
  __device__ __forceinline__ void wait() {
    target_ += blocks_;
    __syncthreads();
    if (threadIdx.x == 0 && threadIdx.y == 0 && threadIdx.z == 0) {
      add_release(counter_, 1);
      // The difference, so that a counter that has gone round is no trouble.
      while (static_cast<int>(load_acquire(counter_) - target_) < 0) {
      }
    }
    __syncthreads();
  }

 private:
  unsigned* counter_;
  unsigned blocks_;
  unsigned target_ = 0;
};

// Blocks of this kernel that the current device holds at once; 0 where it has no cooperative launch.
template <class... P>
int co_resident_blocks(void (*kernel)(P...), int threads, std::size_t shared_bytes) {
  int device = 0;
  int cooperative = 0;
  int multiprocessors = 0;
  int per_multiprocessor = 0;
  if (cudaGetDevice(&device) != cudaSuccess ||
      cudaDeviceGetAttribute(&cooperative, cudaDevAttrCooperativeLaunch, device) != cudaSuccess ||
      cooperative == 0 ||
      cudaDeviceGetAttribute(&multiprocessors, cudaDevAttrMultiProcessorCount, device) !=
          cudaSuccess ||
      cudaOccupancyMaxActiveBlocksPerMultiprocessor(&per_multiprocessor, kernel, threads,
                                                    shared_bytes) != cudaSuccess) {
    (void)cudaGetLastError();
    return 0;
  }
  return multiprocessors * per_multiprocessor;
}

template <class... P>
cudaError_t launch_cooperative(void (*kernel)(P...), unsigned blocks, unsigned threads,
                               std::size_t shared_bytes, cudaStream_t stream,
                               std::type_identity_t<P>... arguments) {
  void* pointers[] = {const_cast<void*>(static_cast<const void*>(&arguments))...};
  return cudaLaunchCooperativeKernel(reinterpret_cast<const void*>(kernel), dim3(blocks),
                                     dim3(threads), pointers, shared_bytes, stream);
}

// A grid of `groups` groups of `members` blocks. Group g takes the rows (of tiles) g, g + groups,
// ..., its member m the columns m, m + members, ...: rows are independent of one another, and only
// the blocks of a row wait for each other.
struct GroupedGrid {
  unsigned groups = 1, members = 1;
  unsigned blocks() const { return groups * members; }
};
inline GroupedGrid grouped_grid(std::int64_t rows, std::int64_t columns, std::int64_t resident,
                                std::int64_t most_groups) {
  const std::int64_t members =
      std::clamp<std::int64_t>(columns, 1, std::max<std::int64_t>(resident, 1));
  const std::int64_t groups =
      std::clamp<std::int64_t>(std::min(rows, resident / members), 1, most_groups);
  return {static_cast<unsigned>(groups), static_cast<unsigned>(members)};
}

}  // namespace annulus::cuda
