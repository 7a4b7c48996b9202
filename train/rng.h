// Random numbers that are the same on every machine: splitmix64, and no distribution of the standard
// library. A stream is named by what it is for (seed, purpose, number) instead of being carried
// along, so a training that continues at step 400 draws what it would have drawn without the stop.
#pragma once

#include <cmath>
#include <cstdint>
#include <numbers>

namespace annulus::train {

class Rng {
 public:
  explicit Rng(std::uint64_t seed) : state_(seed) {}
  // An independent stream for every (seed, purpose, number).
  Rng(std::uint64_t seed, std::uint64_t purpose, std::uint64_t number)
      : state_(mix(mix(mix(seed) + purpose) + number)) {}

  std::uint64_t next() { return mix(state_ += kStep); }
  double uniform() { return static_cast<double>(next() >> 11) * 0x1p-53; }  // [0, 1)
  double uniform(double low, double high) { return low + (high - low) * uniform(); }
  std::int64_t below(std::int64_t n) {  // 0 .. n-1; n is small here, so the bias is below 2^-50
    return static_cast<std::int64_t>(next() % static_cast<std::uint64_t>(n));
  }
  double normal() {  // Box-Muller, one of the pair
    const double radius = std::sqrt(-2 * std::log(1 - uniform()));
    return radius * std::cos(2 * std::numbers::pi * uniform());
  }

 private:
  static constexpr std::uint64_t kStep = 0x9e3779b97f4a7c15ull;
  static std::uint64_t mix(std::uint64_t z) {
    z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9ull;
    z = (z ^ (z >> 27)) * 0x94d049bb133111ebull;
    return z ^ (z >> 31);
  }

  std::uint64_t state_;
};

}  // namespace annulus::train
