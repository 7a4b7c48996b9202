#include "bench/statistics.h"

#include <gtest/gtest.h>

#include <cmath>
#include <stdexcept>

#include "bench/ceilings.h"

namespace annulus::bench {
namespace {

TEST(Statistics, MedianMinimumAndPercentile) {
  const TimeMs odd = summarize({3, 1, 2});
  EXPECT_EQ(odd.median, 2);
  EXPECT_EQ(odd.min, 1);
  EXPECT_EQ(odd.n, 3);
  EXPECT_EQ(summarize({4, 1, 2, 3}).median, 2.5);
  std::vector<double> hundred;
  for (int i = 0; i <= 100; ++i) hundred.push_back(i);
  EXPECT_DOUBLE_EQ(summarize(hundred).p95, 95);
  EXPECT_EQ(summarize({7}).p95, 7);
  EXPECT_THROW(summarize({}), std::invalid_argument);
}

TEST(Statistics, RelativeErrorIsAgainstTheLargestReference) {
  EXPECT_DOUBLE_EQ(max_relative_error({1, 2.5}, {1, 2}), 0.25);
  EXPECT_DOUBLE_EQ(max_relative_error({0.5}, {0}), 0.5);
  EXPECT_TRUE(std::isnan(max_relative_error({std::nan("")}, {1})));
  EXPECT_TRUE(std::isnan(max_relative_error({HUGE_VAL, 1}, {1, 1})));
  EXPECT_EQ(max_relative_error({}, {}), 0);
  EXPECT_THROW(max_relative_error({1}, {}), std::invalid_argument);
}

TEST(Floor, IsTheLargestOfThree) {
  const Ceilings c{{100, 1000}, 0.002};  // 100 GB/s, 1 TFLOP/s, 2 us
  EXPECT_DOUBLE_EQ(floor_of(1e8, 1, c).ms, 1.0);
  EXPECT_EQ(floor_of(1e8, 1, c).kind, FloorKind::kBandwidth);
  EXPECT_DOUBLE_EQ(floor_of(1, 5e9, c).ms, 5.0);
  EXPECT_EQ(floor_of(1, 5e9, c).kind, FloorKind::kCompute);
  EXPECT_DOUBLE_EQ(floor_of(1, 1, c).ms, 0.002);
  EXPECT_EQ(floor_of(1, 1, c).kind, FloorKind::kLatency);
  // Without a BLAS there is no compute ceiling, and none is made up.
  EXPECT_DOUBLE_EQ(floor_of(1e8, 1e15, {{100, 0}, 0}).ms, 1.0);
}

}  // namespace
}  // namespace annulus::bench
