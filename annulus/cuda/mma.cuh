// Tensor-core products of 16-bit tiles and what feeds them: mma.sync, ldmatrix and cp.async, which
// every GPU since compute capability 8.0 has.
//
// Fragments of mma.m16n8k16, for lane l, g = l / 4, q = l % 4; a word holds two neighbours along k:
//   A (16 x 16)  a0 (row g, k 2q)  a1 (row g + 8, k 2q)  a2 (row g, k 2q + 8)  a3 (g + 8, 2q + 8)
//   B (16 x 8)   b0 (k 2q, column g)  b1 (k 2q + 8, column g)
//   D (16 x 8)   d0, d1 (row g, columns 2q, 2q + 1)  d2, d3 (row g + 8, the same)
#pragma once

#include <cuda_bf16.h>

#include <cstdint>
#include <type_traits>

#include "annulus/core/dtype.h"

namespace annulus::cuda {

// d += a b, of T: bfloat16 or float16.
template <class T>
__device__ __forceinline__ void mma(float (&d)[4], const uint4& a, std::uint32_t b0,
                                    std::uint32_t b1) {
  static_assert(std::is_same_v<T, bfloat16> || std::is_same_v<T, float16>);
  if constexpr (std::is_same_v<T, bfloat16>) {
    asm volatile(
        "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, "
        "{%8,%9}, {%0,%1,%2,%3};"
        : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
        : "r"(a.x), "r"(a.y), "r"(a.z), "r"(a.w), "r"(b0), "r"(b1));
  } else {
    asm volatile(
        "mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, "
        "{%8,%9}, {%0,%1,%2,%3};"
        : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
        : "r"(a.x), "r"(a.y), "r"(a.z), "r"(a.w), "r"(b0), "r"(b1));
  }
}
// d = a b
template <class T>
__device__ __forceinline__ void mma_first(float (&d)[4], const uint4& a, std::uint32_t b0,
                                          std::uint32_t b1) {
  if constexpr (std::is_same_v<T, bfloat16>) {
    asm volatile(
        "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, "
        "{%8,%9}, {%10,%10,%10,%10};"
        : "=f"(d[0]), "=f"(d[1]), "=f"(d[2]), "=f"(d[3])
        : "r"(a.x), "r"(a.y), "r"(a.z), "r"(a.w), "r"(b0), "r"(b1), "f"(0.0f));
  } else {
    d[0] = d[1] = d[2] = d[3] = 0;
    mma<T>(d, a, b0, b1);
  }
}

__device__ __forceinline__ std::uint32_t shared_address(const void* p) {
  return static_cast<std::uint32_t>(__cvta_generic_to_shared(p));
}

// Four 8 x 8 matrices stored with k as rows, handed out with k along the word: lane l gives the
// address of row l % 8 of matrix l / 8.
__device__ __forceinline__ uint4 ldmatrix_transposed(std::uint32_t row) {
  uint4 r;
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0,%1,%2,%3}, [%4];"
               : "=r"(r.x), "=r"(r.y), "=r"(r.z), "=r"(r.w)
               : "r"(row));
  return r;
}
__device__ __forceinline__ uint4 ldmatrix_transposed(const void* row) {
  return ldmatrix_transposed(shared_address(row));
}
// The same of matrices stored with k along the rows, which are handed out as they lie.
__device__ __forceinline__ uint4 ldmatrix(std::uint32_t row) {
  uint4 r;
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0,%1,%2,%3}, [%4];"
               : "=r"(r.x), "=r"(r.y), "=r"(r.z), "=r"(r.w)
               : "r"(row));
  return r;
}

// And back: lane l says where row l % 8 of matrix l / 8 lies (compute capability 9.0).
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
__device__ __forceinline__ void stmatrix(std::uint32_t row, const uint4& a) {
  asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1,%2,%3,%4};" ::"r"(row), "r"(a.x),
               "r"(a.y), "r"(a.z), "r"(a.w)
               : "memory");
}
#endif

// 16 bytes from global to shared memory without passing through registers.
__device__ __forceinline__ void copy_async_16(void* shared, const void* global) {
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(shared_address(shared)),
               "l"(global)
               : "memory");
}
// The same, or 16 bytes of zeros: then `global` is not read, and must be an address all the same.
__device__ __forceinline__ void copy_async_16_or_zeros(std::uint32_t shared, const void* global,
                                                       bool there) {
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(shared), "l"(global),
               "r"(there ? 16 : 0)
               : "memory");
}
__device__ __forceinline__ void copy_async_commit() {
  asm volatile("cp.async.commit_group;" ::: "memory");
}
// Waits until at most N of the committed groups are still on their way.
template <int N>
__device__ __forceinline__ void copy_async_wait() {
  asm volatile("cp.async.wait_group %0;" ::"n"(N) : "memory");
}
// All of the thread's, committed or not.
__device__ __forceinline__ void copy_async_wait_all() {
  asm volatile("cp.async.wait_all;" ::: "memory");
}

// A number as the sum of `Terms` bf16: each takes what the ones before left over. Of infinity and
// NaN nothing is left over (inf - inf would make a NaN of an infinity).
template <int Terms>
__device__ __forceinline__ void split_bf16(float v, __nv_bfloat16 (&term)[Terms]) {
#pragma unroll
  for (int i = 0; i < Terms; ++i) {
    term[i] = __float2bfloat16_rn(v);
    const float taken = __bfloat162float(term[i]);
    v = isfinite(taken) ? v - taken : 0.0f;
  }
}

__device__ __forceinline__ std::uint32_t pack_bf16(__nv_bfloat16 low, __nv_bfloat16 high) {
  return static_cast<std::uint32_t>(__bfloat16_as_ushort(low)) |
         (static_cast<std::uint32_t>(__bfloat16_as_ushort(high)) << 16);
}

// Two neighbours split alike: word i holds term i of both; both are rounded by one instruction. Of an
// infinity, and of what rounds to one, NaN is left over.
template <int Terms>
__device__ __forceinline__ void split_finite_pair(float low, float high,
                                                  std::uint32_t (&word)[Terms]) {
#pragma unroll
  for (int i = 0; i < Terms; ++i) {
    const __nv_bfloat162 rounded = __floats2bfloat162_rn(low, high);
    word[i] = reinterpret_cast<const std::uint32_t&>(rounded);
    low -= __uint_as_float(word[i] << 16);
    high -= __uint_as_float(word[i] & 0xffff0000u);
  }
}

// Bit for bit what split_bf16() makes of each. One instruction tests both for infinity: a term after
// the first is finite where the first is.
template <int Terms>
__device__ __forceinline__ void split_pair(float low, float high, std::uint32_t (&word)[Terms]) {
  split_finite_pair<Terms>(low, high, word);
  if constexpr (Terms > 1) {
    const std::uint32_t magnitudes = word[0] & 0x7fff7fffu, infinities = 0x7f807f80u;
    const unsigned finite = __hlt2_mask(reinterpret_cast<const __nv_bfloat162&>(magnitudes),
                                        reinterpret_cast<const __nv_bfloat162&>(infinities));
#pragma unroll
    for (int i = 1; i < Terms; ++i) word[i] &= finite;
  }
}

}  // namespace annulus::cuda
