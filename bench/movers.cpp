#include "bench/movers.h"

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <cstring>
#include <fstream>
#include <string>

#include "annulus/cpu/parallel.h"

namespace annulus::bench {
namespace {

// Large enough that a thread's share is a few tasks, small enough to balance; whole pages.
constexpr std::size_t kChunk = std::size_t{1} << 20;

template <class F>
void for_chunks(std::size_t bytes, F&& f) {
  const std::size_t chunks = (bytes + kChunk - 1) / kChunk;
  cpu::parallel_for(static_cast<std::int64_t>(chunks), 0, [&](std::int64_t i) {
    const std::size_t start = static_cast<std::size_t>(i) * kChunk;
    f(start, std::min(kChunk, bytes - start));
  });
}

}  // namespace

void copy_parallel(void* to, const void* from, std::size_t bytes) {
  for_chunks(bytes, [&](std::size_t start, std::size_t n) {
    std::memcpy(static_cast<char*>(to) + start, static_cast<const char*>(from) + start, n);
  });
}

void sweep_caches(const void* data, std::size_t bytes) {
  static std::atomic<std::uint64_t> sink{0};
  for_chunks(bytes, [&](std::size_t start, std::size_t n) {
    std::uint64_t sum = 0;
    for (std::size_t k = 0; k + 64 <= n; k += 64) {
      std::uint64_t word;
      std::memcpy(&word, static_cast<const char*>(data) + start + k, sizeof word);
      sum += word;
    }
    sink.fetch_add(sum, std::memory_order_relaxed);  // the loads must not be optimised away
  });
}

std::size_t last_level_cache_bytes() {
  std::size_t largest = 0;
  for (int index = 0; index < 8; ++index) {
    std::ifstream file("/sys/devices/system/cpu/cpu0/cache/index" + std::to_string(index) +
                       "/size");
    std::size_t size = 0;
    char unit = ' ';
    if (!(file >> size)) continue;
    file >> unit;
    largest = std::max(largest, size * (unit == 'K' ? 1024u : unit == 'M' ? 1u << 20 : 1u));
  }
  return largest == 0 ? std::size_t{32} << 20 : largest;
}

}  // namespace annulus::bench
