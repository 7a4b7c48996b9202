// The ways a ring RNN call can run on a GPU: what it launches, counted in its captured graph (replays with new
// inputs, for every operator, are in testing/graph_test.cu); all steps in one launch or a launch a part of a
// step, which give the same bits; the kernels of compute capability 8.0 where the GPU has better ones; and the
// order of operations of the general path.
#include <gtest/gtest.h>

#include <cstdint>
#include <string>
#include <vector>

#include "annulus/ring_rnn/cuda/simt/backward.cuh"
#include "annulus/ring_rnn/plan.h"
#include "annulus/ring_rnn/test/calls.h"
#include "annulus/ring_rnn/test/cases.h"
#include "testing/cuda_graph.h"
#include "testing/device_test.h"

namespace annulus::testing {
namespace {

class RingPaths : public DeviceTest {};

TEST_F(RingPaths, AtMostFourLaunches) {
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

struct Way {
  bool stepwise = false, portable = false;
};

RingResults run(Precision precision, std::int64_t checkpoint, Way way, std::int64_t N) {
  const DType dtype = precision == Precision::kF16 ? DType::kF16 : DType::kF32;
  const RingNetwork n(cuda_device(0), dtype, 70, 5, 3, N);
  RingResults r(n);
  ring_rnn::Plan plan;
  plan.device = n.device;
  plan.precision = precision;
  plan.dtype = dtype;
  plan.activation = RingRnnActivation::kGelu;
  plan.checkpoint = checkpoint;
  plan.stepwise = way.stepwise;
  plan.portable = way.portable;
  plan.B = n.B, plan.T = n.T, plan.K = n.K, plan.N = n.N;
  const Dense saved(n.device, DType::kF32, {plan.saved_steps(), n.B, n.N});
  plan.in = n.all_inputs();
  plan.out = r.outputs();
  plan.out.saved = saved.view();
  Context context;
  ring_rnn::cuda::forward(plan, context);
  plan.dout = n.dout.view();
  plan.dh_n = n.dh_n.view();
  plan.grad = r.gradients(plan.in);
  ring_rnn::cuda::backward(plan, context);
  synchronize(n.device);
  return r;
}

TEST_F(RingPaths, StepByStepGivesTheBitsOfOneLaunch) {
  for (const Precision p : {Precision::kBf16, Precision::kF16, Precision::kBf16x3,
                            Precision::kBf16x6, Precision::kFp32}) {
    for (const bool portable : {false, true}) {  // 320 neurons: clusters know no single steps
      const RingResults steps = run(p, 0, {.stepwise = true, .portable = portable}, 320);
      EXPECT_TRUE(run(p, 0, {.portable = portable}, 320).same_bits(steps))
          << name_of(p) << (portable ? " portable" : "");
    }
  }
}

TEST_F(RingPaths, CheckpointsGiveTheSameBits) {
  for (const Precision p : {Precision::kBf16, Precision::kF16, Precision::kBf16x6}) {
    for (const std::int64_t N : {100, 320}) {
      for (const bool portable : {false, true}) {
        const RingResults kept = run(p, 0, {.portable = portable}, N);
        EXPECT_TRUE(kept.same_bits(run(p, 2, {.portable = portable}, N)))
            << name_of(p) << (portable ? " portable" : "") << ", N " << N;
      }
    }
  }
}

TEST_F(RingPaths, PortableKernelsAgreeWithTheOthers) {
  struct Bound {
    Precision precision;
    double limit;  // twice what the mode's own error is, ring_rnn.md
  };
  for (const Bound b : {Bound{Precision::kBf16, 1e-2}, Bound{Precision::kF16, 2e-3},
                        Bound{Precision::kBf16x3, 2e-5}, Bound{Precision::kBf16x6, 4e-6}}) {
    for (const std::int64_t N : {100, 320}) {
      using R = RingResults;
      const R ours = run(b.precision, 0, {.portable = true}, N),
              others = run(b.precision, 0, {}, N);
      for (const auto t : {&R::out, &R::dA, &R::dWa, &R::dWo, &R::dr0}) {
        EXPECT_LE(relative_error(ours.*t, others.*t), b.limit)
            << name_of(b.precision) << ", N " << N;
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
