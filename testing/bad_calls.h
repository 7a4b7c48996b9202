// What the bad calls of every operator share. An operator's Attempt holds good arguments of all its
// functions; a bad call spoils one of them and must be refused with nothing written.
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
  // What every tensor of every operator is refused for, with `call` the function that it is an argument of. The
  // tensor that says which device a call is on cannot be on another one.
  template <class F>
  void add_tensor(const char* name, TensorView Attempt::*tensor, F call, bool says_device = false) {
    const auto spoil = [&](const char* what, auto change) {
      add(what, name, [=](Attempt& a) { change(a.*tensor, a), call(a); });
    };
    using View = TensorView&;
    spoil("a rank too many",
          [](View v, Attempt&) { v.shape[static_cast<std::size_t>(v.rank++)] = 1; });
    spoil("more dimensions than a view can hold", [](View v, Attempt&) { v.rank = kMaxRank + 1; });
    spoil("a dtype of another kind", [](View v, Attempt&) { v.dtype = DType::kI32; });
    spoil("a dtype that is none", [](View v, Attempt&) { v.dtype = static_cast<DType>(99); });
    spoil("a null pointer", [](View v, Attempt&) { v.data = nullptr; });
    spoil("a negative extent", [](View v, Attempt&) { v.shape[0] = -2; });
    spoil("not aligned to its elements", [](View v, Attempt&) { shift_bytes(v, 1); });
    if (says_device) return;
    spoil("another device", [](View v, Attempt& a) { v.device = a.other_device(); });
  }
  std::vector<BadCall> take() { return std::move(calls_); }

 private:
  std::vector<BadCall> calls_;
};

}  // namespace annulus::testing
