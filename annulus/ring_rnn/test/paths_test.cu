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
#include "annulus/ring_rnn/test/live.h"
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
        RingRnnProblem p = live(dtype, 40, 9, 3, N);
        p.activation = RingRnnActivation::kGelu;
        p.precision = precision;
        p.checkpoint = checkpoint;
        p.J0_form = p.J1_form = RingRnnProblem::Parameter::kTensor;
        p.alpha_form = RingRnnProblem::Parameter::kPerNeuron;
        p.readout = true;
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

// Every output and gradient, but for what is saved.
Tensors run(Precision precision, std::int64_t checkpoint, Way way, std::int64_t N) {
  const DType dtype = precision == Precision::kF16 ? DType::kF16 : DType::kF32;
  RingRnnProblem p = live(dtype, 70, 5, 3, N);
  p.checkpoint = checkpoint;
  Case c = ring_rnn_case(p);
  ring_rnn::Plan plan;
  plan.device = cuda_device(0);
  plan.precision = precision;
  plan.dtype = dtype;
  plan.activation = RingRnnActivation::kGelu;
  plan.checkpoint = checkpoint;
  plan.stepwise = way.stepwise;
  plan.portable = way.portable;
  plan.B = p.B, plan.T = p.T, plan.K = p.K, plan.N = p.N;
  c.calls[0].run = [&, call = c.calls[0]](Views from, Views to, Context& context) {
    plan.in = ring_inputs(p, from, call.inputs);
    plan.out = ring_outputs(to, call.outputs);
    ring_rnn::cuda::forward(plan, context);
  };
  c.calls[1].run = [&, call = c.calls[1]](Views from, Views to, Context& context) {
    plan.in = ring_inputs(p, from, call.inputs);
    plan.out = ring_outputs(from, call.inputs);
    plan.dout = pick(from, call.inputs, "dout");
    plan.dh_n = pick(from, call.inputs, "dh_n");
    plan.grad = ring_gradients(to, call.outputs);
    ring_rnn::cuda::backward(plan, context);
  };
  Context context;
  Tensors t = testing::run(c, plan.device, context, draw(c));
  t.erase("saved");
  return t;
}

TEST_F(RingPaths, StepByStepGivesTheBitsOfOneLaunch) {
  for (const Precision p : {Precision::kBf16, Precision::kF16, Precision::kBf16x3,
                            Precision::kBf16x6, Precision::kFp32}) {
    for (const bool portable : {false, true}) {  // 320 neurons: clusters know no single steps
      const Tensors steps = run(p, 0, {.stepwise = true, .portable = portable}, 320);
      EXPECT_EQ(differing(run(p, 0, {.portable = portable}, 320), steps), "")
          << name_of(p) << (portable ? " portable" : "");
    }
  }
}

TEST_F(RingPaths, CheckpointsGiveTheSameBits) {
  for (const Precision p : {Precision::kBf16, Precision::kF16, Precision::kBf16x6}) {
    for (const std::int64_t N : {100, 320}) {
      for (const bool portable : {false, true}) {
        const Tensors kept = run(p, 0, {.portable = portable}, N);
        EXPECT_EQ(differing(kept, run(p, 2, {.portable = portable}, N)), "")
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
      const Tensors ours = run(b.precision, 0, {.portable = true}, N);
      const Tensors others = run(b.precision, 0, {}, N);
      for (const char* name : {"out", "dA", "dWa", "dWo", "dr0"}) {
        EXPECT_LE(relative_error(ours.at(name), others.at(name)), b.limit)
            << name << ", " << name_of(b.precision) << ", N " << N;
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
