// What the loss needs of a state, three numbers a row, and their gradients spread over the neurons
// again: the only part of the loss that is as large as the states, so it stays on their device.
//
//   X = sum_i r_i cos(2 pi i / N)    Y = sum_i r_i sin(2 pi i / N)    S = sum_i |r_i|
//   dr_i = dX cos(2 pi i / N) + dY sin(2 pi i / N) + dS sign(r_i)
#pragma once

#include "annulus/core/context.h"
#include "annulus/core/tensor.h"

namespace annulus::train {

// All f32, contiguous and on one device: states (B, T, N), sums (B, T, 3), ring (2, N) as
// ring_table() fills it.
void population_sums(const TensorView& states, const TensorView& ring, const TensorView& sums,
                     Context& context);
void population_gradients(const TensorView& states, const TensorView& ring, const TensorView& dsums,
                          const TensorView& dstates, Context& context);

// cos and sin of 2 pi i / N, one row each.
void ring_table(std::int64_t N, float* table);

namespace cuda {  // population_cuda.cu
void population_sums(const float* states, const float* ring, float* sums, std::int64_t rows,
                     std::int64_t N, Context& context);
void population_gradients(const float* states, const float* ring, const float* dsums,
                          float* dstates, std::int64_t rows, std::int64_t N, Context& context);
}  // namespace cuda

}  // namespace annulus::train
