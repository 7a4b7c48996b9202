// Rows of a tensor of any floating type: vectors of N elements in registers, loaded and stored in
// one access of up to 16 bytes, or number by number where a row is strided, not aligned or too
// short for that; single numbers whose type is known at run time; prefetches.
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

// ---- Rows that may be strided, not aligned, or end early: `count` of the N numbers exist.

// Can they be one access?
template <int N, class T>
__device__ __forceinline__ bool in_one_access(const T* p, std::int64_t stride, int count) {
  return N > 1 && count == N && stride == 1 &&
         reinterpret_cast<std::uintptr_t>(p) % (N * sizeof(T)) == 0;
}
// `whole`: the row is dense and aligned, and N numbers of it exist or none. What is beyond is 0.
template <int N, class T, class Real>
__device__ __forceinline__ void load_row(const T* from, std::int64_t stride, std::int64_t count,
                                         bool whole, Real (&out)[N]) {
  if (whole && count > 0) return load<N>(from, out);
#pragma unroll
  for (int i = 0; i < N; ++i) out[i] = i < count ? static_cast<Real>(from[i * stride]) : Real(0);
}
template <int N, class T, class Real>
__device__ __forceinline__ void load_row(const T* from, std::int64_t stride, int count,
                                         Real (&out)[N]) {
  load_row(from, stride, count, in_one_access<N>(from, stride, count), out);
}
template <int N, class T, class Real>
__device__ __forceinline__ void store_row(T* to, std::int64_t stride, int count,
                                          const Real (&in)[N]) {
  if (in_one_access<N>(to, stride, count)) return store<N>(in, to);
#pragma unroll
  for (int i = 0; i < N; ++i) {
    if (i < count) to[i * stride] = T(in[i]);
  }
}

// The same where the layout is known when compiling, kWhole as above, and kept as it lies in memory
// until it is used. What is beyond is `filler`.
template <int N, bool kWhole, class T, class Real>
__device__ __forceinline__ Vec<T, N> fetch_row(const T* from, std::int64_t stride, int count,
                                               Real filler) {
  if constexpr (kWhole) {
    if (count > 0) return fetch<N>(from);
  }
  Real value[N];
#pragma unroll
  for (int i = 0; i < N; ++i) {
    value[i] = !kWhole && i < count ? static_cast<Real>(from[i * stride]) : filler;
  }
  return pack<T>(value);
}
template <int N, bool kWhole, class T, class Real>
__device__ __forceinline__ void put_row(const Real (&in)[N], T* to, std::int64_t stride,
                                        int count) {
  if constexpr (kWhole) {
    if (count > 0) store<N>(in, to);
  } else {
#pragma unroll
    for (int i = 0; i < N; ++i) {
      if (i < count) to[i * stride] = T(in[i]);
    }
  }
}

// The first numbers of a row, to L2; rows that are no neighbours in memory are left where they are.
template <class T>
__device__ __forceinline__ void prefetch_row(const T* from, std::int64_t stride) {
  if (stride == 1) asm volatile("prefetch.global.L2 [%0];" ::"l"(from));
}

// ---- A type that is known at run time only

// f.operator()<T>() for the types that are computed with in f32: f64 never comes here.
template <class F>
__device__ __forceinline__ void visit_narrow(DType dtype, F&& f) {
  switch (dtype) {
    case DType::kF16:
      f.template operator()<float16>();
      break;
    case DType::kBF16:
      f.template operator()<bfloat16>();
      break;
    default:
      f.template operator()<float>();
  }
}

template <class Real>
__device__ __forceinline__ Real load_number(DType dtype, const void* data, std::int64_t at) {
  switch (dtype) {
    case DType::kF64:
      return static_cast<Real>(static_cast<const double*>(data)[at]);
    case DType::kF32:
      return static_cast<Real>(static_cast<const float*>(data)[at]);
    case DType::kF16:
      return static_cast<Real>(static_cast<float>(static_cast<const float16*>(data)[at]));
    default:
      return static_cast<Real>(static_cast<float>(static_cast<const bfloat16*>(data)[at]));
  }
}

// A number of a narrow type that has been asked for but not waited for, and what it is.
__device__ __forceinline__ std::uint32_t load_bits(const void* data, std::int64_t at, bool is_f32) {
  return is_f32 ? static_cast<const std::uint32_t*>(data)[at]
                : static_cast<const std::uint16_t*>(data)[at];
}
__device__ __forceinline__ float number_of(DType dtype, std::uint32_t bits) {
  if (dtype == DType::kF16) {
    return __half2float(__ushort_as_half(static_cast<unsigned short>(bits)));
  }
  return __uint_as_float(dtype == DType::kBF16 ? bits << 16 : bits);
}

}  // namespace annulus::cuda
