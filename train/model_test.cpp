// The whole gradient, loss to weights, against finite differences; a short training that must learn.
#include "train/model.h"

#include <gtest/gtest.h>

#include <cmath>

#include "annulus/cuda/memory.h"
#include "train/evaluate.h"
#include "train/trainer.h"

namespace annulus::train {
namespace {

Recipe small(std::int64_t gain_hidden) {
  Recipe r = seed_recipe();
  r.neurons = 16;
  r.batch = 4;
  r.length = r.first_length = 12;
  r.gain_hidden = gain_hidden;
  r.seed = 3;
  return r;
}

TEST(TrainModel, GradientIsThatOfFiniteDifferences) {
  for (const Encoding encoding : {Encoding::kTurns, Encoding::kSpread}) {
    Recipe recipe = small(4);
    recipe.encoding = encoding;
    recipe.actions = 3;
    RingModel model(recipe, kCPU, 1);
    // The gain network away from its start, where half of its gradients are zero.
    Rng rng(8);
    for (std::size_t i = 2; i < model.parameters().size(); ++i) {
      for (float& v : model.parameters()[i].value) v += static_cast<float>(0.3 * rng.normal());
    }
    const Sequences batch = draw_sequences(recipe.batch, recipe.length, 0.1, Rng(1));
    model.gradients(batch);
    const std::vector<Parameter> saved = model.parameters();
    for (std::size_t i = 0; i < saved.size(); ++i) {
      // Along a random direction: one quotient that every element of the gradient is in.
      for (int direction = 0; direction < 3; ++direction) {
        double slope = 0, length = 0;
        std::vector<float> way(saved[i].value.size());
        for (std::size_t k = 0; k < way.size(); ++k) {
          way[k] = static_cast<float>(rng.normal());
          slope += static_cast<double>(way[k]) * saved[i].gradient[k];
          length += static_cast<double>(way[k]) * way[k];
        }
        const float step = static_cast<float>(0.02 / std::sqrt(length));
        const auto loss_at = [&](float scale) {
          for (std::size_t k = 0; k < way.size(); ++k) {
            model.parameters()[i].value[k] = saved[i].value[k] + scale * way[k];
          }
          return model.loss(batch).total;
        };
        const double quotient =
            (8 * (loss_at(step) - loss_at(-step)) - (loss_at(2 * step) - loss_at(-2 * step))) /
            (12.0 * step);
        EXPECT_NEAR(slope, quotient, 2e-3 * std::fabs(quotient) + 2e-4 * std::sqrt(length))
            << saved[i].name;
        loss_at(0);
      }
    }
  }
}

TEST(TrainModel, ThreadsChangeNoBit) {
  const Recipe recipe = small(4);
  RingModel one(recipe, kCPU, 1), four(recipe, kCPU, 4);
  const Sequences batch = draw_sequences(recipe.batch, recipe.length, 0.1, Rng(1));
  EXPECT_EQ(one.gradients(batch).total, four.gradients(batch).total);
  for (std::size_t i = 0; i < one.parameters().size(); ++i) {
    EXPECT_EQ(one.parameters()[i].gradient, four.parameters()[i].gradient);
  }
}

TEST(TrainModel, DecodesTheSameInStretchesOfAnyLength) {
  RingModel model(small(4), kCPU, 0);
  const Sequences s = draw_sequences(3, 57, 0.1, Rng(2));
  std::vector<float> all_states, cut_states;
  const std::vector<float> all = model.decode(s, 57, 1, &all_states);
  EXPECT_EQ(all, model.decode(s, 10, 1, &cut_states));
  EXPECT_EQ(all_states, cut_states);
  EXPECT_EQ(all_states.size(), 57u * 16u);
}

TEST(TrainModel, UnusedActionChannelsChangeNothing) {
  Recipe recipe = small(0);
  RingModel two(recipe, kCPU, 0);
  recipe.actions = 5;
  RingModel five(recipe, kCPU, 0);
  std::copy_n(two.parameters()[0].value.begin(), 2 * 16 * 16, five.parameters()[0].value.begin());
  five.parameters()[1].value = two.parameters()[1].value;
  const Sequences batch = draw_sequences(recipe.batch, recipe.length, 0.1, Rng(1));
  EXPECT_EQ(two.gradients(batch).total, five.gradients(batch).total);
  EXPECT_EQ(two.parameters()[1].gradient, five.parameters()[1].gradient);
}

Recipe quick() {
  Recipe r = seed_recipe();
  r.neurons = 32;
  r.batch = 32;
  r.steps = 120;
  r.length = r.first_length = 20;
  r.schedule.rate = 1e-2;
  return r;
}

void learns(Device device) {
  for (const std::int64_t gain_hidden : {0, 8}) {
    Recipe recipe = quick();
    recipe.gain_hidden = gain_hidden;
    Trainer trainer(recipe, device, 0);
    const double first = trainer.step().total;
    while (!trainer.finished()) trainer.step();
    double last = 0;
    for (std::size_t i = 0; i < 10; ++i) last += trainer.history().loss[110 + i] / 10.0;
    EXPECT_LT(last, first / 8) << "from " << first << " to " << last;
    const Evaluation e = evaluate(trainer.model(), 20, 20);
    EXPECT_LT(e.mean, 0.25);
    EXPECT_LE(e.mean, e.max);
    EXPECT_EQ(e.curve.size(), 20u);
  }
}

TEST(TrainLoop, ReducesTheLossEightfold) { learns(kCPU); }

TEST(TrainLoop, LearnsOnCuda) {
  if (const std::string why = annulus::cuda::why_unavailable(); !why.empty()) {
    GTEST_SKIP() << "no CUDA: " << why;
  }
  learns(cuda_device());
}

TEST(TrainLoop, SameSeedSameBits) {
  Recipe recipe = quick();
  recipe.steps = 5;
  Trainer a(recipe, kCPU, 1), b(recipe, kCPU, 2);
  for (int i = 0; i < 5; ++i) EXPECT_EQ(a.step().total, b.step().total);
  EXPECT_EQ(a.model().parameters()[0].value, b.model().parameters()[0].value);
  recipe.seed = 1;
  EXPECT_NE(Trainer(recipe, kCPU, 1).step().total, a.history().loss[0]);
}

TEST(TrainLoop, SequencesGrowAsTheRecipeSays) {
  Recipe r = quick();
  r.steps = 100;
  r.first_length = 20;
  r.length = 95;
  r.growth = 0.5;
  EXPECT_EQ(length_at(r, 0), 20);
  EXPECT_EQ(length_at(r, 25), 50);
  EXPECT_EQ(length_at(r, 50), 95);
  EXPECT_EQ(length_at(r, 99), 95);
  r.growth = 0;
  EXPECT_EQ(length_at(r, 0), 95);
}

TEST(TrainLoop, SaysWhenItDiverges) {
  Recipe recipe = quick();
  recipe.schedule.rate = 10;
  Trainer trainer(recipe, kCPU, 0);
  EXPECT_THROW(
      {
        while (!trainer.finished()) trainer.step();
        throw Diverged("it never did");
      },
      Diverged);
}

}  // namespace
}  // namespace annulus::train
