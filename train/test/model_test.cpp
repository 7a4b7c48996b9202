// The loss by hand; every gradient, loss to weights and each part alone, against finite differences; a
// short training that must learn.
#include "train/network/model.h"

#include <gtest/gtest.h>

#include <cmath>
#include <numbers>

#include "testing/dense.h"
#include "train/trainer.h"

namespace annulus::train {
namespace {

using ::annulus::testing::EachDevice;

std::vector<float> normals(std::size_t n, Rng& rng) {
  std::vector<float> values(n);
  for (float& v : values) v = static_cast<float>(rng.normal());
  return values;
}

// The slope of loss() along x, whose steps are exact in f32.
template <class F>
double quotient(float& x, float step, F&& loss) {
  const float at = x, high = at + step, low = at - step;
  x = high;
  const double up = loss();
  x = low;
  const double down = loss();
  x = at;
  return (up - down) / (static_cast<double>(high) - low);
}

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
  std::vector<float> sums = normals(B * T * 3, rng), dsums(sums.size());
  std::vector<double> target(B * T);
  for (double& v : target) v = rng.uniform(-9, 9);
  ring_loss(sums, target, B, T, 0.2, dsums);
  for (std::size_t i = 0; i < sums.size(); ++i) {
    const auto loss = [&] { return ring_loss(sums, target, B, T, 0.2, {}).total; };
    EXPECT_NEAR(dsums[i], quotient(sums[i], 0x1p-10f, loss), 2e-6) << i;
  }
}

TEST(TrainLoss, NoDirectionNoGradient) {
  const std::vector<float> sums(6, 0.0f);
  std::vector<float> dsums(6, 99.0f);
  const LossFigures f = ring_loss(sums, std::vector<double>{1, 2}, 1, 2, 0.2, dsums);
  EXPECT_TRUE(std::isfinite(f.total));
  EXPECT_EQ(dsums, sums);
}

class TrainPopulation : public EachDevice {};
ANNULUS_EACH_DEVICE(TrainPopulation);

TEST_P(TrainPopulation, IsPlainSumsAndTheirGradients) {
  const std::int64_t B = 2, T = 5;
  for (const std::int64_t N : {1, 3, 8, 37, 128, 300}) {
    const auto n = static_cast<std::size_t>(N);
    Rng rng(static_cast<std::uint64_t>(N));
    std::vector<float> states = normals(10 * n, rng), sums(30), table(2 * n), dstates(10 * n);
    const std::vector<float> dsums = normals(30, rng);
    states[0] = 0;  // |r| has no slope there: 0
    ring_table(N, table.data());
    DeviceTensor r(device()), ring(device()), s(device()), ds(device()), dr(device());
    Context context;
    r.upload({B, T, N}, states);
    ring.upload({2, N}, table);
    population_sums(r.view(), ring.view(), s.shaped({B, T, 3}), context);
    s.download(sums);
    population_gradients(r.view(), ring.view(), ds.upload({B, T, 3}, dsums), dr.shaped({B, T, N}),
                         context);
    dr.download(dstates);
    for (std::size_t row = 0; row < 10; ++row) {
      double X = 0, Y = 0, S = 0;
      for (std::size_t i = 0; i < n; ++i) {
        const double angle = 2 * std::numbers::pi * static_cast<double>(i) / static_cast<double>(N);
        const double value = states[row * n + i];
        X += value * std::cos(angle);
        Y += value * std::sin(angle);
        S += std::fabs(value);
        const double sign = value > 0 ? 1 : value < 0 ? -1 : 0;
        EXPECT_NEAR(dstates[row * n + i],
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

TEST(TrainGain, StartsAsThePlainActionsAndItsGradientIsThatOfFiniteDifferences) {
  const std::int64_t B = 3, T = 11, K = 2;
  const Sequences s = draw_sequences(B, T, 0.1, Rng(9));
  const std::vector<float> plain = encode(s.velocity, K, Encoding::kTurns);
  std::vector<Parameter> parameters = gain_network(5, K, Rng(4));
  std::vector<float> A(plain.size());
  gain_forward(parameters, s.velocity, plain, B, T, A, 1);
  EXPECT_EQ(A, plain);

  Rng rng(2);
  for (Parameter& p : parameters) p.value = normals(p.value.size(), rng);
  // The loss is a random combination of the actions, so its gradient is dA.
  const std::vector<float> dA = normals(plain.size(), rng);
  gain_backward(parameters, s.velocity, plain, B, T, dA, 1);
  const auto loss = [&] {
    gain_forward(parameters, s.velocity, plain, B, T, A, 1);
    double sum = 0;
    for (std::size_t i = 0; i < A.size(); ++i) sum += static_cast<double>(A[i]) * dA[i];
    return sum;
  };
  for (Parameter& p : parameters) {
    for (std::size_t i = 0; i < p.value.size(); ++i) {
      EXPECT_NEAR(p.gradient[i], quotient(p.value[i], 0x1p-6f, loss), 2e-4) << p.name << " " << i;
    }
  }
}

Recipe small(std::int64_t gain_hidden) {
  return {.name = "small",
          .neurons = 16,
          .batch = 4,
          .length = 12,
          .first_length = 12,
          .gain_hidden = gain_hidden,
          .seed = 3};
}

TEST(TrainModel, GradientIsThatOfFiniteDifferences) {
  for (const Encoding encoding : {Encoding::kTurns, Encoding::kSpread}) {
    Recipe recipe = small(4);
    recipe.encoding = encoding;
    recipe.actions = 3;
    // One of the two with everything that may be chosen.
    const bool spread = encoding == Encoding::kSpread;
    if (spread) {
      recipe.J0 = -0.05;
      recipe.J1 = 0.3;
      recipe.alpha = 0.4;
      recipe.activation = RingRnnActivation::kTanh;
    }
    RingModel model(recipe, kCPU, 1);
    // The gain network away from its start, where half of its gradients are zero.
    Rng rng(8);
    for (std::size_t i = 2; i < model.parameters().size(); ++i) {
      for (float& v : model.parameters()[i].value) v += static_cast<float>(0.3 * rng.normal());
    }
    Sequences batch = draw_sequences(recipe.batch, recipe.length, 0.1, Rng(1));
    if (spread) add_noise(batch, {.velocity = 0.1, .state = 0.3}, Rng(2));
    model.gradients(batch);
    const std::vector<Parameter> saved = model.parameters();
    for (std::size_t i = 0; i < saved.size(); ++i) {
      // Along a random direction: one quotient that every element of the gradient is in.
      for (int direction = 0; direction < 3; ++direction) {
        double slope = 0, length = 0;
        const std::vector<float> way = normals(saved[i].value.size(), rng);
        for (std::size_t k = 0; k < way.size(); ++k) {
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

TEST(TrainModel, DecodesTheSameInStretchesOfAnyLength) {
  RingModel model(small(4), kCPU, 0);
  Sequences s = draw_sequences(3, 57, 0.1, Rng(2));
  add_noise(s, {.velocity = 0.1, .state = 0.3}, Rng(3));
  std::vector<float> all_states, cut_states;
  const std::vector<float> all = model.decode(s, 57, 1, &all_states);
  EXPECT_EQ(all, model.decode(s, 10, 1, &cut_states));
  EXPECT_EQ(all_states, cut_states);
  EXPECT_EQ(all_states.size(), 57u * 16u);
}

// Of the equation in ring_rnn.h, by one step by hand.
TEST(TrainModel, TakesTheNumbersOfItsRecipe) {
  Recipe recipe = small(0);
  recipe.J0 = -0.2;
  recipe.J1 = 0.7;
  recipe.alpha = 0.6;
  recipe.activation = RingRnnActivation::kTanh;
  RingModel model(recipe, kCPU, 1);
  const Sequences s{.B = 1, .T = 1, .velocity = {0.25f}, .start = {1.0}, .target = {1.0}};
  std::vector<float> states;
  (void)model.decode(s, 1, 0, &states);
  const std::vector<float> r = initial_bumps(s.start, 16);
  const std::vector<float>&Wa = model.parameters()[0].value, &Wo = model.parameters()[1].value;
  for (std::size_t i = 0; i < 16; ++i) {
    double y = 0;
    for (std::size_t j = 0; j < 16; ++j) {
      y += (-0.2 + 0.7 * Wo[i * 16 + j] + 0.25 * Wa[(16 + i) * 16 + j]) * r[j];  // 1: to the right
    }
    EXPECT_NEAR(states[i], 0.4 * r[i] + 0.6 * std::tanh(y), 1e-6) << i;
  }
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

const Recipe kQuick = {.name = "quick",
                       .neurons = 32,
                       .batch = 32,
                       .steps = 120,
                       .length = 20,
                       .first_length = 20,
                       .schedule = {.rate = 1e-2}};

class TrainLoop : public EachDevice {};
ANNULUS_EACH_DEVICE(TrainLoop);

TEST_P(TrainLoop, ReducesTheLossEightfold) {
  for (const std::int64_t gain_hidden : {0, 8}) {
    Recipe recipe = kQuick;
    recipe.gain_hidden = gain_hidden;
    Trainer trainer(recipe, device(), 0);
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

TEST(TrainSteps, SameSeedSameBitsWhateverTheThreads) {
  Recipe recipe = small(4);
  Trainer a(recipe, kCPU, 1), b(recipe, kCPU, 4);
  for (int step = 0; step < 5; ++step) {
    EXPECT_EQ(a.step().total, b.step().total);
    for (std::size_t i = 0; i < a.model().parameters().size(); ++i) {
      const Parameter &p = a.model().parameters()[i], &q = b.model().parameters()[i];
      EXPECT_EQ(p.gradient, q.gradient) << p.name;
      EXPECT_EQ(p.value, q.value) << p.name;
    }
  }
  recipe.seed = 1;
  Trainer other(recipe, kCPU, 1);
  other.step();
  EXPECT_NE(other.history().loss[0], a.history().loss[0]);
}

// A small ring's bump fades within a long sequence before its weights have grown, and the direction of
// what is left is all that is trained: right for 100 steps, lost after 200.
TEST(TrainSteps, ShortSequencesFirstTeachASmallRing) {
  Recipe recipe = default_recipe();
  recipe.neurons = 32;
  recipe.batch = 16;
  recipe.steps = 400;
  recipe.schedule.rate = 1.2e-2;
  recipe.gain_hidden = 0;
  for (const bool short_first : {true, false}) {
    if (!short_first) recipe.first_length = recipe.length;
    Trainer trainer(recipe, kCPU, 0);
    while (!trainer.finished()) trainer.step();
    const double error = evaluate(trainer.model(), 20, 500).mean;
    EXPECT_EQ(error < 0.1, short_first) << error;
  }
}

TEST(TrainSteps, TheDefaultInhibitsLargeRingsLess) {
  EXPECT_EQ(default_recipe(512).J0, -0.025);
  for (const std::int64_t N : {32, 128}) EXPECT_EQ(default_recipe(N).J0, -0.1) << N;
  EXPECT_EQ(difference(default_recipe(64), default_recipe()), "neurons 64, not 128");
}

TEST(TrainSteps, SharesOfTheStepsStayWhenThereAreMore) {
  Recipe r = default_recipe();
  for (const std::int64_t steps : {2000, 2001, 7777, 1500}) {
    const Recipe more = with_steps(r, steps);
    EXPECT_EQ(more.steps, steps);
    EXPECT_EQ(first_gain_step(more), first_gain_step(r)) << steps;
    for (const std::int64_t step : {0, 100, 333, 599, 600, 1000}) {
      EXPECT_EQ(length_at(more, step), length_at(r, step)) << steps << " " << step;
    }
  }
  EXPECT_EQ(difference(with_steps(r, r.steps), r), "");
  EXPECT_EQ(first_gain_step(with_steps(r, 100)), 100);
}

TEST(TrainSteps, SequencesGrowAsTheRecipeSays) {
  Recipe r{.name = "growing", .steps = 100, .length = 95, .first_length = 20, .growth = 0.5};
  EXPECT_EQ(length_at(r, 0), 20);
  EXPECT_EQ(length_at(r, 25), 50);
  EXPECT_EQ(length_at(r, 50), 95);
  EXPECT_EQ(length_at(r, 99), 95);
  r.growth = 0;
  EXPECT_EQ(length_at(r, 0), 95);
}

TEST(TrainSteps, SaysWhenItDiverges) {
  Trainer trainer(kQuick, kCPU, 0);
  EXPECT_NO_THROW(trainer.step());
  trainer.model().parameters()[1].value[5] = std::numeric_limits<float>::infinity();
  EXPECT_THROW(trainer.step(), Diverged);
}

}  // namespace
}  // namespace annulus::train
