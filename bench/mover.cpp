#include "bench/mover.h"

#include <fmt/format.h>

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <cstring>
#include <fstream>
#include <memory>

#include "annulus/core/buffer.h"
#include "annulus/core/checked.h"
#include "annulus/cpu/parallel.h"
#include "bench/gpu.h"

namespace annulus::bench {
namespace {

// Large enough that a thread's share is a few tasks, small enough to balance; whole pages.
constexpr std::size_t kChunk = std::size_t{1} << 20;

template <class F>
void for_chunks(std::size_t bytes, F&& f) {
  const std::int64_t chunks = ceil_div(static_cast<std::int64_t>(bytes), kChunk);
  cpu::parallel_for(chunks, 0, [&](std::int64_t i) {
    const std::size_t start = static_cast<std::size_t>(i) * kChunk;
    f(start, std::min(kChunk, bytes - start));
  });
}

Mover cpu_copy(double bytes) {
  const auto from = std::make_shared<Buffer>(kCPU, static_cast<std::size_t>(bytes / 2));
  const auto to = std::make_shared<Buffer>(kCPU, from->bytes());
  for (std::size_t i = 0; i < from->bytes(); ++i) {
    static_cast<unsigned char*>(from->data())[i] = static_cast<unsigned char>(i * 131 >> 3);
  }
  std::memset(to->data(), 0, to->bytes());
  const auto wrong_share = [=] {
    return std::memcmp(from->data(), to->data(), from->bytes()) == 0 ? 0.0 : 1.0;
  };
  return {[=] { copy_parallel(to->data(), from->data(), from->bytes()); },
          2 * static_cast<double>(from->bytes()), wrong_share, "copy 1:1"};
}

// Moves once more and looks at the first and the last bytes of every piece.
double cuda_wrong_share(const Problem::Pieces& p) {
  gpu::move(p.reads, p.writes, p.unit);
  synchronize(cuda_device());
  const std::size_t whole = p.unit / 16 * 16;
  const std::size_t n = std::min<std::size_t>(whole, 1 << 20);
  std::size_t wrong = 0, seen = 0;
  for (const std::size_t at : {std::size_t{0}, whole - n}) {
    std::vector<unsigned char> expected(n, 0), part(n);
    const auto fetch = [&](const void* piece) {
      copy_bytes(part.data(), kCPU, static_cast<const char*>(piece) + at, cuda_device(), n);
    };
    for (const void* piece : p.reads) {
      fetch(piece);
      for (std::size_t i = 0; i < n; ++i) expected[i] ^= part[i];
    }
    for (const void* piece : p.writes) {
      fetch(piece);
      for (std::size_t i = 0; i < n; ++i) wrong += part[i] != expected[i];
      seen += n;
    }
  }
  return seen == 0 ? 0 : static_cast<double>(wrong) / static_cast<double>(seen);
}

}  // namespace

std::optional<Mover> make_mover(Problem& problem, Device device, std::string* why_not) {
  if (device.type == DeviceType::kCPU) return cpu_copy(problem.bytes());
  const std::vector<Problem::Pieces> pieces = problem.pieces();
  Mover m;
  for (const auto& p : pieces) {
    if (p.unit < 16 || !gpu::can_move(p.reads.size(), p.writes.size())) {
      *why_not = fmt::format("no kernel that reads {} and writes {} streams", p.reads.size(),
                             p.writes.size());
      return std::nullopt;
    }
    m.bytes += static_cast<double>(p.unit) * static_cast<double>(p.reads.size() + p.writes.size());
    m.description += fmt::format("{}read {}, write {}", m.description.empty() ? "" : "; ",
                                 p.reads.size(), p.writes.size());
  }
  m.run = [=] {
    for (const auto& p : pieces) gpu::move(p.reads, p.writes, p.unit);
  };
  // Of the last call only: an earlier call's outputs may be a later one's inputs.
  m.wrong_share = [last = pieces.back()] { return cuda_wrong_share(last); };
  return m;
}

std::size_t mover_bytes(const testing::Case& problem, const std::vector<std::string>& calls,
                        Device device) {
  if (device.type != DeviceType::kCPU) return 0;
  double bytes = 0;
  for (const std::string& name : calls) bytes += find_call(problem, name).bytes;
  return static_cast<std::size_t>(bytes);
}

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
