// Vectors of N elements in registers, loaded and stored in one access of up to 16 bytes.
#pragma once

#include <cstdint>

#include "annulus/core/dtype.h"

namespace annulus::cuda {

template <class T, int N>
struct alignas(sizeof(T) * N) Vec {
  T v[N];
};

// Columns a thread takes with one 16-byte access.
template <class T>
inline constexpr int kVectorWidth = 16 / static_cast<int>(sizeof(T));

template <int N, class T, class Real>
__device__ __forceinline__ void load(const T* p, Real (&out)[N]) {
  const Vec<T, N> raw = *reinterpret_cast<const Vec<T, N>*>(p);
#pragma unroll
  for (int i = 0; i < N; ++i) out[i] = static_cast<Real>(raw.v[i]);
}

template <int N, class T, class Real>
__device__ __forceinline__ void store(const Real (&in)[N], T* p) {
  Vec<T, N> raw;
#pragma unroll
  for (int i = 0; i < N; ++i) raw.v[i] = T(in[i]);
  *reinterpret_cast<Vec<T, N>*>(p) = raw;
}

}  // namespace annulus::cuda
