// The values of a ring RNN problem: dynamics that stay alive and do not explode, actions with zeros
// of every kind, and relu units that stand clear of their kink.
#include <algorithm>
#include <cmath>
#include <limits>
#include <numbers>
#include <string>

#include "annulus/ring_rnn/test/cases.h"
#include "testing/memory/tensors.h"
#include "testing/reference.h"

namespace annulus::testing {

namespace {

using Parameter = RingRnnProblem::Parameter;
using Actions = RingRnnProblem::Actions;

std::size_t extent(const TensorSpec& spec, std::size_t dim) {
  return static_cast<std::size_t>(std::max<std::int64_t>(spec.shape[dim], 1));
}

void draw_actions(Rng& rng, const RingRnnProblem& p, const TensorSpec& spec,
                  std::span<double> values) {
  const std::size_t K = extent(spec, 2), T = extent(spec, 1);
  const auto live = static_cast<std::size_t>(ring_live_channels(p));
  double velocity = 0;
  std::size_t hot = 0;
  for (std::size_t i = 0; i < values.size(); ++i) {
    const std::size_t k = i % K, b = i / K / T;
    if (k == 0) {
      velocity = rng.uniform() < 0.56 ? 0 : 2 * rng.uniform() - 1;
      hot = static_cast<std::size_t>(rng.below(static_cast<std::int64_t>(K)));
    }
    const double n = rng.normal();
    const double u = rng.uniform();
    double v = n;
    if (p.actions == Actions::kSparse && u < 0.6) v = 0;
    if (p.actions == Actions::kOneHot) v = k == hot ? 1 : 0;
    if (p.actions == Actions::kBySample && b % K != k) v = 0;
    if (p.actions == Actions::kVelocity) {
      const double place =
          K > 1 ? 2.0 * static_cast<double>(k) / static_cast<double>(K - 1) - 1 : 1;
      v = std::max(0.0, velocity * place);
    }
    values[i] = k < live ? v : 0;
  }
}

// The standard deviation of a weight: the K + 1 matrices together have the gain, whatever their
// share.
double weight_size(const RingRnnProblem& p) {
  double mixed = p.J1 * p.J1;  // the mean of the sum of c_k^2
  const auto live = static_cast<double>(ring_live_channels(p));
  switch (p.actions) {
    case Actions::kDense:
      mixed += live;
      break;
    case Actions::kSparse:
      mixed += 0.4 * live;
      break;
    case Actions::kVelocity:
      mixed += 0.025 * live;
      break;
    case Actions::kOneHot:
    case Actions::kBySample:
      mixed += live > 0 ? 1 : 0;
      break;
    case Actions::kZero:
      break;
  }
  return p.gain / std::sqrt(std::max(mixed, 0.01) * static_cast<double>(p.N));
}

// Of the neuron that element i of a tensor (..., N) belongs to. Where an angle is decoded, state and
// drive have it: the angle of a state without a bump is made of roundings.
double bump(const RingRnnProblem& p, std::size_t i) {
  const auto N = static_cast<std::size_t>(std::max<std::int64_t>(p.N, 1));
  const double turn = static_cast<double>(i % N) / static_cast<double>(N);
  return std::max(0.0, 2 * std::cos(2 * std::numbers::pi * turn));
}

double state_value(Rng& rng, const RingRnnProblem& p, std::size_t i) {
  const double n = rng.normal();
  if (p.readout) return bump(p, i) + 0.3 * std::abs(n);
  return p.activation == RingRnnActivation::kRelu ? std::abs(n) : n;
}

void spoil(Rng& rng, const RingRnnProblem& p, const TensorSpec& spec, std::span<double> values) {
  if (values.empty()) return;
  // The last sample of r0 or of A, or anything in the drive: elsewhere all stays finite.
  const std::size_t sample = values.size() / extent(spec, 0);
  const std::size_t i =
      values.size() - 1 - static_cast<std::size_t>(rng.below(static_cast<std::int64_t>(sample)));
  if (spec.name == "drive") {
    values[i] = p.activation == RingRnnActivation::kTanh && rng.below(2)
                    ? std::numeric_limits<double>::infinity()
                    : 100 * rng.normal();
  } else if (p.seed % 2 == (spec.name == "A" ? 0 : 1)) {
    values[i] = std::numeric_limits<double>::quiet_NaN();
  }
}

}  // namespace

std::int64_t ring_live_channels(const RingRnnProblem& p) {
  if (p.actions == Actions::kZero) return 0;
  return p.live < 0 ? p.K : std::min(p.live, p.K);
}

void ring_rnn_draw(const RingRnnProblem& p, Rng& rng, const TensorSpec& spec,
                   std::span<double> values) {
  if (spec.name == "A") {
    draw_actions(rng, p, spec, values);
  } else if (spec.name == "Wa" || spec.name == "Wo") {
    const double size = weight_size(p);
    for (double& v : values) v = size * rng.normal();
  } else if (spec.name == "r0" || spec.name == "reset_state") {
    for (std::size_t i = 0; i < values.size(); ++i) values[i] = state_value(rng, p, i);
  } else if (spec.name == "J0" || spec.name == "J1") {
    for (double& v : values) v = spec.name == "J0" ? p.J0 : p.J1;
  } else if (spec.name == "alpha") {
    const bool spread = p.alpha_form == Parameter::kPerNeuron;
    for (double& v : values) v = p.alpha * (spread ? 0.4 + 0.6 * rng.uniform() : 1);
  } else if (spec.name == "drive") {
    // Above 0 more often than below: relu units stay alive under it.
    const double mean = p.activation == RingRnnActivation::kRelu ? 0.3 : 0;
    for (std::size_t i = 0; i < values.size(); ++i) {
      values[i] = p.readout ? bump(p, i) + 0.3 * rng.normal() : mean + 0.7 * rng.normal();
    }
  } else if (spec.name == "reset") {
    for (double& v : values) v = rng.uniform() < 0.2 ? 1 : 0;
    // Every second sample has one, for without a reset reset_state has a gradient of zeros; and not in
    // the first of several steps, for r0 would have one then.
    const std::size_t T = extent(spec, 1);
    for (std::size_t first = 0; first + T <= values.size(); first += 2 * T) {
      const std::span<double> sample = values.subspan(first, T);
      if (std::find(sample.begin(), sample.end(), 1.0) == sample.end()) sample[T / 2] = 1;
    }
  } else if (spec.name == "mask") {
    // Sequences of different lengths, or steps left out anywhere.
    const bool lengths = Rng(p.seed ^ 0x3a5c).below(2) == 0;
    const std::size_t T = extent(spec, 1);
    std::int64_t length = 0;
    for (std::size_t i = 0; i < values.size(); ++i) {
      if (i % T == 0) length = 1 + rng.below(static_cast<std::int64_t>(T));
      const bool in = static_cast<std::int64_t>(i % T) < length;
      values[i] = (lengths ? in : rng.uniform() < 0.8) ? 1 : 0;
    }
  } else {
    for (double& v : values) v = rng.normal();
  }
  const bool spoilt = spec.name == "A" || spec.name == "r0" || spec.name == "drive";
  if (p.special && spoilt) spoil(rng, p, spec, values);
}

namespace {

// y of every step, (T, B, N), in double; `inputs` are those of the forward, in its order.
std::vector<double> exact_y(const RingRnnProblem& p, const Values& inputs) {
  RingRnnProblem q = p;
  q.gradients = kRingDr0;  // so that the forward saves
  q.checkpoint = 0;
  q.h_n = q.readout = false;
  const Call forward = ring_rnn_case(q).calls[0];
  const Values own(inputs.begin(),
                   inputs.begin() + static_cast<std::ptrdiff_t>(forward.inputs.size()));
  return run_reference(forward, own).back();
}

// The relative error of an operand, on the device that has the larger.
double rounding_of(const RingRnnProblem& p) {
  const auto on = [&](Device device) {
    const int bits = facts_of(ring_resolved_precision(p, device)).mantissa_bits;
    if (bits < 23) return std::ldexp(1.0, -1 - bits);
    return p.dtype == DType::kF64 ? 0x1p-45 : 0x1p-20;
  };
  return std::max(on(kCPU), on(cuda_device(0)));
}

void keep_off_kink(const RingRnnProblem& p, std::vector<double>& drive, const Values& inputs) {
  const auto B = static_cast<std::size_t>(p.B), T = static_cast<std::size_t>(p.T),
             N = static_cast<std::size_t>(p.N);
  // A push changes what follows it, so look again until all is well: every pass settles at least
  // one step more.
  for (std::size_t pass = 0; pass <= T; ++pass) {
    const std::vector<double> y = exact_y(p, inputs);
    bool moved = false;
    for (std::size_t row = 0; row < T * B; ++row) {
      const std::size_t t = row / B, b = row % B;
      // In units of the row: one that grows over the steps must not push those that have not.
      double squares = 0;
      for (std::size_t i = 0; i < N; ++i) squares += y[row * N + i] * y[row * N + i];
      const double size = 0.5 + std::sqrt(squares / static_cast<double>(N));
      const double margin = 8 * rounding_of(p) * size;
      for (std::size_t i = 0; i < N; ++i) {
        const double v = y[row * N + i];
        if (!(std::abs(v) < margin)) continue;
        drive[(b * T + t) * N + i] += v < 0 ? -2 * margin : 2 * margin;
        moved = true;
      }
    }
    if (!moved) return;
    round_to(p.dtype, drive);
  }
}

// Some state has only units whose slope is small beside 1: a root mean square below a tenth.
bool is_saturated(const RingRnnProblem& p, const std::vector<double>& y) {
  const auto N = static_cast<std::size_t>(p.N);
  for (std::size_t row = 0; row + N <= y.size(); row += N) {
    double squares = 0;
    for (std::size_t i = 0; i < N; ++i) squares += std::pow(std::cosh(y[row + i]), -4);
    if (squares < 0.01 * static_cast<double>(N)) return true;
  }
  return false;
}

}  // namespace

void ring_rnn_refine(const RingRnnProblem& p, std::vector<std::vector<double>>& inputs) {
  if (p.N == 0 || p.special) return;
  const std::vector<TensorSpec> specs = ring_rnn_case(p).calls[0].inputs;
  const auto of = [&](const std::string& name) -> std::vector<double>* {
    for (std::size_t i = 0; i < specs.size(); ++i) {
      if (specs[i].name == name) return &inputs[i];
    }
    return nullptr;
  };
  if (p.activation == RingRnnActivation::kRelu && p.drive) keep_off_kink(p, *of("drive"), inputs);
  if (p.activation != RingRnnActivation::kTanh) return;
  for (int pass = 0; pass < 20 && is_saturated(p, exact_y(p, inputs)); ++pass) {
    for (const char* name : {"Wa", "Wo", "drive"}) {
      std::vector<double>* values = of(name);
      if (values == nullptr) continue;
      for (double& v : *values) v *= 0.7;
      round_to(p.dtype, *values);
    }
  }
}

double ring_active_share(const RingRnnProblem& p) {
  const Case c = ring_rnn_case(p);
  const std::vector<double> y = exact_y(p, draw_inputs(c, c.calls[0]));
  if (y.empty()) return 0;
  const auto active = std::count_if(y.begin(), y.end(), [](double v) { return v > 0; });
  return static_cast<double>(active) / static_cast<double>(y.size());
}

}  // namespace annulus::testing
