#include "bench/mover_impl.h"

#include <fmt/format.h>

#include <algorithm>
#include <cstring>
#include <utility>

#include "annulus/core/buffer.h"
#include "bench/gpu.h"
#include "bench/movers.h"

namespace annulus::bench {
namespace {

class CpuCopy final : public Mover {
 public:
  explicit CpuCopy(double bytes)
      : from_(kCPU, static_cast<std::size_t>(bytes / 2)), to_(kCPU, from_.bytes()) {
    for (std::size_t i = 0; i < from_.bytes(); ++i) {
      static_cast<unsigned char*>(from_.data())[i] = static_cast<unsigned char>(i * 131 >> 3);
    }
    std::memset(to_.data(), 0, to_.bytes());
  }
  void run() override { copy_parallel(to_.data(), from_.data(), from_.bytes()); }
  double bytes() const override { return 2 * static_cast<double>(from_.bytes()); }
  double wrong_share() const override {
    return std::memcmp(from_.data(), to_.data(), from_.bytes()) == 0 ? 0 : 1;
  }
  std::string description() const override { return "copy 1:1"; }

 private:
  Buffer from_, to_;
};

class CudaMove final : public Mover {
 public:
  explicit CudaMove(std::vector<Problem::Pieces> pieces) : pieces_(std::move(pieces)) {}
  void run() override {
    for (const auto& p : pieces_) gpu::move(p.reads, p.writes, p.unit);
  }
  double bytes() const override {
    double total = 0;
    for (const auto& p : pieces_) {
      total += static_cast<double>(p.unit) * static_cast<double>(p.reads.size() + p.writes.size());
    }
    return total;
  }
  // Runs once more and looks at the first and the last bytes of every piece. The pieces of the last
  // call only: an earlier call's outputs may be a later one's inputs.
  double wrong_share() const override {
    const auto& p = pieces_.back();
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
  std::string description() const override {
    std::string s;
    for (const auto& p : pieces_) {
      s += fmt::format("{}read {}, write {}", s.empty() ? "" : "; ", p.reads.size(),
                       p.writes.size());
    }
    return s;
  }

 private:
  std::vector<Problem::Pieces> pieces_;
};

}  // namespace

std::unique_ptr<Mover> make_mover(Problem& problem, Device device, std::string* why_not) {
  if (device.type == DeviceType::kCPU) return std::make_unique<CpuCopy>(problem.bytes());
  auto pieces = problem.pieces();
  for (const auto& p : pieces) {
    if (p.unit < 16 || !gpu::can_move(p.reads.size(), p.writes.size())) {
      *why_not = fmt::format("no kernel that reads {} and writes {} streams", p.reads.size(),
                             p.writes.size());
      return nullptr;
    }
  }
  return std::make_unique<CudaMove>(std::move(pieces));
}

std::size_t mover_bytes(const testing::Case& problem, const std::vector<std::string>& calls,
                        Device device) {
  if (device.type != DeviceType::kCPU) return 0;
  double bytes = 0;
  for (const std::string& name : calls) bytes += find_call(problem, name).bytes;
  return static_cast<std::size_t>(bytes);
}

}  // namespace annulus::bench
