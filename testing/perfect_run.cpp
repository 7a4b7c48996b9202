#include "testing/perfect_run.h"

#include "annulus/core/values.h"
#include "testing/reference.h"

namespace annulus::testing {

std::function<void(Views, Views, Context&)> perfect_run(const Call& call) {
  return [call](Views in, Views out, Context&) {
    Values inputs;
    for (const TensorView& v : in) inputs.push_back(load_values<double>(v));
    const Values outputs = run_reference(call, inputs);
    for (std::size_t o = 0; o < outputs.size(); ++o) store_values(out[o], outputs[o]);
  };
}

}  // namespace annulus::testing
