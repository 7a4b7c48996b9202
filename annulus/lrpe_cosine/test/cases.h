// The problems of LRPE-cosine and its rotating form, for tests, checks, fuzzing and benchmarks.
#pragma once

#include <cstdint>
#include <vector>

#include "annulus/lrpe_cosine/lrpe_cosine.h"
#include "testing/case.h"

namespace annulus::testing {

struct LrpeProblem {
  enum class Form { kCosine, kCosineQk, kRotateHalves, kRotateInterleaved } form = Form::kCosine;
  std::int64_t B = 1, H = 1, Hk = 0, D = 1, E = 1;  // Hk: heads of k for the qk form
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

// calls: "forward", "backward" (dx and/or dtheta as asked). Inputs are named as in the header.
Case lrpe_case(const LrpeProblem& problem);

// A random problem: the same for a seed on every machine.
LrpeProblem lrpe_fuzz_problem(std::uint64_t seed);
// Hand-picked problems: every edge and every defect of the original implementation.
std::vector<Case> lrpe_named_cases();
std::vector<BadCall> lrpe_bad_calls(Device device);

// What a straightforward programmer writes: float(position) * theta, then std::cos, sums in fp32
// (everything in fp64 for f64 tensors). The arguments of the definition, in the call's own dtypes.
namespace baseline {
void lrpe_cosine_forward(const TensorView& x, const TensorView& theta, const TensorView& y,
                         const LrpeCosineOptions& options);
void lrpe_cosine_backward(const TensorView& dy, const TensorView& x, const TensorView& theta,
                          const TensorView& dx, const TensorView& dtheta,
                          const LrpeCosineOptions& options);
void lrpe_rotate_forward(const TensorView& x, const TensorView& theta, const TensorView& y,
                         const LrpeRotateOptions& options);
void lrpe_rotate_backward(const TensorView& dy, const TensorView& x, const TensorView& theta,
                          const TensorView& dx, const TensorView& dtheta,
                          const LrpeRotateOptions& options);
}  // namespace baseline

}  // namespace annulus::testing
