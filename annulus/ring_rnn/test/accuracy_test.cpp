// How exact each precision is: the table of ring_rnn.md, and a bump that must stay where it is.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <numbers>
#include <string>
#include <vector>

#include "annulus/core/info.h"
#include "annulus/ring_rnn/test/calls.h"

namespace annulus::testing {
namespace {

class RingRnnAccuracy : public EachDevice {
 protected:
  Context context;
};
ANNULUS_EACH_DEVICE(RingRnnAccuracy);

PrecisionInfo precision_info(const std::string& name) {
  for (const OperatorInfo& op : operators()) {
    if (op.name != "ring_rnn") continue;
    for (const PrecisionInfo& p : op.precisions) {
      if (p.name == name) return p;
    }
  }
  ADD_FAILURE() << "annulus info does not know " << name;
  return {};
}

// Relative L2 error of the state over 20 live steps at alpha 0.15, and of the worst gradient.
TEST_P(RingRnnAccuracy, OverTwentyLiveSteps) {
  const RingNetwork n(device(), DType::kF32, 24, 20, 8, 96), x = exact_copy(n);
  RingRnnInputs in = n.inputs(), exact_in = x.inputs();
  in.alpha = exact_in.alpha = 0.15;
  RingRnnOptions options;
  options.activation = RingRnnActivation::kGelu;
  const RingStates states(n), exact(x);
  const RingDerivatives d(n), e(x);
  reference::ring_rnn_forward(exact_in, exact.outputs(), options);
  reference::ring_rnn_backward(exact_in, x.dout.view(), x.dh_n.view(), e.gradients(exact_in),
                               options);
  struct Bar {
    Precision precision;
    const char* name;
    double state, gradient;
  };
  std::vector<Bar> bars = {{Precision::kFp32, "fp32", 3e-7, 1e-6},
                           {Precision::kBf16x6, "bf16x6", 3e-7, 1e-6},
                           {Precision::kBf16x3, "bf16x3", 1e-6, 1e-5},
                           {Precision::kBf16, "bf16", 2e-3, 1e-2}};
  if (device().type == DeviceType::kCUDA) {
    bars.push_back({Precision::kTf32, "tf32", 1e-6, 1e-5});  // made as bf16x3
  }
  for (const Bar& bar : bars) {
    options.precision = bar.precision;
    run_both(n, in, states, d, options, context);
    const double state = relative_error(states.out, exact.out);
    double worst = 0;
    // Of the tensors; a single number may cancel, which the cases judge by its terms.
    for (const auto& [ours, theirs] :
         {std::pair{&d.dA, &e.dA}, {&d.dWa, &e.dWa}, {&d.dWo, &e.dWo}, {&d.dr0, &e.dr0}}) {
      worst = std::max(worst, relative_error(*ours, *theirs));
    }
    EXPECT_LE(state, bar.state) << bar.name;
    EXPECT_LE(worst, bar.gradient) << bar.name;
    // What `annulus info` and the page say, measured on a CPU, is neither better nor much worse.
    if (device().type == DeviceType::kCPU) {
      const PrecisionInfo said = precision_info(bar.name);
      EXPECT_LE(state, 1.5 * said.state_error) << bar.name;
      EXPECT_LE(worst, 1.5 * said.gradient_error) << bar.name;
      EXPECT_GE(state, said.state_error / 3) << bar.name;
      EXPECT_GE(worst, said.gradient_error / 3) << bar.name;
    }
    RecordProperty(std::string(bar.name) + "_state", std::to_string(state * 1e9) + "e-9");
    RecordProperty(std::string(bar.name) + "_gradient", std::to_string(worst * 1e9) + "e-9");
  }
}

// dWa and dWo are sums over B T rows. A tensor core cuts a sum off each time it adds to it, which makes
// long ones too small, by 2.5e-5 for 5120 rows: the bar holds for many, too. (CUDA cuts these rows in
// 26 parts on an H200.)
TEST_P(RingRnnAccuracy, WeightsOfManyRows) {
  const RingNetwork n(device(), DType::kF32, 256, 520, 2, 24), x = exact_copy(n);
  RingRnnInputs in = n.inputs(), exact_in = x.inputs();
  in.alpha = exact_in.alpha = 0.15;
  RingRnnOptions options;
  options.activation = RingRnnActivation::kGelu;
  options.precision = Precision::kBf16x3;
  const RingStates states(n);
  const RingDerivatives d(n), e(x);
  reference::ring_rnn_backward(exact_in, x.dout.view(), x.dh_n.view(), e.gradients(exact_in),
                               options);
  run_both(n, in, states, d, options, context);
  EXPECT_LE(relative_error(d.dWa, e.dWa), 1e-5);
  EXPECT_LE(relative_error(d.dWo, e.dWo), 1e-5);
}

// A bump on a ring of cosine weights is at rest at any angle, so nothing pulls rounding errors
// back: ten thousand steps may move it by 1e-4 rad at most, and the error of the state may not grow
// faster than a walk does.
TEST_P(RingRnnAccuracy, ABumpStaysWhereItIs) {
  constexpr std::int64_t B = 4, T = 10000, N = 64, kPiece = 500;
  RingNetwork n(device(), DType::kF32, B, kPiece, 0, N);
  std::vector<double> W, r0;
  for (int i = 0; i < N; ++i) {
    for (int j = 0; j < N; ++j) {
      W.push_back(2.4 / N * 2 * std::cos(2 * std::numbers::pi * (i - j) / N));
    }
  }
  for (int b = 0; b < B; ++b) {
    for (int i = 0; i < N; ++i) {
      r0.push_back(0.5 * std::cos(2 * std::numbers::pi * i / N - 0.9 - 1.3 * b));
    }
  }
  n.Wo.write(W);
  n.r0.write(r0);
  // The exact one starts from what f32 holds, with the weights f32 holds.
  const RingNetwork x = exact_copy(n);
  RingRnnOptions options;
  options.activation = RingRnnActivation::kTanh;
  const auto run = [&](const RingNetwork& network, auto forward, std::vector<double>& angles,
                       std::vector<double>& lengths) {
    const DType w = wide(network.dtype);
    const RingStates states(network);
    const Dense angle(network.device, w, {B, kPiece}), amplitude(network.device, w, {B, kPiece});
    Dense state(network.device, w, {B, N});
    state.write(network.r0.values());
    for (std::int64_t t = 0; t < T; t += kPiece) {
      RingRnnInputs in = network.inputs();
      in.r0 = state.view();
      in.J0 = 0.0, in.J1 = 1.0, in.alpha = 0.15;
      RingRnnOutputs out = states.outputs();
      out.angle = angle.view();
      out.amplitude = amplitude.view();
      forward(in, out);
      synchronize(network.device);
      state.write(states.h_n.values());
      for (std::size_t b = 0; b < B; ++b) {
        angles.push_back(angle.values()[b * kPiece + kPiece - 1]);
        lengths.push_back(amplitude.values()[b * kPiece + kPiece - 1]);
      }
    }
  };
  std::vector<double> exact_angles, exact_lengths;
  run(
      x,
      [&](const RingRnnInputs& in, const RingRnnOutputs& out) {
        reference::ring_rnn_forward(in, out, options);
      },
      exact_angles, exact_lengths);
  for (const double length : exact_lengths) ASSERT_GT(length, 0.3 * N);  // there is a bump
  for (std::size_t b = 0; b < B; ++b) {  // and it stays, in the definition
    EXPECT_NEAR(std::remainder(exact_angles[b] - exact_angles[exact_angles.size() - B + b],
                               2 * std::numbers::pi),
                0, 1e-4);
  }
  for (const Precision precision : {Precision::kFp32, Precision::kBf16x6}) {
    options.precision = precision;
    std::vector<double> angles, lengths;
    run(
        n,
        [&](const RingRnnInputs& in, const RingRnnOutputs& out) {
          ring_rnn_forward(in, out, options, context);
        },
        angles, lengths);
    double worst = 0;
    for (std::size_t i = 0; i < angles.size(); ++i) {
      worst = std::max(worst,
                       std::abs(std::remainder(angles[i] - exact_angles[i], 2 * std::numbers::pi)));
      EXPECT_NEAR(lengths[i] / exact_lengths[i], 1, 1e-5) << i;
    }
    EXPECT_LE(worst, 1e-4) << static_cast<int>(precision);
    RecordProperty("drift_of_precision_" + std::to_string(static_cast<int>(precision)),
                   std::to_string(worst * 1e6) + "e-6 rad");
  }
}

}  // namespace
}  // namespace annulus::testing
