// Kernels whose blocks stay on the GPU together for many stages of work: how many fit, their
// launch, and the barrier between two stages, of a group of blocks or of the whole grid.
//
// A block that waits for one that is not running waits for ever, so such kernels are only ever
// started by launch_together, which has the driver refuse a grid that does not fit. They can do one
// stage alone, too: where the driver refuses, launch_stages launches them once a stage.
#pragma once

#include <algorithm>
#include <cstdint>
#include <type_traits>

#include "annulus/cuda/check.h"

namespace annulus::cuda {

__device__ __forceinline__ void add_release(unsigned* p, unsigned value) {
  asm volatile("red.release.gpu.global.add.u32 [%0], %1;" ::"l"(p), "r"(value) : "memory");
}
__device__ __forceinline__ unsigned load_acquire(const unsigned* p) {
  unsigned value;
  asm volatile("ld.acquire.gpu.global.u32 %0, [%1];" : "=r"(value) : "l"(p) : "memory");
  return value;
}

// One counter in global memory goes up by one a block and a wait; one thread a block spins on it.
class GroupBarrier {
 public:
  // Counters of two groups lie a cache line apart: 32 of these.
  static constexpr int kStride = 32;

  GroupBarrier() = default;
  // `counter` is 0 before the kernel starts; `blocks` share it, and each waits equally often.
  __device__ GroupBarrier(unsigned* counter, unsigned blocks)
      : counter_(counter), blocks_(blocks) {}

  // What any thread of the group wrote before is seen by all of them after. Called by all threads
  // of one-dimensional blocks, or by those that `sync` makes wait for each other, thread 0 among
  // them. The first sync orders the block's writes before thread 0's release, which carries them
  // along; its acquire and the second do the same for the reads that follow.
  template <class Sync>
  __device__ __forceinline__ void wait(Sync&& sync) {
    target_ += blocks_;
    sync();
    if (threadIdx.x == 0) {
      add_release(counter_, 1);
      // The difference, so that a counter that has gone round is no trouble.
      while (static_cast<int>(load_acquire(counter_) - target_) < 0) {
      }
    }
    sync();
  }
  __device__ __forceinline__ void wait() {
    wait([] { __syncthreads(); });
  }

 private:
  unsigned* counter_ = nullptr;
  unsigned blocks_ = 0;
  unsigned target_ = 0;
};

// Blocks of this kernel that the current device holds at once; 0 where it has no cooperative
// launch.
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

// Starts the kernel with all blocks on the GPU at once, or says that the device does not hold so
// many now (another process may have a part of it) or has no such launch.
template <class... P>
bool launch_together(const char* op, const char* what, void (*kernel)(P...), unsigned blocks,
                     unsigned threads, std::size_t shared_bytes, cudaStream_t stream,
                     std::type_identity_t<P>... arguments) {
  void* pointers[] = {const_cast<void*>(static_cast<const void*>(&arguments))...};
  const cudaError_t error =
      cudaLaunchCooperativeKernel(reinterpret_cast<const void*>(kernel), dim3(blocks),
                                  dim3(threads), pointers, shared_bytes, stream);
  if (error == cudaErrorCooperativeLaunchTooLarge || error == cudaErrorNotSupported) {
    (void)cudaGetLastError();
    return false;
  }
  throw_on_error(error, op, what);
  return true;
}

// What one launch does of a kernel's work: stages first to last.
struct Stages {
  GroupedGrid grid;
  std::int64_t first = 0, last = 0;
};

// kernel(stages, arguments...) over rows x columns tiles: all stages in one launch, or, where the
// device refuses that or `one_by_one` asks for it, a launch a stage, to the same bits.
template <class... P>
void launch_stages(const char* op, const char* what, void (*kernel)(Stages, P...), unsigned threads,
                   std::int64_t rows, std::int64_t columns, std::int64_t most_groups,
                   std::int64_t first, std::int64_t last, bool one_by_one, cudaStream_t stream,
                   std::type_identity_t<P>... arguments) {
  const int resident = one_by_one ? 0 : co_resident_blocks(kernel, static_cast<int>(threads), 0);
  if (resident > 0) {
    const GroupedGrid grid = grouped_grid(rows, columns, resident, most_groups);
    if (launch_together(op, what, kernel, grid.blocks(), threads, 0, stream,
                        Stages{grid, first, last}, arguments...)) {
      return;
    }
  }
  const GroupedGrid grid = grouped_grid(rows, columns, 1 << 20, most_groups);
  for (std::int64_t stage = first; stage <= last; ++stage) {
    kernel<<<grid.blocks(), threads, 0, stream>>>(Stages{grid, stage, stage}, arguments...);
    check_launch(op, what);
  }
}

}  // namespace annulus::cuda
