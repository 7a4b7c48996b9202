// What compute capability 9.0 adds and the kernels here use, besides barriers that count arriving bytes
// (shared_barrier.cuh): bulk copies that need one thread, and products of a warpgroup (wgmma) whose right
// operand lies in shared memory. Device code of this header exists only when compiling for sm_90a.
#pragma once

#include <cstdint>

#include "annulus/cuda/shared_barrier.cuh"

namespace annulus::cuda {

#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
#define ANNULUS_DEVICE_HOPPER 1
#else
#define ANNULUS_DEVICE_HOPPER 0
#endif

#if ANNULUS_DEVICE_HOPPER

// A number that all lanes of a warp have, said in a way the compiler understands: what is made of it
// then stays in uniform registers, where wgmma wants its descriptors, instead of being sent there by
// two instructions for each. It helps only where the compiler knows that warps stay together: a loop
// that it thinks lanes might leave one by one, anywhere before, undoes it.
__device__ __forceinline__ std::uint32_t uniform(std::uint32_t v) {
  return __reduce_or_sync(~0u, v);
}
__device__ __forceinline__ int uniform(int v) {
  return static_cast<int>(uniform(static_cast<std::uint32_t>(v)));
}

// Multiples of 16 bytes, aligned to 16; the barrier's phase ends when they have arrived.
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

// To L2, for what will be read later; multiples of 16 bytes, aligned to 16.
__device__ __forceinline__ void prefetch_bulk(const void* global, unsigned bytes) {
  asm volatile("cp.async.bulk.prefetch.L2.global [%0], %1;" ::"l"(global), "r"(bytes));
}

// A group of four warps leaves registers to the block's others, or takes what was left.
template <int Registers>
__device__ __forceinline__ void give_registers() {
  asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(Registers));
}
template <int Registers>
__device__ __forceinline__ void take_registers() {
  asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(Registers));
}

// Some of a block's warps wait for each other; barrier 0 is __syncthreads.
__device__ __forceinline__ void sync_threads(int barrier, int threads) {
  asm volatile("bar.sync %0, %1;" ::"r"(barrier), "r"(threads) : "memory");
}

// The right operand of wgmma: 64 columns n of 64 rows k, bf16, in 128-byte rows of one column each,
// whose 16-byte pieces are swapped by the row's number modulo 8 (the 128-byte swizzle):
// element (k, n) at byte 128 n + 16 ((k / 8) xor (n mod 8)) + 2 (k mod 8). Aligned to 1024 bytes.
// wgmma finds it by a descriptor: its low word here, one for the whole operand, ...
__device__ __forceinline__ std::uint32_t swizzled_operand_low(const void* shared) {
  return ((shared_address(shared) >> 4) & 0x3fff) | (1u << 16);
}
// ... and the whole of it for rows k 16 step ...
__device__ __forceinline__ std::uint64_t swizzled_operand(std::uint32_t low, int step) {
  constexpr std::uint64_t kGroupStride = 1024 >> 4;  // eight columns
  constexpr std::uint64_t kSwizzle128 = 1;
  return (low + static_cast<std::uint32_t>(step) * 2) | (kGroupStride << 32) | (kSwizzle128 << 62);
}

// Before the first wgmma that uses registers written otherwise.
__device__ __forceinline__ void wgmma_fence() {
  asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
}
__device__ __forceinline__ void wgmma_commit() {
  asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
}
template <int Pending>
__device__ __forceinline__ void wgmma_wait() {
  asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(Pending) : "memory");
}

// d (64 x 64) = or += a (64 x 16) b (16 x 64). A warp of the four holds 16 rows: a as mma.cuh says,
// d[4 n + i] as mma.cuh says of d_i in columns 8 n ...
__device__ __forceinline__ void wgmma_64x64(float (&d)[32], const uint4& a, std::uint64_t b,
                                            bool add) {
  asm volatile(
      "{.reg .pred p; setp.ne.b32 p, %37, 0;"
      "wgmma.mma_async.sync.aligned.m64n64k16.f32.bf16.bf16 "
      "{%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11,%12,%13,%14,%15,"
      "%16,%17,%18,%19,%20,%21,%22,%23,%24,%25,%26,%27,%28,%29,%30,%31}, "
      "{%32,%33,%34,%35}, %36, p, 1, 1, 0;}"
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3]), "+f"(d[4]), "+f"(d[5]), "+f"(d[6]),
        "+f"(d[7]), "+f"(d[8]), "+f"(d[9]), "+f"(d[10]), "+f"(d[11]), "+f"(d[12]), "+f"(d[13]),
        "+f"(d[14]), "+f"(d[15]), "+f"(d[16]), "+f"(d[17]), "+f"(d[18]), "+f"(d[19]), "+f"(d[20]),
        "+f"(d[21]), "+f"(d[22]), "+f"(d[23]), "+f"(d[24]), "+f"(d[25]), "+f"(d[26]), "+f"(d[27]),
        "+f"(d[28]), "+f"(d[29]), "+f"(d[30]), "+f"(d[31])
      : "r"(a.x), "r"(a.y), "r"(a.z), "r"(a.w), "l"(b), "r"(static_cast<int>(add)));
}

