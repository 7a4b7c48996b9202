// A ring attractor by hand, from C++ and with nothing but the library: a bump of activity that
// integrates angular velocity, run as one call, streamed step by step with packed weights, and
// differentiated.
#include <algorithm>
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

const annulus::RingRnnOptions kOptions = {.activation = annulus::RingRnnActivation::kTanh};

double angle_of(std::int64_t neuron) {
  return 2 * std::numbers::pi * static_cast<double>(neuron) / static_cast<double>(kNeurons);
}

// Wo keeps a bump where it is: each neuron is driven by the cosine of the distance. The two action
// matrices add a sine, to one side and to the other, which turns the bump.
struct Ring {
  std::vector<double> A = std::vector<double>(kBatch * kSteps * kActions);
  std::vector<double> Wa = std::vector<double>(kActions * kNeurons * kNeurons);
  std::vector<double> Wo = std::vector<double>(kNeurons * kNeurons);
  std::vector<double> r0 = std::vector<double>(kBatch * kNeurons);
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
    return {.A = annulus::contiguous(A.data(), {kBatch, kSteps, kActions}),
            .Wa = annulus::contiguous(Wa.data(), {kActions, kNeurons, kNeurons}),
            .Wo = annulus::contiguous(Wo.data(), {kNeurons, kNeurons}),
            .r0 = annulus::contiguous(r0.data(), {kBatch, kNeurons}),
            .J0 = 0.0,
            .J1 = 1.0,
            .alpha = kAlpha};
  }
};

// The decoded angles of every step, (B, T); `out` receives the states, (B, T, N).
std::vector<double> decode(const Ring& ring, std::vector<double>& out, annulus::Context& context) {
  std::vector<double> angle(kBatch * kSteps), amplitude(angle.size());
  annulus::ring_rnn_forward(ring.inputs(),
                            {.out = annulus::contiguous(out.data(), {kBatch, kSteps, kNeurons}),
                             .angle = annulus::contiguous(angle.data(), {kBatch, kSteps}),
                             .amplitude = annulus::contiguous(amplitude.data(), {kBatch, kSteps})},
                            kOptions, context);
  return angle;
}

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
  const std::int64_t size = annulus::ring_rnn_pack_size(in.Wa, in.Wo, kOptions);
  const annulus::Buffer packed(annulus::kCPU, static_cast<std::size_t>(size) * 4);
  in.packed = annulus::contiguous(static_cast<std::int32_t*>(packed.data()), {size});
  in.packed_form = annulus::ring_rnn_pack(in.Wa, in.Wo, in.packed, kOptions, context);
  std::vector<double> state = ring.r0, next(state.size()), step(state.size());
  for (std::int64_t t = 0; t < kSteps; ++t) {
    // A view of one step of A: the strides stay those of the whole.
    in.A = annulus::contiguous(ring.A.data() + t * kActions, {kBatch, 1, kActions});
    in.A.stride[0] = kSteps * kActions;
    in.r0 = annulus::contiguous(state.data(), {kBatch, kNeurons});
    annulus::ring_rnn_forward(in,
                              {.out = annulus::contiguous(step.data(), {kBatch, 1, kNeurons}),
                               .h_n = annulus::contiguous(next.data(), {kBatch, kNeurons})},
                              kOptions, context);
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
  const auto saved_shape = annulus::ring_rnn_saved_shape(in, kOptions);
  std::vector<double> out(kBatch * kSteps * kNeurons), saved(out.size()), dout(out.size());
  std::vector<double> angle(kBatch * kSteps), amplitude(angle.size()), dangle(angle.size());
  std::vector<double> dA(ring.A.size());
  const annulus::RingRnnOutputs outputs{
      .out = annulus::contiguous(out.data(), {kBatch, kSteps, kNeurons}),
      .saved = annulus::contiguous(saved.data(), annulus::DType::kF64, saved_shape)};
  annulus::ring_rnn_forward(in, outputs, kOptions, context);
  annulus::ring_readout_forward(outputs.out, annulus::contiguous(angle.data(), {kBatch, kSteps}),
                                annulus::contiguous(amplitude.data(), {kBatch, kSteps}), context);
  for (std::int64_t b = 0; b < kBatch; ++b) {
    const auto last = static_cast<std::size_t>((b + 1) * kSteps - 1);
    dangle[last] = std::sin(angle[last] - target[static_cast<std::size_t>(b)]);
  }
  const auto dstates = annulus::contiguous(dout.data(), {kBatch, kSteps, kNeurons});
  annulus::ring_readout_backward(outputs.out, annulus::contiguous(dangle.data(), {kBatch, kSteps}),
                                 {}, dstates, context);
  // Only the gradients that are named are computed.
  annulus::ring_rnn_backward(in, dstates, {}, outputs.out, outputs.saved,
                             {.dA = annulus::contiguous(dA.data(), {kBatch, kSteps, kActions})},
                             kOptions, context);
  return dA;
}

int run() {
  annulus::Context context;
  Ring ring;
  std::vector<double> out(kBatch * kSteps * kNeurons);
  const std::vector<double> angle = decode(ring, out, context);
  double drift = 0;
  for (std::int64_t b = 0; b < kBatch; ++b) {
    const double decoded = angle[static_cast<std::size_t>((b + 1) * kSteps - 1)];
    const double turned = ring.turned[static_cast<std::size_t>(b)];
    drift = std::max(drift, std::fabs(std::remainder(decoded - turned, 2 * std::numbers::pi)));
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
  const auto loss_at = [&](double action) {
    ring.A[kAt] = action;
    return loss_of(decode(ring, out, context), target);
  };
  const double measured = (loss_at(kept + kStep) - loss_at(kept - kStep)) / (2 * kStep);
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
