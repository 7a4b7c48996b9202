// The hand-picked problems of the ring RNN (every edge, every defect of the original
// implementation), the fuzzer's distribution, and the registration of both.
#include <algorithm>
#include <array>
#include <cmath>
#include <limits>
#include <numbers>
#include <string>
#include <utility>

#include "annulus/ring_rnn/test/cases.h"

namespace annulus::testing {

namespace {

using Parameter = RingRnnProblem::Parameter;
using Actions = RingRnnProblem::Actions;
using Draw = std::function<void(Rng&, const TensorSpec&, std::span<double>)>;

constexpr std::array kAllDTypes = {DType::kF64, DType::kF32, DType::kF16, DType::kBF16};
constexpr std::array kActivations = {RingRnnActivation::kRelu, RingRnnActivation::kGelu,
                                     RingRnnActivation::kTanh, RingRnnActivation::kSilu};
constexpr std::array kAsked = {Precision::kAuto,   Precision::kFp32, Precision::kBf16x6,
                               Precision::kBf16x3, Precision::kTf32, Precision::kBf16};
std::vector<Precision> asked_of(DType dtype) {
  std::vector<Precision> all(kAsked.begin(), kAsked.end());
  if (dtype == DType::kF16) all.push_back(Precision::kF16);
  return all;
}
constexpr std::array kAllActions = {Actions::kDense,    Actions::kSparse,   Actions::kOneHot,
                                    Actions::kBySample, Actions::kVelocity, Actions::kZero};

class Builder {
 public:
  Case& add(const std::string& name, RingRnnProblem p) {
    if (p.seed == 0) p.seed = 1000 + cases_.size();
    cases_.push_back(ring_rnn_case(p));
    cases_.back().params = "'" + name + "' " + cases_.back().params;
    return cases_.back();
  }
  std::vector<Case> take() { return std::move(cases_); }

