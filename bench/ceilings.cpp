#include "bench/ceilings.h"

#include <algorithm>
#include <chrono>
#include <cstring>
#include <vector>

#include "annulus/core/buffer.h"
#include "bench/gpu.h"
#include "bench/movers.h"
#if ANNULUS_HAVE_BLAS
#include <cblas.h>
#endif

namespace annulus::bench {
namespace {

template <class F>
double best_ms(int repetitions, F&& f) {
  double best = 1e300;
  for (int i = 0; i < repetitions; ++i) {
    const auto start = std::chrono::steady_clock::now();
    f();
    const std::chrono::duration<double, std::milli> t = std::chrono::steady_clock::now() - start;
    best = std::min(best, t.count());
  }
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

double cpu_gemm_gflops() {
#if ANNULUS_HAVE_BLAS
  constexpr int n = 1024;
  std::vector<float> a(n * n, 0.5f), b(n * n, 0.25f), c(n * n);
  const auto multiply = [&] {
    cblas_sgemm(CblasRowMajor, CblasNoTrans, CblasNoTrans, n, n, n, 1.0f, a.data(), n, b.data(), n,
                0.0f, c.data(), n);
  };
  multiply();
  return 2e-6 * n * n * n / best_ms(5, multiply);
#else
  return 0;
#endif
}

}  // namespace

Ceilings measure_ceilings(DeviceType device) {
  if (device == DeviceType::kCUDA) {
    return {{gpu::copy_gbs(), gpu::gemm_gflops()}, gpu::launch_ms()};
  }
  return {{cpu_copy_gbs(), cpu_gemm_gflops()}, 0};
}

Floor floor_of(double bytes, double flops, const Ceilings& c) {
  Floor floor;
  if (c.figures.copy_gbs > 0) floor.ms = 1e-6 * bytes / c.figures.copy_gbs;
  const double compute = c.figures.gemm_gflops > 0 ? 1e-6 * flops / c.figures.gemm_gflops : 0;
  if (compute > floor.ms) floor = {compute, FloorKind::kCompute};
  if (c.latency_ms > floor.ms) floor = {c.latency_ms, FloorKind::kLatency};
  return floor;
}

}  // namespace annulus::bench
