// Draws a call's inputs, runs its reference or baseline on dense CPU tensors and returns the outputs as
// double; and whether a reference's gradients are those of its forward.
#pragma once

#include <cmath>
#include <cstddef>
#include <string>
#include <vector>

#include "testing/case.h"

namespace annulus::testing {

// Draws the inputs of a call, already rounded to their dtype. A tensor of the same name has the
// same values in every call of a case. Derived inputs are zeros here.
Values draw_inputs(const Case& c, const Call& call);
// The same of every call of the case, each tensor drawn once.
std::vector<Values> draw_inputs(const Case& c);

// Floating tensors as f64, others in their own dtype.
Values run_reference(const Call& call, const Values& inputs);
// Every tensor in its own dtype.
Values run_baseline(const Call& call, const Values& inputs);

// |got - want| / |want|: 0 where they are equal, infinities too; no number where one of them has none.
template <class Got, class Want>
double relative_error(const Got& got, const Want& want) {
  double apart = 0, size = 0;
  for (std::size_t i = 0; i < want.size(); ++i) {
    if (std::isinf(want[i]) && got[i] == want[i]) continue;
    apart += (got[i] - want[i]) * (got[i] - want[i]);
    size += want[i] * want[i];
  }
  return apart == 0 ? 0 : std::sqrt(apart / size);
}

// The gradients of a reference against central differences of its own forward, in fp64.
struct GradientCheck {
  bool compared = false;  // not: no backward call, too large a case, values that are not finite
  std::string fault;      // empty when all gradients agree
};
GradientCheck check_reference_gradients(const Case& c);

}  // namespace annulus::testing
