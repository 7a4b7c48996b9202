// The problems of the readout: angle and length of a ring's population vector.
#include <algorithm>
#include <array>
#include <cmath>
#include <numbers>
#include <string>
#include <utility>

#include "annulus/ring_rnn/test/cases.h"
#include "testing/memory/tensors.h"

namespace annulus::testing {

namespace {

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
  const auto of = [](auto f) {
    return [f](Views in, Views out, auto&... context) { f(in[0], out[0], out[1], context...); };
  };
  forward.run = of(ring_readout_forward);
  forward.reference = of(reference::ring_readout_forward);
  forward.baseline = of(ring_readout_baseline_forward);
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
  // f(states, dangle, damplitude, dstates) and what comes after them.
  const auto on = [specs = backward.inputs](auto f) {
    return [=](Views in, Views out, auto&... context) {
      f(in[0], pick(in, specs, "dangle"), pick(in, specs, "damplitude"), out[0], context...);
    };
  };
  backward.run = on(ring_readout_backward);
  backward.reference = on(reference::ring_readout_backward);
  backward.baseline = on(ring_readout_baseline_backward);
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
const CasesRegistration kReadoutRegistration(
    {.op = "ring_readout",
     .named = ring_readout_named_cases,
     .fuzz = [](std::uint64_t seed) { return ring_readout_case(ring_readout_fuzz_problem(seed)); },
     .sanitized = "many rows"});
}  // namespace

}  // namespace annulus::testing
