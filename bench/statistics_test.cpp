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

// 100 GB/s; 1 TFLOP/s in fp32, 8 in bf16, no tf32; a launch takes 2 us, a barrier 1 us, in a cluster
// 0.25 us; a cluster holds 2 MB, the chip 50 MB.
Ceilings ceilings() {
  Ceilings c;
  c.copy_gbs = 100;
  c.gemm[static_cast<std::size_t>(Precision::kFp32)] = 1000;
  c.gemm[static_cast<std::size_t>(Precision::kBf16)] = 8000;
  c.launch_ms = 0.002;
  c.barrier_ms = 0.001;
  c.small_barrier_ms = 0.00025;
  c.small_bytes = 2e6;
  c.on_chip_bytes = 50e6;
  return c;
}

TEST(Floor, IsTheLargestOfThree) {
  const Ceilings c = ceilings();
  EXPECT_DOUBLE_EQ(floor_of(1e8, 1, {}, c).ms, 1.0);
  EXPECT_EQ(floor_of(1e8, 1, {}, c).kind, FloorKind::kBandwidth);
  EXPECT_DOUBLE_EQ(floor_of(1, 5e9, {}, c).ms, 5.0);
  EXPECT_EQ(floor_of(1, 5e9, {}, c).kind, FloorKind::kCompute);
  EXPECT_DOUBLE_EQ(floor_of(1, 1, {}, c).ms, 0.002);
  EXPECT_EQ(floor_of(1, 1, {}, c).kind, FloorKind::kLatency);
  // What was not measured is no ceiling, and none is made up.
  EXPECT_DOUBLE_EQ(floor_of(1e8, 1e15, {Precision::kTf32}, c).ms, 1.0);
}

TEST(Floor, CountsTheProductsOfTheMode) {
  const Ceilings c = ceilings();
  EXPECT_DOUBLE_EQ(floor_of(1, 8e9, {Precision::kBf16, 1}, c).ms, 1.0);
  EXPECT_DOUBLE_EQ(floor_of(1, 8e9, {Precision::kBf16, 3}, c).ms, 3.0);
  EXPECT_EQ(floor_of(1, 8e9, {Precision::kBf16, 3}, c).kind, FloorKind::kCompute);
}

TEST(Floor, StepsCannotOverlap) {
  const Ceilings c = ceilings();
  // Twenty barriers come on top of what is computed between them.
  EXPECT_DOUBLE_EQ(floor_of(1, 8e9, {Precision::kBf16, 1, 20, 10e6}, c).ms, 1.02);
  // Weights that a cluster holds need only the cluster's barrier.
  EXPECT_DOUBLE_EQ(floor_of(1, 8e9, {Precision::kBf16, 1, 20, 1e6}, c).ms, 1.005);
  EXPECT_EQ(floor_of(1, 8e6, {Precision::kBf16, 1, 20, 1e6}, c).kind, FloorKind::kLatency);
  // Weights that the chip cannot hold: what is too much is read again in every step but the first.
  const Floor streamed = floor_of(60e6, 8e6, {Precision::kBf16, 1, 20, 60e6}, c);
  EXPECT_NEAR(streamed.ms, 0.6 + 19 * 0.1 + 0.02, 1e-12);
  EXPECT_EQ(streamed.kind, FloorKind::kBandwidth);
}

}  // namespace
}  // namespace annulus::bench
