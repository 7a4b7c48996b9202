// What the kernels of the general backward share: scratch, and the order of the loop's operations.
#pragma once

#include <cstdint>

#include "annulus/ring_rnn/cuda/simt/step.cuh"

namespace annulus::ring_rnn::cuda::general {

// What is nullptr was not asked for.
template <class Real>
struct BackwardScratch {
  StepScratch<Real> step;    // of the steps that are computed again
  Real* ys = nullptr;        // (checkpoint, B, N): y of step t at t mod checkpoint
  Real* g = nullptr;         // (g_steps, B, N): g of step t at t mod g_steps
  std::int64_t g_steps = 1;  // T where dW is to be made of them, else 2
  Real* carry = nullptr;     // (B, N): l of the step that is open
  Real* g_sums = nullptr;    // (2, B, groups): of g_t in half t & 1
  Real* s_sums = nullptr;    // likewise of s_t, for dJ0
  double* dJ0 = nullptr;     // (B)
  Real* dJ1 = nullptr;       // (B, parts)
  Real* dA = nullptr;        // (T, B, K, parts)
  Real* dalpha = nullptr;    // (B, N) where alpha has N elements, else (B, groups)
  Real* dreset = nullptr;    // (B, N)
  std::int64_t parts = 0;    // partial sums over the neurons: one a tile and slice
  bool reset_to_r0 = true;
};

// The loop of a backward is a list of operations with a barrier between each two. Without
// checkpoints: open T - 1, then backward T - 1 .. 0, each of which opens the step before it. With
// them, for each segment of steps t0 .. t1 - 1 from the last on: begin t0, forward t0 .. t1 - 1,
// open t1 - 1, backward t1 - 1 .. t0.
struct Operation {
  enum Kind { kBegin, kForward, kOpen, kBackward };
  Kind kind;
  std::int64_t t;
};

ANNULUS_HD inline std::int64_t operation_count(std::int64_t T, std::int64_t checkpoint) {
  if (checkpoint == 0 || T == 0) return T + 1;
  return 2 * T + 2 * ((T + checkpoint - 1) / checkpoint);
}

ANNULUS_HD inline Operation operation(std::int64_t index, std::int64_t T, std::int64_t checkpoint) {
  if (checkpoint == 0 || T == 0) {
    return index == 0 ? Operation{Operation::kOpen, T - 1}
                      : Operation{Operation::kBackward, T - index};
  }
  const std::int64_t segments = (T + checkpoint - 1) / checkpoint;
  std::int64_t t0 = (segments - 1) * checkpoint;
  std::int64_t steps = T - t0;  // the last segment may be short
  if (index >= 2 * steps + 2) {
    index -= 2 * steps + 2;
    t0 -= (index / (2 * checkpoint + 2) + 1) * checkpoint;
    index %= 2 * checkpoint + 2;
    steps = checkpoint;
  }
  if (index == 0) return {Operation::kBegin, t0};
  if (index <= steps) return {Operation::kForward, t0 + index - 1};
  if (index == steps + 1) return {Operation::kOpen, t0 + steps - 1};
  return {Operation::kBackward, t0 + 2 * steps + 1 - index};
}

template <class T>
void launch_backward_loop(const Plan& plan, const Args& a, const BackwardScratch<compute_t<T>>& w,
                          unsigned* counters, cudaStream_t stream);

// dWa and dWo, those that were asked for, from g (T, B, N). `states`: s (T, B, N) where `out` has it
// rounded, else nullptr. Both of the type that arithmetic is done in.
void launch_dweights(const Plan& plan, const Args& a, const void* g, const void* states,
                     cudaStream_t stream);

}  // namespace annulus::ring_rnn::cuda::general
