// The gradients of a reference against central differences of its own forward, in fp64.
#pragma once

#include <string>
#include <vector>

#include "testing/case.h"

namespace annulus::testing {

// `forward_in` and `backward_in` hold the values of each call's inputs. Empty when all gradients
// agree, or when there is none to check: no backward call, too large a case, values that are not
// finite.
std::string check_reference_gradients(const Case& c,
                                      const std::vector<std::vector<double>>& forward_in,
                                      const std::vector<std::vector<double>>& backward_in);

}  // namespace annulus::testing
