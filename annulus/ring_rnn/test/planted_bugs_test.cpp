// The test of the tests, with the ring RNN: its definition with one bug at a time. The runner must
// report every one, by the check named.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <complex>
#include <numbers>
#include <string>
#include <vector>

#include "annulus/core/dtype.h"
#include "annulus/ring_rnn/test/cases.h"
#include "testing/planted_bugs.h"

namespace annulus::testing {
namespace {

using P = RingRnnProblem;
using std::numbers::pi;

constexpr std::size_t B = 3, T = 5, K = 2, N = 21;
constexpr double kJ1 = 0.7;

RingRnnProblem problem() {
  P p;
  p.B = B, p.T = T, p.K = K, p.N = N;
  p.activation = RingRnnActivation::kGelu;
  p.J0 = -0.03, p.J1 = kJ1, p.alpha = 0.4;
  p.alpha_form = P::Parameter::kPerNeuron;
  p.drive = p.reset = p.mask = p.h_n = p.dh_n = p.readout = true;
  p.gain = 0.6;
  p.gradients = kRingAllGradients;
  p.seed = 6;
  return p;
}

Case small(void (*change)(P&) = [](P&) {}) {
  P p = problem();
  change(p);
  return sound(ring_rnn_case(p));
}

// One sample, one step: then every tensor but weights and actions has N elements, s is r0, and the
// gradient that comes in, l, is dout + dh_n.
Case one_step(void (*change)(P&) = [](P&) {}) {
  P p = problem();
  p.B = p.T = 1;
  p.reset = p.mask = false;
  change(p);
  return sound(ring_rnn_case(p));
}

void in_bf16(P& p) { p.dtype = DType::kBF16, p.precision = Precision::kFp32; }
double to_bf16(double v) {
  return static_cast<double>(static_cast<float>(bfloat16(static_cast<float>(v))));
}

std::slice row(std::size_t i) { return {i * N, N, 1}; }

Vector transposed(const Vector& matrices) {
  Vector turned(matrices.size());
  for (std::size_t i = 0; i < turned.size(); ++i) {
    turned[i / N / N * N * N + i % N * N + i / N % N] = matrices[i];
  }
  return turned;
}

std::complex<double> population(const Vector& state, double neurons) {
  std::complex<double> sum = 0;
  for (std::size_t i = 0; i < N; ++i) {
    sum += std::polar(state[i], 2 * pi * static_cast<double>(i) / neurons);
  }
  return sum;
}

// phi with 1 / sqrt(norm).
double gelu_slope(double y, double norm) {
  return 0.5 * std::erfc(-y / std::numbers::sqrt2) + y * std::exp(-0.5 * y * y) / std::sqrt(norm);
}

// dA of one step, g . Wa x with x for s.
Vector dA_with(const Vector& x, Tensors& t) {
  Vector dA(K);
  for (std::size_t i = 0; i < K * N * N; ++i) {
    dA[i / N / N] += t["ddrive"][i / N % N] * t["Wa"][i] * x[i % N];
  }
  return dA;
}

std::vector<Planted> wrong_forwards() {
  return {
      {"output in (T, B, N)", "forward out", small(), after([](Tensors& t) {
         const Vector out = t["out"];
         for (std::size_t i = 0; i < B * T; ++i) t["out"][row(i % T * B + i / T)] = out[row(i)];
       })},
      {"last tile of neurons dropped", "forward out", small(), given([](Tensors& t) {
         for (Vector* W : {&t["Wa"], &t["Wo"]}) {
           for (std::size_t i = 0; i < W->size(); ++i) (*W)[i] *= i % N < 16 ? 1 : 0;
         }
       })},
      {"state updated while it is read", "forward out", one_step(),
       [](const Right& right, Tensors& t) {
         const Vector alpha = t["alpha"];
         for (std::size_t i = 0; i < N; ++i, t["r0"] = t["h_n"]) {  // one neuron after the other
           t["alpha"] = 0.0;
           t["alpha"][i] = alpha[i];
           right(t);
         }
       }},
      {"state rounded to bf16 between steps", "forward h_n", one_step(in_bf16),
       after([](Tensors& t) { t["h_n"] = t["h_n"].apply(to_bf16); })},
      {"reset after the step", "forward out", small(), given([](Tensors& t) {
         t["reset"] = t["reset"].shift(-1);
         t["reset"][std::slice(0, B, T)] = 0.0;
       })},
      {"reset to zero", "forward out", small([](P& p) { p.reset_state = true; }),
       given([](Tensors& t) { t["reset_state"] = 0.0; })},
      {"mask ignored", "forward out", small(), given([](Tensors& t) { t["mask"] = 1.0; })},
      {"J0 folded into Wo, so scaled by J1", "forward out",
       small([](P& p) { p.J0_form = P::Parameter::kTensor; }),
       given([](Tensors& t) { t["J0"] *= kJ1; })},
      {"drive added after the activation", "forward out", one_step(),
       [](const Right& right, Tensors& t) {
         const Vector drive = t["drive"];
         t["drive"] = 0.0;
         right(t);
         t["out"] += t["alpha"] * drive;
       }},
      {"a channel skipped because the first sample's action is zero", "forward out",
       small([](P& p) { p.actions = P::Actions::kSparse; }), given([](Tensors& t) {
         Vector& A = t["A"];
         for (std::size_t i = 0; i < A.size(); ++i) A[i] *= A[i % (T * K)] == 0 ? 0 : 1;
       })},
      {"the first alpha for every neuron", "forward out", small(),
       given([](Tensors& t) { t["alpha"] = double{t["alpha"][0]}; })},
      {"h_n is the state before the last step", "forward h_n", small(), after([](Tensors& t) {
         for (std::size_t b = 0; b < B; ++b) t["h_n"][row(b)] = t["out"][row(b * T + T - 2)];
       })},
      {"preferred angles of linspace", "forward angle", small(), after([](Tensors& t) {
         for (std::size_t i = 0; i < B * T; ++i) {
           t["angle"][i] = std::arg(population(t["out"][row(i)], N - 1));
         }
       })},
      {"readout of the rounded state", "forward amplitude", small(in_bf16), after([](Tensors& t) {
         const Vector rounded = t["out"].apply(to_bf16);
         for (std::size_t i = 0; i < B * T; ++i) {
           t["amplitude"][i] = std::abs(population(rounded[row(i)], N));
         }
       })},
      {"an angle from 0 to 2 pi", "outside of [-pi, pi]",
       drawing(small([](P& p) { p.drive = false; }), "r0",
               [](std::size_t i, double) { return i % N == 16 ? 3 : 0; }),  // at three quarters
       after([](Tensors& t) {
         t["angle"] = t["angle"].apply([](double v) { return v < 0 ? v + 2 * pi : v; });
       })},
  };
}

std::vector<Planted> wrong_backwards() {
  const auto zero = [](std::size_t, double) { return 0.0; };
  Case kinked = small([](P& p) { p.activation = RingRnnActivation::kRelu; });
  kinked = drawing(drawing(kinked, "r0", zero), "drive", zero);
  kinked.refine = nullptr;
  return {
      {"gelu' with 1 / sqrt(pi)", "backward dr0", one_step(), given([](Tensors& t) {
         for (std::size_t i = 0; i < N; ++i) {
           const double y = t["saved"][i];
           const double factor = gelu_slope(y, pi) / gelu_slope(y, 2 * pi);
           t["dout"][i] *= factor;
           t["dh_n"][i] *= factor;
         }
       })},
      {"relu' is 1 at exactly 0", "backward ddrive", kinked,
       given([](Tensors& t) { t["drive"] += 1e-300; })},
      {"mask ignored in the backward", "backward ddrive", small(),
       given([](Tensors& t) { t["mask"] = 1.0; })},
      {"alpha missing in g", "backward ddrive", one_step(), given([](Tensors& t) {
         t["dout"] /= t["alpha"];
         t["dh_n"] /= t["alpha"];
       })},
      {"leak missing in the backward", "backward dr0", one_step(),
       after([](Tensors& t) { t["dr0"] -= (1.0 - t["alpha"]) * (t["dout"] + t["dh_n"]); })},
      {"dA without its last neuron", "backward dA", one_step(), after([](Tensors& t) {
         t["r0"][N - 1] = 0;
         t["dA"] = dA_with(t["r0"], t);
       })},
      {"dA of the state after the step", "backward dA", one_step(),
       after([](Tensors& t) { t["dA"] = dA_with(t["out"], t); })},
      {"dWa transposed", "backward dWa", small(),
       after([](Tensors& t) { t["dWa"] = transposed(t["dWa"]); })},
      {"dWa without the action", "backward dWa", small(), after([](Tensors& t) {
         for (std::size_t i = 0; i < K * N * N; ++i) t["dWa"][i] = t["dWo"][i % (N * N)] / kJ1;
       })},
      {"dWo without J1", "backward dWo", small(), after([](Tensors& t) { t["dWo"] /= kJ1; })},
      {"dJ0 of the last sample only", "backward dJ0", small(),
       [](const Right& right, Tensors& t) {
         right(t);
         Tensors last = t;
         last["dout"][std::slice(0, (B - 1) * T * N, 1)] = 0.0;
         last["dh_n"][std::slice(0, (B - 1) * N, 1)] = 0.0;
         right(last);
         t["dJ0"] = last["dJ0"];
       }},
      {"dJ1 with Wo transposed", "backward dJ1", small(), after([](Tensors& t) {
         // dJ1 is the sum of Wo g s^T, and dWo that of J1 g s^T.
         t["dJ1"] = (transposed(t["Wo"]) * t["dWo"]).sum() / kJ1;
       })},
      {"dalpha without the state", "backward dalpha", one_step(),
       after([](Tensors& t) { t["dalpha"] += (t["dout"] + t["dh_n"]) * t["r0"]; })},
      {"dr0 without what flows back through resets", "backward dr0", small(),
       [](const Right&, Tensors& t) {
         t["reset_state"] = t["r0"];
         define(small([](P& p) { p.reset_state = true; }).calls[kBackward], t);
       }},
      {"gradient carried on across a reset", "backward dr0", one_step([](P& p) { p.reset = true; }),
       after([](Tensors& t) { t["dr0"] *= 1 + t["reset"][0]; })},
      {"dh_n ignored", "backward dr0", small(), given([](Tensors& t) { t["dh_n"] = 0.0; })},
      {"checkpoint of the stretch before", "backward dWo",
       one_step([](P& p) { p.T = 2, p.checkpoint = 1; }), after([](Tensors& t) {
         for (std::size_t i = 0; i < N * N; ++i) {  // the second step from r0, too
           const double stale = t["r0"][i % N] - t["out"][i % N];
           t["dWo"][i] += kJ1 * t["ddrive"][N + i / N] * stale;
         }
       })},
  };
}

// Runs the naive program of another precision in the place of ours.
Case with_precision(Precision asked, Precision used, DType dtype = DType::kF32) {
  P p = problem();
  p.dtype = dtype;
  p.precision = used;
  const Case naive = ring_rnn_case(p);
  p.precision = asked;
  Case c = sound(ring_rnn_case(p));
  for (std::size_t i = 0; i < c.calls.size(); ++i) {
    c.calls[i].run = [call = naive.calls[i]](Views in, Views out, Context&) {
      Values inputs;
      for (const TensorView& v : in) inputs.push_back(load_values<double>(v));
      const Values outputs = run_baseline(call, inputs);
      for (std::size_t o = 0; o < out.size(); ++o) store_values(out[o], outputs[o]);
    };
  }
  return c;
}

std::vector<Planted> wrong_precisions() {
  return {
      {"bf16 where fp32 was asked for", "forward out",
       with_precision(Precision::kFp32, Precision::kBf16)},
      {"bf16 where bf16x3 was asked for", "backward dWa",
       with_precision(Precision::kBf16x3, Precision::kBf16)},
      {"bf16x3 where fp32 was asked for", "ratio to baseline",
       with_precision(Precision::kFp32, Precision::kBf16x3)},
      {"bf16x3 where bf16x6 was asked for", "backward dWa",
       with_precision(Precision::kBf16x6, Precision::kBf16x3)},
      {"bf16 for f16 tensors", "ratio to baseline",
       with_precision(Precision::kAuto, Precision::kBf16, DType::kF16)},
  };
}

TEST(PlantedRingRnnBugs, EveryOneIsKilled) {
  expect_all_killed(wrong_forwards());
  expect_all_killed(wrong_backwards());
  expect_all_killed(wrong_precisions());
}

TEST(PlantedRingRnnBugs, WithoutABugNothingIsReported) {
  for (const DType dtype : {DType::kF32, DType::kBF16}) {
    for (const auto f : {RingRnnActivation::kRelu, RingRnnActivation::kGelu,
                         RingRnnActivation::kTanh, RingRnnActivation::kSilu}) {
      P p = problem();
      p.dtype = dtype;
      p.activation = f;
      expect_sound(sound(ring_rnn_case(p)));
      p.reset_state = true;
      p.checkpoint = 2;
      p.alpha_form = P::Parameter::kTensor;
      p.actions = P::Actions::kSparse;
      expect_sound(sound(ring_rnn_case(p)));
    }
  }
  expect_sound(one_step());
  expect_sound(with_precision(Precision::kBf16x3, Precision::kBf16x3));
  expect_sound(with_precision(Precision::kBf16, Precision::kBf16));
  expect_sound(with_precision(Precision::kBf16x3, Precision::kFp32));
  expect_sound(with_precision(Precision::kAuto, Precision::kFp32, DType::kF16));
}

}  // namespace
}  // namespace annulus::testing
