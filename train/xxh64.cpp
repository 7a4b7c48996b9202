// Written from the published description of the algorithm; the tests hold its known answers.
#include "train/xxh64.h"

#include <array>
#include <bit>

namespace annulus::train {
namespace {

constexpr std::uint64_t kPrime1 = 0x9E3779B185EBCA87ull;
constexpr std::uint64_t kPrime2 = 0xC2B2AE3D27D4EB4Full;
constexpr std::uint64_t kPrime3 = 0x165667B19E3779F9ull;
constexpr std::uint64_t kPrime4 = 0x85EBCA77C2B2AE63ull;
constexpr std::uint64_t kPrime5 = 0x27D4EB2F165667C5ull;

// Little-endian, on any machine.
std::uint64_t load(const std::byte* p, int bytes) {
  std::uint64_t v = 0;
  for (int i = 0; i < bytes; ++i) v |= std::to_integer<std::uint64_t>(p[i]) << (8 * i);
  return v;
}

std::uint64_t round(std::uint64_t lane, std::uint64_t input) {
  return std::rotl(lane + input * kPrime2, 31) * kPrime1;
}

}  // namespace

std::uint64_t xxh64(std::span<const std::byte> data, std::uint64_t seed) {
  const std::byte* p = data.data();
  std::size_t left = data.size();
  std::uint64_t hash = seed + kPrime5;
  if (left >= 32) {
    std::array<std::uint64_t, 4> lane = {seed + kPrime1 + kPrime2, seed + kPrime2, seed,
                                         seed - kPrime1};
    for (; left >= 32; left -= 32) {
      for (std::uint64_t& v : lane) {
        v = round(v, load(p, 8));
        p += 8;
      }
    }
    hash = std::rotl(lane[0], 1) + std::rotl(lane[1], 7) + std::rotl(lane[2], 12) +
           std::rotl(lane[3], 18);
    for (const std::uint64_t v : lane) hash = (hash ^ round(0, v)) * kPrime1 + kPrime4;
  }
  hash += data.size();
  for (; left >= 8; left -= 8, p += 8) {
    hash = std::rotl(hash ^ round(0, load(p, 8)), 27) * kPrime1 + kPrime4;
  }
  if (left >= 4) {
    hash = std::rotl(hash ^ (load(p, 4) * kPrime1), 23) * kPrime2 + kPrime3;
    left -= 4;
    p += 4;
  }
  for (; left > 0; --left, ++p) hash = std::rotl(hash ^ (load(p, 1) * kPrime5), 11) * kPrime1;
  hash = (hash ^ (hash >> 33)) * kPrime2;
  hash = (hash ^ (hash >> 29)) * kPrime3;
  return hash ^ (hash >> 32);
}

}  // namespace annulus::train
