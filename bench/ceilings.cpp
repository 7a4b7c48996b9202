#include "bench/ceilings.h"

#include <dlfcn.h>

#include <algorithm>
#include <cstring>
#include <thread>
#include <vector>

#include "annulus/core/buffer.h"
#include "annulus/cpu/parallel.h"
#include "bench/gpu.h"
#include "bench/mover.h"
#include "bench/statistics.h"
#if ANNULUS_HAVE_BLAS
#include <cblas.h>
#endif

namespace annulus::bench {
namespace {

template <class F>
double best_ms(int repetitions, F&& f) {
  double best = milliseconds(f);
  for (int i = 1; i < repetitions; ++i) best = std::min(best, milliseconds(f));
  return best;
}

double cpu_copy_gbs() {
  // Eight times the last cache on either side, so that none of it helps; bounded for big servers.
  const std::size_t bytes =
      std::clamp(8 * last_level_cache_bytes(), std::size_t{128} << 20, std::size_t{1} << 30);
  const Buffer from(kCPU, bytes), to(kCPU, bytes);
  std::memset(from.data(), 1, bytes);
  std::memset(to.data(), 2, bytes);  // page faults happen here
  const double ms = best_ms(12, [&] { copy_parallel(to.data(), from.data(), bytes); });
  return 2e-6 * static_cast<double>(bytes) / ms;
}

#if ANNULUS_HAVE_BLAS
// Not linked: OpenBLAS starts its threads as it is loaded and ends the process where it cannot, which must
// not happen to a command that measures nothing.
decltype(&cblas_sgemm) load_sgemm() {
  const int threads = static_cast<int>(std::thread::hardware_concurrency());
  if (cpu::startable_threads(threads) < threads) return nullptr;
  void* library = dlopen(ANNULUS_BLAS_SONAME, RTLD_NOW | RTLD_LOCAL);
  if (!library) library = dlopen(ANNULUS_BLAS_PATH, RTLD_NOW | RTLD_LOCAL);
  void* function = library ? dlsym(library, "cblas_sgemm") : nullptr;
  return reinterpret_cast<decltype(&cblas_sgemm)>(function);
}
#endif

// 0 where there is no BLAS, or it cannot be loaded.
double sgemm_gflops() {
#if ANNULUS_HAVE_BLAS
  static const auto sgemm = load_sgemm();
  if (!sgemm) return 0;
  constexpr int n = 1024;
  std::vector<float> a(n * n, 0.5f), b(n * n, 0.25f), c(n * n);
  const auto multiply = [&] {
    sgemm(CblasRowMajor, CblasNoTrans, CblasNoTrans, n, n, n, 1.0f, a.data(), n, b.data(), n, 0.0f,
          c.data(), n);
  };
  multiply();
  return 2e-6 * n * n * n / best_ms(5, multiply);
#else
  return 0;
#endif
}

}  // namespace

Ceilings measure_ceilings(DeviceType device) {
  if (device == DeviceType::kCUDA) return gpu::ceilings();
  Ceilings c;
  c.copy_gbs = cpu_copy_gbs();
  for (const Precision p : kAllProducts) c.rate(p) = cpu_peak_gflops(p);
  const double sgemm = sgemm_gflops();
  c.blas_missing = ANNULUS_HAVE_BLAS && sgemm == 0;
  c.rate(Precision::kFp32) = std::max(c.rate(Precision::kFp32), sgemm);
  c.on_chip_bytes = static_cast<double>(last_level_cache_bytes());
  return c;
}

Ceilings together(std::span<const RankCeilings> ranks) {
  Ceilings all = ranks.front().ceilings;
  all.copy_gbs = all.on_chip_bytes = 0;
  all.gemm = {};
  for (const RankCeilings& rank : ranks) {
    const auto here = [&](const RankCeilings& other) { return other.place == rank.place; };
    if (&rank != &*std::find_if(ranks.begin(), ranks.end(), here)) continue;
    const auto sharing = static_cast<double>(std::count_if(ranks.begin(), ranks.end(), here));
    const double times = std::min(sharing, std::max(rank.at_most, 1.0));
    all.copy_gbs += times * rank.ceilings.copy_gbs;
    for (std::size_t p = 0; p < all.gemm.size(); ++p) all.gemm[p] += times * rank.ceilings.gemm[p];
    all.on_chip_bytes += rank.ceilings.on_chip_bytes;
  }
  return all;
}

Floor floor_of(double bytes, double flops, const Work& work, const Ceilings& c) {
  const double again = work.steps > 1 ? static_cast<double>(work.steps - 1) : 0;
  const double moved = bytes + again * std::max(work.step_bytes - c.on_chip_bytes, 0.0);
  const double rate = c.gemm_gflops(work.products);
  const double bandwidth = c.copy_gbs > 0 ? 1e-6 * moved / c.copy_gbs : 0;
  const double compute = rate > 0 ? 1e-6 * work.passes * flops / rate : 0;
  const double barriers = static_cast<double>(work.steps) * c.step_ms(work.step_bytes);
  const double latency = std::max(barriers, c.launch_ms);
  return {std::max(std::max(compute, bandwidth) + barriers, c.launch_ms),
          latency > std::max(compute, bandwidth) ? FloorKind::kLatency
          : compute > bandwidth                  ? FloorKind::kCompute
                                                 : FloorKind::kBandwidth};
}

}  // namespace annulus::bench
