// The loss of a batch and its gradient, from three sums of every state.
//
//   L = mean_bt |u - (cos target, sin target)|^2  +  w mean_bt (S_bt - S_b0)^2
//   u = (X, Y) / sqrt(X^2 + Y^2): the direction the population points to. The first term is
//   2 - 2 cos(angle - target), the second keeps the bump from fading or growing.
//   Where X = Y = 0 there is no direction: u is (1, 0) and its gradient 0.
//
//   X = sum_i r_i cos(2 pi i / N)    Y = sum_i r_i sin(2 pi i / N)    S = sum_i |r_i|
//   dr_i = dX cos(2 pi i / N) + dY sin(2 pi i / N) + dS sign(r_i)
//   The sums and their gradients are the only part that is as large as the states, so it stays on
//   their device.
#pragma once

#include <cstdint>
#include <span>

#include "annulus/core/context.h"
#include "annulus/core/tensor.h"

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

// cos and sin of 2 pi i / N, one row each.
void ring_table(std::int64_t N, float* table);

// All f32, contiguous and on one device: states (B, T, N), sums (B, T, 3), ring (2, N) as
// ring_table() fills it.
void population_sums(const TensorView& states, const TensorView& ring, const TensorView& sums,
                     Context& context);
void population_gradients(const TensorView& states, const TensorView& ring, const TensorView& dsums,
                          const TensorView& dstates, Context& context);

namespace cuda {  // loss_cuda.cu
void population_sums(const TensorView& states, const TensorView& ring, const TensorView& sums,
                     Context& context);
void population_gradients(const TensorView& states, const TensorView& ring, const TensorView& dsums,
                          const TensorView& dstates, Context& context);
}  // namespace cuda

}  // namespace annulus::train
