#include "annulus/cpu/features.h"

#include "annulus/cpu/tile.h"

#if defined(__aarch64__) && defined(__linux__)
#include <sys/auxv.h>
#endif

#if ANNULUS_HAVE_HWY
#include <hwy/highway.h>
#if ANNULUS_HWY_DISPATCH
#include <hwy/targets.h>
#endif
#endif

namespace annulus::cpu {

bool has_arm_bf16() {
#if defined(__aarch64__) && defined(__linux__)
  constexpr unsigned long kHwcap2Bf16 = 1ul << 14;
  static const bool found = (getauxval(AT_HWCAP2) & kHwcap2Bf16) != 0;
  return found;
#else
  return false;
#endif
}

std::string simd_description() {
#if ANNULUS_HAVE_HWY && ANNULUS_HWY_DISPATCH
  // The best of the targets this file was compiled for that the CPU also has: lowest bit is best.
  const auto usable = hwy::SupportedTargets() & HWY_TARGETS;
  std::string s = std::string("Highway ") + hwy::TargetName(usable & -usable);
#elif ANNULUS_HAVE_HWY
  std::string s = "Highway, compiled for the building machine";
#else
  std::string s = "scalar (built without Highway)";
#endif
  if (has_arm_bf16()) s += ", bf16 in hardware (bfcvtn, bfmmla)";
  if (detail::bf16_tiles_x86(Arithmetic::kBf16) != nullptr) s += ", bf16 in hardware (vdpbf16ps)";
  return s;
}

}  // namespace annulus::cpu
