// Products of a warpgroup, four neighbouring warps (compute capability 9.0): d = or += a b with d
// of 64 x N in f32, a of 64 x 16 and b of 16 x N in bf16 or f16, for every N the hardware has: 8,
// 16, ..., 256.
//
// They run beside the warps that ask for them: wgmma_fence() before the first that reads registers
// written otherwise, wgmma_commit() after the last of a group, and nothing of their operands,
// registers included, is touched before wgmma_wait() says that the group is done.
//
// a is in registers or in shared memory, b in shared memory, each K-major or MN-major there:
//   K-major    rows of W bytes are W / 2 neighbouring k of one m (or n); eight rows are 8 W bytes on
//   MN-major   rows of W bytes are W / 2 neighbouring m (or n) of one k; eight k are 8 W bytes on, and the
//              next W / 2 of m (or n) are a block stride of the caller's choice on
// in either case swizzled: pieces of 16 bytes are swapped within W bytes by swizzled_byte(), so
// that neither the tensor cores nor whoever writes meets bank conflicts, and as the copy engine
// leaves them (tma.cuh). W is 128, 64 or 32; operands begin at multiples of 8 W bytes.
#pragma once

#include <concepts>
#include <cstdint>

#include "annulus/core/dtype.h"
#include "annulus/cuda/mma.cuh"

