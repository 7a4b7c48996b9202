// What kernels take by value, small structs. The loops over steps: the pass (what either direction reads and
// leaves behind), the operands that the blocks of a grid exchange, and the tiling. Before and after them:
// operands made ready, and gradients that are sums over all steps.
#pragma once

#include <cstddef>
#include <cstdint>

#include "annulus/ring_rnn/cuda/arguments.cuh"
#include "annulus/ring_rnn/cuda/tiling.h"

namespace annulus::ring_rnn::cuda::tensor {

// A factor of pairs of bf16, the sum of two pairs.
struct alignas(8) Scale {
  std::uint32_t high, low;
};
static_assert(sizeof(Scale) == kPairFactorBytes);

// c of all steps and which channels count, as prepare.cu makes them.
struct Coefficients {
  float* c = nullptr;                  // [T][channel][padded_b]
  std::uint32_t* active = nullptr;     // [T][batch tile][mask_words]: channels not all zero
  Scale* scales = nullptr;             // as c, where c is multiplied onto X
  std::uint32_t* two_terms = nullptr;  // as active: channels with a c that is no bf16
};

// What both directions have.
struct Pass {
  Args args;
  Layout layout;
  DType dtype = DType::kF32;
  const uint4* weights = nullptr;  // V; null: the cluster packs them itself
  Coefficients coefficients = {};
  std::int64_t first = 0, last = 0;  // this launch runs steps first .. last - 1
};

// Either direction: the step of the call that the launch comes to at `step`, from first on, and which of the two
// buffers holds X of a step. (Counted by steps of the call, so that launches of single phases agree.)
struct ForwardPass : Pass {
  static constexpr bool kBackward = false;
  ANNULUS_HD std::int64_t time(std::int64_t step) const { return step; }
  ANNULUS_HD int parity(std::int64_t time) const { return static_cast<int>(time & 1); }

  float* s = nullptr;        // [padded_b][padded_n], between steps
  float* vectors = nullptr;  // [T][row part][padded_b][2]: of the population vector, or not
  // Computing again what a backward needs: begins with `restart`, and of each step y is all that is
  // written, [t - again_first][B][N].
  Ref<2> restart;
  float* y_again = nullptr;
  std::int64_t again_first = 0;
};

// Sums that the backward loop leaves to gather.cu; null: not needed.
struct LoopSums {
  float* dots = nullptr;        // [T][tile * splits * warps][channel][padded_b]: parts of s . u_k
  float* alpha_sums = nullptr;  // [padded_b][padded_n]: l (F(y) - s), summed over steps
  float* g_sums = nullptr;      // [T][row part][padded_b]
  float* s_sums = nullptr;      // [T][row part][padded_b]
};

// Runs from the last step to the first.
struct BackwardPass : Pass, LoopSums {
  static constexpr bool kBackward = true;
  ANNULUS_HD std::int64_t time(std::int64_t step) const { return last - 1 - (step - first); }
  ANNULUS_HD int parity(std::int64_t time) const {
    return static_cast<int>((args.T - 1 - time) & 1);
  }

  float* l = nullptr;           // [padded_b][padded_n]: dL/dr, between steps
  float* reset_sums = nullptr;  // [padded_b][padded_n]: l of the steps that began with a reset
  std::byte* g = nullptr;       // of all steps, by store_g()
  const std::uint16_t* states = nullptr;  // [term]: s_t of all steps, by state_at()
  const float* y = nullptr;               // of steps y_first.., [.][B][N]: saved, or computed again
  std::int64_t y_first = 0;
  std::int64_t y_stride[3] = {};
  bool own_reset_state = false;  // resets have a state, and a gradient, of their own
  // This launch leaves l of the step before this one to the next launch, which makes g.
  std::int64_t leave_at = 0;
};

// Phases of a step. kBegin makes the X of the first.
inline constexpr unsigned kBegin = 1, kMultiply = 2, kFinish = 4;

// What the blocks of a grid write for each other. X is s or g; of its two buffers a step reads one and
// writes the other.
struct GridOperands {
  std::uint32_t* x_fragments = nullptr;  // [2][term][row / 16][column / 16][lane][4]
  std::uint16_t* x_rows = nullptr;       // [2][padded_b][padded_n] instead, where not null
  float* x_scales = nullptr;             // [2][tile][padded_b]: X times them is meant; F16 alone
  float* row_sums = nullptr;             // [2][tile][padded_b]: of X
  float* partial = nullptr;              // [item][rows][64]
  unsigned* counters = nullptr;          // of the barriers; zero before a launch
  unsigned phases = kBegin | kMultiply | kFinish;
  bool together = true;  // all phases in one launch, with barriers in between
};

template <class Direction, class Tiling>
struct GridLoop : Direction::Pass, GridOperands {
  Tiling tiling;
};
template <class Direction>
using Sm80Loop = GridLoop<Direction, Sm80Tiling>;
template <class Direction>
using Sm90Loop = GridLoop<Direction, Sm90Tiling>;

template <class Element>
struct ClusterLoop : Element::Pass {
  ClusterTiling tiling;
};

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
