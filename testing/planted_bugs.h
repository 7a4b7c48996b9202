// Bugs planted one at a time in a run that is otherwise right, and the checks that must report
// them: the test of the tests.
//
// What is right is the operator's own definition. A bug changes the values it is given, or those it
// returns, or asks it for something else; no equation is written a second time.
#pragma once

#include <gtest/gtest.h>

#include <cstdint>
#include <functional>
#include <string>
#include <vector>

#include "annulus/core/values.h"
#include "testing/by_hand.h"
#include "testing/reference.h"
#include "testing/suite.h"

namespace annulus::testing {

using Right = std::function<void(Tensors&)>;  // the definition of a call
using Bug = std::function<void(const Right& right, Tensors& t)>;

// A change of what the definition is given, or of what it returns.
inline Bug given(const std::function<void(Tensors&)>& change) {
  return [change](const Right& right, Tensors& t) {
    change(t);
    right(t);
  };
}
inline Bug after(const std::function<void(Tensors&)>& change) {
  return [change](const Right& right, Tensors& t) {
    right(t);
    change(t);
  };
}

struct Planted {
  const char* bug;
  const char* killed_by;  // in the place or the text of some failure
  Case run;               // sound() but for what the bug changes
  Bug change = {};        // in the backward where that must report it, else in the forward
};

// The calls of a case.
inline constexpr std::size_t kForward = 0;
inline constexpr std::size_t kBackward = 1;

// A run that computes this, on CPU tensors of any layout.
inline std::function<void(Views, Views, Context&)> run_of(const Call& call, const Bug& bug) {
  return [call, bug](Views in, Views out, Context&) {
    Tensors t;
    for (std::size_t i = 0; i < in.size(); ++i) {
      t[call.inputs[i].name] = vector_of(load_values<double>(in[i]));
    }
    bug([&call](Tensors& tensors) { define(call, tensors); }, t);
    for (std::size_t i = 0; i < out.size(); ++i) {
      store_values(out[i], values_of(t.at(call.outputs[i].name)));
    }
  };
}

// A case without a fault: it runs its own definition and needs no workspace.
inline Case sound(Case c) {
  const auto as_defined = [](const Right& right, Tensors& t) { right(t); };
  for (Call& call : c.calls) {
    call.run = run_of(call, as_defined);
    call.workspace = [](Views, Views) { return std::size_t{0}; };
    if (!call.prepare) continue;
    call.prepare = [forward = c.calls[kForward], specs = call.inputs](Views in, Context& context) {
      std::vector<TensorView> from, to;
      for (const TensorSpec& s : forward.inputs) from.push_back(pick(in, specs, s.name));
      for (const TensorSpec& s : forward.outputs) to.push_back(pick(in, specs, s.name));
      forward.run(from, to, context);
    };
  }
  return c;
}

using Run = std::function<void(Views, Views, Context&)>;

// Runs f after the sound run of one call.
inline Case then(Case c, std::size_t call, Run f) {
  c.calls[call].run = [run = c.calls[call].run, f](Views in, Views out, Context& context) {
    run(in, out, context);
    f(in, out, context);
  };
  return c;
}

// Runs one call on views of its inputs that f has changed: one that misreads its strides.
inline Case misreading(Case c, std::size_t call,
                       const std::function<void(std::vector<TensorView>&)>& f) {
  c.calls[call].run = [run = c.calls[call].run, f](Views in, Views out, Context& context) {
    std::vector<TensorView> misread(in.begin(), in.end());
    f(misread);
    run(misread, out, context);
  };
  return c;
}

using Change = std::function<double(std::size_t index, double value)>;

// Changes what is drawn for one tensor.
inline Case drawing(Case c, const std::string& name, const Change& change) {
  c.draw = [usual = c.draw, name, change](Rng& rng, const TensorSpec& spec, std::span<double> v) {
    usual(rng, spec, v);
    for (std::size_t i = 0; spec.name == name && i < v.size(); ++i) v[i] = change(i, v[i]);
  };
  return c;
}

// Changes every element of an output.
inline void edit(const TensorView& v, const Change& change) {
  std::vector<double> values = load_values<double>(v);
  for (std::size_t i = 0; i < values.size(); ++i) values[i] = change(i, values[i]);
  store_values(v, values);
}

// The plain run draws its layout from the variant; a few of them meet every layout.
inline bool is_killed(Planted planted, std::string& reports) {
  if (planted.change) {
    const bool backward = std::string(planted.killed_by).rfind("backward", 0) == 0;
    Call& call = planted.run.calls[backward ? kBackward : kForward];
    call.run = run_of(call, planted.change);
  }
  const auto is_it = [&](const std::string& text) {
    reports += "\n  " + text;
    return text.find(planted.killed_by) != std::string::npos;
  };
  for (std::uint64_t variant = 0; variant < 4; ++variant) {
    const CaseResult r = run_case(planted.run, kCPU, kAllOracles, variant, "planted");
    for (const Failure& f : r.failures) {
      if (is_it(f.where + ": " + f.detail)) return true;
    }
  }
  return is_it("gradients of the reference: " + check_reference_gradients(planted.run).fault);
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
