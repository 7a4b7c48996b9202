// The problems of LRPE-cosine and its rotating form, for tests, checks, fuzzing and benchmarks.
#pragma once

#include <cstdint>
#include <vector>

#include "annulus/lrpe_cosine/lrpe_cosine.h"
#include "testing/case.h"

namespace annulus::testing {

// LRPE-cosine: one product of an activated value and a cosine or sine, within a neighbour of the exact
// value. Without an activation, and with relu, sigmoid and silu, which are elementwise.
inline constexpr CaseLimits kLrpeProductLimits{
    .ulp_f16_bf16 = 1, .relative_f32 = 2e-7, .relative_f64 = 1e-12};
// The exponentials and the sum of a softmax cost f32 a few roundings more.
inline constexpr CaseLimits kLrpeSoftmaxLimits{
    .ulp_f16_bf16 = 1, .relative_f32 = 1e-6, .relative_f64 = 1e-12};
// The rotating form subtracts two products made in f32: where they cancel, it is their size that the
// error is measured by, not that of what is left.
inline constexpr CaseLimits kLrpeRotateLimits{
    .ulp_f16_bf16 = 1, .cancelled_f16_bf16 = 2e-7, .relative_f32 = 2e-7, .relative_f64 = 1e-12};

struct LrpeProblem {
  enum class Form {
    kCosine,
    kCosineQk,
    kRotateHalves,
    kRotateInterleaved,
    kRotateQkHalves,
    kRotateQkInterleaved
  } form = Form::kCosine;
  std::int64_t B = 1, H = 1, Hk = 0, D = 1, E = 1;  // Hk: heads of k for the qk forms
  bool one_row = false;                             // of theta, for all heads
  LrpeGrid shape{1};
  std::int64_t prefix = 0;
  LrpeActivation activation = LrpeActivation::kNone;
  std::int64_t offset = 0;
  bool offset_per_batch = false;  // adds an `offsets` input of shape (B,)
  // Adds a `position_ids` input, one row for all sequences or one each. The call is then given no shape, which only
  // says how many tokens and axes there are.
  enum class Ids { kNone, kShared, kOwn } ids = Ids::kNone;
  // What they say: sequences that start at 0 along the last axis; runs that start far out; anything near; anything.
  enum class IdValues { kPacked, kFarRuns, kNear, kFar } id_values = IdValues::kPacked;
  DType dtype = DType::kF32;
  DType theta_dtype = DType::kF32;
  bool need_dx = true;
  bool need_dtheta = true;
  std::uint64_t seed = 0;
};

inline bool is_rotate(LrpeProblem::Form f) { return f >= LrpeProblem::Form::kRotateHalves; }
inline bool is_qk(LrpeProblem::Form f) {
  return f == LrpeProblem::Form::kCosineQk || f >= LrpeProblem::Form::kRotateQkHalves;
}
// Prefix and grid.
std::int64_t tokens_of(const LrpeProblem& problem);

// calls: "forward", "backward" (dx and/or dtheta as asked). Inputs are named as in the header.
Case lrpe_case(LrpeProblem problem);

std::vector<BadCall> lrpe_bad_calls(Device device);

}  // namespace annulus::testing