namespace annulus::cuda {

// Device code for compute capability 9.0 exactly: wgmma, and what goes with it.
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
#define ANNULUS_DEVICE_HOPPER 1
#else
#define ANNULUS_DEVICE_HOPPER 0
#endif

enum class Major { kK = 0, kMN = 1 };  // the instruction's own codes

// Where the byte that would lie at `byte` of an operand without swizzle lies, W bytes wide.
ANNULUS_HD constexpr std::uint32_t swizzled_byte(int W, std::uint32_t byte) {
  return byte ^ (((byte >> 7) & static_cast<std::uint32_t>(W / 16 - 1)) << 4);
}

#if ANNULUS_DEVICE_HOPPER

// wgmma finds an operand by a descriptor of 64 bits. Its low word, which is all that differs
// between operands of one layout, is made once and kept in a uniform register; the high word is a
// constant.
namespace detail {
template <int W>
__device__ __forceinline__ std::uint64_t descriptor(std::uint32_t low) {
  constexpr std::uint64_t kGroupStride = 8 * W >> 4;  // of eight rows
  constexpr std::uint64_t kSwizzle = W == 128 ? 1 : W == 64 ? 2 : 3;
  return low | (kGroupStride << 32) | (kSwizzle << 62);
}
}  // namespace detail

__device__ __forceinline__ std::uint32_t k_major_low(const void* shared) {
  return ((shared_address(shared) >> 4) & 0x3fff) | (1u << 16);
}
// Of k 16 step to 16 step + 15, which lie in one row: step < W / 32.
template <int W = 128>
__device__ __forceinline__ std::uint64_t k_major(std::uint32_t low, int step) {
  return detail::descriptor<W>(low + static_cast<std::uint32_t>(step) * 2);
}

__device__ __forceinline__ std::uint32_t mn_major_low(const void* shared,
                                                      std::uint32_t block_stride) {
  return ((shared_address(shared) >> 4) & 0x3fff) | ((block_stride >> 4) << 16);
}
// Of k 16 step to 16 step + 15.
template <int W = 128>
__device__ __forceinline__ std::uint64_t mn_major(std::uint32_t low, int step) {
  return detail::descriptor<W>(low + static_cast<std::uint32_t>(step) * (16 * W >> 4));
}

__device__ __forceinline__ void wgmma_fence() {
  asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
}
__device__ __forceinline__ void wgmma_commit() {
  asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
}
// Until at most `Pending` of the committed groups are still on their way.
template <int Pending>
__device__ __forceinline__ void wgmma_wait() {
  asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(Pending) : "memory");
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

// wgmma<T, Major of b>(d, a, b, add): d += a b, or d = a b, with a in registers. T is bfloat16 or
// float16, and N is twice the number of accumulators of a thread. A warp of the four holds 16 rows:
// a as mma.cuh says, d[4 n + i] as mma.cuh says of d_i, in columns 8 n ... wgmma<T, Major of b,
// Major of a>(d, a, b, add): the same with a descriptor of a.
//
// The instruction names every accumulator, so there is one function for each N. The preprocessor
// writes the lists, four accumulators at a time: F of each four with S() in between.
#define ANNULUS_QUADS_4(F, S) F(0, 1, 2, 3)
#define ANNULUS_QUADS_8(F, S) ANNULUS_QUADS_4(F, S) S() F(4, 5, 6, 7)
#define ANNULUS_QUADS_12(F, S) ANNULUS_QUADS_8(F, S) S() F(8, 9, 10, 11)
#define ANNULUS_QUADS_16(F, S) ANNULUS_QUADS_12(F, S) S() F(12, 13, 14, 15)
#define ANNULUS_QUADS_20(F, S) ANNULUS_QUADS_16(F, S) S() F(16, 17, 18, 19)
#define ANNULUS_QUADS_24(F, S) ANNULUS_QUADS_20(F, S) S() F(20, 21, 22, 23)
#define ANNULUS_QUADS_28(F, S) ANNULUS_QUADS_24(F, S) S() F(24, 25, 26, 27)
#define ANNULUS_QUADS_32(F, S) ANNULUS_QUADS_28(F, S) S() F(28, 29, 30, 31)
#define ANNULUS_QUADS_36(F, S) ANNULUS_QUADS_32(F, S) S() F(32, 33, 34, 35)
#define ANNULUS_QUADS_40(F, S) ANNULUS_QUADS_36(F, S) S() F(36, 37, 38, 39)
#define ANNULUS_QUADS_44(F, S) ANNULUS_QUADS_40(F, S) S() F(40, 41, 42, 43)
#define ANNULUS_QUADS_48(F, S) ANNULUS_QUADS_44(F, S) S() F(44, 45, 46, 47)
#define ANNULUS_QUADS_52(F, S) ANNULUS_QUADS_48(F, S) S() F(48, 49, 50, 51)
#define ANNULUS_QUADS_56(F, S) ANNULUS_QUADS_52(F, S) S() F(52, 53, 54, 55)
#define ANNULUS_QUADS_60(F, S) ANNULUS_QUADS_56(F, S) S() F(56, 57, 58, 59)
#define ANNULUS_QUADS_64(F, S) ANNULUS_QUADS_60(F, S) S() F(60, 61, 62, 63)
#define ANNULUS_QUADS_68(F, S) ANNULUS_QUADS_64(F, S) S() F(64, 65, 66, 67)
#define ANNULUS_QUADS_72(F, S) ANNULUS_QUADS_68(F, S) S() F(68, 69, 70, 71)
#define ANNULUS_QUADS_76(F, S) ANNULUS_QUADS_72(F, S) S() F(72, 73, 74, 75)
#define ANNULUS_QUADS_80(F, S) ANNULUS_QUADS_76(F, S) S() F(76, 77, 78, 79)
#define ANNULUS_QUADS_84(F, S) ANNULUS_QUADS_80(F, S) S() F(80, 81, 82, 83)
#define ANNULUS_QUADS_88(F, S) ANNULUS_QUADS_84(F, S) S() F(84, 85, 86, 87)
#define ANNULUS_QUADS_92(F, S) ANNULUS_QUADS_88(F, S) S() F(88, 89, 90, 91)
#define ANNULUS_QUADS_96(F, S) ANNULUS_QUADS_92(F, S) S() F(92, 93, 94, 95)
#define ANNULUS_QUADS_100(F, S) ANNULUS_QUADS_96(F, S) S() F(96, 97, 98, 99)
#define ANNULUS_QUADS_104(F, S) ANNULUS_QUADS_100(F, S) S() F(100, 101, 102, 103)
#define ANNULUS_QUADS_108(F, S) ANNULUS_QUADS_104(F, S) S() F(104, 105, 106, 107)
#define ANNULUS_QUADS_112(F, S) ANNULUS_QUADS_108(F, S) S() F(108, 109, 110, 111)
#define ANNULUS_QUADS_116(F, S) ANNULUS_QUADS_112(F, S) S() F(112, 113, 114, 115)
#define ANNULUS_QUADS_120(F, S) ANNULUS_QUADS_116(F, S) S() F(116, 117, 118, 119)
#define ANNULUS_QUADS_124(F, S) ANNULUS_QUADS_120(F, S) S() F(120, 121, 122, 123)
#define ANNULUS_QUADS_128(F, S) ANNULUS_QUADS_124(F, S) S() F(124, 125, 126, 127)
#define ANNULUS_NAMES(a, b, c, d) "%" #a ",%" #b ",%" #c ",%" #d
#define ANNULUS_NAMES_COMMA() ","
#define ANNULUS_ACCUMULATORS(a, b, c, e) "+f"(d[a]), "+f"(d[b]), "+f"(d[c]), "+f"(d[e])
#define ANNULUS_ACCUMULATORS_COMMA() ,
#define ANNULUS_WGMMA_TEXT(type, N, R, add, operands)                            \
  "{.reg .pred p; setp.ne.b32 p, %" #add                                         \
  ", 0; "                                                                        \
  "wgmma.mma_async.sync.aligned.m64n" #N "k16.f32." type "." type                \
  " {" ANNULUS_QUADS_##R(ANNULUS_NAMES, ANNULUS_NAMES_COMMA) "}, " operands ";}" \
      : ANNULUS_QUADS_##R(ANNULUS_ACCUMULATORS, ANNULUS_ACCUMULATORS_COMMA)
#define ANNULUS_WGMMA_OF(Type, type, N, R, r1, r2, r3, r4, r5, r6)                                 \
  template <std::same_as<Type> T, Major kB = Major::kK>                                            \
  __device__ __forceinline__ void wgmma(float(&d)[R], const uint4& a, std::uint64_t b, bool add) { \
    asm volatile(                                                                                  \
        ANNULUS_WGMMA_TEXT(type, N, R, r5,                                                         \
                           "{%" #R ",%" #r1 ",%" #r2 ",%" #r3 "}, %" #r4 ", p, 1, 1, %" #r6)       \
        : "r"(a.x), "r"(a.y), "r"(a.z), "r"(a.w), "l"(b), "r"(static_cast<int>(add)),              \
          "n"(static_cast<int>(kB)));                                                              \
  }                                                                                                \
  template <std::same_as<Type> T, Major kB = Major::kK, Major kA = Major::kK>                      \
  __device__ __forceinline__ void wgmma(float(&d)[R], std::uint64_t a, std::uint64_t b,            \
                                        bool add) {                                                \
    asm volatile(ANNULUS_WGMMA_TEXT(type, N, R, r2, "%" #R ", %" #r1 ", p, 1, 1, %" #r3 ", %" #r4) \
                 : "l"(a), "l"(b), "r"(static_cast<int>(add)), "n"(static_cast<int>(kA)),          \
                   "n"(static_cast<int>(kB)));                                                     \
  }
// N, and seven numbers from R = N / 2, the number of accumulators, on.
#define ANNULUS_WGMMA(...)                        \
  ANNULUS_WGMMA_OF(bfloat16, "bf16", __VA_ARGS__) \
  ANNULUS_WGMMA_OF(float16, "f16", __VA_ARGS__)
ANNULUS_WGMMA(8, 4, 5, 6, 7, 8, 9, 10)
ANNULUS_WGMMA(16, 8, 9, 10, 11, 12, 13, 14)
ANNULUS_WGMMA(24, 12, 13, 14, 15, 16, 17, 18)
ANNULUS_WGMMA(32, 16, 17, 18, 19, 20, 21, 22)
ANNULUS_WGMMA(40, 20, 21, 22, 23, 24, 25, 26)
ANNULUS_WGMMA(48, 24, 25, 26, 27, 28, 29, 30)
ANNULUS_WGMMA(56, 28, 29, 30, 31, 32, 33, 34)
ANNULUS_WGMMA(64, 32, 33, 34, 35, 36, 37, 38)
ANNULUS_WGMMA(72, 36, 37, 38, 39, 40, 41, 42)
ANNULUS_WGMMA(80, 40, 41, 42, 43, 44, 45, 46)
ANNULUS_WGMMA(88, 44, 45, 46, 47, 48, 49, 50)
ANNULUS_WGMMA(96, 48, 49, 50, 51, 52, 53, 54)
ANNULUS_WGMMA(104, 52, 53, 54, 55, 56, 57, 58)
ANNULUS_WGMMA(112, 56, 57, 58, 59, 60, 61, 62)
ANNULUS_WGMMA(120, 60, 61, 62, 63, 64, 65, 66)
ANNULUS_WGMMA(128, 64, 65, 66, 67, 68, 69, 70)
ANNULUS_WGMMA(136, 68, 69, 70, 71, 72, 73, 74)
ANNULUS_WGMMA(144, 72, 73, 74, 75, 76, 77, 78)
ANNULUS_WGMMA(152, 76, 77, 78, 79, 80, 81, 82)
ANNULUS_WGMMA(160, 80, 81, 82, 83, 84, 85, 86)
ANNULUS_WGMMA(168, 84, 85, 86, 87, 88, 89, 90)
ANNULUS_WGMMA(176, 88, 89, 90, 91, 92, 93, 94)
ANNULUS_WGMMA(184, 92, 93, 94, 95, 96, 97, 98)
ANNULUS_WGMMA(192, 96, 97, 98, 99, 100, 101, 102)
ANNULUS_WGMMA(200, 100, 101, 102, 103, 104, 105, 106)
ANNULUS_WGMMA(208, 104, 105, 106, 107, 108, 109, 110)
ANNULUS_WGMMA(216, 108, 109, 110, 111, 112, 113, 114)
ANNULUS_WGMMA(224, 112, 113, 114, 115, 116, 117, 118)
ANNULUS_WGMMA(232, 116, 117, 118, 119, 120, 121, 122)
ANNULUS_WGMMA(240, 120, 121, 122, 123, 124, 125, 126)
ANNULUS_WGMMA(248, 124, 125, 126, 127, 128, 129, 130)
ANNULUS_WGMMA(256, 128, 129, 130, 131, 132, 133, 134)
#undef ANNULUS_WGMMA
#undef ANNULUS_WGMMA_OF
#undef ANNULUS_WGMMA_TEXT

#endif  // ANNULUS_DEVICE_HOPPER

}  // namespace annulus::cuda
