// Division by a number known at launch: a multiplication by a magic number instead of the 20 to 100
// instructions of an integer division on the GPU. Exact for every dividend below 2^31.
#pragma once

#include <cstdint>

#include "annulus/core/macros.h"

namespace annulus::cuda {

struct FastDiv {
  std::uint32_t divisor = 1;
  std::uint32_t magic = 0;
  std::uint32_t shift = 0;

  FastDiv() = default;
  explicit FastDiv(std::uint32_t d) : divisor(d) {
    // Round-up method: n / d = (n * ceil(2^(32 + s) / d)) >> (32 + s) with s = ceil(log2 d) - 1 has
    // a magic number below 2^32 for every d > 1, and is exact for n < 2^31.
    if (d <= 1) return;
    while ((std::uint64_t{1} << (shift + 1)) < d) ++shift;
    magic = static_cast<std::uint32_t>(((std::uint64_t{1} << (32 + shift)) + d - 1) / d);
  }

  ANNULUS_HD std::uint32_t divide(std::uint32_t n) const {
    if (divisor == 1) return n;
#if defined(__CUDA_ARCH__)
    return __umulhi(n, magic) >> shift;
#else
    return static_cast<std::uint32_t>((static_cast<std::uint64_t>(n) * magic) >> 32) >> shift;
#endif
  }
};

}  // namespace annulus::cuda
