// The problems of the readout: angle and length of a ring's population vector.
#include <algorithm>
#include <array>
#include <cmath>
#include <numbers>
#include <string>
#include <utility>

#include "annulus/cuda/memory.h"
#include "annulus/ring_rnn/test/cases.h"
#include "testing/bad_calls.h"
#include "testing/tensors.h"

namespace annulus::testing {

namespace {

using Expect = BadCall::Expect;

std::string describe(const RingReadoutProblem& p) {
  std::string s = "B=" + std::to_string(p.B) + " T=" + std::to_string(p.T) +
                  " N=" + std::to_string(p.N) + " dtype=" + name_of(p.dtype);
  if (!p.backward) return s + " grads=none";
  return s + " grads=dstates of" + (p.dangle ? " dangle" : "") +
         (p.damplitude ? " damplitude" : "");
}

// A bump somewhere on the ring with noise on it; now and then a state of nothing, or noise alone.
void draw_states(const RingReadoutProblem& p, Rng& rng, std::span<double> values) {
  const auto N = static_cast<std::size_t>(std::max<std::int64_t>(p.N, 1));
  double centre = 0, height = 0, noise = 0;
  for (std::size_t i = 0; i < values.size(); ++i) {
    if (i % N == 0) {
      centre = rng.uniform();
      const std::int64_t kind = rng.below(16);
      height = kind == 0 || kind == 1 ? 0 : 1 + rng.uniform();
      noise = kind == 0 ? 0 : 0.3;
    }
    const double turn = static_cast<double>(i % N) / static_cast<double>(N) - centre;
    values[i] =
        std::max(0.0, height * std::cos(2 * std::numbers::pi * turn)) + noise * rng.normal();
  }
}

}  // namespace

Case ring_readout_case(const RingReadoutProblem& p) {
  const DType wide = p.dtype == DType::kF64 ? p.dtype : DType::kF32;
  const TensorSpec states{"states", p.dtype, {p.B, p.T, p.N}};
  Case c;
  c.op = "ring_readout";
  c.params = describe(p);
  c.seed = p.seed;
  c.draw = [p](Rng& rng, const TensorSpec& spec, std::span<double> values) {
    if (spec.name == "states") return draw_states(p, rng, values);
    for (double& v : values) v = rng.normal();
  };

  Call forward;
  forward.name = "forward";
  forward.inputs = {states};
  forward.outputs = {{"angle", wide, {p.B, p.T}}, {"amplitude", wide, {p.B, p.T}}};
  forward.outputs[0].circular = true;
  forward.outputs[0].unpaired = !p.dangle;
  forward.outputs[1].unpaired = !p.damplitude;
  forward.run = [](Views in, Views out, Context& context) {
    ring_readout_forward(in[0], out[0], out[1], context);
  };
  forward.reference = [](Views in, Views out) {
    reference::ring_readout_forward(in[0], out[0], out[1]);
  };
  forward.baseline = [](Views in, Views out) {
    ring_readout_baseline_forward(in[0], out[0], out[1]);
  };
  forward.workspace = [](Views, Views) { return std::size_t{0}; };
  // The angle of a state whose vector nearly cancels is as uncertain as the vector.
  forward.terms = {"states"};
  const auto n = static_cast<double>(p.B) * static_cast<double>(p.T) * static_cast<double>(p.N);
  const double rows = 2.0 * static_cast<double>(p.B) * static_cast<double>(p.T);
  forward.flops = 4 * n;
  forward.bytes =
      n * static_cast<double>(size_of(p.dtype)) + rows * static_cast<double>(size_of(wide));
  c.calls.push_back(forward);
  if (!p.backward) return c;

  Call backward;
  backward.name = "backward";
  backward.inputs = {states};
  if (p.dangle) backward.inputs.push_back({"dangle", wide, {p.B, p.T}});
  if (p.damplitude) backward.inputs.push_back({"damplitude", wide, {p.B, p.T}});
  backward.outputs = {{"dstates", p.dtype, states.shape}};
  // One neuron, and two opposite ones, have the angle 0 or pi, which their rates do not move.
  backward.outputs[0].zero = p.N <= 2 && !p.damplitude;
  const auto dangle = [p](Views in) { return p.dangle ? in[1] : TensorView(); };
  const auto damplitude = [p](Views in) {
    return p.damplitude ? in[p.dangle ? 2 : 1] : TensorView();
  };
  backward.run = [=](Views in, Views out, Context& context) {
    ring_readout_backward(in[0], dangle(in), damplitude(in), out[0], context);
  };
  backward.reference = [=](Views in, Views out) {
    reference::ring_readout_backward(in[0], dangle(in), damplitude(in), out[0]);
  };
  backward.baseline = [=](Views in, Views out) {
    ring_readout_baseline_backward(in[0], dangle(in), damplitude(in), out[0]);
  };
  backward.workspace = forward.workspace;
  backward.terms = {"states", "dangle", "damplitude"};
  backward.flops = 8 * n;
  backward.bytes = forward.bytes + n * static_cast<double>(size_of(p.dtype));
  c.calls.push_back(backward);
  return c;
}

std::vector<Case> ring_readout_named_cases() {
  std::vector<Case> cases;
  const auto add = [&](const std::string& name, RingReadoutProblem p) -> Case& {
    p.seed = 2000 + cases.size();
    cases.push_back(ring_readout_case(p));
    cases.back().params = "'" + name + "' " + cases.back().params;
    return cases.back();
  };
  for (const DType dtype : {DType::kF64, DType::kF32, DType::kF16, DType::kBF16}) {
    add("every dtype", {.B = 3, .T = 5, .N = 37, .dtype = dtype});
    add("only dangle", {.B = 3, .T = 5, .N = 32, .dtype = dtype, .damplitude = false});
    add("only damplitude", {.B = 3, .T = 5, .N = 32, .dtype = dtype, .dangle = false});
    Case& zero = add("no activity: angle, amplitude and gradients are 0",
                     {.B = 2, .T = 2, .N = 9, .dtype = dtype});
    zero.draw = [](Rng& rng, const TensorSpec& spec, std::span<double> values) {
      for (double& v : values) v = spec.name == "states" ? 0 : rng.normal();
    };
    Case& nan = add("NaN stays in its row", {.B = 3, .T = 2, .N = 9, .dtype = dtype});
    nan.draw = [usual = nan.draw](Rng& rng, const TensorSpec& spec, std::span<double> values) {
      usual(rng, spec, values);
      if (spec.name == "states") values[3 * 9 + 4] = std::nan("");
    };
  }
  for (const std::int64_t N : {1, 2, 3, 4, 7, 8, 15, 16, 17, 31, 32, 33, 63, 64, 65, 120, 1000}) {
    add("N around vector widths", {.B = 2, .T = 3, .N = N});
  }
  add("B of 0", {.B = 0, .T = 3, .N = 4});
  add("T of 0", {.B = 2, .T = 0, .N = 4});
  add("N of 0: no vector, so 0", {.B = 2, .T = 3, .N = 0});
  add("many rows", {.B = 40, .T = 60, .N = 8});
  // The direction of -1: both ends of the range of angles are right.
  Case& west = add("angle pi", {.B = 2, .T = 3, .N = 8, .backward = false});
  west.draw = [](Rng&, const TensorSpec&, std::span<double> values) {
    for (std::size_t i = 0; i < values.size(); ++i) values[i] = i % 8 == 4 ? 1 : 0;
  };
  return cases;
}

RingReadoutProblem ring_readout_fuzz_problem(std::uint64_t seed) {
  static constexpr std::array<std::int64_t, 13> kEdges = {1,  2,  3,  4,  8,  15, 16,
                                                          17, 31, 32, 33, 64, 65};
  Rng rng(seed);
  RingReadoutProblem p;
  p.seed = seed;
  p.dtype = std::array{DType::kF64, DType::kF32, DType::kF16,
                       DType::kBF16}[static_cast<std::size_t>(rng.below(4))];
  p.B = rng.below(60) == 0 ? 0 : 1 + rng.below(6);
  p.T = rng.below(60) == 0 ? 0 : 1 + rng.below(rng.below(20) == 0 ? 200 : 12);
  p.N = rng.below(60) == 0  ? 0
        : rng.below(2) == 0 ? kEdges[static_cast<std::size_t>(rng.below(13))]
                            : 1 + rng.below(rng.below(10) == 0 ? 600 : 70);
  // The angle of one or two neurons is 0 or pi: a few such cases are enough.
  if ((p.N == 1 || p.N == 2) && Rng(seed ^ 0x11fe).below(8) != 0) p.N = 3;
  p.dangle = rng.below(4) != 0;
  p.damplitude = !p.dangle || rng.below(3) != 0;
  p.backward = rng.below(5) != 0;
  return p;
}

namespace {

// Good arguments, B = 2, T = 3, N = 4; a bad call spoils one.
class ReadoutAttempt : public AttemptTensors {
 public:
  explicit ReadoutAttempt(Device device) : AttemptTensors(device) {
    states = input("states", {2, 3, 4});
    dangle = input("dangle", {2, 3});
    damplitude = input("damplitude", {2, 3});
    angle = output("angle", {2, 3});
    amplitude = output("amplitude", {2, 3});
    dstates = output("dstates", {2, 3, 4});
  }
  void forward() { ring_readout_forward(states, angle, amplitude, context); }
  void backward() { ring_readout_backward(states, dangle, damplitude, dstates, context); }

