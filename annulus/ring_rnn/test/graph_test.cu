// Ring RNN in CUDA graphs: a call is captured on a stream of its own, counted, and replayed with new
// inputs. The scratch is the caller's, of exactly the size that was asked for.
#include <gtest/gtest.h>

#include <array>
#include <string>
#include <vector>

#include "annulus/ring_rnn/cuda/simt/backward.cuh"
#include "annulus/ring_rnn/test/calls.h"
#include "testing/cuda_graph.h"

namespace annulus::testing {
namespace {

class RingGraph : public ::testing::Test {
 protected:
  void SetUp() override {
    const std::string why = annulus::cuda::why_unavailable();
    if (!why.empty()) GTEST_SKIP() << "no CUDA device: " << why;
  }
};

// A forward and a backward on one stream, each with scratch of its own.
struct Calls {
  Calls(const RingNetwork& n, const RingRnnOptions& options)
      : in(n.all_inputs()),
        options(options),
        n(n),
        states(n),
        derivatives(n),
        angle(n.device, wide(n.dtype), {n.B, n.T}),
        amplitude(n.device, wide(n.dtype), {n.B, n.T}),
        saved(n.device, wide(n.dtype), shape()) {
    outputs = states.outputs();
    outputs.angle = angle.view();
    outputs.amplitude = amplitude.view();
    outputs.saved = saved.view();
    gradients = derivatives.gradients(in);
    const std::size_t first = ring_rnn_forward_workspace(in, outputs, options);
    const std::size_t second = ring_rnn_backward_workspace(in, gradients, options);
    scratch = {Buffer(n.device, first), Buffer(n.device, second)};
  }
  void forward(const Stream& stream) {
    BorrowedWorkspace workspace(scratch[0].data(), scratch[0].bytes());
    Context context;
    context.stream = stream.get();
    context.allocator = &workspace;
    ring_rnn_forward(in, outputs, options, context);
  }
  void backward(const Stream& stream) {
    BorrowedWorkspace workspace(scratch[1].data(), scratch[1].bytes());
    Context context;
    context.stream = stream.get();
    context.allocator = &workspace;
    ring_rnn_backward(in, n.dout.view(), n.dh_n.view(), outputs.out, outputs.saved, gradients,
                      options, context);
  }
  std::vector<std::vector<std::byte>> results() const {
    std::vector<std::vector<std::byte>> all;
    for (const Dense* d : {&states.out, &states.h_n, &angle, &amplitude}) {
      all.push_back(d->bytes());
    }
    for (const Dense* d : derivatives.all()) all.push_back(d->bytes());
    return all;
  }
  std::vector<std::int64_t> shape() const {
    const auto s = ring_rnn_saved_shape(in, options);
    return {s[0], s[1], s[2]};
  }

  RingRnnInputs in;
  RingRnnOptions options;
  const RingNetwork& n;
  RingStates states;
  RingDerivatives derivatives;
  Dense angle, amplitude, saved;
  RingRnnOutputs outputs;
  RingRnnGradients gradients;
  std::array<Buffer, 2> scratch;
};

TEST_F(RingGraph, AtMostFourLaunchesAndReplaysEqualPlainCalls) {
  for (const DType dtype : {DType::kF64, DType::kF32, DType::kF16, DType::kBF16}) {
    for (const Precision precision : precisions_of(cuda_device(0), dtype)) {
      for (const std::int64_t checkpoint : {0, 4}) {
        // With clusters and without them, by turns.
        const std::int64_t N = (checkpoint > 0) == (dtype == DType::kBF16) ? 320 : 96;
        SCOPED_TRACE(std::string(name_of(dtype)) + ", precision " +
                     std::to_string(static_cast<int>(precision)) + ", checkpoint " +
                     std::to_string(checkpoint) + ", N " + std::to_string(N));
        RingRnnOptions options;
        options.activation = RingRnnActivation::kGelu;
        options.precision = precision;
        options.checkpoint = checkpoint;
        RingNetwork n(cuda_device(0), dtype, 40, 9, 3, N);
        Calls calls(n, options);
        const Stream stream;
        calls.forward(stream);  // what is done once, such as loading the kernels
        calls.backward(stream);
        const Graph forward(stream, [&] { calls.forward(stream); });
        const Graph backward(stream, [&] { calls.backward(stream); });
        // With checkpoints the loops are a graph, which counts as one.
        EXPECT_LE(forward.nodes().size(), 4u);
        EXPECT_LE(backward.nodes().size(), 4u);
        n.A.normal(77);
        n.r0.normal(78);
        forward.replay(stream);
        backward.replay(stream);
        stream.wait();
        const auto replayed = calls.results();
        calls.forward(stream);
        calls.backward(stream);
        stream.wait();
        EXPECT_TRUE(replayed == calls.results()) << "a replay has other bits";
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
