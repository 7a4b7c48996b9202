// The tiles of this machine: bf16 instructions of Arm or x86 where they are, else Highway.

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "annulus/cpu/tile.cpp"
#if ANNULUS_HAVE_HWY && ANNULUS_HWY_DISPATCH
#include <hwy/foreach_target.h>  // compiles this file once per instruction set
#endif

#include "annulus/cpu/tile-inl.h"

#if HWY_ONCE
namespace annulus::cpu {

ANNULUS_CPU_EXPORT(float_tiles);
ANNULUS_CPU_EXPORT(double_tiles);

const Tiles<float>* detail::float_tiles_highway(Precision precision) {
  return ANNULUS_CPU_CALL(float_tiles)(precision);
}

template <>
const Tiles<float>& tiles<float>(Precision precision) {
  if (precision != Precision::kFp32) {
    if (const Tiles<float>* t = detail::bf16_tiles_arm(precision)) return *t;
    if (const Tiles<float>* t = detail::bf16_tiles_amx(precision)) return *t;
    if (const Tiles<float>* t = detail::bf16_tiles_x86(precision)) return *t;
  }
  return *detail::float_tiles_highway(precision);
}

template <>
const Tiles<double>& tiles<double>(Precision) {
  return *ANNULUS_CPU_CALL(double_tiles)();
}

}  // namespace annulus::cpu
#endif
