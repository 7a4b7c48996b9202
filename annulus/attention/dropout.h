// Which weights dropout keeps: a hash of (seed, sample, head, query, key), so that the mask is the same for every tiling and
// device. A row's numbers are mixed once to 64 bits, from which two rounds of 32-bit mixing make a key's.
#pragma once

#include <cstdint>

#include "annulus/core/macros.h"

namespace annulus::attention {

// MurmurHash3's finalizers (public domain): every bit of x changes each bit of the result with probability 1/2.
ANNULUS_HD constexpr std::uint32_t mix32(std::uint32_t x) {
  x = (x ^ (x >> 16)) * 0x85ebca6bu;
  x = (x ^ (x >> 13)) * 0xc2b2ae35u;
  return x ^ (x >> 16);
}
ANNULUS_HD constexpr std::uint64_t mix64(std::uint64_t x) {
  x = (x ^ (x >> 33)) * 0xff51afd7ed558ccdull;
  x = (x ^ (x >> 33)) * 0xc4ceb9fe1a85ec53ull;
  return x ^ (x >> 33);
}

struct Dropout {
  std::uint64_t seed = 0;
  // A weight is dropped where its number is below it; 0: none is. (2^32 p, so p = 1 drops all but one in 2^32: not offered.)
  std::uint32_t threshold = 0;
  float scale = 1;  // of a weight that is kept

  Dropout() = default;
  Dropout(double p, std::uint64_t s)
      : seed(s),
        threshold(static_cast<std::uint32_t>(p * 4294967296.0)),
        scale(static_cast<float>(1 / (1 - p))) {}

  ANNULUS_HD bool any() const { return threshold != 0; }
  ANNULUS_HD std::uint64_t row(std::int64_t sample, std::int64_t head, std::int64_t query) const {
    std::uint64_t x = mix64(seed + 0x9e3779b97f4a7c15ull);
    x = mix64(x ^ static_cast<std::uint64_t>(sample));
    x = mix64(x ^ static_cast<std::uint64_t>(head));
    return mix64(x ^ static_cast<std::uint64_t>(query));
  }
  ANNULUS_HD bool keeps(std::uint64_t row, std::int64_t key) const {
    const auto low = static_cast<std::uint32_t>(key);
    const auto high = static_cast<std::uint32_t>(static_cast<std::uint64_t>(key) >> 32);
    const auto a = static_cast<std::uint32_t>(row);
    const auto b = static_cast<std::uint32_t>(row >> 32) + high;
    return mix32(mix32(low ^ a) + b) >= threshold;
  }
};

}  // namespace annulus::attention
