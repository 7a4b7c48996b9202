// Elementary functions that CUDA has not, and arithmetic whose rounding is fixed. (exp, erf, tanh, fmax and
// the like have an overload for float and one for double.)
//
// nvcc turns a product and a sum into one fma where it likes, and it may like it in one kernel and
// not in another. Where bits must not depend on the kernel that a function was inlined into,
// products and sums are written as fma_of, mul_of and add_of.
#pragma once

namespace annulus::cuda {

// Always fused.
__device__ __forceinline__ float fma_of(float a, float b, float c) { return __fmaf_rn(a, b, c); }
__device__ __forceinline__ double fma_of(double a, double b, double c) { return __fma_rn(a, b, c); }
// A product that is never fused into a following sum.
__device__ __forceinline__ float mul_of(float a, float b) { return __fmul_rn(a, b); }
__device__ __forceinline__ double mul_of(double a, double b) { return __dmul_rn(a, b); }
// A sum that takes up no product before it.
__device__ __forceinline__ float add_of(float a, float b) { return __fadd_rn(a, b); }
__device__ __forceinline__ double add_of(double a, double b) { return __dadd_rn(a, b); }

// 1 / (1 + e^-x); 0 where e^-x overflows and the result would be subnormal.
template <class Real>
__device__ __forceinline__ Real sigmoid_of(Real x) {
  return Real(1) / add_of(Real(1), exp(-x));
}
// The same with subnormal results: with e = e^-|x| it is 1 / (1 + e), or e / (1 + e) below zero.
template <class Real>
__device__ __forceinline__ Real sigmoid_with_tails(Real x) {
  const Real e = exp(x < 0 ? x : -x);
  return (x < 0 ? e : Real(1)) / (Real(1) + e);
}

// ---- By the special-function unit: one or two instructions, enough for results in 16 bits.

inline constexpr float kLog2E = 1.44269504f;

// 2^x to 2 ulp; 0 below 2^-126. (With those results the compiler spends four more instructions.)
__device__ __forceinline__ float exp2_fast(float x) {
  float result;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(result) : "f"(x));
  return result;
}
__device__ __forceinline__ float inverse_fast(float x) {
  float result;
  asm("rcp.approx.f32 %0, %1;" : "=f"(result) : "f"(x));
  return result;
}
// Right to 2^-17 where f16 keeps 2^-11, and 1 minus it to 2^-23 of 1.
__device__ __forceinline__ float sigmoid_fast(float x) {
  const float e = __expf(-fabsf(x));
  return (x < 0 ? e : 1.0f) * inverse_fast(1.0f + e);
}

}  // namespace annulus::cuda
