// Runs a call's reference or baseline on dense CPU tensors and returns the outputs as double.
#pragma once

#include <cstdint>
#include <vector>

#include "testing/case.h"

namespace annulus::testing {

using Values = std::vector<std::vector<double>>;  // one entry a tensor

// Draws the inputs of a call, already rounded to their dtype. A tensor of the same name has the
// same values in every call of a case. Derived inputs are zeros here.
Values draw_inputs(const Case& c, const Call& call);
// The same of every call of the case, each tensor drawn once.
std::vector<Values> draw_inputs(const Case& c);

// Floating tensors as f64, others in their own dtype.
Values run_reference(const Call& call, const Values& inputs);
// Every tensor in its own dtype.
Values run_baseline(const Call& call, const Values& inputs);

}  // namespace annulus::testing
