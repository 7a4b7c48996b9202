#include "train/network/adam.h"

#include <gtest/gtest.h>

#include <cmath>

namespace annulus::train {
namespace {

TEST(TrainAdam, ThreeStepsByHand) {
  struct Weight {
    double value, gradient, mean = 0, square = 0;
  };
  // The first step is the rate against the sign, however small or large the gradient.
  std::vector<Weight> weights = {{1, 0.5}, {0, 1e-3}, {0, -20}, {0, 0}};
  std::vector<Parameter> p = {{"p", {4}}};
  p[0].value[0] = 1;
  for (int step = 1; step <= 3; ++step) {
    for (std::size_t i = 0; i < 4; ++i) {
      p[0].gradient[i] = static_cast<float>(weights[i].gradient / step);
    }
    adam_step(p, step, {.rate = 0.1});
    for (std::size_t i = 0; i < 4; ++i) {
      auto& [value, gradient, mean, square] = weights[i];
      const double g = gradient / step;
      mean = 0.9 * mean + 0.1 * g;
      square = 0.999 * square + 0.001 * g * g;
      value -= 0.1 * (mean / (1 - std::pow(0.9, step))) /
               (std::sqrt(square / (1 - std::pow(0.999, step))) + 1e-8);
      EXPECT_NEAR(p[0].value[i], value, 1e-6) << i << " after " << step;
    }
  }
  EXPECT_EQ(p[0].value[3], 0.0f);
}

TEST(TrainAdam, ClipsByTheNormOverAll) {
  std::vector<Parameter> p = {{"p", {1}}, {"q", {2}}};
  p[0].gradient = {3};
  p[1].gradient = {0, 4};
  EXPECT_DOUBLE_EQ(clip_gradients(p, 10), 5);
  EXPECT_EQ(p[1].gradient[1], 4.0f);  // untouched below the limit
  EXPECT_DOUBLE_EQ(clip_gradients(p, 1), 5);
  EXPECT_NEAR(p[0].gradient[0], 0.6, 1e-6);
  EXPECT_NEAR(p[1].gradient[1], 0.8, 1e-6);
}

TEST(TrainAdam, ScheduleWarmsUpAndFalls) {
  for (const std::int64_t step : {0, 1, 500, 999}) {
    EXPECT_DOUBLE_EQ(rate_at({.rate = 1e-3}, step, 1000), 1e-3);
  }
  const Schedule s{.rate = 2e-3, .warm_up = 10, .final = 0.1};
  EXPECT_DOUBLE_EQ(rate_at(s, 0, 101), 2e-4);
  EXPECT_DOUBLE_EQ(rate_at(s, 9, 101), 2e-3);
  EXPECT_DOUBLE_EQ(rate_at(s, 10, 101), 2e-3);
  EXPECT_NEAR(rate_at(s, 55, 101), 1.1e-3, 1e-12);
  EXPECT_NEAR(rate_at(s, 100, 101), 2e-4, 1e-12);
  for (std::int64_t step = 11; step <= 100; ++step) {
    EXPECT_LT(rate_at(s, step, 101), rate_at(s, step - 1, 101));
  }
  EXPECT_TRUE(std::isfinite(rate_at(s, 0, 1)));
  EXPECT_TRUE(std::isfinite(rate_at({.rate = 1, .warm_up = 0, .final = 0.5}, 0, 1)));
}

}  // namespace
}  // namespace annulus::train
