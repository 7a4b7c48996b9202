// Where the arrays of the tensor-core path lie in a call's scratch memory.
#pragma once

#include <cstddef>
#include <cstdint>

#include "annulus/core/scratch.h"
#include "annulus/ring_rnn/cuda/gradients.cuh"
#include "annulus/ring_rnn/plan.h"

namespace annulus::ring_rnn::cuda::tensor {

// Pointers are null where a call needs no such array.
struct ForwardScratch {
  uint4* weights = nullptr;
  Coefficients coefficients;
  GridOperands x;
  float* s = nullptr;
  float* vectors = nullptr;
};
ForwardScratch take_forward(ScratchLayout& scratch, const Plan& plan, const Tiling& tiling);

struct BackwardScratch {
  uint4* weights = nullptr;
  Coefficients coefficients;
  GridOperands x;
  float* l = nullptr;
  std::byte* g = nullptr;
  std::uint16_t* states = nullptr;
  LoopSums sums;
  float* reset_sums = nullptr;
  // The weights' gradients.
  std::uint32_t* active_rows = nullptr;
  std::uint32_t* tile_c = nullptr;
  int depth_splits = 1;
  float* parts = nullptr;
  double* slice_sums = nullptr;
  unsigned* slice_counters = nullptr;
  // With checkpoints: the forward loop again, and y of the steps between two of them.
  ForwardScratch again;
  float* y = nullptr;
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
