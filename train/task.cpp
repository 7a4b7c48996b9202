#include "train/task.h"

#include <algorithm>
#include <array>
#include <cmath>

#include "annulus/cpu/parallel.h"

namespace annulus::train {

Sequences draw_sequences(std::int64_t B, std::int64_t T, double lead, Rng rng) {
  constexpr std::array<double, 3> kStill = {0.2, 0.5, 0.8};
  Sequences s;
  s.B = B;
  s.T = T;
  s.velocity.assign(static_cast<std::size_t>(B * T), 0.0f);
  s.target.resize(s.velocity.size());
  s.start.resize(static_cast<std::size_t>(B));
  const auto still_steps = static_cast<std::int64_t>(std::floor(lead * static_cast<double>(T)));
  for (std::int64_t b = 0; b < B; ++b) {
    const double start = rng.uniform(0, 2 * std::numbers::pi);
    const double still = kStill[static_cast<std::size_t>(rng.below(3))];
    s.start[static_cast<std::size_t>(b)] = start;
    double sum = start;
    for (std::int64_t t = 0; t < T; ++t) {
      const auto at = static_cast<std::size_t>(b * T + t);
      s.target[at] = sum;
      if (t < still_steps) continue;
      const bool moves = rng.uniform() >= still;
      const double v = rng.uniform(-kFastest, kFastest);
      if (moves) s.velocity[at] = static_cast<float>(v);
      sum += s.velocity[at];  // of what the network is given, rounding included
    }
  }
  return s;
}

void add_noise(Sequences& s, const Noise& noise, Rng rng) {
  s.state_noise = noise.state;
  s.noise_seed = rng.next();
  if (noise.velocity == 0) return;
  for (float& v : s.velocity) v += static_cast<float>(noise.velocity * rng.normal());
}

std::vector<float> drive_noise(const Sequences& s, std::int64_t t, std::int64_t steps,
                               std::int64_t N, int threads) {
  if (s.state_noise == 0) return {};
  const auto n = static_cast<std::size_t>(N);
  const double scale = s.state_noise * std::ranges::max(initial_bumps(std::array{0.0}, N));
  std::vector<float> drive(static_cast<std::size_t>(s.B * steps) * n);
  cpu::parallel_for(s.B * steps, threads, [&](std::int64_t row) {
    const std::int64_t number = row / steps * s.T + t + row % steps;
    Rng rng(s.noise_seed, 0, static_cast<std::uint64_t>(number));
    float* to = drive.data() + static_cast<std::size_t>(row) * n;
    for (std::size_t i = 0; i < n; ++i) to[i] = static_cast<float>(scale * rng.normal());
  });
  return drive;
}

std::vector<float> encode(std::span<const float> velocity, std::int64_t K, Encoding encoding) {
  const auto channels = static_cast<std::size_t>(K);
  std::vector<float> actions(velocity.size() * channels, 0.0f);
  for (std::size_t i = 0; i < velocity.size(); ++i) {
    const float v = velocity[i];
    float* a = actions.data() + i * channels;
    if (encoding == Encoding::kTurns) {
      a[0] = std::max(-v, 0.0f);
      a[1] = std::max(v, 0.0f);
    } else {
      for (std::size_t k = 0; k < channels; ++k) {
        const auto s = static_cast<float>(
            2.0 * static_cast<double>(k) / static_cast<double>(channels - 1) - 1.0);
        a[k] = std::max(v * s, 0.0f);
      }
    }
  }
  return actions;
}

std::vector<float> delayed(std::span<const float> velocity, std::int64_t B, std::int64_t T,
                           std::int64_t delay) {
  std::vector<float> later(velocity.size(), 0.0f);
  for (std::int64_t b = 0; b < B; ++b) {
    for (std::int64_t t = delay; t < T; ++t) {
      later[static_cast<std::size_t>(b * T + t)] =
          velocity[static_cast<std::size_t>(b * T + t - delay)];
    }
  }
  return later;
}

std::vector<float> initial_bumps(std::span<const double> start, std::int64_t N) {
  const auto n = static_cast<std::size_t>(N);
  const double neurons = static_cast<double>(N), width = neurons / 10;
  std::vector<float> r0(start.size() * n);
  std::vector<double> bump(n);
  for (std::size_t b = 0; b < start.size(); ++b) {
    const double center = start[b] * neurons / (2 * std::numbers::pi);
    double squares = 0;
    for (std::size_t i = 0; i < n; ++i) {
      const double away = std::fabs(std::remainder(static_cast<double>(i) - center, neurons));
      bump[i] = std::exp(-away * away / (2 * width * width));
      squares += bump[i] * bump[i];
    }
    const double scale = 1 / std::sqrt(squares);
    for (std::size_t i = 0; i < n; ++i) r0[b * n + i] = static_cast<float>(bump[i] * scale);
  }
  return r0;
}

double circular_distance(double a, double b) {
  return std::fabs(std::remainder(a - b, 2 * std::numbers::pi));
}

}  // namespace annulus::train
