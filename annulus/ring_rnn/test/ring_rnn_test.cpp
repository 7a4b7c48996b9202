// What the ring RNN promises, one test for each defect of the original implementation: slopes,
// layout off the grid of 16, every gradient, preferred angles, live dynamics. On the CPU, and on
// CUDA where there is a device.
#include <gtest/gtest.h>

#include <array>
#include <cmath>
#include <functional>
#include <numbers>
#include <string>
#include <vector>

#include "annulus/ring_rnn/test/calls.h"
#include "annulus/ring_rnn/test/cases.h"

namespace annulus::testing {
namespace {

class RingRnn : public EachDevice {
 protected:
  Context context;
};
ANNULUS_EACH_DEVICE(RingRnn);

// One neuron that drives itself, alpha 1: out = F(r0) and dr0 = F'(r0).
TEST_P(RingRnn, ActivationsAndTheirSlopes) {
  struct Point {
    RingRnnActivation f;
    double y, value, slope;
  };
  // Of normal and logistic distribution tables. The original's gelu' took phi with 1 / sqrt(pi) for
  // 1 / sqrt(2 pi): 1.1835 at 1 and -0.1835 at -1.
  const std::vector<Point> points = {
      {RingRnnActivation::kRelu, 2.0, 2.0, 1.0},
      {RingRnnActivation::kRelu, -2.0, 0.0, 0.0},
      {RingRnnActivation::kRelu, 0.0, 0.0, 0.0},
      {RingRnnActivation::kGelu, 1.0, 0.8413447460685429, 1.0833154705876864},
      {RingRnnActivation::kGelu, -1.0, -0.1586552539314571, -0.0833154705876863},
      {RingRnnActivation::kGelu, 0.0, 0.0, 0.5},
      {RingRnnActivation::kGelu, 3.0, 2.9959503059051100, 1.0119456472041839},
      {RingRnnActivation::kGelu, -3.0, -0.0040496940948903, -0.0119456472041839},
      {RingRnnActivation::kTanh, 1.0, 0.7615941559557649, 0.4199743416140261},
      {RingRnnActivation::kTanh, -0.5, -0.4621171572600098, 0.7864477329659274},
      {RingRnnActivation::kTanh, 0.0, 0.0, 1.0},
      {RingRnnActivation::kSilu, 1.0, 0.7310585786300049, 0.9276705118714869},
      {RingRnnActivation::kSilu, -1.0, -0.2689414213699951, 0.0723294881285133},
      {RingRnnActivation::kSilu, 0.0, 0.0, 0.5},
  };
  for (const DType dtype : {DType::kF64, DType::kF32}) {
    for (const Point& p : points) {
      RingNetwork n(device(), dtype, 1, 1, 0, 1);
      n.Wo.write({1.0});
      n.r0.write({p.y});
      n.dout.write({1.0});
      n.dh_n.write({0.0});
      RingRnnInputs in = n.inputs();
      in.J0 = 0.0, in.J1 = 1.0, in.alpha = 1.0;
      RingRnnOptions options;
      options.activation = p.f;
      if (dtype == DType::kF32) options.precision = Precision::kFp32;
      const RingStates states(n);
      const RingDerivatives d(n);
      run_both(n, in, states, d, options, context);
      const double limit = dtype == DType::kF64 ? 1e-14 : 3e-7;
      const int f = static_cast<int>(p.f);
      EXPECT_NEAR(states.out.values()[0], p.value, limit) << f << " at " << p.y;
      EXPECT_NEAR(d.dr0.values()[0], p.slope, limit) << f << " at " << p.y;
    }
  }
}

// The original wrote (B, T, N) where its caller read (T, B, N) for any size off the grid of 16, and
// its backward ran the kernel for that grid whatever the sizes were.
TEST_P(RingRnn, LayoutAtSizesOffTheGrid) {
  for (const auto& [B, T, K, N] : {std::array<std::int64_t, 4>{3, 5, 2, 13},
                                   {5, 3, 1, 7},
                                   {2, 7, 3, 17},
                                   {16, 4, 2, 30},
                                   {1, 6, 5, 33}}) {
    const RingNetwork n(device(), DType::kF32, B, T, K, N), x = exact_copy(n);
    RingRnnOptions options;
    options.activation = RingRnnActivation::kGelu;
    options.precision = Precision::kFp32;
    const RingStates states(n), exact(x);
    const RingDerivatives d(n), e(x);
    run_both(n, n.all_inputs(), states, d, options, context);
    reference::ring_rnn_forward(x.all_inputs(), exact.outputs(), options);
    reference::ring_rnn_backward(x.all_inputs(), x.dout.view(), x.dh_n.view(),
                                 e.gradients(x.all_inputs()), options);
    EXPECT_LE(relative_error(states.out, exact.out), 1e-6) << N;
    const auto ours = d.all(), theirs = e.all();
    for (std::size_t i = 0; i < ours.size(); ++i) {
      EXPECT_LE(relative_error(*ours[i], *theirs[i]), 2e-6) << "gradient " << i << ", N " << N;
    }
  }
}

// <dO, J v> = <J^T dO, v> along random directions of every input at once, in f64: no gradient is
// missing, and none is wrong. (The original had neither dA nor dr0, dJ0, dJ1, dalpha.)
TEST_P(RingRnn, GradientsAreTheAdjointOfTheForward) {
  for (int round = 0; round < 20; ++round) {
    const auto f = static_cast<RingRnnActivation>(1 + round % 3);  // smooth ones
    RingNetwork n(device(), DType::kF64, 4, 6, 3, 19, static_cast<std::uint64_t>(50 + round));
    RingRnnOptions options;
    options.activation = f;
    options.checkpoint = round % 4;
    RingRnnInputs in = n.all_inputs();
    const Dense J0(device(), DType::kF64, {}), J1(device(), DType::kF64, {});
    Dense alpha(device(), DType::kF64, {19}), dalpha(device(), DType::kF64, {19});
    const RingDerivatives d(n);
    const RingStates states(n);
    const Dense saved(
        device(), DType::kF64,
        {options.checkpoint == 0 ? n.T : (n.T + options.checkpoint - 1) / options.checkpoint, n.B,
         n.N});

    // All differentiable inputs, as one list.
    struct Input {
      Dense* at;
      std::vector<double> value, direction;
      const Dense* gradient;
    };
    Dense J0w(device(), DType::kF64, {}), J1w(device(), DType::kF64, {});
    J0w.write({-0.02});
    J1w.write({0.7});
    std::vector<double> leaks(19);
    for (std::size_t i = 0; i < leaks.size(); ++i) leaks[i] = 0.2 + 0.02 * static_cast<double>(i);
    alpha.write(leaks);
    in.J0 = J0w.view(), in.J1 = J1w.view(), in.alpha = alpha.view();
    std::vector<Input> inputs = {{&n.A, {}, {}, &d.dA},
                                 {&n.Wa, {}, {}, &d.dWa},
                                 {&n.Wo, {}, {}, &d.dWo},
                                 {&n.r0, {}, {}, &d.dr0},
                                 {&J0w, {}, {}, &d.dJ0},
                                 {&J1w, {}, {}, &d.dJ1},
                                 {&alpha, {}, {}, &dalpha},
                                 {&n.drive, {}, {}, &d.ddrive},
                                 {&n.reset_state, {}, {}, &d.dreset_state}};
    RingRnnGradients gradients = d.gradients(in);
    gradients.dalpha = dalpha.view();
    RingRnnOutputs out = states.outputs();
    out.saved = saved.view();
    ring_rnn_forward(in, out, options, context);
    ring_rnn_backward(in, n.dout.view(), n.dh_n.view(), out.out, out.saved, gradients, options,
                      context);

    Rng rng(static_cast<std::uint64_t>(round));
    double expected = 0;
    for (Input& i : inputs) {
      i.value = i.at->values();
      const std::vector<double> g = i.gradient->values();
      for (const double v : g) {
        i.direction.push_back(rng.normal());
        expected += v * i.direction.back();
      }
    }
    const auto loss_at = [&](double h) {
      for (Input& i : inputs) {
        std::vector<double> moved = i.value;
        for (std::size_t k = 0; k < moved.size(); ++k) moved[k] += h * i.direction[k];
        i.at->write(moved);
      }
      const RingStates moved(n);
      ring_rnn_forward(in, moved.outputs(), options, context);
      const std::vector<double> o = moved.out.values(), w = n.dout.values();
      const std::vector<double> s = moved.h_n.values(), ws = n.dh_n.values();
      double sum = 0;
      for (std::size_t k = 0; k < o.size(); ++k) sum += o[k] * w[k];
      for (std::size_t k = 0; k < s.size(); ++k) sum += s[k] * ws[k];
      return sum;
    };
    // Fourth order in h, so that the difference itself is right to 1e-9.
    const double h = 1e-4;
    const double got =
        (8 * (loss_at(h) - loss_at(-h)) - (loss_at(2 * h) - loss_at(-2 * h))) / 12 / h;
    EXPECT_NEAR(got, expected, 1e-8 * (1 + std::abs(expected))) << round;
  }
}

// J0 sum(s) is a term of its own in f32. Folded into weights that are rounded to bf16 it would be
// off by 2e-3.
TEST_P(RingRnn, GlobalInhibitionIsExactInEveryPrecision) {
  for (const Precision precision : precisions_of(device(), DType::kF32)) {
    RingNetwork n(device(), DType::kF32, 6, 1, 2, 50), x(kCPU, DType::kF64, 6, 1, 2, 50);
    n.Wa.write(std::vector<double>(2 * 50 * 50, 0.0));
    n.Wo.write(std::vector<double>(50 * 50, 0.0));
    x = exact_copy(n);
    RingRnnInputs in = n.inputs(), exact_in = x.inputs();
    in.J0 = exact_in.J0 = -0.0123456789;
    in.alpha = exact_in.alpha = 1.0;
    RingRnnOptions options;
    options.activation = RingRnnActivation::kTanh;
    const RingStates exact(x), states(n);
    reference::ring_rnn_forward(exact_in, exact.outputs(), options);
    options.precision = precision;
    ring_rnn_forward(in, states.outputs(), options, context);
    EXPECT_LE(relative_error(states.out, exact.out), 5e-7) << static_cast<int>(precision);
  }
}

// Preferred angles are 2 pi i / N. With the end of the circle included, as linspace does it, the
// decoded angle is off by up to 1.7 degrees at N = 120.
TEST_P(RingRnn, DecodesTheAngleOfABump) {
  for (const std::int64_t N : {120, 256, 33}) {
    constexpr std::int64_t kAngles = 40;
    Dense states(device(), DType::kF32, {1, kAngles, N});
    Dense angle(device(), DType::kF32, {1, kAngles}),
        amplitude(device(), DType::kF32, {1, kAngles});
    std::vector<double> values, expected;
    for (std::int64_t t = 0; t < kAngles; ++t) {
      expected.push_back(std::remainder(0.173 * static_cast<double>(t), 2 * std::numbers::pi));
      for (std::int64_t i = 0; i < N; ++i) {
        const double place = 2 * std::numbers::pi * static_cast<double>(i) / static_cast<double>(N);
        values.push_back(1 + std::cos(place - expected.back()));
      }
    }
    states.write(values);
    ring_readout_forward(states.view(), angle.view(), amplitude.view(), context);
    const std::vector<double> got = angle.values(), length = amplitude.values();
    for (std::size_t t = 0; t < got.size(); ++t) {
      EXPECT_NEAR(std::remainder(got[t] - expected[t], 2 * std::numbers::pi), 0, 1e-6) << N;
      EXPECT_NEAR(length[t], static_cast<double>(N) / 2, 1e-4) << N;
    }
  }
}

// Asked of a forward, angle and amplitude are those of the state before it is rounded to `out`.
TEST_P(RingRnn, FusedReadoutIsTheReadoutOfTheState) {
  for (const DType dtype : {DType::kF64, DType::kF32, DType::kBF16, DType::kF16}) {
    RingNetwork n(device(), dtype, 5, 7, 2, 45);
    std::vector<double> bump;
    for (int i = 0; i < 5 * 45; ++i) bump.push_back(2 + 2 * std::cos(0.1 * i));
    n.r0.write(bump);
    const RingStates states(n);
    const DType w = wide(dtype);
    const Dense angle(device(), w, {5, 7}), amplitude(device(), w, {5, 7});
    RingRnnOutputs out = states.outputs();
    out.angle = angle.view();
    out.amplitude = amplitude.view();
    RingRnnInputs in = n.inputs();
    in.alpha = 0.05;  // the bump stays
    ring_rnn_forward(in, out, {.activation = RingRnnActivation::kTanh}, context);
    // h_n is the state itself, so this holds for 16-bit tensors too, at the last step.
    const Dense a(device(), w, {5, 1}), m(device(), w, {5, 1});
    TensorView last = states.h_n.view();
    last = contiguous(last.data, last.dtype, std::array<std::int64_t, 3>{5, 1, 45}, last.device);
    ring_readout_forward(last, a.view(), m.view(), context);
    const double limit = dtype == DType::kF64 ? 1e-13 : 1e-6;
    for (std::size_t b = 0; b < 5; ++b) {
      EXPECT_GT(m.values()[b], 5);
      EXPECT_NEAR(angle.values()[b * 7 + 6], a.values()[b], limit) << name_of(dtype);
      EXPECT_NEAR(amplitude.values()[b * 7 + 6] / m.values()[b], 1, limit) << name_of(dtype);
    }
  }
}

// Turning weights and initial state by some neurons turns the output with them, and the angle.
TEST_P(RingRnn, RotationEquivariance) {
  const std::int64_t N = 40, turn = 7;
  for (const Precision precision : precisions_of(device(), DType::kF32)) {
    const RingNetwork n(device(), DType::kF32, 3, 8, 2, N);
    RingNetwork turned(device(), DType::kF32, 3, 8, 2, N);
    const auto rotate = [&](const Dense& from, Dense& to, bool matrix) {
      const std::vector<double> v = from.values();
      std::vector<double> w(v.size());
      for (std::size_t i = 0; i < v.size(); ++i) {
        const auto k = static_cast<std::int64_t>(i);
        const std::int64_t row = matrix ? (k / N % N + turn) % N : k / N % N;
        w[static_cast<std::size_t>((k / N / N * N + row) * N + (k % N + turn) % N)] = v[i];
      }
      to.write(w);
    };
    turned.A.write(n.A.values());
    rotate(n.Wa, turned.Wa, true);
    rotate(n.Wo, turned.Wo, true);
    rotate(n.r0, turned.r0, false);
    const RingStates plain(n), other(turned);
    Dense expected(device(), DType::kF32, {3, 8, N});
    RingRnnOptions options;
    options.activation = RingRnnActivation::kGelu;
    options.precision = precision;
    ring_rnn_forward(n.inputs(), plain.outputs(), options, context);
    ring_rnn_forward(turned.inputs(), other.outputs(), options, context);
    const std::vector<double> o = plain.out.values();
    std::vector<double> w(o.size());
    for (std::size_t i = 0; i < o.size(); ++i) w[i / 40 * 40 + (i % 40 + 7) % 40] = o[i];
    expected.write(w);
    // The same operands, rounded alike, in another order.
    EXPECT_LE(relative_error(other.out, expected), 1e-6) << static_cast<int>(precision);
  }
}

// The forward keeps what the header says it keeps.
TEST_P(RingRnn, SavedHoldsDrivesOrStates) {
  const RingNetwork n(device(), DType::kF32, 4, 7, 2, 25), x = exact_copy(n);
  for (const std::int64_t checkpoint : {0, 1, 3}) {
    RingRnnOptions options;
    options.precision = Precision::kFp32;
    options.activation = RingRnnActivation::kSilu;
    options.checkpoint = checkpoint;
    const auto shape = ring_rnn_saved_shape(n.inputs(), options);
    EXPECT_EQ(shape[0], checkpoint == 0 ? 7 : (7 + checkpoint - 1) / checkpoint);
    EXPECT_EQ(shape[1], 4);
    EXPECT_EQ(shape[2], 25);
    const Dense saved(device(), DType::kF32, {shape[0], shape[1], shape[2]});
    const Dense exact(kCPU, DType::kF64, {shape[0], shape[1], shape[2]});
    const RingStates states(n), exact_states(x);
    RingRnnOutputs out = states.outputs(), exact_out = exact_states.outputs();
    out.saved = saved.view();
    exact_out.saved = exact.view();
    ring_rnn_forward(n.inputs(), out, options, context);
    options.precision = Precision::kAuto;
    reference::ring_rnn_forward(x.inputs(), exact_out, options);
    EXPECT_LE(relative_error(saved, exact), 1e-6) << checkpoint;
  }
}

// A size can be asked for before there is memory.
TEST_P(RingRnn, WorkspaceNeedsNoData) {
  const auto like = [&](std::initializer_list<std::int64_t> shape) {
    return contiguous(nullptr, DType::kF32, {shape.begin(), shape.size()}, device());
  };
  RingRnnInputs in;
  in.A = like({3, 4, 2});
  in.Wa = like({2, 8, 8});
  in.Wo = like({8, 8});
  in.r0 = like({3, 8});
  in.drive = like({3, 4, 8});
  RingRnnOutputs out;
  out.out = like({3, 4, 8});
  RingRnnGradients grad;
  grad.dA = in.A;
  grad.dWa = in.Wa;
  EXPECT_NO_THROW(ring_rnn_forward_workspace(in, out, {}));
  EXPECT_NO_THROW(ring_rnn_backward_workspace(in, grad, {}));
  EXPECT_NO_THROW(ring_rnn_pack_size(in.Wa, in.Wo, {}));
  EXPECT_NO_THROW(ring_rnn_saved_shape(in, {}));
}

// The original's benchmark network was dead: relu, J0 = -0.1 and weights about 0 gave y < 0
// everywhere, and any kernel with negative drive passed its check.
TEST(RingRnnCases, DynamicsAreAlive) {
  double least = 1;
  int counted = 0;
  for (std::uint64_t seed = 0; seed < 400; ++seed) {
    RingRnnProblem p = ring_rnn_fuzz_problem(seed);
    if (p.activation != RingRnnActivation::kRelu || p.special || p.N < 8) continue;
    if (p.B * p.T == 0) continue;
    const double share = ring_active_share(p);
    least = std::min(least, share);
    ++counted;
    EXPECT_GT(share, 0.05) << ring_rnn_case(p).params;
  }
  EXPECT_GT(counted, 40);
  ::testing::Test::RecordProperty("least_active_share", std::to_string(least));

  RingRnnProblem dead;  // what they ran
  dead.B = 4, dead.T = 20, dead.K = 16, dead.N = 128;
  dead.activation = RingRnnActivation::kRelu;
  dead.actions = RingRnnProblem::Actions::kVelocity;
  dead.gain = 0.1;
  EXPECT_LT(ring_active_share(dead), 0.01);
}

}  // namespace
}  // namespace annulus::testing
