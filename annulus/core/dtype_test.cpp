// Conversions of the 16-bit types, exhaustively, against arithmetic in double.
#include <gtest/gtest.h>

#include <bit>
#include <cmath>
#include <cstdint>
#include <limits>

#include "annulus/core/dtype.h"
#include "testing/limits.h"

namespace annulus {
namespace {

// The value of a 16-bit pattern by the definition of its format, without the library's conversion.
double value_of(std::uint16_t bits, int exponent_bits, int mantissa_bits) {
  const int bias = (1 << (exponent_bits - 1)) - 1;
  const int exponent = (bits >> mantissa_bits) & ((1 << exponent_bits) - 1);
  const int mantissa = bits & ((1 << mantissa_bits) - 1);
  const double sign = bits >> 15 ? -1 : 1;
  if (exponent == (1 << exponent_bits) - 1) {
    return mantissa ? std::numeric_limits<double>::quiet_NaN() : sign * INFINITY;
  }
  const int fraction = exponent == 0 ? mantissa : mantissa + (1 << mantissa_bits);
  return sign * std::ldexp(fraction, std::max(exponent, 1) - bias - mantissa_bits);
}

template <class T>
void check_every_pattern(int exponent_bits, int mantissa_bits) {
  for (unsigned u = 0; u < 0x10000; ++u) {
    T v;
    v.bits = static_cast<std::uint16_t>(u);
    const double expected = value_of(v.bits, exponent_bits, mantissa_bits);
    const auto f = static_cast<float>(v);
    if (std::isnan(expected)) {
      ASSERT_TRUE(std::isnan(f)) << u;
      ASSERT_TRUE(std::isnan(static_cast<float>(T(f)))) << u;
      continue;
    }
    ASSERT_EQ(static_cast<double>(f), expected) << u;
    ASSERT_EQ(T(f).bits, v.bits) << u;  // the round trip is exact
  }
}

// Between two neighbours: below the middle rounds down, above it up, the middle itself to even.
template <class T>
void check_every_rounding(unsigned infinity_bits) {
  for (unsigned u = 0; u + 1 < infinity_bits; ++u) {
    T low, high;
    low.bits = static_cast<std::uint16_t>(u);
    high.bits = static_cast<std::uint16_t>(u + 1);
    const double a = static_cast<double>(static_cast<float>(low));
    const double b = static_cast<double>(static_cast<float>(high));
    const auto middle = static_cast<float>((a + b) / 2);
    ASSERT_EQ(static_cast<double>(middle),
              (a + b) / 2);  // representable: the test means what it says
    const std::uint16_t even = u % 2 == 0 ? low.bits : high.bits;
    ASSERT_EQ(T(middle).bits, even) << u;
    ASSERT_EQ(T(-middle).bits, even | 0x8000u) << u;
    ASSERT_EQ(T(std::nextafter(middle, 0.0f)).bits, low.bits) << u;
    ASSERT_EQ(T(std::nextafter(middle, INFINITY)).bits, high.bits) << u;
  }
}

TEST(DType, EveryBfloat16) { check_every_pattern<bfloat16>(8, 7); }
TEST(DType, EveryFloat16) { check_every_pattern<float16>(5, 10); }
TEST(DType, EveryBfloat16Rounding) { check_every_rounding<bfloat16>(0x7f80); }
TEST(DType, EveryFloat16Rounding) { check_every_rounding<float16>(0x7c00); }

TEST(DType, BeyondTheLargest) {
  EXPECT_EQ(float16(65519.0f).bits, 0x7bff);  // below half-way to the next: still the largest
  EXPECT_EQ(float16(65520.0f).bits, 0x7c00);  // the tie goes to infinity, which is even
  EXPECT_EQ(float16(1e10f).bits, 0x7c00);
  EXPECT_EQ(float16(-1e10f).bits, 0xfc00);
  EXPECT_EQ(bfloat16(std::numeric_limits<float>::max()).bits, 0x7f80);
  EXPECT_EQ(float16(std::ldexp(1.0f, -26)).bits, 0);  // below half the smallest subnormal
  EXPECT_EQ(float16(-0.0f).bits, 0x8000);
}

// A NaN whose payload lies in the dropped bits only must not become infinity.
TEST(DType, NanWithALowPayload) {
  const float nan = std::bit_cast<float>(0x7f800001u);
  EXPECT_TRUE(std::isnan(static_cast<float>(bfloat16(nan))));
  EXPECT_TRUE(std::isnan(static_cast<float>(float16(nan))));
}

TEST(DType, SizesAndNames) {
  EXPECT_EQ(size_of(DType::kBF16), 2);
  EXPECT_EQ(size_of(DType::kI64), 8);
  EXPECT_STREQ(name_of(DType::kF16), "f16");
  EXPECT_TRUE(is_floating(DType::kF64));
  EXPECT_FALSE(is_floating(DType::kBool));
  EXPECT_EQ(dtype_of<bfloat16>, DType::kBF16);
}

}  // namespace
}  // namespace annulus
