// Eight host threads call every given case at once, each with a Context of its own, on shared
// inputs: the bits are those of one thread alone.
#pragma once

#include <gtest/gtest.h>

#include <cstdint>
#include <exception>
#include <memory>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "testing/reference.h"
#include "testing/tensors.h"

namespace annulus::testing {

// One call of one case, with inputs that all threads read.
class SharedCall {
 public:
  using Bits = std::vector<std::vector<std::uint64_t>>;  // one entry an output

  SharedCall(const Case& c, const Call& call, Device device)
      : what(c.params + " " + call.name), call_(call), device_(device) {
    const Values values = draw_inputs(c, call);
    for (std::size_t i = 0; i < values.size(); ++i) {
      const TensorSpec& spec = call.inputs[i];
      inputs_.push_back(
          spec.derived
              ? std::make_unique<TestTensor>(spec, Layout::kContiguous, device)
              : std::make_unique<TestTensor>(spec, Layout::kContiguous, device, values[i]));
      views_.push_back(inputs_.back()->view());
    }
    if (!call.prepare) return;
    Context context;
    call.prepare(views_, context);
    synchronize(device);
    for (std::size_t i = 0; i < inputs_.size(); ++i) {
      if (!call.inputs[i].derived) continue;
      EXPECT_EQ(inputs_[i]->settle(), "") << what;
    }
  }

  // Fresh outputs, the call, and their bits; or what went wrong.
  std::string run(int threads, Bits& bits) const {
    std::vector<std::unique_ptr<TestTensor>> outputs;
    std::vector<TensorView> out;
    for (const TensorSpec& spec : call_.outputs) {
      outputs.push_back(std::make_unique<TestTensor>(spec, Layout::kContiguous, device_));
      out.push_back(outputs.back()->view());
    }
    Context context;
    context.threads = threads;
    try {
      call_.run(views_, out, context);
      synchronize(device_);
    } catch (const std::exception& e) {
      return e.what();
    }
    bits.clear();
    for (const auto& t : outputs) {
      const std::string fault = t->collect(&bits.emplace_back());
      if (!fault.empty()) return fault;
    }
    return {};
  }
  std::string inputs_changed() const {
    for (const auto& t : inputs_) {
      const std::string fault = t->collect(nullptr);
      if (!fault.empty()) return fault;
    }
    return {};
  }

  std::string what;

 private:
  Call call_;
  Device device_;
  std::vector<std::unique_ptr<TestTensor>> inputs_;
  std::vector<TensorView> views_;
};

inline void expect_equal_bits_at_once(const std::vector<Case>& cases, Device device) {
  constexpr std::size_t kThreads = 8, kRounds = 3;
  std::vector<SharedCall> calls;
  for (const Case& c : cases) {
    for (const Call& call : c.calls) calls.emplace_back(c, call, device);
  }
  std::vector<SharedCall::Bits> alone(calls.size());
  for (std::size_t i = 0; i < calls.size(); ++i) {
    ASSERT_EQ(calls[i].run(1, alone[i]), "") << calls[i].what;
  }
  std::vector<std::string> faults(kThreads);
  std::vector<std::thread> threads;
  for (std::size_t t = 0; t < kThreads; ++t) {
    threads.emplace_back([&, t] {
      for (std::size_t n = 0; n < kRounds * calls.size(); ++n) {
        const std::size_t i = (n + t * 5) % calls.size();  // each begins elsewhere
        SharedCall::Bits bits;
        std::string fault = calls[i].run(1 + static_cast<int>(t % 2), bits);
        if (fault.empty() && bits != alone[i]) fault = "other bits than one thread alone";
        if (!fault.empty()) faults[t] = calls[i].what + ": " + fault;
      }
    });
  }
  for (std::thread& t : threads) t.join();
  for (const std::string& fault : faults) EXPECT_EQ(fault, "");
  for (const SharedCall& c : calls) EXPECT_EQ(c.inputs_changed(), "") << c.what;
}

}  // namespace annulus::testing
