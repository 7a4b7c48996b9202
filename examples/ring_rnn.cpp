// A ring attractor by hand, from C++ and with nothing but the library: a bump of activity that
// integrates angular velocity, run as one call, streamed step by step with packed weights, and
// differentiated.
#include <algorithm>
#include <array>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <exception>
#include <numbers>
#include <vector>

#include "annulus/annulus.h"

namespace {

constexpr std::int64_t kBatch = 2, kSteps = 50, kActions = 2, kNeurons = 64;
constexpr double kAlpha = 0.15, kGain = 3;

std::size_t count(std::initializer_list<std::int64_t> shape) {
  std::int64_t n = 1;
  for (const std::int64_t extent : shape) n *= extent;
  return static_cast<std::size_t>(n);
}

double angle_of(std::int64_t neuron) {
  return 2 * std::numbers::pi * static_cast<double>(neuron) / static_cast<double>(kNeurons);
}

// Wo keeps a bump where it is: each neuron is driven by the cosine of the distance. The two action
// matrices add a sine, to one side and to the other, which turns the bump.
struct Ring {
  std::vector<double> A = std::vector<double>(count({kBatch, kSteps, kActions}));
  std::vector<double> Wa = std::vector<double>(count({kActions, kNeurons, kNeurons}));
  std::vector<double> Wo = std::vector<double>(count({kNeurons, kNeurons}));
  std::vector<double> r0 = std::vector<double>(count({kBatch, kNeurons}));
  std::vector<double> turned = std::vector<double>(kBatch);  // the sum of the velocities

  Ring() {
    const double scale = 2 * kGain / static_cast<double>(kNeurons);
    for (std::int64_t i = 0; i < kNeurons; ++i) {
      for (std::int64_t j = 0; j < kNeurons; ++j) {
        const auto at = static_cast<std::size_t>(i * kNeurons + j);
        Wo[at] = scale * std::cos(angle_of(i) - angle_of(j));
        Wa[at] = scale * std::sin(angle_of(i) - angle_of(j));
        Wa[at + Wo.size()] = -Wa[at];
      }
    }
    for (std::int64_t b = 0; b < kBatch; ++b) {
      for (std::int64_t i = 0; i < kNeurons; ++i) {
        r0[static_cast<std::size_t>(b * kNeurons + i)] = std::tanh(kGain * std::cos(angle_of(i)));
      }
      for (std::int64_t t = 0; t < kSteps; ++t) {
        const double phase = static_cast<double>(t) / 8 + static_cast<double>(b);
        const double velocity = 0.03 * (1 + std::sin(phase)) * (b == 0 ? 1 : -1);
        turned[static_cast<std::size_t>(b)] += velocity;
        // A step moves the state alpha of the way to a bump that stands ahead by atan(action).
        const double action = std::tan(velocity / kAlpha);
        const auto at = static_cast<std::size_t>((b * kSteps + t) * kActions);
        A[at] = std::max(action, 0.0);
        A[at + 1] = std::max(-action, 0.0);
      }
    }
  }

