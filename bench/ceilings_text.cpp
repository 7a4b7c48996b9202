#include <fmt/format.h>

#include "bench/ceilings.h"

namespace annulus::bench {

std::string to_string(const Ceilings& c) {
  std::string rates;
  for (const Precision p : kAllProducts) {
    if (!(c.gemm_gflops(p) > 0)) continue;
    rates += fmt::format("{}{} {:.0f}", rates.empty() ? "" : ", ", name_of(p), c.gemm_gflops(p));
  }
  std::string s = fmt::format("copy {:.1f} GB/s", c.copy_gbs);
  s += rates.empty() ? ", GEMM not measured" : ", GEMM " + rates + " GFLOP/s";
  if (c.launch_ms > 0) s += fmt::format(", empty launch {:.1f} us", 1e3 * c.launch_ms);
  if (c.barrier_ms > 0) s += fmt::format(", grid barrier {:.2f} us", 1e3 * c.barrier_ms);
  if (c.small_barrier_ms > 0) {
    s += fmt::format(", cluster barrier {:.2f} us", 1e3 * c.small_barrier_ms);
  }
  return s;
}

}  // namespace annulus::bench
