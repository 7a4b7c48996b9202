// The arithmetic of the comparison itself, at the ends of the range of a double.
#include "testing/compare.h"

#include <gtest/gtest.h>

#include <cmath>
#include <numbers>
#include <vector>

namespace annulus::testing {
namespace {

Comparison compare_f64(const std::vector<double>& reference, const std::vector<double>& ours) {
  return compare({.dtype = DType::kF64,
                  .forward = true,
                  .reference = reference,
                  .baseline = reference,
                  .ours = ours,
                  .limits = {},
                  .baseline_error = {},
                  .term_size = {}});
}

TEST(Compare, SquaresOfHugeAndTinyValuesNeitherOverflowNorVanish) {
  for (const double size : {1e307, 1e200, 1.0, 1e-200}) {
    const std::vector<double> reference = {size, -0.5 * size, 0.25 * size, 0};
    std::vector<double> ours = reference;
    ours[1] *= 1 + 1e-14;
    const Comparison good = compare_f64(reference, ours);
    EXPECT_EQ(good.fault, "") << size;
    EXPECT_GT(good.worst_ratio, 0) << size;
    EXPECT_LT(good.worst_ratio, 0.1) << size;
    ours[1] = reference[1] * (1 + 1e-10);
    const Comparison bad = compare_f64(reference, ours);
    EXPECT_NE(bad.fault, "") << size;
    // rms of one error of 5e-11 beside values of 1, 1/2, 1/4: the same at every size.
    EXPECT_NEAR(bad.worst_ratio, 0.5e-10 / std::sqrt(1.3125) / 1e-12, 0.01) << size;
  }
}

TEST(Compare, AnErrorBeyondTheRangeIsAFault) {
  const std::vector<double> reference = {1.7e308, 1.0};
  EXPECT_NE(compare_f64(reference, {-1.7e308, 1.0}).fault, "");
}

TEST(Compare, AnglesCountModuloAFullTurn) {
  const double pi = std::numbers::pi;
  const std::vector<double> reference = {pi - 1e-8, 1.0};
  const auto judge = [&](const std::vector<double>& ours) {
    return compare({.dtype = DType::kF32,
                    .forward = true,
                    .reference = reference,
                    .baseline = reference,
                    .ours = ours,
                    .limits = {},
                    .circular = true,
                    .baseline_error = {},
                    .term_size = {}});
  };
  EXPECT_EQ(judge({-pi + 1e-8, 1.0}).fault, "");
  EXPECT_NE(judge({-pi + 1e-3, 1.0}).fault, "");
  EXPECT_NE(judge({pi, 1.0 + 2 * pi}).fault, "");  // right, but not in the range that was promised
}

}  // namespace
}  // namespace annulus::testing
