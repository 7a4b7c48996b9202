#include "testing/limits.h"

#include <algorithm>
#include <cmath>
#include <limits>

namespace annulus::testing {

FloatFormat format_of(DType t) {
  switch (t) {
    case DType::kF64:
      return {52, -1022, std::numeric_limits<double>::max()};
    case DType::kF32:
      return {23, -126, static_cast<double>(std::numeric_limits<float>::max())};
    case DType::kF16:
      return {10, -14, 65504.0};
    case DType::kBF16:
      return {7, -126, 0x1.fep127};
    default:
      return {0, 0, 0};
  }
}

double ulp_at(double v, DType t) {
  const FloatFormat f = format_of(t);
  int exponent = f.min_exponent;
  if (v != 0 && std::isfinite(v)) exponent = std::max(exponent, std::ilogb(v));
  return std::ldexp(1.0, exponent - f.mantissa_bits);
}

double ulp_at(double v, DType t, Precision p) {
  // What is left of an operand below bf16's least number is lost to every split into bf16 terms. (f16
  // has no such floor: the power of two in front of a row keeps its range.)
  const bool splits = v != 0 && facts_of(p).element == DType::kBF16;
  const double own = std::max(ulp_at(v, t), splits ? ulp_at(0, DType::kBF16) : 0);
  if (guard_of(p) == 0 || v == 0 || !std::isfinite(v)) return own;
  // The exponents of f32, which all of these have; an f16 output has a floor of its own.
  const int exponent = std::max(format_of(DType::kF32).min_exponent, std::ilogb(v));
  return std::max(own, std::ldexp(1.0, exponent - facts_of(p).mantissa_bits));
}

}  // namespace annulus::testing
