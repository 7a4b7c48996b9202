// A Call whose `run` is its own reference, rounded to the output dtype: a run without a fault,
// which the tests of the runner spoil in one way at a time.
#pragma once

#include <functional>

#include "testing/case.h"

namespace annulus::testing {

// Works on CPU tensors of any layout. The result touches nothing of the library's kernels.
std::function<void(Views, Views, Context&)> perfect_run(const Call& call);

}  // namespace annulus::testing
