#include "train/trainer.h"

#include <algorithm>
#include <chrono>
#include <cmath>

namespace annulus::train {
namespace {

// Purposes of random streams; never renumber them.
constexpr std::uint64_t kBatchStream = 3, kEvaluationStream = 4, kEvaluationSeed = 1;
constexpr std::uint64_t kNoiseStream = 5, kEvaluationNoiseStream = 6;
constexpr std::int64_t kStretch = 100;

std::size_t size(std::int64_t n) { return static_cast<std::size_t>(n); }

Sequences test_sequences(std::int64_t B, std::int64_t T, double lead = kLead,
                         const Noise& noise = {}) {
  const auto number = static_cast<std::uint64_t>(T);
  Sequences s = draw_sequences(B, T, lead, Rng(kEvaluationSeed, kEvaluationStream, number));
  add_noise(s, noise, Rng(kEvaluationSeed, kEvaluationNoiseStream, number));
  return s;
}

}  // namespace

Trainer::Trainer(const Recipe& recipe, Device device, int threads)
    : model_(recipe, device, threads) {}

LossFigures Trainer::step() {
  const auto begin = std::chrono::steady_clock::now();
  const Recipe& r = recipe();
  const std::int64_t step = steps_done();
  Sequences batch = draw_sequences(r.batch, length_at(r, step), r.lead,
                                   Rng(r.seed, kBatchStream, static_cast<std::uint64_t>(step)));
  add_noise(batch, r.noise, Rng(r.seed, kNoiseStream, static_cast<std::uint64_t>(step)));
  const LossFigures figures = model_.gradients(batch);
  // The gain network waits until there is a ring to steer: trained from the start, it helps to keep
  // the first, fading bumps alive and never finds its way back.
  const bool with_gain = step >= first_gain_step(r);
  const auto trained = with_gain ? std::span(model_.parameters()) : model_.ring_parameters();
  const double norm = clip_gradients(trained, r.clip);
  if (!std::isfinite(figures.total) || !std::isfinite(norm)) {
    throw Diverged("[train] the loss of recipe \"" + r.name + "\" is not finite at step " +
                   std::to_string(step) + "; a smaller rate may help");
  }
  const AdamOptions adam{.rate = rate_at(r.schedule, step, r.steps)};
  adam_step(model_.ring_parameters(), step + 1, adam);
  if (with_gain) adam_step(model_.gain_parameters(), step + 1 - first_gain_step(r), adam);
  history_.loss.push_back(static_cast<float>(figures.total));
  history_.error.push_back(static_cast<float>(figures.error));
  seconds_ += std::chrono::duration<double>(std::chrono::steady_clock::now() - begin).count();
  return figures;
}

void Trainer::restore(History history, double seconds) {
  history_ = std::move(history);
  seconds_ = seconds;
}

Evaluation evaluate(RingModel& model, std::int64_t sequences, std::int64_t T, double lead,
                    const Noise& noise) {
  const Sequences s = test_sequences(sequences, T, lead, noise);
  const std::vector<float> decoded = model.decode(s, kStretch);
  Evaluation e;
  e.sequences = sequences;
  e.T = T;
  e.curve.assign(size(T), 0.0);
  double sum = 0, squares = 0;
  for (std::int64_t b = 0; b < sequences; ++b) {
    for (std::int64_t t = 0; t < T; ++t) {
      const double d = circular_distance(decoded[size(b * T + t)], s.target[size(b * T + t)]);
      sum += d;
      squares += d * d;
      e.max = std::max(e.max, d);
      e.curve[size(t)] += d / static_cast<double>(sequences);
    }
  }
  const double n = static_cast<double>(sequences * T);
  e.mean = sum / n;
  e.std = std::sqrt(std::max(0.0, squares / n - e.mean * e.mean));
  e.final = e.curve.empty() ? 0 : e.curve.back();
  return e;
}

double error_of_turning_at_once(std::int64_t sequences, std::int64_t T) {
  double sum = 0;
  const Sequences s = test_sequences(sequences, T);
  for (const float v : s.velocity) sum += std::fabs(v);
  return sum / static_cast<double>(s.velocity.size());
}

double error_of_integrating(std::int64_t sequences, std::int64_t T, const Noise& noise) {
  const Sequences s = test_sequences(sequences, T, kLead, noise);
  double sum = 0;
  for (std::int64_t b = 0; b < sequences; ++b) {
    double angle = s.start[size(b)];
    for (std::int64_t t = 0; t < T; ++t) {
      sum += circular_distance(angle, s.target[size(b * T + t)]);
      angle += s.velocity[size(b * T + t)];
    }
  }
  return sum / static_cast<double>(s.velocity.size());
}

Example example(RingModel& model, std::int64_t sequences, std::int64_t T) {
  const Sequences all = test_sequences(sequences, T);
  std::int64_t number = 0;
  double farthest = -1;
  for (std::int64_t b = 0; b < sequences; ++b) {
    const auto [least, most] =
        std::ranges::minmax(std::span(all.target).subspan(size(b * T), size(T)));
    if (most - least <= farthest) continue;
    farthest = most - least;
    number = b;
  }
  const auto velocity = all.velocity.begin() + static_cast<std::ptrdiff_t>(number * T);
  const auto target = all.target.begin() + static_cast<std::ptrdiff_t>(number * T);
  const Sequences one{.B = 1,
                      .T = T,
                      .velocity = {velocity, velocity + T},
                      .start = {all.start[size(number)]},
                      .target = {target, target + T}};
  Example e;
  e.decoded = model.decode(one, kStretch, 0, &e.states);
  e.velocity = one.velocity;
  e.target = one.target;
  return e;
}

}  // namespace annulus::train
