// Calls that must be refused with nothing written. Those that every argument of a list (core/operator.h)
// has are derived from the operator's cases: missing, wrong rank, dtype, shape, device or address, overlap.
// For the rules beyond the list an operator's Attempt holds good arguments of all its functions; a bad
// call spoils one of them.
#pragma once

#include <cstdint>
#include <initializer_list>
#include <memory>
#include <utility>
#include <vector>

#include "testing/case.h"
#include "testing/tensors.h"

namespace annulus::testing {

class AttemptTensors {
 public:
  explicit AttemptTensors(Device device) : device_(device) {}

  // The values of inputs are all 0.25; outputs hold poison.
  TensorView input(const char* name, std::vector<std::int64_t> shape, DType t = DType::kF32);
  TensorView output(const char* name, std::vector<std::int64_t> shape, DType t = DType::kF32);
  Device other_device() const;

  // Throws where a tensor, or what lies around one, is no longer as it was made.
  void verify_untouched();

 private:
  Device device_;
  std::vector<std::unique_ptr<TestTensor>> tensors_;
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
                        try {
                          f(a);
                        } catch (...) {
                          a.verify_untouched();
                          throw;
                        }
                      }});
  }
  std::vector<BadCall> take() { return std::move(calls_); }

 private:
  std::vector<BadCall> calls_;
};

// All that the lists of an operator's calls say: of every function that its named cases reach, every
// argument is spoilt in every way, once.
std::vector<BadCall> derived_bad_calls(const OperatorCases& op, Device device);
// Those and the operator's own, which come first.
std::vector<BadCall> all_bad_calls(const OperatorCases& op, Device device);

}  // namespace annulus::testing
