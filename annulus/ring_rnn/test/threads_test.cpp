#include <gtest/gtest.h>

#include "annulus/ring_rnn/test/calls.h"

namespace annulus::testing {
namespace {

class RingRnnThreads : public EachDevice {};
ANNULUS_EACH_DEVICE(RingRnnThreads);

// On the CPU: so many samples of so small a network that each of eight threads takes its own through
// all steps, and fewer with enough work a step that all eight share it.
TEST_P(RingRnnThreads, AnyNumberOfThreadsGivesTheSameBits) {
  for (const DType dtype : {DType::kF64, DType::kF32, DType::kF16, DType::kBF16}) {
    const RingNetwork many(device(), dtype, 533, 4, 5, 40), few(device(), dtype, 70, 2, 4, 83);
    for (const RingNetwork* n : {&many, &few}) {
      for (const Precision precision : precisions_of(device(), dtype)) {
        const RingRnnOptions options{.precision = precision};
        Context context;
        context.threads = 1;
        const RingResults one = run_both(*n, n->all_inputs(), options, context);
        for (const int threads : {2, 3, 4, 8}) {
          context.threads = threads;
          EXPECT_TRUE(one.same_bits(run_both(*n, n->all_inputs(), options, context)))
              << threads << " threads, B " << n->B << ", precision " << name_of(precision);
        }
      }
    }
  }
}

}  // namespace
}  // namespace annulus::testing
