// The task's data: what task.h says, and the same numbers everywhere.
#include "train/task.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>

namespace annulus::train {
namespace {

std::size_t size(std::int64_t n) { return static_cast<std::size_t>(n); }

TEST(TrainRng, IsSplitmix64) {
  Rng rng(0);  // the first numbers of splitmix64 from state 0
  EXPECT_EQ(rng.next(), 0xe220a8397b1dcdafull);
  EXPECT_EQ(rng.next(), 0x6e789e6aa1b965f4ull);
  EXPECT_EQ(rng.next(), 0x06c45d188009454full);
}

TEST(TrainRng, StreamsDiffer) {
  EXPECT_NE(Rng(1, 2, 3).next(), Rng(1, 2, 4).next());
  EXPECT_NE(Rng(1, 2, 3).next(), Rng(1, 3, 3).next());
  EXPECT_NE(Rng(1, 2, 3).next(), Rng(2, 2, 3).next());
  EXPECT_NE(Rng(0, 0, 0).next(), Rng(0, 0, 1).next());
  EXPECT_EQ(Rng(1, 2, 3).next(), Rng(1, 2, 3).next());
}

TEST(TrainRng, NormalHasTheMomentsOfOne) {
  Rng rng(7);
  double sum = 0, squares = 0;
  constexpr int kDraws = 200000;
  for (int i = 0; i < kDraws; ++i) {
    const double z = rng.normal();
    sum += z;
    squares += z * z;
  }
  EXPECT_NEAR(sum / kDraws, 0, 0.01);
  EXPECT_NEAR(squares / kDraws, 1, 0.02);
}

TEST(TrainTask, TargetIsTheSumOfWhatCameBefore) {
  const Sequences s = draw_sequences(5, 73, kLead, Rng(3));
  for (std::int64_t b = 0; b < s.B; ++b) {
    double sum = s.start[size(b)];
    for (std::int64_t t = 0; t < s.T; ++t) {
      EXPECT_DOUBLE_EQ(s.target[size(b * s.T + t)], sum);
      sum += s.velocity[size(b * s.T + t)];
    }
  }
}

TEST(TrainTask, StillAtFirstAndThenAsOftenAsSaid) {
  const std::int64_t B = 600, T = 200;
  const Sequences s = draw_sequences(B, T, 0.1, Rng(11));
  double moving = 0, speed = 0, fastest = 0;
  std::array<int, 3> kinds{};
  for (std::int64_t b = 0; b < B; ++b) {
    for (std::int64_t t = 0; t < 20; ++t) EXPECT_EQ(s.velocity[size(b * T + t)], 0.0f);
    double steps = 0;
    for (std::int64_t t = 20; t < T; ++t) {
      const double v = std::fabs(s.velocity[size(b * T + t)]);
      steps += v > 0;
      speed += v;
      fastest = std::max(fastest, v);
    }
    moving += steps;
    // 180 steps, moving with probability 0.8, 0.5 or 0.2: far enough apart to tell.
    ++kinds[steps > 117 ? 0 : steps > 63 ? 1 : 2];
  }
  EXPECT_NEAR(moving / static_cast<double>(B * 180), 0.5, 0.02);
  EXPECT_NEAR(speed / moving, kFastest / 2, 0.002);
  EXPECT_LE(fastest, kFastest * (1 + 1e-6));
  for (const int n : kinds) EXPECT_NEAR(n, 200, 50);
}

TEST(TrainTask, SeedDecidesAll) {
  const Sequences a = draw_sequences(4, 50, 0.1, Rng(5)), b = draw_sequences(4, 50, 0.1, Rng(5));
  EXPECT_EQ(a.velocity, b.velocity);
  EXPECT_EQ(a.start, b.start);
  EXPECT_NE(a.velocity, draw_sequences(4, 50, 0.1, Rng(6)).velocity);
}

TEST(TrainTask, NoiseIsOfTheVelocityToldAndOfEveryNeuron) {
  const std::int64_t B = 20, T = 100, N = 32;
  const Sequences plain = draw_sequences(B, T, 0.1, Rng(5));
  Sequences s = plain;
  EXPECT_TRUE(drive_noise(s, 0, T, N, 1).empty());
  add_noise(s, {}, Rng(1));
  EXPECT_EQ(s.velocity, plain.velocity);
  add_noise(s, {.velocity = 0.05, .state = 0.5}, Rng(1));
  EXPECT_EQ(s.target, plain.target);
  const auto deviation = [](const std::vector<float>& values, const std::vector<float>* from) {
    double squares = 0;
    for (std::size_t i = 0; i < values.size(); ++i) {
      const double d = values[i] - (from ? (*from)[i] : 0.0f);
      squares += d * d;
    }
    return std::sqrt(squares / static_cast<double>(values.size()));
  };
  EXPECT_NEAR(deviation(s.velocity, &plain.velocity), 0.05, 0.003);
  const double peak = std::ranges::max(initial_bumps(std::vector<double>{0}, N));
  const std::vector<float> whole = drive_noise(s, 0, T, N, 1);
  ASSERT_EQ(whole.size(), size(B * T * N));
  EXPECT_NEAR(deviation(whole, nullptr), 0.5 * peak, 0.01 * peak);
  // The same for other threads, and in a piece.
  EXPECT_EQ(drive_noise(s, 0, T, N, 3), whole);
  const std::vector<float> piece = drive_noise(s, 30, 7, N, 2);
  for (std::int64_t b = 0; b < B; ++b) {
    EXPECT_TRUE(std::equal(piece.begin() + b * 7 * N, piece.begin() + (b + 1) * 7 * N,
                           whole.begin() + (b * T + 30) * N));
  }
}

TEST(TrainTask, Actions) {
  const std::vector<float> v = {0.25f, -0.5f, 0.0f};
  EXPECT_EQ(encode(v, 2, Encoding::kTurns), (std::vector<float>{0, 0.25f, 0.5f, 0, 0, 0}));
  EXPECT_EQ(encode(v, 4, Encoding::kTurns),
            (std::vector<float>{0, 0.25f, 0, 0, 0.5f, 0, 0, 0, 0, 0, 0, 0}));
  EXPECT_EQ(encode(v, 5, Encoding::kSpread),
            (std::vector<float>{0, 0, 0, 0.125f, 0.25f, 0.5f, 0.25f, 0, 0, 0, 0, 0, 0, 0, 0}));
}

TEST(TrainTask, BumpsPointToTheStart) {
  const std::vector<double> start = {0.0, 1.0, 3.0, 6.2};
  for (const std::int64_t N : {7, 64, 128}) {
    const std::vector<float> r = initial_bumps(start, N);
    for (std::size_t b = 0; b < start.size(); ++b) {
      double X = 0, Y = 0, squares = 0;
      for (std::int64_t i = 0; i < N; ++i) {
        const double value = r[b * size(N) + size(i)];
        const double angle = 2 * std::numbers::pi * static_cast<double>(i) / static_cast<double>(N);
        X += value * std::cos(angle);
        Y += value * std::sin(angle);
        squares += value * value;
      }
      EXPECT_NEAR(squares, 1, 1e-6);
      // A Gaussian of width N/10 sampled at 7 neurons is a coarse picture of itself.
      EXPECT_LT(circular_distance(std::atan2(Y, X), start[b]), N < 10 ? 0.06 : 1e-5);
    }
  }
}

TEST(TrainTask, CircularDistance) {
  EXPECT_NEAR(circular_distance(0.1, 2 * std::numbers::pi - 0.1), 0.2, 1e-12);
  EXPECT_NEAR(circular_distance(0, 40 * std::numbers::pi + 0.5), 0.5, 1e-12);
  EXPECT_NEAR(circular_distance(0, std::numbers::pi), std::numbers::pi, 1e-12);
}

}  // namespace
}  // namespace annulus::train
