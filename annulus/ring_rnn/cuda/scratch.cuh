// What the kernels of a call work on, with its arrays in the call's scratch memory.
#pragma once

#include <cstdint>

#include "annulus/core/scratch.h"
#include "annulus/ring_rnn/cuda/gradients.cuh"
#include "annulus/ring_rnn/plan.h"

namespace annulus::ring_rnn::cuda::tensor {

// Pointers are null where a call needs no such array.
struct ForwardScratch {
  ForwardPass pass;
  GridOperands x;
  uint4* weights = nullptr;  // to be packed
};
ForwardScratch take_forward(ScratchLayout& scratch, const Plan& plan, const Tiling& tiling);

struct BackwardScratch {
  BackwardPass pass;
  GridOperands x;
  uint4* weights = nullptr;
  std::uint16_t* states = nullptr;
  std::uint32_t *active_rows = nullptr, *tile_c = nullptr;
  WeightGradients gradients;
  double* slice_sums = nullptr;
  unsigned* slice_counters = nullptr;
  ForwardScratch
      again;  // with checkpoints: the forward loop, for y of the steps between two of them
};
BackwardScratch take_backward(ScratchLayout& scratch, const Plan& plan, const Tiling& tiling,
                              const Tiling& forward_tiling, const Gpu& gpu);

// Does a backward need s . u_k? Clusters leave them to the launch after the loop.
inline bool needs_dots(const Plan& plan) {
  return plan.grad.dA.defined() || plan.grad.dJ1.defined();
}

// Barrier counters: one for the blocks of the same samples, and one a tile for its splits.
std::int64_t counters_of(const StepTiling& tiling);

}  // namespace annulus::ring_rnn::cuda::tensor
