// What the CPU under us has, asked once.
#pragma once

#include <string>

#include "annulus/core/macros.h"

namespace annulus::cpu {

// Arm FEAT_BF16: hardware conversion to bfloat16 (bfcvtn) and bf16 matrix products.
ANNULUS_API bool has_arm_bf16();

// "Highway NEON, bf16 in hardware (bfcvtn, bfmmla)", or "scalar (built without Highway)".
ANNULUS_API std::string simd_description();

}  // namespace annulus::cpu
