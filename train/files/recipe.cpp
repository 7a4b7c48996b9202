#include "train/files/recipe.h"

#include <algorithm>
#include <cmath>
#include <nlohmann/json.hpp>

#include "annulus/core/check.h"
#include "files/json.h"

namespace annulus::train {

const std::vector<std::string> kActivations = {"relu", "gelu", "tanh", "silu"};

namespace {

using files::Json;

const std::vector<std::string> kEncodings = {"turns", "spread"};

// f(key, field, what it may be) of every field: a number's least and most, or the names of an enum.
template <class R, class F>
void for_fields(R& r, F&& f) {
  f("name", r.name);
  f("neurons", r.neurons, 3, 8192);
  f("actions", r.actions, 2, 1024);
  f("encoding", r.encoding, kEncodings);
  f("activation", r.activation, kActivations);
  f("J0", r.J0, -1000, 1000);
  f("J1", r.J1, -1000, 1000);
  f("alpha", r.alpha, 0, 1);
  f("batch", r.batch, 1, 65536);
  f("steps", r.steps, 1, 10'000'000);
  f("length", r.length, 1, 100'000);
  f("first_length", r.first_length, 1, 100'000);
  f("growth", r.growth, 0, 1);
  f("rate", r.schedule.rate, 0, 10);
  f("warm_up", r.schedule.warm_up, 0, 10'000'000);
  f("final", r.schedule.final, 0, 1);
  f("lead", r.lead, 0, 1);
  f("velocity_noise", r.noise.velocity, 0, 10);
  f("state_noise", r.noise.state, 0, 1000);
  f("clip", r.clip, 0, 1e30);
  f("amplitude_weight", r.amplitude_weight, 0, 1e6);
  f("delay", r.delay, 0, 1000);
  f("spread", r.spread, 0, 1000);
  f("gain_hidden", r.gain_hidden, 0, 4096);
  f("gain_start", r.gain_start, 0, 1);
  f("seed", r.seed);
}

}  // namespace

Recipe original_recipe() { return {.name = "original"}; }

Recipe default_recipe(std::int64_t neurons) {
  return {
      .name = "default",
      .neurons = neurons,
      .J0 = -0.1 * std::min(1.0, 128.0 / static_cast<double>(std::max<std::int64_t>(neurons, 1))),
      .steps = 2000,
      .first_length = 20,
      .growth = 0.3,
      .schedule = {.rate = 3e-3, .warm_up = 50, .final = 0.02},
      .delay = 1,
      .spread = 0.1,
      .gain_hidden = 16,
      .gain_start = 0.3};
}

Recipe with_steps(Recipe r, std::int64_t steps) {
  if (steps == r.steps || steps < 1) {
    r.steps = steps;
    return r;
  }
  const double old = static_cast<double>(r.steps), now = static_cast<double>(steps);
  // Half a step more than the first: its share of the steps is rounded down.
  r.gain_start = std::min(1.0, (static_cast<double>(first_gain_step(r)) + 0.5) / now);
  r.growth = std::min(1.0, r.growth * old / now);
  r.steps = steps;
  return r;
}

std::int64_t right_action(const Recipe& r) {
  return r.encoding == Encoding::kTurns ? 1 : r.actions - 1;
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

void check(const Recipe& recipe) {
  for_fields(recipe, []<class T>(const char* name, const T& value, const auto&... range) {
    if constexpr (sizeof...(range) == 2) {
      const T limits[] = {static_cast<T>(range)...};
      if (value >= limits[0] && value <= limits[1]) return;  // false for NaN
      invalid("train", name,
              "be between " + std::to_string(limits[0]) + " and " + std::to_string(limits[1]),
              "is " + std::to_string(value));
    }
  });
}

Json to_json(const Recipe& recipe) {
  Json out;
  for_fields(recipe, [&]<class T>(const char* key, const T& value, const auto&... names) {
    if constexpr (std::is_enum_v<T>) {
      out[key] = (names[static_cast<std::size_t>(value)], ...);
    } else {
      out[key] = value;
    }
  });
  return out;
}

Recipe recipe_from_json(const Json& json) {
  Recipe recipe;
  std::vector<std::string> known;
  for_fields(recipe, [&](const char* key, const auto&...) { known.push_back(key); });
  const files::JsonObject in(json, "recipe", known);
  for_fields(recipe, [&]<class T>(const char* key, T& value, const auto&... names) {
    if constexpr (std::is_enum_v<T>) {
      value = static_cast<T>(in.one_of(key, names...));
    } else if constexpr (std::is_same_v<T, std::string>) {
      value = in.text(key);
    } else if constexpr (std::is_same_v<T, std::uint64_t>) {
      value = in.bits(key);
    } else if constexpr (std::is_same_v<T, std::int64_t>) {
      value = in.whole(key, INT64_MIN, INT64_MAX);
    } else {
      value = in.real(key, -1e300, 1e300);
    }
  });
  check(recipe);
  return recipe;
}

std::string difference(const Recipe& saved, const Recipe& asked) {
  const Json a = to_json(saved), b = to_json(asked);
  for (const auto& [key, value] : a.items()) {
    if (b.at(key) != value) return key + " " + value.dump() + ", not " + b.at(key).dump();
  }
  return "";
}

RingRnnActivation activation_of(const std::string& name) {
  const auto at = std::find(kActivations.begin(), kActivations.end(), name);
  return static_cast<RingRnnActivation>(at - kActivations.begin());
}

std::string name_of(RingRnnActivation a) { return kActivations[static_cast<std::size_t>(a)]; }

}  // namespace annulus::train
