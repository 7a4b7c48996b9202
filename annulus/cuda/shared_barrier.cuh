// Barriers in shared memory (compute capability 9.0) that threads arrive at, and bytes: those of bulk
// copies, and those that other blocks of a cluster store.
#pragma once

#include <cstdint>

#include "annulus/cuda/mma.cuh"

namespace annulus::cuda {

// A barrier of `arrivals` a phase. Phases are told apart by parity: 0, 1, 0, ...
struct SharedBarrier {
  std::uint64_t word;

#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  __device__ void init(unsigned arrivals) {
    asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(shared_address(&word)),
                 "r"(arrivals)
                 : "memory");
  }
  __device__ void arrive() {
    asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(shared_address(&word))
                 : "memory");
  }
  // Arrives, and lets the phase wait for that many bytes, too.
  __device__ void arrive_expecting(unsigned bytes) {
    asm volatile(
        "mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(shared_address(&word)),
        "r"(bytes)
        : "memory");
  }
  __device__ void wait(unsigned parity) {
    unsigned done;
    do {
      asm volatile(
          "{.reg .pred p; mbarrier.try_wait.parity.shared::cta.b64 p, [%1], %2; selp.u32 %0, 1, 0, "
          "p;}"
          : "=r"(done)
          : "r"(shared_address(&word)), "r"(parity)
          : "memory");
    } while (done == 0);
  }
#endif
};

#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900

// A place in a ring of stages, and the parity of its barriers' phase.
struct RingPlace {
  int at = 0;
  unsigned parity = 0;
  __device__ __forceinline__ void next(int ring) {
    if (++at == ring) {
      at = 0;
      parity ^= 1;
    }
  }
};

// What threads wrote to shared memory, copy_async_16 included, before wgmma or the copy engine uses it.
__device__ __forceinline__ void fence_shared_writes() {
  asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
}

// Makes freshly made barriers known to the copy engine and, after the cluster's barrier, to its blocks.
__device__ __forceinline__ void fence_barriers() {
  asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
  fence_shared_writes();
}

#endif

}  // namespace annulus::cuda
