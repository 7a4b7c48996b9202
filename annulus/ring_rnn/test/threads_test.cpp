#include <gtest/gtest.h>

#include <cstdint>

#include "annulus/ring_rnn/test/calls.h"
#include "testing/dense.h"

namespace annulus::testing {
namespace {

class RingRnnThreads : public EachDevice {};
ANNULUS_EACH_DEVICE(RingRnnThreads);

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
