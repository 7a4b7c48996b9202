// The problems of LRPE-cosine and its rotating form, for tests, checks, fuzzing and benchmarks.
#pragma once

#include <cstdint>

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
  DType dtype = DType::kF32;
  DType theta_dtype = DType::kF32;
  bool need_dx = true;
  bool need_dtheta = true;
  std::uint64_t seed = 0;
};

// calls: "forward", "backward" (dx and/or dtheta as asked). Inputs are named as in the header.
Case lrpe_case(const LrpeProblem& problem);

}  // namespace annulus::testing