  annulus::RingRnnInputs inputs() const {
    annulus::RingRnnInputs in;
    in.A = annulus::contiguous(A.data(), {kBatch, kSteps, kActions});
    in.Wa = annulus::contiguous(Wa.data(), {kActions, kNeurons, kNeurons});
    in.Wo = annulus::contiguous(Wo.data(), {kNeurons, kNeurons});
    in.r0 = annulus::contiguous(r0.data(), {kBatch, kNeurons});
    in.J0 = 0.0;
    in.J1 = 1.0;
    in.alpha = kAlpha;
    return in;
  }
};

annulus::RingRnnOptions options() {
  annulus::RingRnnOptions o;
  o.activation = annulus::RingRnnActivation::kTanh;
  return o;
}

// The decoded angles of every step, (B, T); `out` receives the states, (B, T, N).
std::vector<double> decode(const Ring& ring, std::vector<double>& out, annulus::Context& context) {
  std::vector<double> angle(count({kBatch, kSteps})), amplitude(angle.size());
  annulus::RingRnnOutputs outputs;
  outputs.out = annulus::contiguous(out.data(), {kBatch, kSteps, kNeurons});
  outputs.angle = annulus::contiguous(angle.data(), {kBatch, kSteps});
  outputs.amplitude = annulus::contiguous(amplitude.data(), {kBatch, kSteps});
  annulus::ring_rnn_forward(ring.inputs(), outputs, options(), context);
  return angle;
}

double around(double angle) { return std::remainder(angle, 2 * std::numbers::pi); }

// Sum over samples of (1 - cos(last angle - target)).
double loss_of(const std::vector<double>& angle, const std::vector<double>& target) {
  double loss = 0;
  for (std::int64_t b = 0; b < kBatch; ++b) {
    const auto last = static_cast<std::size_t>((b + 1) * kSteps - 1);
    loss += 1 - std::cos(angle[last] - target[static_cast<std::size_t>(b)]);
  }
  return loss;
}

// One step a call, as a robot would: the weights are packed once, the state is handed on.
bool streams_to_the_same_bits(const Ring& ring, const std::vector<double>& out,
                              annulus::Context& context) {
  annulus::RingRnnInputs in = ring.inputs();
  const std::int64_t size = annulus::ring_rnn_pack_size(in.Wa, in.Wo, options());
  const annulus::Buffer packed(annulus::kCPU, static_cast<std::size_t>(size) * 4);
  in.packed = annulus::contiguous(static_cast<std::int32_t*>(packed.data()), {size});
  annulus::ring_rnn_pack(in.Wa, in.Wo, in.packed, options(), context);
  std::vector<double> state = ring.r0, next(state.size()), step(state.size());
  for (std::int64_t t = 0; t < kSteps; ++t) {
    // A view of one step of A: the strides stay those of the whole.
    in.A = annulus::contiguous(ring.A.data() + t * kActions, {kBatch, 1, kActions});
    in.A.stride[0] = kSteps * kActions;
    in.r0 = annulus::contiguous(state.data(), {kBatch, kNeurons});
    annulus::RingRnnOutputs outputs;
    outputs.out = annulus::contiguous(step.data(), {kBatch, 1, kNeurons});
    outputs.h_n = annulus::contiguous(next.data(), {kBatch, kNeurons});
    annulus::ring_rnn_forward(in, outputs, options(), context);
    for (std::int64_t b = 0; b < kBatch; ++b) {
      const auto whole = out.begin() + (b * kSteps + t) * kNeurons;
      if (!std::equal(whole, whole + kNeurons, step.begin() + b * kNeurons)) return false;
    }
    state.swap(next);
  }
  return true;
}

// dL/dA: the readout's backward gives dL/d(states), the network's the rest.
std::vector<double> gradient(const Ring& ring, const std::vector<double>& target,
                             annulus::Context& context) {
  const annulus::RingRnnInputs in = ring.inputs();
  const auto saved_shape = annulus::ring_rnn_saved_shape(in, options());
  std::vector<double> out(count({kBatch, kSteps, kNeurons})), saved(out.size()), dout(out.size());
  std::vector<double> angle(count({kBatch, kSteps})), amplitude(angle.size()), dangle(angle.size());
  std::vector<double> dA(ring.A.size());
  annulus::RingRnnOutputs outputs;
  outputs.out = annulus::contiguous(out.data(), {kBatch, kSteps, kNeurons});
  outputs.saved =
      annulus::contiguous(saved.data(), {saved_shape[0], saved_shape[1], saved_shape[2]});
  annulus::ring_rnn_forward(in, outputs, options(), context);
  annulus::ring_readout_forward(outputs.out, annulus::contiguous(angle.data(), {kBatch, kSteps}),
                                annulus::contiguous(amplitude.data(), {kBatch, kSteps}), context);
  for (std::int64_t b = 0; b < kBatch; ++b) {
    const auto last = static_cast<std::size_t>((b + 1) * kSteps - 1);
    dangle[last] = std::sin(angle[last] - target[static_cast<std::size_t>(b)]);
  }
  const auto dstates = annulus::contiguous(dout.data(), {kBatch, kSteps, kNeurons});
  annulus::ring_readout_backward(outputs.out, annulus::contiguous(dangle.data(), {kBatch, kSteps}),
                                 {}, dstates, context);
  annulus::RingRnnGradients gradients;  // only what is named is computed
  gradients.dA = annulus::contiguous(dA.data(), {kBatch, kSteps, kActions});
  annulus::ring_rnn_backward(in, dstates, {}, outputs.out, outputs.saved, gradients, options(),
                             context);
  return dA;
}

int run() {
  annulus::Context context;
  Ring ring;
  std::vector<double> out(count({kBatch, kSteps, kNeurons}));
  const std::vector<double> angle = decode(ring, out, context);
  double drift = 0;
  for (std::int64_t b = 0; b < kBatch; ++b) {
    const double decoded = angle[static_cast<std::size_t>((b + 1) * kSteps - 1)];
    const double turned = ring.turned[static_cast<std::size_t>(b)];
    drift = std::max(drift, std::fabs(around(decoded - turned)));
    std::printf("sample %d   turned by %+.3f rad, the bump stands at %+.3f\n", static_cast<int>(b),
                turned, decoded);
  }

  const bool same = streams_to_the_same_bits(ring, out, context);
  std::printf("streaming  %d single steps give %s\n", static_cast<int>(kSteps),
              same ? "the bits of one call" : "OTHER BITS");

  const std::vector<double> target = {ring.turned[0] + 0.4, ring.turned[1] - 0.2};
  const std::vector<double> dA = gradient(ring, target, context);
  constexpr std::size_t kAt = 2 * 20;  // sample 0, step 20, the channel that turns it
  constexpr double kStep = 1e-5;
  const double kept = ring.A[kAt];
  std::array<double, 2> loss{};
  for (std::size_t side = 0; side < 2; ++side) {
    ring.A[kAt] = kept + (side == 0 ? kStep : -kStep);
    loss[side] = loss_of(decode(ring, out, context), target);
  }
  const double measured = (loss[0] - loss[1]) / (2 * kStep);
  std::printf("gradient   dL/dA = %.9f, by differences %.9f\n", dA[kAt], measured);

  const bool right = drift < 0.1 && same && std::fabs(dA[kAt] - measured) < 1e-6;
  std::printf("%s\n", right ? "all as it should be" : "WRONG");
  return right ? 0 : 1;
}

}  // namespace

int main() {
  try {
    return run();
  } catch (const std::exception& error) {
    std::fprintf(stderr, "%s\n", error.what());
    return 1;
  }
}
