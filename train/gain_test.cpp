// The gain network: it starts as no network at all, and its gradient is that of finite differences.
#include "train/gain.h"

#include <gtest/gtest.h>

#include <cmath>

#include "train/task.h"

namespace annulus::train {
namespace {

struct Problem {
  std::int64_t B = 3, T = 11, K = 2, H = 5;
  Sequences s = draw_sequences(3, 11, 0.1, Rng(9));
  std::vector<float> plain = encode(s.velocity, 2, Encoding::kTurns);
  GainNetwork network{5, 2};
  std::vector<Parameter> p = network.parameters(Rng(4));

  std::vector<float> actions(int threads = 1) const {
    std::vector<float> A(plain.size());
    network.forward(p, s.velocity, plain, B, T, A, threads);
    return A;
  }
};

TEST(TrainGain, StartsAsThePlainActions) {
  const Problem problem;
  EXPECT_EQ(problem.actions(), problem.plain);
}

TEST(TrainGain, GradientIsThatOfFiniteDifferences) {
  Problem problem;
  Rng rng(2);
  for (Parameter& p : problem.p) {
    for (float& v : p.value) v = static_cast<float>(rng.normal());
  }
  // The loss is a random combination of the actions, so its gradient is dA. Tenfold, so that the
  // differences stand well above f32's rounding of A.
  std::vector<float> dA(problem.plain.size());
  for (float& v : dA) v = static_cast<float>(rng.normal());
  const auto loss = [&] {
    double sum = 0;
    const std::vector<float> A = problem.actions();
    for (std::size_t i = 0; i < A.size(); ++i) sum += static_cast<double>(A[i]) * dA[i];
    return sum;
  };
  problem.network.backward(problem.p, problem.s.velocity, problem.plain, problem.B, problem.T, dA,
                           1);
  for (Parameter& p : problem.p) {
    for (std::size_t i = 0; i < p.value.size(); ++i) {
      const float at = p.value[i], step = 0x1p-6f;
      p.value[i] = at + step;
      const double high = p.value[i], up = loss();
      p.value[i] = at - step;
      const double low = p.value[i], down = loss();
      p.value[i] = at;
      EXPECT_NEAR(p.gradient[i], (up - down) / (high - low), 2e-4) << p.name << " " << i;
    }
  }
}

TEST(TrainGain, ThreadsChangeNoBit) {
  Problem one;
  Rng rng(5);
  for (Parameter& p : one.p) {
    for (float& v : p.value) v = static_cast<float>(rng.normal());
  }
  Problem four = one;
  EXPECT_EQ(one.actions(1), four.actions(4));
  std::vector<float> dA(one.plain.size(), 0.5f);
  one.network.backward(one.p, one.s.velocity, one.plain, one.B, one.T, dA, 1);
  four.network.backward(four.p, four.s.velocity, four.plain, four.B, four.T, dA, 4);
  for (std::size_t i = 0; i < one.p.size(); ++i) {
    EXPECT_EQ(one.p[i].gradient, four.p[i].gradient);
  }
}

}  // namespace
}  // namespace annulus::train
