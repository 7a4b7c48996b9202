// The loss of a batch and its gradient, from the three sums of every state (population.h).
//
//   L = mean_bt |u - (cos target, sin target)|^2  +  w mean_bt (S_bt - S_b0)^2
//   u = (X, Y) / sqrt(X^2 + Y^2): the direction the population points to. The first term is
//   2 - 2 cos(angle - target), the second keeps the bump from fading or growing.
//   Where X = Y = 0 there is no direction: u is (1, 0) and its gradient 0.
#pragma once

#include <cstdint>
#include <span>

namespace annulus::train {

struct LossFigures {
  double total = 0;
  double angle = 0;      // the first term
  double amplitude = 0;  // the second, without its weight
  double error = 0;      // mean circular |angle - target| in radians, for people
};

// sums (B, T, 3), target (B, T) -> dsums (B, T, 3), the gradient of the total; an empty dsums is not
// written. Sums in double, in a fixed order.
LossFigures ring_loss(std::span<const float> sums, std::span<const double> target, std::int64_t B,
                      std::int64_t T, double amplitude_weight, std::span<float> dsums);

}  // namespace annulus::train
