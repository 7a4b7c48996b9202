// Bugs planted one at a time in a run that is otherwise right, and the checks that must report
// them: the test of the tests.
#pragma once

#include <gtest/gtest.h>

#include <cstdint>
#include <functional>
#include <string>
#include <vector>

#include "annulus/core/values.h"
#include "testing/reference.h"
#include "testing/suite.h"

namespace annulus::testing {

using Run = std::function<void(Views, Views, Context&)>;

// The calls of a case.
inline constexpr std::size_t kForward = 0;
inline constexpr std::size_t kBackward = 1;

struct Planted {
  const char* bug;
  const char* killed_by;  // in the place or the text of some failure
  std::function<Case()> make;
};

// The reference of a call as its run, rounded to the output dtype: on CPU tensors of any layout, by
// nothing of the library's kernels.
inline Run perfect_run(const Call& call) {
  return [call](Views in, Views out, Context&) {
    Values inputs;
    for (const TensorView& v : in) inputs.push_back(load_values<double>(v));
    const Values outputs = run_reference(call, inputs);
    for (std::size_t o = 0; o < outputs.size(); ++o) store_values(out[o], outputs[o]);
  };
}

// A case without a fault: it runs its own reference and needs no workspace, nor an earlier call.
inline Case made_sound(Case c) {
  for (Call& call : c.calls) {
    call.run = perfect_run(call);
    call.prepare = nullptr;
    call.workspace = [](Views, Views) { return std::size_t{0}; };
  }
  return c;
}

// Runs f after the sound run of one call.
inline Case spoilt_after(Case c, std::size_t call, Run f) {
  c.calls[call].run = [sound = c.calls[call].run, f](Views in, Views out, Context& context) {
    sound(in, out, context);
    f(in, out, context);
  };
  return c;
}

// Runs one call on views of its inputs that f has changed: one that misreads its strides.
inline Case misreading(Case c, std::size_t call,
                       const std::function<void(std::vector<TensorView>&)>& f) {
  c.calls[call].run = [sound = c.calls[call].run, f](Views in, Views out, Context& context) {
    std::vector<TensorView> misread(in.begin(), in.end());
    f(misread);
    sound(misread, out, context);
  };
  return c;
}

// Runs one call on an f32 input whose values f has changed.
inline Case mistaking(Case c, std::size_t call, std::size_t input,
                      const std::function<double(double)>& f) {
  c.calls[call].run = [sound = c.calls[call].run, input, f](Views in, Views out, Context& context) {
    std::vector<float> copy;
    for (const double v : load_values<double>(in[input])) copy.push_back(static_cast<float>(f(v)));
    std::vector<TensorView> mistaken(in.begin(), in.end());
    mistaken[input] = contiguous(copy.data(), DType::kF32, in[input].sizes());
    sound(mistaken, out, context);
  };
  return c;
}

// Calls `change(index, value)` on every element of an output.
inline void edit(const TensorView& v, const std::function<double(std::size_t, double)>& change) {
  std::vector<double> values = load_values<double>(v);
  for (std::size_t i = 0; i < values.size(); ++i) values[i] = change(i, values[i]);
  store_values(v, values);
}

// The plain run draws its layout from the variant; a few of them meet every layout.
inline bool is_killed(const Planted& planted, std::string& reports) {
  const auto is_it = [&](const std::string& text) {
    reports += "\n  " + text;
    return text.find(planted.killed_by) != std::string::npos;
  };
  for (std::uint64_t variant = 0; variant < 4; ++variant) {
    const CaseResult r = run_case(planted.make(), kCPU, kAllOracles, variant, "planted");
    for (const Failure& f : r.failures) {
      if (is_it(f.where + ": " + f.detail)) return true;
    }
  }
  return is_it("gradients of the reference: " + check_reference_gradients(planted.make()).fault);
}

inline void expect_all_killed(const std::vector<Planted>& all) {
  for (const Planted& planted : all) {
    std::string reports;
    EXPECT_TRUE(is_killed(planted, reports))
        << "'" << planted.bug << "' survived; reported instead:" << reports;
  }
}

// The runs that bugs are planted in are without a fault, so it is the bug that was reported.
inline void expect_sound(const Case& c) {
  for (std::uint64_t variant = 0; variant < 6; ++variant) {
    const CaseResult r = run_case(c, kCPU, kAllOracles, variant, "sound");
    for (const Failure& f : r.failures)
      ADD_FAILURE() << c.params << " " << f.where << ": " << f.detail;
  }
  EXPECT_EQ(check_reference_gradients(c).fault, "") << c.params;
}

}  // namespace annulus::testing
