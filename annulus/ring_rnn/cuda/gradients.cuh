// What comes before and after the loops: operands made ready, and gradients that are sums over all steps.
#pragma once

#include <cstddef>
#include <cstdint>

#include "annulus/ring_rnn/cuda/operands.cuh"

namespace annulus::ring_rnn::cuda::tensor {

// ---- before: one launch, of what is not null

struct PackWeights {
  uint4* to = nullptr;
  bool swizzled = false;    // as wgmma reads them; else as fragments of mma.sync
  bool transposed = false;  // V_k[m, n] = W_k[m, n], for the backward
  int chunks = 0;           // of m
};
struct MakeCoefficients {
  Coefficients to;
  std::uint32_t* active_rows = nullptr;  // [T][padded_b / 32][mask_words]
  std::uint32_t* tile_c = nullptr;       // c again, by store_tile_c()
  int rows = 0, batch_tiles = 0;
  bool all_channels = false;  // every channel counts as active: dA needs all u_k
};
struct ClearCounters {
  unsigned* counters = nullptr;
  std::int64_t count = 0;
  unsigned* slice_counters = nullptr;  // [3]
};
struct Prepare {
  Args args;
  Layout layout;
  PackWeights pack;
  MakeCoefficients coefficients;
  std::uint16_t* states = nullptr;  // [term]: s_t of all steps, by state_at()
  ClearCounters clear;
};

// ---- after: the weights' gradients

// dWo alone, dWa alone or both.
struct WeightGradients {
  Args args;
  Layout layout;
  DType dtype = DType::kF32;
  int first_channel = 0, last_channel = 0;
  int sides = 0;  // tiles of 128
  int depth_splits = 1;
  float* parts = nullptr;  // [split of the depth][channel][128 sides][128 sides]
  const std::uint16_t* states = nullptr;
  const std::uint32_t* active_rows = nullptr;
};
struct Sm80WeightGradients : WeightGradients {
  const float* g = nullptr;
  const float* c = nullptr;
};
struct Sm90WeightGradients : WeightGradients {
  const std::byte* g = nullptr;
  const std::uint32_t* tile_c = nullptr;
  unsigned blocks = 0;  // of threads that make the gradients; those after them make late dots
  // Of the depth of a late dot: as many as tiles. Known to be equal, ptxas unrolls those loops so that it
  // has too few registers for the gradients' wgmma and makes them wait for each other (C7512).
  int chunks = 0;
  // Where the loop has left s . u_k to this launch: see sm90/late_dots.cuh.
  float* dots = nullptr;           // as LoopSums has them
  const uint4* weights = nullptr;  // V
};

// ---- after: sums over parts

struct Readout {
  Layout layout;
  const float* vectors = nullptr;
  Ref<2> angle, amplitude;
};

struct Gather : LoopSums {
  static constexpr int kSlices = 32;  // of the sums that are single numbers: dJ0, dJ1, dalpha
  WeightGradients weights;
  DotParts dot_parts;
  double* slice_sums = nullptr;        // [3][kSlices]
  unsigned* slice_counters = nullptr;  // [3], zero before the launch
};

}  // namespace annulus::ring_rnn::cuda::tensor
