// The probes, on rings whose answer is known.
#include "train/probe.h"

#include <gtest/gtest.h>

#include <cmath>

#include "train/trainer.h"

namespace annulus::train {
namespace {

// Without weights and J0 the state only shrinks: it points where it did for ever.
RingModel frozen() {
  Recipe recipe{.name = "frozen", .neurons = 32, .J0 = 0};
  recipe.spread = 0;
  return {recipe, kCPU, 1};
}

TEST(TrainProbe, AFrozenBumpNeitherDriftsNorTurns) {
  RingModel model = frozen();
  const Drift drift = drift_at_rest(model, 5, 300);
  ASSERT_EQ(drift.mean.size(), 300u);
  for (std::size_t t = 0; t < 300; ++t) {
    EXPECT_LT(drift.most[t], 1e-4) << t;
    EXPECT_LE(drift.mean[t], drift.most[t]);
  }
  const TurnCurve curve = turn_curve(model);
  ASSERT_EQ(curve.told.size(), 37u);
  EXPECT_NEAR(curve.told.front(), -kFastest, 1e-12);
  EXPECT_EQ(curve.told[18], 0);
  for (const double turned : curve.turned) EXPECT_NEAR(turned, 0, 1e-5);
}

// Wa that moves every state one neuron on, and nothing else acts: told 0.3, the bump turns right by as
// much as the right channel's matrix says, told -0.3 not at all (left is zero).
TEST(TrainProbe, SeesTheBumpTurn) {
  Recipe recipe{.name = "turning", .neurons = 32, .activation = RingRnnActivation::kRelu, .J0 = 0};
  recipe.alpha = 0.5;
  recipe.spread = 0;
  RingModel model(recipe, kCPU, 1);
  std::vector<float>& Wa = model.parameters()[0].value;
  const auto put = [&](std::size_t action, std::size_t to, std::size_t from, float w) {
    Wa[(action * 32 + to) * 32 + from] = w;
  };
  for (std::size_t i = 0; i < 32; ++i) put(1, (i + 1) % 32, i, 1 / static_cast<float>(kFastest));
  const TurnCurve curve = turn_curve(model);
  EXPECT_NEAR(curve.turned.front(), 0, 1e-5);
  // At full speed each state is half where it was, half one neuron on: half a neuron a step.
  EXPECT_NEAR(curve.turned.back(), std::numbers::pi / 32, 1e-3);
}

TEST(TrainProbe, DriftIsSeen) {
  RingModel model = frozen();
  // Every neuron excites the one ahead of it, all the time.
  std::vector<float>& Wo = model.parameters()[1].value;
  for (std::size_t i = 0; i < 32; ++i) Wo[(i + 1) % 32 * 32 + i] = 20;
  const Drift drift = drift_at_rest(model, 4, 50);
  EXPECT_GT(drift.mean.back(), 0.5);
}

TEST(TrainProbe, NoiseInTheVelocityAddsUpInAnIntegrator) {
  EXPECT_NEAR(error_of_integrating(20, 100, {}), 0, 1e-6);
  // sigma sqrt(2 t / pi) at step t, on average over 100 steps 0.0532 for 0.01.
  EXPECT_NEAR(error_of_integrating(400, 100, {.velocity = 0.01}), 0.0532, 0.006);
  RingModel model = frozen();
  const NoiseCurve v = velocity_noise_curve(model, 4, 50), s = state_noise_curve(model, 4, 50);
  EXPECT_EQ(v.level.size(), v.error.size());
  EXPECT_EQ(v.error[0], s.error[0]);
  EXPECT_NE(s.error[0], s.error.back());
  EXPECT_EQ(s.integrator.front(), s.integrator.back());
}

}  // namespace
}  // namespace annulus::train
