// A Case is one problem of one operator: its tensors, its calls, its definition and its limits.
// Every operator's <op>_cases.cpp makes Cases, and the test runner, `annulus check`, the fuzzer and
// the benchmark read nothing else. Adding an operator adds no line here.
#pragma once

#include <cmath>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <numbers>
#include <span>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "annulus/core/context.h"
#include "annulus/core/tensor.h"
#include "testing/limits.h"

namespace annulus::testing {

// Seed -> numbers, the same on every machine (splitmix64): std::normal_distribution is not.
class Rng {
 public:
  explicit Rng(std::uint64_t seed) : state_(seed) {}
  std::uint64_t next() {
    std::uint64_t z = (state_ += 0x9e3779b97f4a7c15ull);
    z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9ull;
    z = (z ^ (z >> 27)) * 0x94d049bb133111ebull;
    return z ^ (z >> 31);
  }
  double uniform() { return static_cast<double>(next() >> 11) * 0x1p-53; }  // [0, 1)
  std::int64_t below(std::int64_t n) {                                      // 0 .. n-1
    return static_cast<std::int64_t>(next() % static_cast<std::uint64_t>(n));
  }
  double normal() {                    // Box-Muller
    const double u = 1.0 - uniform();  // (0, 1]: the logarithm stays finite
    const double v = uniform();
    return std::sqrt(-2.0 * std::log(u)) * std::cos(2.0 * std::numbers::pi * v);
  }
  template <class T>
  const T& pick(std::span<const T> choices) {
    return choices[static_cast<std::size_t>(below(static_cast<std::int64_t>(choices.size())))];
  }

 private:
  std::uint64_t state_;
};

struct TensorSpec {
  std::string name;  // "x"; a gradient is "d" + name, which is how the runner pairs them
  DType dtype = DType::kF32;
  std::vector<std::int64_t> shape;
  // An input that no draw makes but an earlier function of the operator: Call::prepare writes it.
  bool derived = false;
  // An output in a form of the operator's own (what a forward saves for its backward). All of it
  // must be written, and always with the same bits; what it holds, only its reader judges.
  bool opaque = false;
  // No gradient belongs to it: an output without an incoming gradient, or the gradient of a
  // parameter that this problem passes as a number.
  bool unpaired = false;
  // An output whose terms CUDA adds in an order that may change: calls agree closely there, not to the bit.
  bool reordered = false;
  // An angle: errors count modulo 2 pi.
  bool circular = false;
  // An output that this problem makes zero whatever the values are (NaN where they are not finite), by
  // a rule that stands where this is set: it counts neither as trusted nor as mistrusted. The runner
  // reports a reference that is not zero.
  bool zero = false;
};

inline std::int64_t numel_of(const TensorSpec& spec) {
  std::int64_t n = 1;
  for (const std::int64_t s : spec.shape) n *= s;
  return n;
}

using Views = std::span<const TensorView>;
using Values = std::vector<std::vector<double>>;  // one entry a tensor

// The view of the tensor of that name; not defined where there is none.
inline TensorView pick(Views views, const std::vector<TensorSpec>& specs, std::string_view name) {
  for (std::size_t i = 0; i < specs.size(); ++i) {
    if (specs[i].name == name) return views[i];
  }
  return {};
}

// One function of the operator, on this problem.
struct Call {
  std::string name;  // "forward", "backward", ...
  std::vector<TensorSpec> inputs;
  std::vector<TensorSpec> outputs;
  // The library's function, on tensors of any layout on any device.
  std::function<void(Views in, Views out, Context&)> run;
  // Optional: the library's own function that a caller runs before this one, which fills the inputs
  // marked `derived` (views of them are writable here). Neither timed nor judged by itself.
  std::function<void(Views in, Context&)> prepare;
  // The definition: same tensors on the CPU, every floating one as f64 (already rounded to its
  // dtype).
  std::function<void(Views in, Views out)> reference;
  // What a straightforward programmer writes in the call's own dtype with fp32 sums, dense on the
  // CPU: the yardstick of the numeric policy.
  std::function<void(Views in, Views out)> baseline;
  // The library's own word on its scratch bytes; the runner asserts that it is exact.
  std::function<std::size_t(Views in, Views out)> workspace;
  // How its products are made on a device; nullptr: in the tensors' own dtype.
  std::function<Precision(Device)> precision;
  // Inputs whose elements are factors of the terms that the outputs are sums of (see limits.h).
  // Empty: for a forward none, for other calls the incoming gradients.
  std::vector<std::string> terms;
  // On CUDA other kernels may run for other layouts: results there are as good as any, but not the same to the bit.
  bool kernels_by_layout = false;
  // The least work the mathematics asks for: the floors of the benchmark.
  double flops = 0;
  double bytes = 0;
};

struct Case {
  std::string op;
  std::string params;      // "form=cosine B=2 H=3 L=16x16+10 D=64 E=32 dtype=bf16 act=silu"
  std::uint64_t seed = 0;  // inputs are drawn from it
  std::vector<Call>
      calls;  // calls[0] is the forward; a later call named "backward" has its gradients
  // Draws an input; nullptr: standard normal for floating tensors, zeros for integers.
  std::function<void(Rng&, const TensorSpec&, std::span<double> values)> draw;
  // Optional: a last look at all drawn inputs of the first call, for values that depend on one another.
  // Later calls have the same tensors by name.
  std::function<void(std::vector<std::vector<double>>& inputs)> refine;
  CaseLimits limits;  // beyond the common policy
};

// An operator's description of a problem, changed a little.
template <class P, class F>
P with(P problem, F change) {
  change(problem);
  return problem;
}

// A call that breaks one rule. The runner checks the type and the message of what it throws, and
// that a good call still works.
struct BadCall {
  std::string what;  // "theta has a wrong head count"
  enum class Expect { kInvalidArgument, kNotSupported, kDeviceError } expect;
  std::string argument;  // the message must name it
  // Runs the bad call on `device`. `outputs` receives every output it passes, so that the runner
  // can compare them before and after.
  std::function<void(Device device)> call;
};

struct OperatorCases {
  std::string op;
  // Hand-picked: every edge, every defect of the original, one per kernel.
  std::function<std::vector<Case>()> named;
  // f(seed), the same on every machine and device.
  std::function<Case(std::uint64_t seed)> fuzz;
  // Rules beyond the list of arguments; what the list says is derived from it (bad_calls.h).
  std::function<std::vector<BadCall>(Device)> bad_calls = {};
  // Of the named cases a few for each kernel, by a regular expression over what describes them: what a
  // tool that watches every access of memory runs in minutes; and those that even watching shared
  // memory for races (many times slower) ends with. Empty: all.
  std::string sanitized = {};
  std::string raced = {};
  // Of the cases that all operators are fuzzed with, one in so many: for those of which each costs as much.
  int one_in = 1;
};

// Operators add themselves: one static CasesRegistration at the end of <op>_cases.cpp. The list is a
// function's own, because registrations run before main in no particular order.
inline std::vector<OperatorCases>& all_cases() {
  static std::vector<OperatorCases> cases;
  return cases;
}
struct CasesRegistration {
  explicit CasesRegistration(OperatorCases cases) { all_cases().push_back(std::move(cases)); }
};

}  // namespace annulus::testing
