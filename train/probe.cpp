#include "train/probe.h"

#include <algorithm>
#include <cmath>

#include "train/trainer.h"

namespace annulus::train {
namespace {

constexpr double kCircle = 2 * std::numbers::pi;
constexpr std::int64_t kStretch = 100, kTurnSteps = 100, kSpeeds = 18;  // to each side

std::size_t size(std::int64_t n) { return static_cast<std::size_t>(n); }

// B sequences of T steps, still, whose starts go once around the circle.
Sequences around(std::int64_t B, std::int64_t T) {
  Sequences s;
  s.B = B;
  s.T = T;
  s.velocity.assign(size(B * T), 0.0f);
  s.target.resize(size(B * T));
  for (std::int64_t b = 0; b < B; ++b) {
    s.start.push_back(kCircle * static_cast<double>(b) / static_cast<double>(B));
    std::fill_n(s.target.begin() + b * T, T, s.start.back());
  }
  return s;
}

template <class NoiseAt>
NoiseCurve noise_curve(RingModel& model, std::int64_t sequences, std::int64_t steps,
                       std::initializer_list<double> levels, NoiseAt&& noise_at) {
  NoiseCurve c;
  for (const double level : levels) {
    const Noise noise = noise_at(level);
    c.level.push_back(level);
    c.error.push_back(evaluate(model, sequences, steps, kLead, noise).mean);
    c.integrator.push_back(error_of_integrating(sequences, steps, noise));
  }
  return c;
}

}  // namespace

Drift drift_at_rest(RingModel& model, std::int64_t starts, std::int64_t steps) {
  const Sequences s = around(starts, steps);
  const std::vector<float> decoded = model.decode(s, kStretch);
  Drift d;
  d.starts = starts;
  d.mean.assign(size(steps), 0.0);
  d.most.assign(size(steps), 0.0);
  for (std::int64_t b = 0; b < starts; ++b) {
    for (std::int64_t t = 0; t < steps; ++t) {
      const double away = circular_distance(decoded[size(b * steps + t)], s.start[size(b)]);
      d.mean[size(t)] += away / static_cast<double>(starts);
      d.most[size(t)] = std::max(d.most[size(t)], away);
    }
  }
  return d;
}

TurnCurve turn_curve(RingModel& model) {
  TurnCurve c;
  Sequences s = around(2 * kSpeeds + 1, kTurnSteps);
  for (std::int64_t b = 0; b < s.B; ++b) {
    c.told.push_back(kFastest * static_cast<double>(b - kSpeeds) / kSpeeds);
    std::fill_n(s.velocity.begin() + b * s.T, s.T, static_cast<float>(c.told.back()));
  }
  const std::vector<float> decoded = model.decode(s, kStretch);
  const std::int64_t first = kTurnSteps / 2;
  for (std::int64_t b = 0; b < s.B; ++b) {
    double turned = 0;
    for (std::int64_t t = first; t < s.T; ++t) {
      const std::size_t at = size(b * s.T + t);
      turned += std::remainder(static_cast<double>(decoded[at]) - decoded[at - 1], kCircle);
    }
    c.turned.push_back(turned / static_cast<double>(s.T - first));
  }
  return c;
}

NoiseCurve velocity_noise_curve(RingModel& model, std::int64_t sequences, std::int64_t steps) {
  return noise_curve(model, sequences, steps, {0, 0.01, 0.02, 0.04, 0.07, 0.1},
                     [](double level) { return Noise{.velocity = level}; });
}

NoiseCurve state_noise_curve(RingModel& model, std::int64_t sequences, std::int64_t steps) {
  return noise_curve(model, sequences, steps, {0, 0.05, 0.1, 0.2, 0.35, 0.5},
                     [](double level) { return Noise{.state = level}; });
}

}  // namespace annulus::train
