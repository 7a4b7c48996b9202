// Copies by the copy engine (compute capability 9.0): one thread asks for them, no thread waits, no
// register is needed, and the bytes arrive at a barrier (pipeline.cuh). Bulk copies move
// neighbouring bytes. Tensor copies move a box of a tensor of 1 to 5 dimensions, any strides, into
// shared memory that is dense or swizzled as wgmma wants it (wgmma.cuh) and back; what lies outside
// of the tensor is read as zeros and not written.
//
// A tensor is described by a TensorMap (tensor_map.h), which the kernel takes by value as a
// `const __grid_constant__ TensorMap` parameter.
#pragma once

#include <cstdint>

#include "annulus/cuda/pipeline.cuh"
#include "annulus/cuda/tensor_map.h"

namespace annulus::cuda {

#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900

// ---- Neighbouring bytes: multiples of 16, aligned to 16

// The barrier's phase ends when they have arrived.
__device__ __forceinline__ void copy_bulk(void* shared, const void* global, unsigned bytes,
                                          SharedBarrier* barrier) {
  asm volatile(
      "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::
          "r"(shared_address(shared)),
      "l"(global), "r"(bytes), "r"(shared_address(&barrier->word))
      : "memory");
}

// The same for what is read once and need not stay in L2, where `policy` is read_once().
__device__ __forceinline__ std::uint64_t read_once() {
  std::uint64_t policy;
  asm("createpolicy.fractional.L2::evict_first.b64 %0, 1.0;" : "=l"(policy));
  return policy;
}
__device__ __forceinline__ void copy_bulk(void* shared, const void* global, unsigned bytes,
                                          SharedBarrier* barrier, std::uint64_t policy) {
  asm volatile(
      "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint "
      "[%0], [%1], %2, [%3], %4;" ::"r"(shared_address(shared)),
      "l"(global), "r"(bytes), "r"(shared_address(&barrier->word)), "l"(policy)
      : "memory");
}

// To L2, for what will be read later.
__device__ __forceinline__ void prefetch_bulk(const void* global, unsigned bytes) {
  asm volatile("cp.async.bulk.prefetch.L2.global [%0], %1;" ::"l"(global), "r"(bytes));
}

// ---- Boxes of a tensor. Shared memory is aligned to 128 bytes, or to 8 times the swizzle.

// The map itself, before the first copy waits for it.
__device__ __forceinline__ void prefetch_map(const TensorMap& map) {
  asm volatile("prefetch.tensormap [%0];" ::"l"(&map) : "memory");
}

// load_box(shared, map, {i0, i1, ...}, barrier): the box whose first element is (i0, i1, ...),
// which may be negative. All of its bytes count as arriving, those outside of the tensor, too.
// load_box(shared, map, {...}, barrier, blocks): to the same place in each block of the cluster
// that has a bit in `blocks`; the bytes arrive at the barrier of each at the same place.
// store_box(map, {...}, shared): see commit_stores(). Its box may end beyond the tensor but not begin
// before it: an H200 takes a negative index of a store for an illegal instruction.
// add_box(map, {...}, shared): adds, in the map's type, where store_box() writes; see commit_stores(), too.
// prefetch_box(map, {...}): to L2.
//
// One text for each number of dimensions; operands that an instruction does not have are constants.
#define ANNULUS_BOX(Rank, names, ...)                                                              \
  __device__ __forceinline__ void load_box(void* shared, const TensorMap& map,                     \
                                           const int(&i)[Rank], SharedBarrier* barrier) {          \
    asm volatile("cp.async.bulk.tensor." #Rank                                                     \
                 "d.shared::cluster.global.mbarrier::complete_tx::bytes "                          \
                 "[%0], [%1, {" names "}], [%2];" ::"r"(shared_address(shared)),                   \
                 "l"(&map), "r"(shared_address(&barrier->word)), "n"(0), __VA_ARGS__               \
                 : "memory");                                                                      \
  }                                                                                                \
  __device__ __forceinline__ void load_box(void* shared, const TensorMap& map,                     \
                                           const int(&i)[Rank], SharedBarrier* barrier,            \
                                           std::uint16_t blocks) {                                 \
    asm volatile("cp.async.bulk.tensor." #Rank                                                     \
                 "d.shared::cluster.global.mbarrier::complete_tx::bytes.multicast::cluster "       \
                 "[%0], [%1, {" names "}], [%2], %3;" ::"r"(shared_address(shared)),               \
                 "l"(&map), "r"(shared_address(&barrier->word)), "h"(blocks), __VA_ARGS__          \
                 : "memory");                                                                      \
  }                                                                                                \
  __device__ __forceinline__ void store_box(const TensorMap& map, const int(&i)[Rank],             \
                                            const void* shared) {                                  \
    asm volatile("cp.async.bulk.tensor." #Rank "d.global.shared::cta.bulk_group [%1, {" names      \
                 "}], [%0];" ::"r"(shared_address(shared)),                                        \
                 "l"(&map), "n"(0), "n"(0), __VA_ARGS__                                            \
                 : "memory");                                                                      \
  }                                                                                                \
  __device__ __forceinline__ void add_box(const TensorMap& map, const int(&i)[Rank],               \
                                          const void* shared) {                                    \
    asm volatile("cp.reduce.async.bulk.tensor." #Rank                                              \
                 "d.global.shared::cta.add.bulk_group [%1, {" names                                \
                 "}], [%0];" ::"r"(shared_address(shared)),                                        \
                 "l"(&map), "n"(0), "n"(0), __VA_ARGS__                                            \
                 : "memory");                                                                      \
  }                                                                                                \
  __device__ __forceinline__ void prefetch_box(const TensorMap& map, const int(&i)[Rank]) {        \
    asm volatile("cp.async.bulk.prefetch.tensor." #Rank "d.L2.global [%1, {" names "}];" ::"n"(0), \
                 "l"(&map), "n"(0), "n"(0), __VA_ARGS__                                            \
                 : "memory");                                                                      \
  }
ANNULUS_BOX(1, "%4", "r"(i[0]))
ANNULUS_BOX(2, "%4,%5", "r"(i[0]), "r"(i[1]))
ANNULUS_BOX(3, "%4,%5,%6", "r"(i[0]), "r"(i[1]), "r"(i[2]))
ANNULUS_BOX(4, "%4,%5,%6,%7", "r"(i[0]), "r"(i[1]), "r"(i[2]), "r"(i[3]))
ANNULUS_BOX(5, "%4,%5,%6,%7,%8", "r"(i[0]), "r"(i[1]), "r"(i[2]), "r"(i[3]), "r"(i[4]))
#undef ANNULUS_BOX

// A thread's stores so far become a group. What they read was written by threads that called
// fence_shared_writes() before a barrier.
__device__ __forceinline__ void commit_stores() {
  asm volatile("cp.async.bulk.commit_group;" ::: "memory");
}
// Until at most `Pending` of the thread's groups still read shared memory ...
template <int Pending>
__device__ __forceinline__ void wait_stores_read() {
  asm volatile("cp.async.bulk.wait_group.read %0;" ::"n"(Pending) : "memory");
}
// ... or have not been written yet.
template <int Pending>
__device__ __forceinline__ void wait_stores() {
  asm volatile("cp.async.bulk.wait_group %0;" ::"n"(Pending) : "memory");
}

#endif

}  // namespace annulus::cuda
