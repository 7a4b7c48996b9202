// The loss: its value by hand, its gradient against finite differences, and the two parts that work
// on whole states (population.h) against plain sums.
#include "train/loss.h"

#include <gtest/gtest.h>

#include <cmath>
#include <numbers>
#include <vector>

#include "annulus/core/buffer.h"
#include "annulus/cuda/memory.h"
#include "train/model.h"
#include "train/population.h"
#include "train/rng.h"

namespace annulus::train {
namespace {

TEST(TrainLoss, ByHand) {
  // One sequence, two steps: right at first, a quarter turn off and twice as large at the second.
  const std::vector<float> sums = {2, 0, 3, 0, 4, 6};
  const std::vector<double> target = {0, std::numbers::pi};
  const LossFigures f = ring_loss(sums, target, 1, 2, 0.2, {});
  EXPECT_NEAR(f.angle, (0 + 2) / 2.0, 1e-12);
  EXPECT_NEAR(f.amplitude, (0 + 9) / 2.0, 1e-12);
  EXPECT_NEAR(f.total, 1 + 0.2 * 4.5, 1e-12);
  EXPECT_NEAR(f.error, std::numbers::pi / 4, 1e-12);
}

TEST(TrainLoss, GradientIsThatOfFiniteDifferences) {
  const std::int64_t B = 3, T = 7;
  Rng rng(1);
  std::vector<float> sums(static_cast<std::size_t>(B * T * 3)), dsums(sums.size());
  std::vector<double> target(static_cast<std::size_t>(B * T));
  for (float& v : sums) v = static_cast<float>(rng.normal());
  for (double& v : target) v = rng.uniform(-9, 9);
  const double weight = 0.2;
  ring_loss(sums, target, B, T, weight, dsums);
  for (std::size_t i = 0; i < sums.size(); ++i) {
    // The step is exact in f32, so the quotient is right to about step^2.
    const float step = 0x1p-10f, at = sums[i];
    sums[i] = at + step;
    const float high = sums[i];
    const double up = ring_loss(sums, target, B, T, weight, {}).total;
    sums[i] = at - step;
    const float low = sums[i];
    const double down = ring_loss(sums, target, B, T, weight, {}).total;
    sums[i] = at;
    EXPECT_NEAR(dsums[i], (up - down) / (static_cast<double>(high) - low), 2e-6) << i;
  }
}

TEST(TrainLoss, NoDirectionNoGradient) {
  const std::vector<float> sums = {0, 0, 0, 0, 0, 0};
  std::vector<float> dsums(6, 99.0f);
  const LossFigures f = ring_loss(sums, std::vector<double>{1, 2}, 1, 2, 0.2, dsums);
  EXPECT_TRUE(std::isfinite(f.total));
  for (const float d : dsums) EXPECT_EQ(d, 0.0f);
}

void population_is_plain_sums(Device device) {
  const std::int64_t B = 2, T = 5;
  for (const std::int64_t N : {1, 3, 8, 37, 128, 300}) {
    Rng rng(static_cast<std::uint64_t>(N));
    std::vector<float> states(static_cast<std::size_t>(B * T * N)), dsums(30), sums(30);
    std::vector<float> table(static_cast<std::size_t>(2 * N)), dstates(states.size());
    for (float& v : states) v = static_cast<float>(rng.normal());
    states[0] = 0;  // |r| has no slope there: 0
    for (float& v : dsums) v = static_cast<float>(rng.normal());
    ring_table(N, table.data());
    DeviceTensor r(device), ring(device), s(device), ds(device), dr(device);
    Context context;
    r.shaped({B, T, N});
    r.upload(states);
    ring.shaped({2, N});
    ring.upload(table);
    population_sums(r.view(), ring.view(), s.shaped({B, T, 3}), context);
    s.download(sums);
    ds.shaped({B, T, 3});
    ds.upload(dsums);
    population_gradients(r.view(), ring.view(), ds.view(), dr.shaped({B, T, N}), context);
    dr.download(dstates);
    for (std::size_t row = 0; row < 10; ++row) {
      double X = 0, Y = 0, S = 0;
      for (std::size_t i = 0; i < static_cast<std::size_t>(N); ++i) {
        const double angle = 2 * std::numbers::pi * static_cast<double>(i) / static_cast<double>(N);
        const double value = states[row * static_cast<std::size_t>(N) + i];
        X += value * std::cos(angle);
        Y += value * std::sin(angle);
        S += std::fabs(value);
        const double sign = value > 0 ? 1 : value < 0 ? -1 : 0;
        EXPECT_NEAR(dstates[row * static_cast<std::size_t>(N) + i],
                    dsums[3 * row] * std::cos(angle) + dsums[3 * row + 1] * std::sin(angle) +
                        dsums[3 * row + 2] * sign,
                    2e-6);
      }
      EXPECT_NEAR(sums[3 * row], X, 2e-5);
      EXPECT_NEAR(sums[3 * row + 1], Y, 2e-5);
      EXPECT_NEAR(sums[3 * row + 2], S, 2e-4);
    }
  }
}

TEST(TrainPopulation, SumsAndTheirGradients) { population_is_plain_sums(kCPU); }

TEST(TrainPopulation, OnCuda) {
  if (const std::string why = annulus::cuda::why_unavailable(); !why.empty()) {
    GTEST_SKIP() << "no CUDA: " << why;
  }
  population_is_plain_sums(cuda_device());
}

}  // namespace
}  // namespace annulus::train
