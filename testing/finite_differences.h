// The gradients of a reference against central differences of its own forward, in fp64.
#pragma once

#include <string>

#include "testing/case.h"

namespace annulus::testing {

struct GradientCheck {
  bool compared = false;  // not: no backward call, too large a case, values that are not finite
  std::string fault;      // empty when all gradients agree
};
GradientCheck check_reference_gradients(const Case& c);

}  // namespace annulus::testing
