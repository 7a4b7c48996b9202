// The preferred directions of a ring's neurons, and the angle of a population vector.
#pragma once

#include <cstdint>

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
template <class Real>
__device__ __forceinline__ Real angle_of(Real X, Real Y) {
  return X == 0 && Y == 0 ? 0 : atan2(Y, X);
}

}  // namespace annulus::ring_rnn::cuda
