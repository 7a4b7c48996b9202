// The preferred directions of a ring's neurons, and the angle and length of a population vector.
#pragma once

#include <cstdint>
#include <type_traits>

#include "annulus/ring_rnn/cuda/arguments.cuh"

namespace annulus::ring_rnn::cuda {

template <class Real>
struct Direction {
  Real cos, sin;
};

// cos and sin of 2 pi i / N, 0 <= i < N, in double until the end. The angle is brought into the
// first eighth of the circle in whole numbers, so that quarter turns are exact.
template <class Real>
__device__ __forceinline__ Direction<Real> direction(std::int64_t i, std::int64_t N) {
  const std::int64_t quarter = (8 * i + N) / (2 * N);
  double s;
  double c;
  sincospi(static_cast<double>(4 * i - quarter * N) / static_cast<double>(2 * N), &s, &c);
  switch (quarter & 3) {
    case 0:
      return {static_cast<Real>(c), static_cast<Real>(s)};
    case 1:
      return {static_cast<Real>(-s), static_cast<Real>(c)};
    case 2:
      return {static_cast<Real>(-c), static_cast<Real>(-s)};
    default:
      return {static_cast<Real>(s), static_cast<Real>(-c)};
  }
}

// A vector of length 0 has angle 0.
__device__ __forceinline__ float angle_of(float X, float Y) {
  return X == 0 && Y == 0 ? 0 : atan2f(Y, X);
}
__device__ __forceinline__ double angle_of(double X, double Y) {
  return X == 0 && Y == 0 ? 0 : atan2(Y, X);
}
__device__ __forceinline__ float length_of(float X, float Y) { return hypotf(X, Y); }
__device__ __forceinline__ double length_of(double X, double Y) { return hypot(X, Y); }

}  // namespace annulus::ring_rnn::cuda
