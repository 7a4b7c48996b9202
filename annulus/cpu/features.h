// What the CPU under us has, asked once.
#pragma once

#include <string>

namespace annulus::cpu {

// Arm FEAT_BF16: hardware conversion to bfloat16 (bfcvtn) and bf16 matrix products.
bool has_arm_bf16();

// AVX512-BF16 (vdpbf16ps), with the AVX512 F, BW, VL and DQ that code around it uses.
bool has_avx512_bf16();
// Whether that makes products faster than fp32 multiply-adds do. Intel's cores take two cycles for one (Sapphire Rapids: 72 GFLOP/s of
// a core, and 138 in fp32).
bool has_fast_avx512_bf16();

// Intel's AMX with bf16 products (tdpbf16ps), and Linux lets this process use it. The tiles are
// large (8 KiB that a signal has to save), so the kernel hands them out on request only: the first
// call asks for the whole process, and what was refused then stays refused.
bool has_amx_bf16();

// "Highway NEON, bf16 in hardware (bfcvtn, bfmmla)", or "scalar (built without Highway)".
std::string simd_description();
// The same for as long as the process lives.
inline const char* simd_text() {
  static const std::string& text = *new std::string(simd_description());
  return text.c_str();
}

}  // namespace annulus::cpu
