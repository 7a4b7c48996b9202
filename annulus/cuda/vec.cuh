// Vectors of N elements in registers, loaded and stored in one access of up to 16 bytes.
#pragma once

#include <cstdint>
#include <type_traits>

#include "annulus/core/dtype.h"

namespace annulus::cuda {

// 16-bit numbers stay packed two to a register until they are used: as an array of 16-bit members
// the compiler gives each a register of its own, and four vectors in flight spill.
template <class T, int N>
inline constexpr bool kPaired = sizeof(T) == 2 && N % 2 == 0;

template <class T, int N>
struct alignas(sizeof(T) * N) Vec {
  using Word = std::conditional_t<kPaired<T, N>, std::uint32_t, T>;
  Word word[sizeof(T) * N / sizeof(Word)];
};

// Columns a thread takes with one 16-byte access.
template <class T>
inline constexpr int kVectorWidth = 16 / static_cast<int>(sizeof(T));

template <class T, int N, class Real>
__device__ __forceinline__ void unpack(const Vec<T, N>& raw, Real (&out)[N]) {
  if constexpr (kPaired<T, N>) {
#pragma unroll
    for (int i = 0; i < N / 2; ++i) {
      const std::uint32_t w = raw.word[i];
      if constexpr (std::is_same_v<T, bfloat16>) {
        out[2 * i] = __uint_as_float(w << 16);
        out[2 * i + 1] = __uint_as_float(w & 0xffff0000u);
      } else {
        const float2 two = __half22float2(*reinterpret_cast<const __half2*>(&w));
        out[2 * i] = two.x;
        out[2 * i + 1] = two.y;
      }
    }
  } else {
#pragma unroll
    for (int i = 0; i < N; ++i) out[i] = static_cast<Real>(raw.word[i]);
  }
}

// N numbers rounded to T; a pair of 16-bit ones by a single instruction.
template <class T, int N, class Real>
__device__ __forceinline__ Vec<T, N> pack(const Real (&in)[N]) {
  Vec<T, N> raw;
  if constexpr (kPaired<T, N>) {
#pragma unroll
    for (int i = 0; i < N / 2; ++i) {
      if constexpr (std::is_same_v<T, bfloat16>) {
        const __nv_bfloat162 two = __floats2bfloat162_rn(in[2 * i], in[2 * i + 1]);
        raw.word[i] = *reinterpret_cast<const std::uint32_t*>(&two);
      } else {
        const __half2 two = __floats2half2_rn(in[2 * i], in[2 * i + 1]);
        raw.word[i] = *reinterpret_cast<const std::uint32_t*>(&two);
      }
    }
  } else {
#pragma unroll
    for (int i = 0; i < N; ++i) raw.word[i] = T(in[i]);
  }
  return raw;
}

template <int N, class T>
__device__ __forceinline__ Vec<T, N> fetch(const T* p) {
  return *reinterpret_cast<const Vec<T, N>*>(p);
}

template <int N, class T, class Real>
__device__ __forceinline__ void load(const T* p, Real (&out)[N]) {
  unpack(fetch<N>(p), out);
}

template <int N, class T, class Real>
__device__ __forceinline__ void store(const Real (&in)[N], T* p) {
  *reinterpret_cast<Vec<T, N>*>(p) = pack<T>(in);
}

}  // namespace annulus::cuda
