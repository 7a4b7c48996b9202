#include "train/recipe.h"

#include <algorithm>
#include <cmath>

#include "annulus/core/check.h"

namespace annulus::train {

Recipe seed_recipe() {
  Recipe r;
  r.name = "seed";
  return r;
}

Recipe default_recipe() {
  Recipe r;
  r.name = "default";
  r.steps = 2000;
  r.schedule = {.rate = 3e-3, .warm_up = 50, .final = 0.02};
  r.delay = 1;
  r.spread = 0.1;
  r.gain_hidden = 16;
  r.gain_start = 0.2;
  return r;
}

std::int64_t first_gain_step(const Recipe& r) {
  return static_cast<std::int64_t>(std::floor(r.gain_start * static_cast<double>(r.steps)));
}

std::int64_t length_at(const Recipe& r, std::int64_t step) {
  const double grown = r.growth * static_cast<double>(r.steps);
  const double way = grown > 0 ? std::min(1.0, static_cast<double>(step) / grown) : 1.0;
  const double length =
      static_cast<double>(r.first_length) + way * static_cast<double>(r.length - r.first_length);
  if (way >= 1) return r.length;
  return std::max<std::int64_t>(1, static_cast<std::int64_t>(std::floor(length / 10)) * 10);
}

void check(const Recipe& r) {
  const auto range = [](const char* name, std::int64_t value, std::int64_t low, std::int64_t high) {
    if (value >= low && value <= high) return;
    invalid("train", name, "be between " + std::to_string(low) + " and " + std::to_string(high),
            "is " + std::to_string(value));
  };
  range("neurons", r.neurons, 3, 8192);
  range("actions", r.actions, 2, 1024);
  range("batch", r.batch, 1, 65536);
  range("steps", r.steps, 1, 10'000'000);
  range("length", r.length, 1, 100'000);
  range("first_length", r.first_length, 1, 100'000);
  range("delay", r.delay, 0, 1000);
  range("gain_hidden", r.gain_hidden, 0, 4096);
  range("warm_up", r.schedule.warm_up, 0, 10'000'000);
  const auto real = [](const char* name, double value, double low, double high) {
    if (value >= low && value <= high) return;  // false for NaN
    invalid("train", name, "be between " + std::to_string(low) + " and " + std::to_string(high),
            "is " + std::to_string(value));
  };
  real("rate", r.schedule.rate, 0, 10);
  real("final", r.schedule.final, 0, 1);
  real("spread", r.spread, 0, 1000);
  real("gain_start", r.gain_start, 0, 1);
  real("growth", r.growth, 0, 1);
  real("lead", r.lead, 0, 1);
  real("clip", r.clip, 0, 1e30);
  real("amplitude_weight", r.amplitude_weight, 0, 1e6);
}

}  // namespace annulus::train
