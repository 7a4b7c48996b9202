// Calls that must be refused with nothing written. Those that every argument of a list (core/operator.h)
// has are derived from the operator's cases: missing, wrong rank, dtype, shape, device or address, overlap.
// For the rules beyond the list an operator's Attempt holds good arguments of all its functions; a bad
// call spoils one of them.
#pragma once

#include <cstdint>
#include <initializer_list>
#include <utility>
#include <vector>

#include "testing/case.h"
#include "testing/memory/tensors.h"

namespace annulus::testing {

class AttemptTensors {
 public:
  explicit AttemptTensors(Device device) : device_(device) {}

  // The values of inputs are all 0.25; outputs hold poison.
  TensorView input(const char* name, std::vector<std::int64_t> shape, DType t = DType::kF32);
  TensorView input_of(const TensorSpec& spec, const std::vector<double>& values);
  TensorView output(const char* name, std::vector<std::int64_t> shape, DType t = DType::kF32);

  // Runs f. Where it throws, none of the tensors, nor what lies around them, may have changed.
  template <class F>
  void attempt(F&& f) {
    try {
      f();
    } catch (...) {
      verify_untouched();
      throw;
    }
  }

 private:
  void verify_untouched();

  Device device_;
  std::vector<TestTensor> tensors_;
};

// Ways to spoil a view.
void set_shape(TensorView& v, std::initializer_list<std::int64_t> shape);
void shift_bytes(TensorView& v, int bytes);

// Collects calls f(attempt), each on an Attempt of its own.
template <class Attempt>
class BadCallsOf {
 public:
  template <class F>
  void add(const char* what, const char* argument, F f,
           BadCall::Expect expect = BadCall::Expect::kInvalidArgument) {
    calls_.push_back({what, expect, argument, [f](Device device) {
                        Attempt a(device);
                        a.attempt([&] { f(a); });
                      }});
  }
  std::vector<BadCall> take() { return std::move(calls_); }

 private:
  std::vector<BadCall> calls_;
};

// The operator's own, then all that the lists of its calls say: of every function that its named cases
// reach, every argument is spoilt in every way, once.
std::vector<BadCall> all_bad_calls(const OperatorCases& op, Device device);

}  // namespace annulus::testing
