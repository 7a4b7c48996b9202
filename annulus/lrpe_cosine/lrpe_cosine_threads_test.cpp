// Eight host threads call every form at once, each with a Context of its own, on shared inputs: the
// bits are those of one thread alone.
#include <gtest/gtest.h>

#include <array>
#include <cstdint>
#include <exception>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "annulus/lrpe_cosine/lrpe_cosine_cases.h"
#include "testing/dense.h"
#include "testing/reference.h"

namespace annulus::testing {
namespace {

using Form = LrpeProblem::Form;
using Bits = std::vector<std::vector<std::uint64_t>>;  // one entry an output

// One call of one problem, with inputs that all threads read.
struct Work {
  std::string what;
  Call call;
  std::vector<std::unique_ptr<TestTensor>> inputs;
  std::vector<TensorView> views;

  // Fresh outputs, the call, and their bits; or what went wrong.
  std::string run(Device device, int threads, Bits& bits) const {
    std::vector<std::unique_ptr<TestTensor>> outputs;
    std::vector<TensorView> out;
    for (const TensorSpec& spec : call.outputs) {
      outputs.push_back(std::make_unique<TestTensor>(spec, Layout::kContiguous, device));
      out.push_back(outputs.back()->view());
    }
    Context context;
    context.threads = threads;
    try {
      call.run(views, out, context);
      synchronize(device);
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
};

std::vector<Work> all_work(Device device) {
  std::vector<Work> all;
  std::uint64_t seed = 77;
  for (const Form form :
       {Form::kCosine, Form::kCosineQk, Form::kRotateHalves, Form::kRotateInterleaved}) {
    for (const DType dtype : {DType::kF64, DType::kF32, DType::kF16, DType::kBF16}) {
      LrpeProblem p{.form = form, .B = 2, .H = 4, .Hk = 2, .D = 40, .E = 40, .shape = {33}};
      p.prefix = 2;
      p.dtype = dtype;
      p.offset_per_batch = true;
      static constexpr std::array kActivations = {LrpeActivation::kNone, LrpeActivation::kSilu,
                                                  LrpeActivation::kSoftmaxFeatures,
                                                  LrpeActivation::kSoftmaxTokens};
      if (form == Form::kCosine || form == Form::kCosineQk) p.activation = kActivations[seed % 4];
      p.seed = ++seed;
      const Case c = lrpe_case(p);
      for (const Call& call : c.calls) {
        Work w{c.params + " " + call.name, call, {}, {}};
        const Values values = draw_inputs(c, call);
        for (std::size_t i = 0; i < values.size(); ++i) {
          w.inputs.push_back(
              std::make_unique<TestTensor>(call.inputs[i], Layout::kContiguous, device, values[i]));
          w.views.push_back(w.inputs.back()->view());
        }
        all.push_back(std::move(w));
      }
    }
  }
  return all;
}

class LrpeThreads : public EachDevice {};
ANNULUS_EACH_DEVICE(LrpeThreads);

TEST_P(LrpeThreads, EightThreadsAtOnceEqualOneAlone) {
  constexpr std::size_t kThreads = 8, kRounds = 3;
  const std::vector<Work> work = all_work(device());
  std::vector<Bits> alone(work.size());
  for (std::size_t i = 0; i < work.size(); ++i) {
    ASSERT_EQ(work[i].run(device(), 1, alone[i]), "") << work[i].what;
  }
  std::vector<std::string> faults(kThreads);
  std::vector<std::thread> threads;
  for (std::size_t t = 0; t < kThreads; ++t) {
    threads.emplace_back([&, t] {
      for (std::size_t n = 0; n < kRounds * work.size(); ++n) {
        const std::size_t i = (n + t * 5) % work.size();  // each begins elsewhere
        Bits bits;
        std::string fault = work[i].run(device(), 1 + static_cast<int>(t % 2), bits);
        if (fault.empty() && bits != alone[i]) fault = "other bits than one thread alone";
        if (!fault.empty()) faults[t] = work[i].what + ": " + fault;
      }
    });
  }
  for (std::thread& t : threads) t.join();
  for (const std::string& fault : faults) EXPECT_EQ(fault, "");
  for (const Work& w : work) {
    for (const auto& t : w.inputs) EXPECT_EQ(t->collect(nullptr), "") << w.what;
  }
}

}  // namespace
}  // namespace annulus::testing
