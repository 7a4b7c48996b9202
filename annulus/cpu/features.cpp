#include "annulus/cpu/features.h"

#include "annulus/cpu/tile.h"

#if defined(__aarch64__) && defined(__linux__)
#include <sys/auxv.h>
#elif defined(__x86_64__) && defined(__linux__)
#include <cpuid.h>
#include <sys/syscall.h>
#include <unistd.h>
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

bool has_avx512_bf16() {
#if defined(__x86_64__) && defined(__linux__)
  // The compiler's question takes the operating system's saving of the registers into account.
  static const bool found =
      __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
      __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq") &&
      __builtin_cpu_supports("avx512bf16");
  return found;
#else
  return false;
#endif
}

bool has_fast_avx512_bf16() {
#if defined(__x86_64__) && defined(__linux__)
  static const bool fast = has_avx512_bf16() && !__builtin_cpu_is("intel");
  return fast;
#else
  return false;
#endif
}

#if defined(__x86_64__) && defined(__linux__)
static bool ask_for_amx() {
  constexpr long kRequest = 0x1023, kTileData = 18;  // ARCH_REQ_XCOMP_PERM, XFEATURE_XTILEDATA
  unsigned a = 0, b = 0, c = 0, d = 0;
  if (__get_cpuid_count(7, 0, &a, &b, &c, &d) == 0) return false;
  const bool has = (d >> 22 & 1) != 0 && (d >> 24 & 1) != 0;  // AMX-BF16, AMX-TILE
  // Also how a kernel that does not know the tiles says so.
  return has && syscall(SYS_arch_prctl, kRequest, kTileData) == 0;
}
#endif

bool has_amx_bf16() {
#if defined(__x86_64__) && defined(__linux__)
  static const bool granted = ask_for_amx();
  return granted;
#else
  return false;
#endif
}

std::string simd_description() {
#if ANNULUS_HAVE_HWY && ANNULUS_HWY_DISPATCH
  // The best of the targets this file was compiled for that the CPU also has: lowest bit is best.
  const auto usable = hwy::SupportedTargets() & HWY_TARGETS;
  const auto best = usable & -usable;
  std::string s = best == HWY_SCALAR ? std::string("scalar (this CPU has no AVX2)")
                                     : std::string("Highway ") + hwy::TargetName(best);
#elif ANNULUS_HAVE_HWY
  std::string s = "Highway, compiled for the building machine";
#else
  std::string s = "scalar (built without Highway)";
#endif
  if (has_arm_bf16()) s += ", bf16 in hardware (bfcvtn, bfmmla)";
  if (detail::bf16_tiles_amx(Precision::kBf16) != nullptr) {
    s += ", bf16 in hardware (AMX, vdpbf16ps)";
  } else if (detail::bf16_tiles_x86(Precision::kBf16) != nullptr) {
    s += ", bf16 in hardware (vdpbf16ps)";
  }
  return s;
}

}  // namespace annulus::cpu
