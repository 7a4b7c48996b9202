// Element types. bfloat16 and float16 are 16-bit storage types: they convert to float and back
// (round to nearest, ties to even, NaN stays NaN) and do no arithmetic of their own.
#pragma once

#include <bit>
#include <cstddef>
#include <cstdint>
#include <type_traits>

#include "annulus/core/macros.h"

#if defined(__CUDACC__)
#include <cuda_bf16.h>
#include <cuda_fp16.h>
#endif

namespace annulus {

enum class DType : std::uint8_t { kF64, kF32, kF16, kBF16, kI32, kI64, kBool };

struct DTypeFacts {
  const char* name;
  std::int64_t size;
};
inline constexpr DTypeFacts kDTypes[] = {{"f64", 8}, {"f32", 4}, {"f16", 2}, {"bf16", 2},
                                         {"i32", 4}, {"i64", 8}, {"bool", 1}};
// "unknown" and 0 for a value that is none of them.
constexpr DTypeFacts facts_of(DType t) {
  return t <= DType::kBool ? kDTypes[static_cast<std::size_t>(t)] : DTypeFacts{"unknown", 0};
}
constexpr std::int64_t size_of(DType t) { return facts_of(t).size; }
constexpr const char* name_of(DType t) { return facts_of(t).name; }

constexpr bool is_floating(DType t) { return t <= DType::kBF16; }

struct bfloat16 {
  std::uint16_t bits;

  bfloat16() = default;
  ANNULUS_HD explicit bfloat16(float f) {
#if defined(__CUDA_ARCH__)
    bits = __bfloat16_as_ushort(__float2bfloat16_rn(f));
#else
    const std::uint32_t u = std::bit_cast<std::uint32_t>(f);
    if ((u & 0x7fffffffu) > 0x7f800000u) {
      bits = static_cast<std::uint16_t>((u >> 16) | 0x0040u);  // quiet the NaN, keep its sign
    } else {
      bits = static_cast<std::uint16_t>((u + 0x7fffu + ((u >> 16) & 1u)) >> 16);
    }
#endif
  }
  ANNULUS_HD explicit operator float() const {
#if defined(__CUDA_ARCH__)
    return __uint_as_float(static_cast<unsigned>(bits) << 16);
#else
    return std::bit_cast<float>(static_cast<std::uint32_t>(bits) << 16);
#endif
  }
};

struct float16 {
  std::uint16_t bits;

  float16() = default;
  ANNULUS_HD explicit float16(float f) {
#if defined(__CUDA_ARCH__)
    bits = __half_as_ushort(__float2half_rn(f));
#else
    bits = from_float(f);
#endif
  }
  ANNULUS_HD explicit operator float() const {
#if defined(__CUDA_ARCH__)
    return __half2float(__ushort_as_half(bits));
#else
    return to_float(bits);
#endif
  }

 private:
  static std::uint16_t from_float(float f) {
    const std::uint32_t u = std::bit_cast<std::uint32_t>(f);
    const std::uint32_t sign = (u >> 16) & 0x8000u;
    const std::uint32_t mag = u & 0x7fffffffu;
    if (mag > 0x7f800000u) return static_cast<std::uint16_t>(sign | 0x7e00u);   // NaN
    if (mag >= 0x47800000u) return static_cast<std::uint16_t>(sign | 0x7c00u);  // >= 65536: inf
    if (mag < 0x38800000u) {
      // Subnormal in f16: adding 0.5 puts the value at the bottom of the float's mantissa with the
      // hardware's own round-to-nearest-even (the unit in the last place of 0.5f is 2^-24).
      const float shifted = std::bit_cast<float>(mag) + 0.5f;
      return static_cast<std::uint16_t>(sign |
                                        (std::bit_cast<std::uint32_t>(shifted) - 0x3f000000u));
    }
    const std::uint32_t rounded = mag + 0xfffu + ((mag >> 13) & 1u);
    return static_cast<std::uint16_t>(sign | ((rounded - 0x38000000u) >> 13));
  }
  static float to_float(std::uint16_t h) {
    const std::uint32_t sign = static_cast<std::uint32_t>(h & 0x8000u) << 16;
    const std::uint32_t exponent = (h >> 10) & 0x1fu;
    const std::uint32_t mantissa = h & 0x3ffu;
    if (exponent == 0x1f) return std::bit_cast<float>(sign | 0x7f800000u | (mantissa << 13));
    if (exponent == 0) {
      const float v = static_cast<float>(mantissa) * 0x1p-24f;
      return std::bit_cast<float>(sign | std::bit_cast<std::uint32_t>(v));
    }
    return std::bit_cast<float>(sign | ((exponent + 112u) << 23) | (mantissa << 13));
  }
};

namespace detail {
template <class T, class... Types>
consteval DType dtype_among() {
  static_assert((std::is_same_v<T, Types> || ...),
                "elements are double, float, annulus::float16, annulus::bfloat16, std::int32_t, "
                "std::int64_t or bool");
  int place = 0;
  static_cast<void>(((std::is_same_v<T, Types> || (++place, false)) || ...));
  return static_cast<DType>(place);
}
}  // namespace detail

template <class T>  // in the order of DType
inline constexpr DType dtype_of =
    detail::dtype_among<T, double, float, float16, bfloat16, std::int32_t, std::int64_t, bool>();

// The type arithmetic is done in: double for double, float for everything narrower.
template <class T>
using compute_t = std::conditional_t<std::is_same_v<T, double>, double, float>;

}  // namespace annulus