// The same with a in shared memory, rows like the columns of b.
__device__ __forceinline__ void wgmma_64x64(float (&d)[32], std::uint64_t a, std::uint64_t b,
                                            bool add) {
  asm volatile(
      "{.reg .pred p; setp.ne.b32 p, %34, 0;"
      "wgmma.mma_async.sync.aligned.m64n64k16.f32.bf16.bf16 "
      "{%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11,%12,%13,%14,%15,"
      "%16,%17,%18,%19,%20,%21,%22,%23,%24,%25,%26,%27,%28,%29,%30,%31}, "
      "%32, %33, p, 1, 1, 0, 0;}"
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3]), "+f"(d[4]), "+f"(d[5]), "+f"(d[6]),
        "+f"(d[7]), "+f"(d[8]), "+f"(d[9]), "+f"(d[10]), "+f"(d[11]), "+f"(d[12]), "+f"(d[13]),
        "+f"(d[14]), "+f"(d[15]), "+f"(d[16]), "+f"(d[17]), "+f"(d[18]), "+f"(d[19]), "+f"(d[20]),
        "+f"(d[21]), "+f"(d[22]), "+f"(d[23]), "+f"(d[24]), "+f"(d[25]), "+f"(d[26]), "+f"(d[27]),
        "+f"(d[28]), "+f"(d[29]), "+f"(d[30]), "+f"(d[31])
      : "l"(a), "l"(b), "r"(static_cast<int>(add)));
}

// The right operand the other way round: rows of 128 bytes are 64 neighbouring columns n of one k,
// 16-byte pieces swapped by k modulo 8: element (k, n) at byte block_stride (n / 64) + 128 k +
// 16 ((n / 8 mod 8) xor (k mod 8)) + 2 (n mod 8). Aligned to 1024 bytes. The low word, ...
__device__ __forceinline__ std::uint32_t row_operand_low(const void* shared,
                                                         std::uint32_t block_stride) {
  return ((shared_address(shared) >> 4) & 0x3fff) | ((block_stride >> 4) << 16);
}
// ... and the whole of it for rows k 16 step ...
__device__ __forceinline__ std::uint64_t row_operand(std::uint32_t low, int step) {
  constexpr std::uint64_t kGroupStride = 1024 >> 4;  // eight rows
  constexpr std::uint64_t kSwizzle128 = 1;
  return (low + static_cast<std::uint32_t>(step) * (2048 >> 4)) | (kGroupStride << 32) |
         (kSwizzle128 << 62);
}

// d (64 x 128) = or += a (64 x 16) b (16 x 128), a and d as of wgmma_64x64; b a row_operand.
__device__ __forceinline__ void wgmma_64x128(float (&d)[64], const uint4& a, std::uint64_t b,
                                             bool add) {
  asm volatile(
      "{.reg .pred p; setp.ne.b32 p, %69, 0;"
      "wgmma.mma_async.sync.aligned.m64n128k16.f32.bf16.bf16 "
      "{%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11,%12,%13,%14,%15,"
      "%16,%17,%18,%19,%20,%21,%22,%23,%24,%25,%26,%27,%28,%29,%30,%31,"
      "%32,%33,%34,%35,%36,%37,%38,%39,%40,%41,%42,%43,%44,%45,%46,%47,"
      "%48,%49,%50,%51,%52,%53,%54,%55,%56,%57,%58,%59,%60,%61,%62,%63}, "
      "{%64,%65,%66,%67}, %68, p, 1, 1, 1;}"
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3]), "+f"(d[4]), "+f"(d[5]), "+f"(d[6]),
        "+f"(d[7]), "+f"(d[8]), "+f"(d[9]), "+f"(d[10]), "+f"(d[11]), "+f"(d[12]), "+f"(d[13]),
        "+f"(d[14]), "+f"(d[15]), "+f"(d[16]), "+f"(d[17]), "+f"(d[18]), "+f"(d[19]), "+f"(d[20]),
        "+f"(d[21]), "+f"(d[22]), "+f"(d[23]), "+f"(d[24]), "+f"(d[25]), "+f"(d[26]), "+f"(d[27]),
        "+f"(d[28]), "+f"(d[29]), "+f"(d[30]), "+f"(d[31]), "+f"(d[32]), "+f"(d[33]), "+f"(d[34]),
        "+f"(d[35]), "+f"(d[36]), "+f"(d[37]), "+f"(d[38]), "+f"(d[39]), "+f"(d[40]), "+f"(d[41]),
        "+f"(d[42]), "+f"(d[43]), "+f"(d[44]), "+f"(d[45]), "+f"(d[46]), "+f"(d[47]), "+f"(d[48]),
        "+f"(d[49]), "+f"(d[50]), "+f"(d[51]), "+f"(d[52]), "+f"(d[53]), "+f"(d[54]), "+f"(d[55]),
        "+f"(d[56]), "+f"(d[57]), "+f"(d[58]), "+f"(d[59]), "+f"(d[60]), "+f"(d[61]), "+f"(d[62]),
        "+f"(d[63])
      : "r"(a.x), "r"(a.y), "r"(a.z), "r"(a.w), "l"(b), "r"(static_cast<int>(add)));
}

#endif  // ANNULUS_DEVICE_HOPPER

}  // namespace annulus::cuda