 private:
  std::vector<Case> cases_;
};

// `value(rng, index)` for the named tensor, the usual draw for the others.
Draw replacing(Draw usual, const std::string& name,
               std::function<double(Rng&, std::size_t)> value) {
  return [usual, name, value](Rng& rng, const TensorSpec& spec, std::span<double> v) {
    usual(rng, spec, v);
    if (spec.name != name) return;
    for (std::size_t i = 0; i < v.size(); ++i) v[i] = value(rng, i);
  };
}

// Sizes off the grid of 16, with B != T: where the original read its output transposed.
RingRnnProblem small(DType dtype = DType::kF32) {
  RingRnnProblem p{.B = 3, .T = 5, .K = 2, .N = 13, .dtype = dtype};
  p.J0 = -0.03, p.J1 = 0.7, p.alpha = 0.4;
  p.gradients = kRingAllGradients;
  return p;
}

// Everything a call can be given.
RingRnnProblem full(DType dtype = DType::kF32) {
  RingRnnProblem p = small(dtype);
  p.drive = p.reset = p.reset_state = p.mask = p.h_n = p.readout = p.dh_n = true;
  p.J0_form = p.J1_form = Parameter::kTensor;
  p.alpha_form = Parameter::kPerNeuron;
  return p;
}

void add_types_and_precisions(Builder& b) {
  b.add("smallest of all", {});
  for (const DType dtype : kAllDTypes) {
    for (const RingRnnActivation f : kActivations) {
      RingRnnProblem p = full(dtype);
      p.activation = f;
      b.add("every input and output, every dtype and activation", p);
      p.f32_state = p.f32_parameters = false;
      p.checkpoint = 2;
      p.alpha_form = Parameter::kTensor;
      b.add("state and parameters in the dtype of A, checkpoints", p);
    }
    for (const Precision precision : asked_of(dtype)) {
      if (dtype == DType::kF64) continue;
      RingRnnProblem p = small(dtype);
      p.B = 17, p.K = 3, p.N = 33;
      p.precision = precision;
      b.add("every precision", p);
      p.B = 70, p.T = 3, p.N = 64;
      p.activation = RingRnnActivation::kGelu;
      p.checkpoint = 1;
      b.add("every precision on whole tiles", p);
    }
  }
}

void add_sizes(Builder& b) {
  for (const auto size :
       {&RingRnnProblem::B, &RingRnnProblem::T, &RingRnnProblem::K, &RingRnnProblem::N}) {
    for (RingRnnProblem p : {small(), full()}) {
      p.*size = 0;
      b.add("zero size", p);
      p.dtype = DType::kBF16;
      p.checkpoint = 2;
      b.add("zero size", p);
    }
  }
  RingRnnProblem empty = full();
  empty.B = empty.T = empty.K = empty.N = 0;
  b.add("nothing at all", empty);
  RingRnnProblem edge = small();
  for (const std::int64_t N : {1, 2, 3, 4, 7, 8, 9, 15, 16, 17, 31, 32, 48, 63, 64, 65, 127, 129}) {
    edge.N = N;
    edge.T = N > 40 ? 2 : 4;
    edge.dtype = N % 2 ? DType::kF32 : DType::kBF16;
    edge.readout = edge.drive = true;
    edge.gain = 0.4;
    b.add("N around vector and tile widths", edge);
  }
  edge = small();
  for (const std::int64_t B : {1, 2, 4, 5, 8, 15, 16, 31, 33, 63, 64, 65, 128, 130}) {
    edge.B = B;
    edge.T = 2;
    edge.dtype = B % 2 ? DType::kBF16 : DType::kF32;
    b.add("B around tile heights", edge);
  }
  edge = small();
  for (const std::int64_t K : {1, 3, 4, 7, 8, 16, 17, 33}) {
    edge.K = K;
    edge.T = 3;
    edge.dtype = K % 2 ? DType::kF16 : DType::kF32;
    b.add("K of every kind", edge);
  }
  for (const DType dtype : {DType::kF32, DType::kBF16}) {
    RingRnnProblem p = small(dtype);
    p.B = 130, p.T = 2, p.K = 1, p.N = 130;
    b.add("several tiles each way", p);
    p.B = 2, p.T = 40, p.N = 20;
    p.checkpoint = 7;
    b.add("many steps", p);
    p.B = 1, p.T = 2, p.K = 2, p.N = 257;
    b.add("one sample, many neurons", p);
  }
  // CUDA has kernels for up to 64 or 128 neurons and others for more, in instances by samples.
  for (const Precision precision :
       {Precision::kBf16, Precision::kF16, Precision::kBf16x3, Precision::kBf16x6}) {
    const bool f16 = precision == Precision::kF16;
    RingRnnProblem p = full();
    p.dtype = f16 ? DType::kF16 : precision == Precision::kBf16 ? DType::kBF16 : DType::kF32;
    p.precision = precision;
    p.J0 = -0.5 / 300;  // a part of the input, whatever N is
    p.B = 205, p.T = 2, p.K = 1, p.N = 260;
    b.add("more neurons than a cluster has", p);
    p.B = 5, p.T = 5, p.K = 3, p.N = 330;
    p.checkpoint = 2;
    b.add("more neurons than a cluster has, checkpoints", p);
    p = small();
    p.dtype = f16 || precision == Precision::kBf16 ? DType::kF16 : DType::kF32;
    p.precision = precision;
    p.gradients = kRingDWa | kRingDWo | kRingDr0;
    p.J0 = -0.5 / 300;
    p.B = 20, p.T = 2, p.K = 1, p.N = 513;
    b.add("more neurons than a cluster has, without s . u_k", p);
    p.gradients = kRingAllGradients;
    p.N = 64, p.K = 70, p.B = 3;
    b.add("in clusters, more channels than they stage", p);
    p.N = precision == Precision::kBf16x6 ? 40 : 100, p.K = 1, p.B = 540;
    b.add("in clusters, more samples than go eight a cluster", p);
    // As many channels as a block of threads cannot keep on 132 multiprocessors; two to four groups.
    p.N = 260, p.B = 4;
    p.K = f16 || precision == Precision::kBf16 ? 110 : precision == Precision::kBf16x3 ? 60 : 40;
    p.gradients = kRingDA | kRingDr0;
    b.add("weights that stream past", p);
    if (f16 || precision == Precision::kBf16) {  // which has another loop for it
      p.gradients = kRingDr0;
      b.add("weights that stream past, without s . u_k", p);
    }
  }
  {
    RingRnnProblem p = small(DType::kBF16);
    p.J0 = -0.5 / 300;
    p.B = 11600, p.T = 1, p.K = 1, p.N = 130;
    b.add("more tiles than multiprocessors", p);
    p.B = 250;
    for (const std::int64_t N : {256, 512}) {
      p.N = N;
      b.add("fewer samples a block, so that its weights stay", p);
    }
  }
  // Several chunks of the sum a block of threads: two at N 1024, five at N 1600 on 132 multiprocessors.
  for (const std::int64_t N : {1024, 1600}) {
    RingRnnProblem p = small(DType::kBF16);
    p.J0 = -0.5 / 1000;
    p.B = 3, p.T = 1, p.K = 1, p.N = N;
    b.add("long sums", p);
    p.gradients = kRingDWo | kRingDr0;
    b.add("long sums, without s . u_k", p);
  }
}

void add_inputs(Builder& b) {
  for (const DType dtype : {DType::kF32, DType::kBF16}) {
    constexpr void (*kOptional[])(RingRnnProblem&) = {
        [](auto& p) { p.drive = true; },
        [](auto& p) { p.reset = true; },
        [](auto& p) { p.reset = p.reset_state = true; },
        [](auto& p) { p.mask = true; },
        [](auto& p) { p.h_n = p.dh_n = true; },
        [](auto& p) { p.readout = true, p.gain = 0.4; },
        [](auto& p) { p.J0_form = p.J1_form = p.alpha_form = Parameter::kTensor; },
        [](auto& p) { p.alpha_form = Parameter::kPerNeuron; }};
    for (const auto give : kOptional) {
      RingRnnProblem p = small(dtype);
      give(p);
      b.add("one optional input or output at a time", p);
    }
    for (unsigned bit = 0; bit < 9; ++bit) {
      RingRnnProblem p = full(dtype);
      p.gradients = 1u << bit;
      b.add("one gradient at a time", p);
    }
  }
  RingRnnProblem p = full();
  p.dout = false;
  b.add("only dh_n comes in", p);
  p.dh_n = false;
  b.add("no gradient comes in", p);
  p = full();
  p.gradients = 0;
  b.add("forward only", p);
  for (const std::int64_t checkpoint : {1, 2, 3, 4, 5, 6, 100}) {
    p = full();
    p.checkpoint = checkpoint;
    p.activation = RingRnnActivation::kGelu;
    b.add("checkpoints, also one longer than T", p);
  }
  for (const double alpha : {0.0, 1.0, 1.5}) {
    p = small();
    p.alpha = alpha;
    b.add("leak of 0, 1 and beyond", p);
  }
  p = small();
  p.J1 = 0;
  p.actions = Actions::kZero;
  b.add("no matrix acts", p);
}

void add_actions(Builder& b) {
  for (const Actions actions : kAllActions) {
    for (const DType dtype : {DType::kF32, DType::kBF16}) {
      RingRnnProblem p = small(dtype);
      p.B = 21, p.K = 6, p.N = 24, p.T = 3;
      p.actions = actions;
      b.add("zeros of every kind in A", p);
      p.live = 2;
      b.add("and channels of padding", p);
    }
  }
  for (const DType dtype : {DType::kF64, DType::kF32, DType::kBF16}) {
    RingRnnProblem p = full(dtype);
    p.B = 97, p.K = 3, p.N = 83, p.T = 2;
    p.actions = dtype == DType::kF32 ? Actions::kSparse : Actions::kBySample;
    b.add("enough work a step for eight threads", p);
  }
  RingRnnProblem p = small();
  p.B = 140, p.K = 5, p.N = 16, p.T = 2;
  p.actions = Actions::kZero;
  Case& lone = b.add("a channel that acts on one sample at one step", p);
  lone.draw = replacing(lone.draw, "A",
                        [](Rng&, std::size_t i) { return i == (137 * 2 + 1) * 5 + 3 ? 1.5 : 0.0; });
  Case& minus = b.add("channels of minus zero", p);
  minus.draw =
      replacing(minus.draw, "A", [](Rng&, std::size_t i) { return i % 5 == 2 ? 1.0 : -0.0; });
}

void add_values(Builder& b) {
  RingRnnProblem p = small();
  p.activation = RingRnnActivation::kRelu;
  Case& kink = b.add("relu at exactly 0 has slope 0", p);
  kink.draw = replacing(kink.draw, "r0", [](Rng&, std::size_t) { return 0.0; });
  for (const RingRnnActivation f : kActivations) {
    p = small();
    p.drive = true;
    p.activation = f;
    Case& c = b.add("y of +-50", p);
    c.refine = nullptr;
    c.draw = replacing(c.draw, "drive", [](Rng& rng, std::size_t i) {
      return i % 3 == 0 ? 50.0 : i % 3 == 1 ? -50.0 : 1 + rng.uniform();
    });
    p.gradients = 0;
    p.special = true;
    for (const DType dtype : kAllDTypes) {
      p.dtype = dtype;
      b.add("NaN reaches its own sample and no other", p);
      p.reset = p.reset_state = p.h_n = true;
      b.add("and a reset ends it", p);
    }
  }
  for (const DType dtype : kAllDTypes) {
    p = small(dtype);
    p.precision = dtype == DType::kF64 ? Precision::kAuto : Precision::kFp32;
    p.gradients = 0;
    p.h_n = true;
    const double size = dtype == DType::kF16 ? 1e-6 : dtype == DType::kF64 ? 1e-308 : 1e-38;
    Case& c = b.add("a denormal state is not flushed", p);
    c.draw = replacing(c.draw, "r0", [size](Rng& rng, std::size_t) { return size * rng.normal(); });
  }
}

// cos(2 pi (i - j) / N) and its turned copies: a bump that stays, and actions that move it.
void add_attractor(Builder& b) {
  for (const DType dtype : {DType::kF64, DType::kF32, DType::kBF16}) {
    RingRnnProblem p{.B = 3, .T = 60, .K = 2, .N = 32, .dtype = dtype};
    p.seed = 7;  // one whose draw repeats no rows
    p.J0 = -0.02, p.J1 = 0.1, p.alpha = 0.15;
    p.readout = p.h_n = true;
    p.gradients = kRingAllGradients;
    Case& c = b.add("ring attractor, tanh", p);
    c.draw = [usual = c.draw](Rng& rng, const TensorSpec& spec, std::span<double> v) {
      usual(rng, spec, v);
      for (std::size_t i = 0; i < v.size(); ++i) {
        const double turn = 2 * std::numbers::pi / 32;
        const auto difference = static_cast<double>(i / 32 % 32) - static_cast<double>(i % 32);
        if (spec.name == "Wo") v[i] = 1.2 * std::cos(turn * difference);
        if (spec.name == "Wa") {
          v[i] = 0.1 * std::cos(turn * (difference + (i < 32 * 32 ? 1 : -1)));
        }
        if (spec.name == "A") v[i] = std::max(0.0, 0.5 * rng.normal());
      }
    };
  }
}

}  // namespace

std::vector<Case> ring_rnn_named_cases() {
  Builder b;
  add_types_and_precisions(b);
  add_sizes(b);
  add_inputs(b);
  add_actions(b);
  add_values(b);
  add_attractor(b);
  return b.take();
}

namespace {

std::int64_t draw_neurons(Rng& rng) {
  static constexpr std::array<std::int64_t, 14> kEdges = {0,  1,  2,  7,  8,  15, 16,
                                                          17, 31, 32, 33, 63, 64, 65};
  if (rng.below(30) == 0) return rng.below(2) ? 128 : 130;
  std::int64_t n = rng.below(2) ? kEdges[static_cast<std::size_t>(rng.below(14))] : rng.below(71);
  if (n == 0 && rng.below(3)) n = 1 + rng.below(70);  // empty cases prove little
  return n;
}

template <class Choices>
auto one_of(Rng& rng, const Choices& choices) {
  return choices[static_cast<std::size_t>(rng.below(static_cast<std::int64_t>(choices.size())))];
}

}  // namespace

RingRnnProblem ring_rnn_fuzz_problem(std::uint64_t seed) {
  Rng rng(seed);
  RingRnnProblem p;
  p.seed = seed;
  p.dtype = one_of(rng, kAllDTypes);
  p.activation = one_of(rng, kActivations);
  if (p.dtype != DType::kF64) p.precision = one_of(rng, asked_of(p.dtype));
  p.f32_state = rng.below(2) == 0;
  p.f32_parameters = rng.below(2) == 0;
  p.B = rng.below(60) == 0 ? 0 : rng.below(25) == 0 ? 64 + rng.below(67) : 1 + rng.below(9);
  p.T = rng.below(60) == 0 ? 0 : rng.below(20) == 0 ? 30 : 1 + rng.below(12);
  p.K = rng.below(15) == 0 ? 0 : rng.below(15) == 0 ? 16 : 1 + rng.below(5);
  p.N = draw_neurons(rng);
  // Little work in nine cases of ten, so that ten thousand of them cost minutes.
  const std::int64_t budget = rng.below(12) == 0 ? 3000000 : 300000;
  const std::int64_t step = std::max<std::int64_t>(1, (p.K + 1) * p.N * p.N);
  if (p.B * p.T * step > budget) {
    p.T = std::min(p.T, std::max<std::int64_t>(1 + rng.below(3), budget / (p.B * step)));
    p.B = std::min(p.B, std::max<std::int64_t>(1, budget / (p.T * step)));
  }
  static constexpr std::array<std::int64_t, 10> kCheckpoints = {0, 0, 0, 0, 0, 1, 2, 3, 5, 40};
  p.checkpoint = one_of(rng, kCheckpoints);

  const auto form = [&] { return rng.below(2) ? Parameter::kTensor : Parameter::kNumber; };
  p.J0_form = form();
  p.J1_form = form();
  p.alpha_form = rng.below(3) == 0 ? Parameter::kPerNeuron : form();
  p.alpha = one_of(rng, std::array{0.15, 0.15, 0.5, 0.05, 1.0});
  p.J1 = rng.below(20) == 0 ? 0 : one_of(rng, std::array{0.1, 1.0, -0.6, 0.3});
  // As large as one more row of weights: -1 to 0.8 for the whole sum.
  const double whole = rng.below(6) == 0 ? 0 : 1.8 * rng.uniform() - 1;
  p.J0 = whole / static_cast<double>(std::max<std::int64_t>(p.N, 1));
  p.gain = one_of(rng, std::array{0.9, 0.9, 0.5, 1.0});

  p.drive = rng.below(2) == 0;
  p.reset = rng.below(3) == 0;
  p.reset_state = p.reset && rng.below(2) == 0;
  p.mask = rng.below(4) == 0;
  p.h_n = rng.below(2) == 0;
  p.readout = rng.below(4) == 0;
  if (p.readout) {  // a bump under a drive that keeps it, so that there is an angle to decode
    p.drive = true;
    p.gain = 0.4;
    if (p.N == 1 || p.N == 2) {  // their angle is 0 or pi: the named cases have it
      p.N = 3;
      p.J0 = whole / 3;
    }
  }
  p.actions = rng.below(3) == 0 ? Actions::kDense : one_of(rng, kAllActions);
  if (rng.below(4) == 0 && p.K > 0) p.live = 1 + rng.below(p.K);
  if (p.activation == RingRnnActivation::kRelu) {
    p.gain *= std::numbers::sqrt2;
    const bool exact = p.dtype == DType::kF64 || p.precision == Precision::kFp32 ||
                       p.precision == Precision::kBf16x6;
    if (!exact) p.drive = true;  // see ring_rnn_refine
    if (!p.drive) {
      p.J0 = std::abs(p.J0);
      p.alpha = std::min(p.alpha, 0.5);  // a state of exact zeros sits on the kink
    }
  }
  p.gradients = rng.below(3) == 0   ? static_cast<unsigned>(kRingAllGradients)
                : rng.below(4) == 0 ? 0u
                                    : static_cast<unsigned>(1 + rng.below(kRingAllGradients));
  // A matrix that hardly acts has a gradient of zeros, which proves little. The named cases have it.
  const bool few = p.actions == Actions::kZero || 3 * ring_live_channels(p) < p.K ||
                   (p.actions == Actions::kBySample && p.B < p.K) ||
                   (p.actions == Actions::kOneHot && p.B * p.T < p.K) ||
                   (p.actions == Actions::kSparse && p.B * p.T < 8) ||
                   (p.actions == Actions::kVelocity && p.B * p.T < 30);
  if (few) p.gradients &= ~static_cast<unsigned>(kRingDWa);
  if (p.J1 == 0) p.gradients &= ~static_cast<unsigned>(kRingDWo);
  p.dout = rng.below(5) != 0;
  p.dh_n = !p.dout || rng.below(3) == 0;
  // Nothing of r0 is left behind a reset.
  if (p.reset && (!p.dout || p.B * p.T < 4)) p.gradients &= ~static_cast<unsigned>(kRingDr0);
  if (rng.below(25) == 0 && p.B >= 3) {
    p.special = true;
    p.gradients = 0;
  }
  return p;
}

namespace {
const CasesRegistration kRegistration(
    {.op = "ring_rnn",
     .named = ring_rnn_named_cases,
     .fuzz = [](std::uint64_t seed) { return ring_rnn_case(ring_rnn_fuzz_problem(seed)); },
     .bad_calls = ring_rnn_bad_calls,
     .sanitized = "in clusters|a cluster has|stream past|more tiles than|ring attractor|"
                  "and a reset ends it",
     .raced = "a cluster has|and a reset ends it"});
}  // namespace

}  // namespace annulus::testing
