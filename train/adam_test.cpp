#include "train/adam.h"

#include <gtest/gtest.h>

#include <cmath>

namespace annulus::train {
namespace {

Parameter parameter(std::vector<float> values, std::vector<float> gradient) {
  Parameter p("p", {static_cast<std::int64_t>(values.size())});
  p.value = std::move(values);
  p.gradient = std::move(gradient);
  return p;
}

TEST(TrainAdam, ThreeStepsByHand) {
  std::vector<Parameter> p;
  p.push_back(parameter({1.0f}, {0.5f}));
  double value = 1, mean = 0, square = 0;
  for (int step = 1; step <= 3; ++step) {
    const double g = 0.5 / step;
    p[0].gradient[0] = static_cast<float>(g);
    adam_step(p, step, {.rate = 0.1});
    mean = 0.9 * mean + 0.1 * g;
    square = 0.999 * square + 0.001 * g * g;
    value -= 0.1 * (mean / (1 - std::pow(0.9, step))) /
             (std::sqrt(square / (1 - std::pow(0.999, step))) + 1e-8);
    EXPECT_NEAR(p[0].value[0], value, 1e-6);
  }
}

TEST(TrainAdam, FirstStepIsTheRateAgainstTheSign) {
  std::vector<Parameter> p;
  p.push_back(parameter({0, 0, 0}, {1e-3f, -20.0f, 0.0f}));
  adam_step(p, 1, {.rate = 0.01});
  EXPECT_NEAR(p[0].value[0], -0.01, 1e-6);
  EXPECT_NEAR(p[0].value[1], 0.01, 1e-6);
  EXPECT_EQ(p[0].value[2], 0.0f);
}

TEST(TrainAdam, ClipsByTheNormOverAll) {
  std::vector<Parameter> p;
  p.push_back(parameter({0}, {3}));
  p.push_back(parameter({0, 0}, {0, 4}));
  EXPECT_DOUBLE_EQ(clip_gradients(p, 10), 5);
  EXPECT_EQ(p[1].gradient[1], 4.0f);  // untouched below the limit
  EXPECT_DOUBLE_EQ(clip_gradients(p, 1), 5);
  EXPECT_NEAR(p[0].gradient[0], 0.6, 1e-6);
  EXPECT_NEAR(p[1].gradient[1], 0.8, 1e-6);
}

TEST(TrainAdam, ScheduleWarmsUpAndFalls) {
  const Schedule constant{.rate = 1e-3};
  for (const std::int64_t step : {0, 1, 500, 999}) {
    EXPECT_DOUBLE_EQ(rate_at(constant, step, 1000), 1e-3);
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