  TensorView states, dangle, damplitude, angle, amplitude, dstates;
  Context context;
};

}  // namespace

std::vector<BadCall> ring_readout_bad_calls(Device device) {
  BadCallsOf<ReadoutAttempt> b;
  b.add("states is missing", "states", [](ReadoutAttempt& a) { a.states = {}, a.forward(); });
  b.add("angle is missing", "angle", [](ReadoutAttempt& a) { a.angle = {}, a.forward(); });
  b.add("amplitude is missing", "amplitude",
        [](ReadoutAttempt& a) { a.amplitude = {}, a.forward(); });
  b.add("dstates is missing", "dstates", [](ReadoutAttempt& a) { a.dstates = {}, a.backward(); });
  b.add("states has 2 dimensions", "states",
        [](ReadoutAttempt& a) { a.states.rank = 2, a.forward(); });
  b.add("angle has 1 dimension", "angle", [](ReadoutAttempt& a) { a.angle.rank = 1, a.forward(); });
  b.add("dstates has 2 dimensions", "dstates",
        [](ReadoutAttempt& a) { a.dstates.rank = 2, a.backward(); });
  b.add("states is i64", "states",
        [](ReadoutAttempt& a) { a.states.dtype = DType::kI64, a.forward(); });
  b.add("states is bool", "states",
        [](ReadoutAttempt& a) { a.states.dtype = DType::kBool, a.backward(); });
  b.add("angle is bf16", "angle",
        [](ReadoutAttempt& a) { a.angle.dtype = DType::kBF16, a.forward(); });
  b.add("amplitude is f64 beside f32", "amplitude",
        [](ReadoutAttempt& a) { a.amplitude.dtype = DType::kF64, a.forward(); });
  b.add("dangle is f16", "dangle",
        [](ReadoutAttempt& a) { a.dangle.dtype = DType::kF16, a.backward(); });
  b.add("dstates has another dtype than states", "dstates",
        [](ReadoutAttempt& a) { a.dstates.dtype = DType::kBF16, a.backward(); });
  b.add("angle on another device", "angle",
        [](ReadoutAttempt& a) { a.angle.device = a.other_device(), a.forward(); });
  b.add("dstates on another device", "dstates",
        [](ReadoutAttempt& a) { a.dstates.device = a.other_device(), a.backward(); });
  b.add("damplitude on another device", "damplitude",
        [](ReadoutAttempt& a) { a.damplitude.device = a.other_device(), a.backward(); });
  b.add("states is a null pointer", "states",
        [](ReadoutAttempt& a) { a.states.data = nullptr, a.forward(); });
  b.add("amplitude is a null pointer", "amplitude",
        [](ReadoutAttempt& a) { a.amplitude.data = nullptr, a.forward(); });
  b.add("negative number of steps", "states",
        [](ReadoutAttempt& a) { a.states.shape[1] = -3, a.forward(); });
  b.add("sizes whose product is beyond 2^63", "states",
        [](ReadoutAttempt& a) { a.states.shape[0] = a.states.shape[1] = 1ll << 40, a.forward(); });
  b.add("states is not aligned to its elements", "states", [](ReadoutAttempt& a) {
    a.states.data = static_cast<std::byte*>(a.states.data) + 1, a.forward();
  });
  b.add("angle is (T, B)", "angle",
        [](ReadoutAttempt& a) { std::swap(a.angle.shape[0], a.angle.shape[1]), a.forward(); });
  b.add("amplitude has the wrong shape", "amplitude",
        [](ReadoutAttempt& a) { a.amplitude.shape[1] = 2, a.forward(); });
  b.add("dangle has the wrong shape", "dangle",
        [](ReadoutAttempt& a) { a.dangle.shape[0] = 1, a.backward(); });
  b.add("dstates has the wrong shape", "dstates",
        [](ReadoutAttempt& a) { a.dstates.shape[2] = 3, a.backward(); });
  b.add("angle has stride 0", "angle",
        [](ReadoutAttempt& a) { a.angle.stride[0] = 0, a.forward(); });
  b.add("dstates has stride 0", "dstates",
        [](ReadoutAttempt& a) { a.dstates.stride[1] = 0, a.backward(); });
  b.add("angle overlaps states", "angle",
        [](ReadoutAttempt& a) { a.states.data = a.angle.data, a.forward(); });
  b.add("angle and amplitude overlap", "amplitude",
        [](ReadoutAttempt& a) { a.amplitude.data = a.angle.data, a.forward(); });
  b.add("dstates is states", "dstates",
        [](ReadoutAttempt& a) { a.states.data = a.dstates.data, a.backward(); });
  b.add("dstates overlaps dangle", "dstates",
        [](ReadoutAttempt& a) { a.dangle.data = a.dstates.data, a.backward(); });
  if (device.type == DeviceType::kCPU && !cuda::built()) {
    b.add(
        "CUDA tensors in a build without CUDA", "CUDA",
        [](ReadoutAttempt& a) {
          a.states.device = a.angle.device = a.amplitude.device = cuda_device(0);
          a.forward();
        },
        Expect::kNotSupported);
  }
  return b.take();
}

namespace {
const CasesRegistration kReadoutRegistration(
    {.op = "ring_readout",
     .named = ring_readout_named_cases,
     .fuzz = [](std::uint64_t seed) { return ring_readout_case(ring_readout_fuzz_problem(seed)); },
     .bad_calls = ring_readout_bad_calls});
}  // namespace

}  // namespace annulus::testing
