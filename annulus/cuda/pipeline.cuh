// A ring of stages in shared memory between threads that fill them and threads that use them
// (compute capability 9.0).
//
// Every stage has two barriers. `full`: its data has come, which the hardware counts itself, in
// bytes, where a bulk copy brings it (tma.cuh): no thread waits for a copy. `empty`: all consumers
// are done with it. A producer runs ahead of the consumers by as many stages as there are; nobody
// waits but for the one stage it comes to. Barriers tell odd from even rounds only, so a thread
// must not be two rounds ahead of another on its side: producers that take turns are at most as
// many as there are stages.
//
//   producer   PipelineStage s = Pipeline::producer();   consumer   PipelineStage s;
//     ring.acquire(s);                                     ring.wait(s);
//     ring.expect(s, bytes); copies -> ring.full + s.at    ... uses stage s.at ...
//     s.next(stages);                                      ring.release(s.at);  s.next(stages);
#pragma once

#include <cstdint>

#include "annulus/cuda/mma.cuh"

namespace annulus::cuda {

// A barrier of `arrivals` a phase, and of the bytes that were announced for it: those of bulk
// copies, and those that other blocks of a cluster store. Phases are told apart by parity: 0, 1, 0,
// ... (As asm: <cuda/ptx> has these instructions, too, but takes 2 s of compiling a file, a tenth of
// what the kernels take.)
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
  // Arrives when the thread's copies so far (copy_async_16) have come. Who waits for it calls fence_shared_writes() before
  // wgmma reads them.
  __device__ void arrive_when_copied() {
    asm volatile("cp.async.mbarrier.arrive.noinc.shared::cta.b64 [%0];" ::"r"(shared_address(&word))
                 : "memory");
  }
  // Until the phase of this parity is over.
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

// The stage that a thread comes to next, and the parity of the phase that it waits for there.
struct PipelineStage {
  int at = 0;
  unsigned parity = 0;
  __device__ __forceinline__ void next(int stages) {
    if (++at == stages) {
      at = 0;
      parity ^= 1;
    }
  }
};

struct Pipeline {
  SharedBarrier *full = nullptr, *empty = nullptr;  // [stages]

  static constexpr int bytes(int stages) {
    return 2 * stages * static_cast<int>(sizeof(SharedBarrier));
  }

#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  Pipeline() = default;
  // Barriers of `stages` stages at `memory`, shared and aligned to 8 bytes.
  __device__ __forceinline__ Pipeline(void* memory, int stages)
      : full(static_cast<SharedBarrier*>(memory)), empty(full + stages) {}
  __device__ __forceinline__ void* end(int stages) const { return empty + stages; }

  // By one thread, then fence_barriers(), then a barrier of the block. `producers` and `consumers`
  // are arrivals at a stage.
  __device__ __forceinline__ void init(int stages, unsigned producers, unsigned consumers) const {
    for (int i = 0; i < stages; ++i) {
      full[i].init(producers);
      empty[i].init(consumers);
    }
  }

  // A fresh barrier counts as past its phase 1: a producer's first round waits for nobody.
  static __device__ __forceinline__ PipelineStage producer() { return {0, 1}; }
  __device__ __forceinline__ void acquire(const PipelineStage& s) const {
    empty[s.at].wait(s.parity);
  }
  __device__ __forceinline__ void expect(const PipelineStage& s, unsigned bytes) const {
    full[s.at].arrive_expecting(bytes);
  }
  // What the threads wrote themselves is there.
  __device__ __forceinline__ void commit(const PipelineStage& s) const { full[s.at].arrive(); }

  __device__ __forceinline__ void wait(const PipelineStage& s) const { full[s.at].wait(s.parity); }
  // By every thread that counts as a consumer.
  __device__ __forceinline__ void release(int stage) const { empty[stage].arrive(); }
  // By a whole warp that counts as one consumer.
  __device__ __forceinline__ void release_by_warp(int stage) const {
    __syncwarp();
    if ((threadIdx.x & 31) == 0) empty[stage].arrive();
  }
#endif
};

#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900

// What threads wrote to shared memory, copy_async_16 included, before wgmma or the copy engine uses
// it.
__device__ __forceinline__ void fence_shared_writes() {
  asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
}

// Makes freshly made barriers known to the copy engine and, after the cluster's barrier, to its
// blocks.
__device__ __forceinline__ void fence_barriers() {
  asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
  fence_shared_writes();
}

#endif

// Some of a block's warps wait for each other; barrier 0 is __syncthreads.
__device__ __forceinline__ void sync_threads(int barrier, int threads) {
  asm volatile("bar.sync %0, %1;" ::"r"(barrier), "r"(threads) : "memory");
}
// The same without waiting: `threads` counts those who arrive and those who wait.
__device__ __forceinline__ void arrive_threads(int barrier, int threads) {
  asm volatile("bar.arrive %0, %1;" ::"r"(barrier), "r"(threads) : "memory");
}
// Waits, and says whether any of them has `own`.
__device__ __forceinline__ bool sync_threads_or(int barrier, int threads, bool own) {
  int any;
  asm volatile(
      "{.reg .pred p, q; setp.ne.s32 p, %3, 0; bar.red.or.pred q, %1, %2, p; selp.s32 %0, 1, 0, q;}"
      : "=r"(any)
      : "r"(barrier), "r"(threads), "r"(static_cast<int>(own))
      : "memory");
  return any != 0;
}

}  // namespace annulus::cuda
