// The direct path for rows of float16.

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "annulus/lrpe_cosine/cpu/direct_f16.cpp"
#if ANNULUS_HAVE_HWY && ANNULUS_HWY_DISPATCH
#include <hwy/foreach_target.h>  // compiles this file once per instruction set
#endif

#include "annulus/lrpe_cosine/cpu/direct-inl.h"

#if ANNULUS_SIMD
HWY_BEFORE_NAMESPACE();
namespace annulus::lrpe_cosine::HWY_NAMESPACE {
void turn_tile_f16(const Tile& tile) { turn_tile<float16>(tile); }
}  // namespace annulus::lrpe_cosine::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();
#endif
