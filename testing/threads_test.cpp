// Every operator called by eight host threads at once, each with a Context of its own, on shared inputs:
// the bits are those of one thread alone.
#include <gtest/gtest.h>

#include <cstdint>
#include <exception>
#include <string>
#include <thread>
#include <vector>

#include "testing/dense.h"
#include "testing/reference.h"

namespace annulus::testing {
namespace {

// One call of one case, with inputs that all threads read.
struct SharedCall {
  SharedCall(const Case& c, const Call& call, Device device)
      : what(c.params + " " + call.name),
        call(call),
        device(device),
        inputs(values_of(c, call, device)) {
    EXPECT_EQ(inputs.prepare(call), "") << what;
  }

  // Fresh outputs, the call, and their bits; or what went wrong.
  std::string run(int threads, Bits& bits) const {
    TestTensors outputs(call.outputs, device);
    Context context;
    context.threads = threads;
    try {
      call.run(inputs.views(), outputs.views(), context);
      synchronize(device);
    } catch (const std::exception& e) {
      return e.what();
    }
    bits.clear();
    return outputs.collect(&bits);
  }

  std::string what;
  Call call;
  Device device;
  TestTensors inputs;

 private:
  static TestTensors values_of(const Case& c, const Call& call, Device device) {
    const Values values = draw_inputs(c, call);
    return TestTensors(call.inputs, device, &values);
  }
};

void expect_equal_bits_at_once(const std::vector<Case>& cases, Device device) {
  constexpr std::size_t kThreads = 8, kRounds = 3;
  std::vector<SharedCall> calls;
  for (const Case& c : cases) {
    for (const Call& call : c.calls) calls.emplace_back(c, call, device);
  }
  std::vector<Bits> alone(calls.size());
  for (std::size_t i = 0; i < calls.size(); ++i) {
    ASSERT_EQ(calls[i].run(1, alone[i]), "") << calls[i].what;
  }
  std::vector<std::string> faults(kThreads);
  std::vector<std::thread> threads;
  for (std::size_t t = 0; t < kThreads; ++t) {
    threads.emplace_back([&, t] {
      for (std::size_t n = 0; n < kRounds * calls.size(); ++n) {
        const std::size_t i = (n + t * 5) % calls.size();  // each begins elsewhere
        Bits bits;
        std::string fault = calls[i].run(1 + static_cast<int>(t % 2), bits);
        if (fault.empty() && bits != alone[i]) fault = "other bits than one thread alone";
        if (!fault.empty()) faults[t] = calls[i].what + ": " + fault;
      }
    });
  }
  for (std::thread& t : threads) t.join();
  for (const std::string& fault : faults) EXPECT_EQ(fault, "");
  for (SharedCall& c : calls) EXPECT_EQ(c.inputs.collect(), "") << c.what;
}

class OperatorThreads : public EachOperator {};
ANNULUS_EACH_OPERATOR(OperatorThreads);

// Small cases of many kinds: what threads share is tables, plans and scratch, not sizes.
TEST_P(OperatorThreads, EightAtOnceEqualOneAlone) {
  constexpr std::size_t kCases = 24;
  constexpr std::int64_t kMostElements = 20000;
  std::vector<Case> cases;
  for (std::uint64_t seed = 0; cases.size() < kCases && seed < 1000; ++seed) {
    Case c = op().fuzz(seed);
    std::int64_t elements = 0;
    for (const Call& call : c.calls) {
      for (const TensorSpec& s : call.inputs) elements += numel_of(s);
    }
    if (elements > 0 && elements <= kMostElements) cases.push_back(std::move(c));
  }
  ASSERT_EQ(cases.size(), kCases);
  expect_equal_bits_at_once(cases, device());
}

}  // namespace
}  // namespace annulus::testing
