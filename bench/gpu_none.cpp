// The build without CUDA: asking for it is an error that says so.
#include "annulus/core/errors.h"
#include "bench/gpu.h"

namespace annulus::bench::gpu {
namespace {
[[noreturn]] void unavailable() {
  throw NotSupported("[bench] device cuda must be built in but this build has no CUDA");
}
}  // namespace

struct ColdTimer::State {};
ColdTimer::ColdTimer() { unavailable(); }
ColdTimer::~ColdTimer() = default;
std::vector<std::vector<double>> ColdTimer::time(const std::vector<std::function<void()>>&, int) {
  unavailable();
}
bool can_move(std::size_t, std::size_t) { return false; }
void move(const std::vector<const void*>&, const std::vector<void*>&, std::size_t) {
  unavailable();
}
Ceilings ceilings() { unavailable(); }

}  // namespace annulus::bench::gpu
