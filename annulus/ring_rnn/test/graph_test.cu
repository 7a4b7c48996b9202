// What a ring RNN call launches, counted in its captured graph (replays with new inputs, for every operator, are
// in testing/graph_test.cu), and the order of operations of the general path.
#include <gtest/gtest.h>

#include <cstdint>
#include <string>
#include <vector>

#include "annulus/ring_rnn/cuda/simt/backward.cuh"
#include "annulus/ring_rnn/test/calls.h"
#include "annulus/ring_rnn/test/cases.h"
#include "testing/cuda_graph.h"
#include "testing/device_test.h"

namespace annulus::testing {
namespace {

class RingGraph : public DeviceTest {};

TEST_F(RingGraph, AtMostFourLaunches) {
  for (const DType dtype : {DType::kF64, DType::kF32, DType::kF16, DType::kBF16}) {
    for (const Precision precision : precisions_of(cuda_device(0), dtype)) {
      for (const std::int64_t checkpoint : {0, 4}) {
        // With clusters and without them, by turns.
        const std::int64_t N = (checkpoint > 0) == (dtype == DType::kBF16) ? 320 : 96;
        RingRnnProblem p{.B = 40, .T = 9, .K = 3, .N = N, .dtype = dtype};
        p.activation = RingRnnActivation::kGelu;
        p.precision = precision;
        p.checkpoint = checkpoint;
        p.J0_form = p.J1_form = RingRnnProblem::Parameter::kTensor;
        p.alpha_form = RingRnnProblem::Parameter::kPerNeuron;
        p.drive = p.reset = p.reset_state = p.mask = p.readout = p.dh_n = true;
        p.gradients = kRingAllGradients;
        const Case c = ring_rnn_case(p);
        for (std::size_t i = 0; i < c.calls.size(); ++i) {
          SCOPED_TRACE(c.params + " " + c.calls[i].name);
          const Stream stream;
          PreparedCall work(c, i);
          work.draw(c.seed);
          const auto plain = work.results_of(stream, [&] { work.run(stream); });
          const Graph graph(stream, [&] { work.run(stream); });
          // With checkpoints the loops are a graph, which counts as one.
          EXPECT_LE(graph.nodes().size(), 4u);
          const auto replayed = work.results_of(stream, [&] { graph.replay(stream); });
          EXPECT_TRUE(replayed == plain) << "a replay has other bits";
        }
      }
    }
  }
}

// ---------------------------------------------------------------------------------------------------
// Pure functions of the general path: no GPU needed.

using ring_rnn::cuda::general::Operation;

// Every step is computed again before it is opened, opened before it is gone through backwards, and
// gone through once, from the last to the first.
TEST(RingGeneral, OperationsOfABackwardAreInOrder) {
  for (std::int64_t T = 0; T <= 12; ++T) {
    for (std::int64_t checkpoint = 0; checkpoint <= 14; ++checkpoint) {
      SCOPED_TRACE(std::to_string(T) + " steps, checkpoint " + std::to_string(checkpoint));
      const std::int64_t count = ring_rnn::cuda::general::operation_count(T, checkpoint);
      std::vector<int> forward(static_cast<std::size_t>(T)), backward = forward;
      std::int64_t open = T;    // the step that g is known of
      std::int64_t state = -1;  // the step the state stands before
      for (std::int64_t i = 0; i < count; ++i) {
        const Operation op = ring_rnn::cuda::general::operation(i, T, checkpoint);
        switch (op.kind) {
          case Operation::kBegin:
            ASSERT_GT(checkpoint, 0);
            ASSERT_EQ(op.t % checkpoint, 0);
            state = op.t;
            break;
          case Operation::kForward:
            ASSERT_EQ(op.t, state);
            ++forward[static_cast<std::size_t>(state++)];
            break;
          case Operation::kOpen:
            ASSERT_EQ(op.t, open - 1);
            open = op.t;
            break;
          case Operation::kBackward:
            ASSERT_EQ(op.t, open);
            ASSERT_EQ(forward[static_cast<std::size_t>(op.t)], checkpoint > 0 ? 1 : 0);
            ++backward[static_cast<std::size_t>(op.t)];
            // It opens the step before it, but for one whose y is not there yet.
            if (checkpoint == 0 || op.t % checkpoint != 0) open = op.t - 1;
            break;
        }
      }
      for (const int n : backward) EXPECT_EQ(n, 1);
    }
  }
}

}  // namespace
}  // namespace annulus::testing
