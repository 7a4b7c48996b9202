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

TEST(Floor, IsTheLargestTermAndAStepsBarrierOnTop) {
  constexpr auto kBandwidth = FloorKind::kBandwidth, kCompute = FloorKind::kCompute,
                 kLatency = FloorKind::kLatency;
  constexpr Precision bf16 = Precision::kBf16;
  const struct {
    double bytes, flops;
    Work work;
    double ms;
    FloorKind kind;
  } rows[] = {
      {1e8, 1, {}, 1.0, kBandwidth},
      {1, 5e9, {}, 5.0, kCompute},
      {1, 1, {}, 0.002, kLatency},
      // What was not measured is no ceiling, and none is made up.
      {1e8, 1e15, {Precision::kTf32}, 1.0, kBandwidth},
      // The products of the mode.
      {1, 8e9, {bf16, 1}, 1.0, kCompute},
      {1, 8e9, {bf16, 3}, 3.0, kCompute},
      // Twenty barriers come on top of what is computed between them.
      {1, 8e9, {bf16, 1, 20, 10e6}, 1.02, kCompute},
      // Weights that a cluster holds need only the cluster's barrier.
      {1, 8e9, {bf16, 1, 20, 1e6}, 1.005, kCompute},
      {1, 8e6, {bf16, 1, 20, 1e6}, 0.006, kLatency},
      // Weights that the chip cannot hold: what is too much is read again in every step but the first.
      {60e6, 8e6, {bf16, 1, 20, 60e6}, 0.6 + 19 * 0.1 + 0.02, kBandwidth},
  };
  for (const auto& r : rows) {
    const Floor floor = floor_of(r.bytes, r.flops, r.work, ceilings());
    EXPECT_NEAR(floor.ms, r.ms, 1e-12) << r.bytes << " bytes, " << r.flops << " flops";
    EXPECT_EQ(floor.kind, r.kind) << r.bytes << " bytes, " << r.flops << " flops";
  }
}

}  // namespace
}  // namespace annulus::bench
