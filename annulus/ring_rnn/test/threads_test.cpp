#include <gtest/gtest.h>

#include "annulus/ring_rnn/test/live.h"

namespace annulus::testing {
namespace {

class RingRnnThreads : public EachDevice {};
ANNULUS_EACH_DEVICE(RingRnnThreads);

// On the CPU: so many samples of so small a network that each of eight threads takes its own through
// all steps, and fewer with enough work a step that all eight share it.
TEST_P(RingRnnThreads, AnyNumberOfThreadsGivesTheSameBits) {
  for (const DType dtype : {DType::kF64, DType::kF32, DType::kF16, DType::kBF16}) {
    for (RingRnnProblem p : {live(dtype, 533, 4, 5, 40), live(dtype, 70, 2, 4, 83)}) {
      p.activation = RingRnnActivation::kGelu;
      const Tensors in = draw(ring_rnn_case(p));
      for (const Precision precision : precisions_of(device(), dtype)) {
        p.precision = precision;
        const Case c = ring_rnn_case(p);
        Context context;
        context.threads = 1;
        const Tensors one = run(c, device(), context, in);
        for (const int threads : {2, 3, 4, 8}) {
          context.threads = threads;
          EXPECT_EQ(differing(one, run(c, device(), context, in)), "")
              << threads << " threads, " << c.params;
        }
      }
    }
  }
}

}  // namespace
}  // namespace annulus::testing
