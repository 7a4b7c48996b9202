// The limits are what reliability promises, and nothing but the source can change them.
#include <gtest/gtest.h>

#include <cmath>
#include <numbers>
#include <vector>

#include "testing/limits.h"

namespace annulus::testing {
namespace {

// Evaluated by the compiler: what is a constant here cannot depend on the environment it runs in.
static_assert(kPolicy.ratio_forward == 2 && kPolicy.ratio_backward == 3 && kPolicy.slack_ulps == 2);
static_assert(kPolicy.baseline_draws == 8);
static_assert(guard_of(DType::kF64) == 1e-12 && guard_of(DType::kF32) == 1e-6);
static_assert(guard_of(DType::kF16) == 2e-3 && guard_of(DType::kBF16) == 1e-2);
static_assert(kPolicy.guard_backward_factor == 2);
static_assert(kPolicy.mistrusted_share == 0.9 && kPolicy.mistrusted_cases == 0.01);
static_assert(kPolicy.finite_difference == 1e-6);
static_assert(guard_of(DType::kF32, Precision::kAuto) == 1e-6);
static_assert(guard_of(DType::kF32, Precision::kFp32) == 1e-6);
static_assert(guard_of(DType::kF32, Precision::kBf16x6) == 1e-6);
static_assert(guard_of(DType::kF32, Precision::kF16) == 2e-3);
static_assert(guard_of(DType::kF32, Precision::kBf16) == 1e-2);
static_assert(guard_of(DType::kF16, Precision::kBf16) == 1e-2);
static_assert(guard_of(DType::kBF16, Precision::kBf16) == 1e-2);
static_assert(guard_of(DType::kF32, Precision::kTf32) == 2e-3);
static_assert(guard_of(DType::kF32, Precision::kBf16x3) == 1e-5);
static_assert(guard_of(DType::kF16, Precision::kBf16x3) == 2e-3);

TEST(Limits, Ulps) {
  EXPECT_EQ(ulp_at(1.0, DType::kBF16), 0x1p-7);
  EXPECT_EQ(ulp_at(-1.99, DType::kBF16), 0x1p-7);
  EXPECT_EQ(ulp_at(2.0, DType::kBF16), 0x1p-6);
  EXPECT_EQ(ulp_at(1.0, DType::kF32), 0x1p-23);
  EXPECT_EQ(ulp_at(1.0, DType::kF64), 0x1p-52);
  EXPECT_EQ(ulp_at(0.0, DType::kF16), 0x1p-24);  // the floor: spacing of the subnormals
  EXPECT_EQ(ulp_at(1e-9, DType::kF16), 0x1p-24);
  EXPECT_EQ(ulp_at(65504.0, DType::kF16), 32.0);
  EXPECT_EQ(ulp_at(1.5, DType::kF32, Precision::kFp32), 0x1p-23);
  EXPECT_EQ(ulp_at(1.5, DType::kF32, Precision::kBf16), 0x1p-7);
  EXPECT_EQ(ulp_at(1.5, DType::kBF16, Precision::kBf16x3), 0x1p-7);
  EXPECT_EQ(ulp_at(1e-39, DType::kF32, Precision::kFp32), 0x1p-149);
  EXPECT_EQ(ulp_at(1e-39, DType::kF32, Precision::kBf16x6), 0x1p-133);  // bf16's least number
  EXPECT_EQ(ulp_at(1e-30, DType::kF32, Precision::kBf16x6), ulp_at(1e-30, DType::kF32));
  EXPECT_EQ(ulp_at(1.5, DType::kF32, Precision::kBf16x3), 0x1p-15);
  EXPECT_EQ(ulp_at(1.5, DType::kF32, Precision::kTf32), 0x1p-10);
  EXPECT_EQ(ulp_at(0.0, DType::kF32, Precision::kBf16), 0x1p-149);
}

// --- the comparison itself, at the ends of the range of a double ---------------------------------

using Numbers = std::vector<double>;

Comparison judged(DType dtype, const Numbers& reference, const Numbers& ours,
                  bool circular = false) {
  return compare({.dtype = dtype,
                  .reference = reference,
                  .baseline = reference,
                  .ours = ours,
                  .limits = {},
                  .circular = circular,
                  .baseline_error = {},
                  .term_size = {}});
}

TEST(Compare, SquaresOfHugeAndTinyValuesNeitherOverflowNorVanish) {
  for (const double size : {1e307, 1e200, 1.0, 1e-200}) {
    const Numbers reference = {size, -0.5 * size, 0.25 * size, 0};
    Numbers ours = reference;
    ours[1] *= 1 + 1e-14;
    const Comparison good = judged(DType::kF64, reference, ours);
    EXPECT_EQ(good.fault, "") << size;
    EXPECT_GT(good.worst_ratio, 0) << size;
    EXPECT_LT(good.worst_ratio, 0.1) << size;
    ours[1] = reference[1] * (1 + 1e-10);
    const Comparison bad = judged(DType::kF64, reference, ours);
    EXPECT_NE(bad.fault, "") << size;
    // rms of one error of 5e-11 beside values of 1, 1/2, 1/4: the same at every size.
    EXPECT_NEAR(bad.worst_ratio, 0.5e-10 / std::sqrt(1.3125) / 1e-12, 0.01) << size;
  }
}

TEST(Compare, AnErrorBeyondTheRangeIsAFault) {
  const Numbers reference = {1.7e308, 1.0};
  EXPECT_NE(judged(DType::kF64, reference, {-1.7e308, 1.0}).fault, "");
}

TEST(Compare, AnglesCountModuloAFullTurn) {
  const double pi = std::numbers::pi;
  const Numbers reference = {pi - 1e-8, 1.0};
  const auto judge = [&](const Numbers& ours) {
    return judged(DType::kF32, reference, ours, true);
  };
  EXPECT_EQ(judge({-pi + 1e-8, 1.0}).fault, "");
  EXPECT_NE(judge({-pi + 1e-3, 1.0}).fault, "");
  EXPECT_NE(judge({pi, 1.0 + 2 * pi}).fault, "");  // right, but not in the range that was promised
}

}  // namespace
}  // namespace annulus::testing
