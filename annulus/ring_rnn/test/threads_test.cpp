#include <gtest/gtest.h>

#include <cstdint>
#include <vector>

#include "annulus/ring_rnn/test/calls.h"
#include "annulus/ring_rnn/test/cases.h"
#include "testing/concurrent.h"
#include "testing/dense.h"

namespace annulus::testing {
namespace {

class RingRnnThreads : public EachDevice {};
ANNULUS_EACH_DEVICE(RingRnnThreads);

TEST_P(RingRnnThreads, EightAtOnceEqualOneAlone) {
  std::vector<Case> cases;
  std::uint64_t seed = 77;
  for (const DType dtype : {DType::kF64, DType::kF32, DType::kF16, DType::kBF16}) {
    for (const Precision precision : {Precision::kAuto, Precision::kFp32, Precision::kBf16x3}) {
      RingRnnProblem p;
      p.B = 9, p.T = 4, p.K = 3, p.N = 35;
      p.dtype = dtype;
      p.precision = dtype == DType::kF64 ? Precision::kAuto : precision;
      p.activation = static_cast<RingRnnActivation>(seed % 4);
      p.checkpoint = static_cast<std::int64_t>(seed % 3);
      p.drive = p.reset = p.mask = p.h_n = p.dh_n = p.readout = true;
      p.alpha_form = RingRnnProblem::Parameter::kPerNeuron;
      p.gradients = kRingAllGradients;
      p.seed = ++seed;
      cases.push_back(ring_rnn_case(p));
    }
    cases.push_back(ring_readout_case({.B = 3, .T = 5, .N = 35, .dtype = dtype, .seed = ++seed}));
  }
  expect_equal_bits_at_once(cases, device());
}

// So many samples of so small a network that on the CPU each of eight threads takes its own through all
// steps; with fewer samples all threads share every step.
TEST_P(RingRnnThreads, AnyNumberOfThreadsGivesTheSameBits) {
  for (const DType dtype : {DType::kF64, DType::kF32, DType::kF16, DType::kBF16}) {
    for (const std::int64_t B : {533, 60}) {
      const RingNetwork n(device(), dtype, B, 4, 5, 40);
      const RingStates one(n);
      const RingDerivatives one_back(n);
      Context context;
      context.threads = 1;
      run_both(n, n.all_inputs(), one, one_back, {}, context);
      for (const int threads : {2, 3, 8}) {
        const RingStates many(n);
        const RingDerivatives many_back(n);
        context.threads = threads;
        run_both(n, n.all_inputs(), many, many_back, {}, context);
        EXPECT_TRUE(one.out.bytes() == many.out.bytes()) << threads << " threads, B " << B;
        EXPECT_TRUE(one.h_n.bytes() == many.h_n.bytes()) << threads << " threads, B " << B;
        EXPECT_TRUE(one_back.same_bits(many_back)) << threads << " threads, B " << B;
      }
    }
  }
}

}  // namespace
}  // namespace annulus::testing
