// What attention promises beside its definition: identities between its forms, who can reach whom, dropout's mask.
#include <gtest/gtest.h>

#include <array>
#include <cmath>
#include <cstdint>
#include <string>
#include <utility>
#include <valarray>
#include <vector>

#include "annulus/attention/test/cases.h"
#include "testing/by_hand.h"
#include "testing/limits.h"

namespace annulus::testing {
namespace {

using P = AttentionProblem;
using Form = P::Form;

constexpr std::array kDTypes = {DType::kF32, DType::kF16, DType::kBF16};

// Self-attention of 75 tokens in every form.
P dense_problem() {
  return {.B = 2, .Tq = 75, .Tk = 75, .H = 4, .Hkv = 2, .D = 16, .Dv = 16, .dlse = true, .seed = 5};
}
P dilated_problem() {
  return with(dense_problem(), [](P& p) {
    p.form = Form::kDilated, p.segments = {16, 75}, p.rates = {1, 3};
  });
}
P block_problem() {
  return with(dense_problem(),
              [](P& p) { p.form = Form::kBlocks, p.block_size = 16, p.density = 0.6; });
}
P packed_problem() {
  return attention_totals(with(dense_problem(), [](P& p) {
    p.form = Form::kVarlen, p.query_lengths = p.packed_key_lengths = {30, 0, 45};
  }));
}
std::vector<P> all_forms() {
  return {dense_problem(), packed_problem(), dilated_problem(), block_problem()};
}

class Attention : public EachDevice {
 protected:
  // All calls of a problem, on its own values, or on these in their place.
  Tensors run_all(const P& p, const Tensors& values = {}) {
    const Case c = attention_case(p);
    Tensors t = draw(c);
    for (const auto& [name, v] : values) t[name] = v;
    return run(c, device(), context_, std::move(t));
  }
  // Outputs of two runs agree as roundings of the same numbers do.
  void expect_near(const Tensors& a, const Tensors& b, DType t, const std::string& what) {
    const double f32 = device().type == DeviceType::kCPU ? 2e-6 : 5e-5;
    for (const char* name : {"o", "lse", "dq", "dk", "dv"}) {
      const double limit = t == DType::kF32 ? f32 : t == DType::kF16 ? 4e-3 : 2e-2;
      // lse of a query without a key is the same infinity.
      const auto finite = [](Vector v) {
        for (double& x : v) x = x == -INFINITY ? 0 : x;
        return v;
      };
      EXPECT_LT(relative_error(finite(a.at(name)), finite(b.at(name))), limit)
          << what << " " << name;
    }
  }
  Context context_;
};

// The inputs that two problems have in common.
Tensors common(const Tensors& t) {
  Tensors r;
  for (const char* name : {"q", "k", "v", "do", "dlse"}) r[name] = t.at(name);
  return r;
}

TEST_P(Attention, AllBlocksAreDense) {
  for (const DType t : kDTypes) {
    for (const bool causal : {false, true}) {
      const P dense = with(dense_problem(), [&](P& p) { p.dtype = t, p.causal = causal; });
      const Tensors a = run_all(dense);
      for (const std::int64_t size : {16, 32, 64, 128}) {
        const P blocks =
            with(dense, [&](P& p) { p.form = Form::kBlocks, p.block_size = size, p.density = 1; });
        expect_near(run_all(blocks, common(a)), a, t, "blocks of " + std::to_string(size));
      }
    }
  }
}

TEST_P(Attention, OneSegmentOfRateOneIsDense) {
  for (const DType t : kDTypes) {
    for (const bool causal : {false, true}) {
      const P dense = with(dense_problem(), [&](P& p) { p.dtype = t, p.causal = causal; });
      const Tensors a = run_all(dense);
      for (const DilatedMode mode :
           {DilatedMode::kLongNet, DilatedMode::kGrouped, DilatedMode::kGroupedKv}) {
        const P dilated = with(dense, [&](P& p) {
          p.form = Form::kDilated, p.mode = mode, p.segments = {75}, p.rates = {1};
        });
        expect_near(run_all(dilated, common(a)), a, t, "dilated");
      }
    }
  }
}

TEST_P(Attention, PackedSequencesAreAttentionOfEach) {
  const P packed = with(packed_problem(), [](P& p) { p.causal = true; });
  const Tensors all = run_all(packed);
  std::size_t first = 0;
  for (const std::int64_t n : packed.query_lengths) {
    const auto rows = static_cast<std::size_t>(n);
    const auto part = [&](const char* name, std::int64_t heads, std::int64_t columns) {
      const auto row = static_cast<std::size_t>(heads * columns);
      return Vector(all.at(name)[std::slice(first * row, rows * row, 1)]);
    };
    // (H, total): a slice a head.
    const auto of_rows = [&](const char* name) {
      Vector v(4 * rows);
      for (std::size_t h = 0; h < 4; ++h)
        v[std::slice(h * rows, rows, 1)] = all.at(name)[std::slice(h * 75 + first, rows, 1)];
      return v;
    };
    const P one = with(dense_problem(), [&](P& p) { p.B = 1, p.Tq = p.Tk = n, p.causal = true; });
    const Tensors own = run_all(one, {{"q", part("q", 4, 16)},
                                      {"k", part("k", 2, 16)},
                                      {"v", part("v", 2, 16)},
                                      {"do", part("do", 4, 16)},
                                      {"dlse", of_rows("dlse")}});
    if (n > 0) {
      expect_near(own,
                  {{"o", part("o", 4, 16)},
                   {"lse", of_rows("lse")},
                   {"dq", part("dq", 4, 16)},
                   {"dk", part("dk", 2, 16)},
                   {"dv", part("dv", 2, 16)}},
                  DType::kF32, "a sequence");
    }
    first += rows;
  }
}

// Rows of a (B, T, ...) tensor in another order: row r of the result is row order[r].
Vector gathered(const Vector& v, const Vector& order, std::size_t B) {
  const std::size_t T = order.size(), row = v.size() / (B * T);
  Vector r(v.size());
  for (std::size_t b = 0; b < B; ++b) {
    for (std::size_t t = 0; t < T; ++t) {
      const auto from = static_cast<std::size_t>(order[t]);
      r[std::slice((b * T + t) * row, row, 1)] = v[std::slice((b * T + from) * row, row, 1)];
    }
  }
  return r;
}

TEST_P(Attention, AnOrderIsAPermutationOfTokens) {
  for (const Form form : {Form::kDense, Form::kBlocks}) {
    P p = with(form == Form::kDense ? dense_problem() : block_problem(),
               [](P& x) { x.causal = x.order = true; });
    if (form == Form::kDense) p.window_left = 20;
    const Tensors ordered = run_all(p);
    const Vector& order = ordered.at("order");
    Tensors t = common(ordered);
    for (const char* name : {"q", "k", "v", "do"}) t[name] = gathered(t.at(name), order, 2);
    t["dlse"] = gathered(t.at("dlse"), order, 8);  // (B H, T)
    const Tensors plain = run_all(with(p, [](P& x) { x.order = false; }), t);
    Tensors expected;
    for (const char* name : {"o", "dq", "dk", "dv"})
      expected[name] = gathered(ordered.at(name), order, 2);
    expected["lse"] = gathered(ordered.at("lse"), order, 8);
    expect_near(plain, expected, DType::kF32, form == Form::kDense ? "dense" : "blocks");
  }
}

// Equal bits where what comes later is other numbers. Beside what is no number a careful path may round otherwise.
TEST_P(Attention, WhatComesLaterReachesNothingEarlier) {
  constexpr std::size_t kFrom = 40, kTokens = 75;
  for (P p : {dense_problem(), dilated_problem(), block_problem()}) {
    p.causal = true;
    const Tensors a = run_all(p);
    for (const bool numbers : {true, false}) {
      Tensors changed = common(a);
      for (const char* name : {"k", "v"}) {
        Vector& v = changed[name];
        const std::size_t row = v.size() / (2 * kTokens);
        for (std::size_t i = 0; i < v.size(); ++i) {
          if (i / row % kTokens >= kFrom) v[i] = numbers || i % 7 != 0 ? v[i] * 3 + 1 : NAN;
        }
      }
      const Tensors b = run_all(p, changed);
      const std::size_t row = a.at("o").size() / (2 * kTokens);
      for (std::size_t i = 0; i < a.at("o").size(); ++i) {
        if (i / row % kTokens >= kFrom) continue;
        ASSERT_NEAR(a.at("o")[i], b.at("o")[i], numbers ? 0 : 1e-5)
            << attention_case(p).params << " element " << i;
      }
    }
  }
}

// The weights of a query add up to 1: once in the sum that divides them and once in o, in another order, which f32 shows.
TEST_P(Attention, ValuesOfOneGiveOne) {
  for (P p : all_forms()) {
    for (const DType t : kDTypes) {
      p.dtype = t;
      // o and l are sums of the same weights in different orders; on CUDA those of o are two bf16 each.
      const double most = t != DType::kF32 ? 2 * ulp_at(1, t)
                          : device().type == DeviceType::kCPU
                              ? 8 * ulp_at(1, t)
                              : 2 * ulp_at(1, t, Precision::kBf16x3);
      const Tensors r = run_all(
          p, {{"v", Vector(1.0, static_cast<std::size_t>((p.form == Form::kVarlen ? 1 : p.B) *
                                                         p.Tk * p.Hkv * p.Dv))}});
      for (const double o : r.at("o")) {
        if (o != 0) {
          ASSERT_NEAR(o, 1, most) << attention_case(p).params;
        }
      }
    }
  }
}

// What every tile of keys rounds the same way must not add up.
TEST_P(Attention, EqualScoresOfManyKeysHaveEqualWeights) {
  constexpr std::int64_t kKeys = 32768;
  for (const DType t : {DType::kF16, DType::kBF16}) {
    P p{.Tq = 128, .Tk = kKeys, .D = 64, .Dv = 8, .dtype = t};
    Vector v(1.0, kKeys * 8);
    v[std::slice(kKeys * 4, kKeys * 4, 1)] = Vector(-1.0, kKeys * 4);
    for (const double size : {77.0 / 256, 179.0 / 256, 141.0 / 128}) {
      const Tensors r =
          run_all(p, {{"q", Vector(size, 128 * 64)}, {"k", Vector(1.0, kKeys * 64)}, {"v", v}});
      const double lse = size * 64 / 8 + std::log(static_cast<double>(kKeys));
      for (const double x : r.at("lse")) ASSERT_NEAR(x, lse, 1e-5);
      for (const double o : r.at("o")) ASSERT_NEAR(o, 0, 1e-5);
    }
  }
}

TEST_P(Attention, ValuesTimesAPowerOfTwoGiveThatManyTimes) {
  for (const P& p : all_forms()) {
    const Tensors a = run_all(p);
    Tensors eight = common(a);
    eight["v"] *= 8.0;
    const Tensors b = run_all(p, eight);
    EXPECT_TRUE(same_bits(Vector(a.at("o") * 8.0), b.at("o"))) << attention_case(p).params;
    EXPECT_TRUE(same_bits(a.at("lse"), b.at("lse"))) << attention_case(p).params;
  }
}

// The rows of a key are added up in parts, which may be cut otherwise for another number of samples.
TEST_P(Attention, SamplesKnowNothingOfEachOther) {
  for (const P& p : {dense_problem(), dilated_problem(), block_problem()}) {
    const Tensors both = run_all(p);
    const P one = with(p, [](P& x) { x.B = 1; });
    for (std::size_t b = 0; b < 2; ++b) {
      const auto own = [&](const Vector& v) {
        return Vector(v[std::slice(b * v.size() / 2, v.size() / 2, 1)]);
      };
      Tensors t;
      for (const auto& [name, v] : common(both)) t[name] = own(v);
      const Tensors alone = run_all(one, t);
      for (const char* name : {"dk", "dv"}) {
        EXPECT_LT(relative_error(alone.at(name), own(both.at(name))), 1e-5) << name;
      }
      for (const char* name : {"o", "lse", "dq"}) {
        EXPECT_TRUE(same_bits(alone.at(name), own(both.at(name))))
            << name << " of sample " << b << " " << attention_case(p).params;
      }
    }
  }
}

// A key twice is a key whose score is larger by log 2.
TEST_P(Attention, BranchesCountKeysAsOftenAsTheyHaveThem) {
  const P once =
      with(dilated_problem(), [](P& p) { p.segments = {25}, p.rates = {1}, p.dlse = false; });
  const Tensors a = run_all(once);
  const P thrice = with(once, [](P& p) { p.segments = {25, 25, 25}, p.rates = {1, 1, 1}; });
  Tensors b = run_all(thrice);
  b["lse"] -= std::log(3.0);
  expect_near(b, a, DType::kF32, "three times the same branch");
  expect_near(run_all(with(thrice, [](P& p) { p.unite = true; })), a, DType::kF32, "united");
  // All branches have the same alpha and the same o: nothing depends on its gradient.
  b = run_all(with(thrice, [](P& p) { p.stop_alpha_gradient = true; }));
  b["lse"] -= std::log(3.0);
  expect_near(b, a, DType::kF32, "alpha without a gradient");
}

TEST_P(Attention, AQueryWithoutAKeyIsZero) {
  std::vector<P> all = {
      with(dense_problem(), [](P& p) { p.Tk = 30, p.causal = true; }),
      with(dense_problem(),
           [](P& p) {
             p.key_lengths = {0, 20}, p.causal = true;
           }),
      with(dilated_problem(),
           [](P& p) {
             p.segments = {16, 32}, p.rates = {2, 4};
           }),
      with(dilated_problem(),
           [](P& p) {
             p.mode = DilatedMode::kGrouped, p.segments = {16, 32}, p.rates = {2, 4};
           }),
      with(block_problem(), [](P& p) { p.density = 0.2; })};
  for (const P& p : all) {
    const AttentionCensus census = attention_census(p);
    ASSERT_GT(census.empty_queries, 0) << attention_case(p).params;
    const Tensors r = run_all(p);
    const Vector &lse = r.at("lse"), &o = r.at("o"), &dq = r.at("dq");
    const auto H = static_cast<std::size_t>(p.H), T = static_cast<std::size_t>(p.Tq);
    std::int64_t empty = 0;
    for (std::size_t i = 0; i < lse.size(); ++i) {
      const std::size_t b = i / (H * T), h = i / T % H, t = i % T, row = (b * T + t) * H + h;
      const bool none = lse[i] == -INFINITY;
      empty += none;
      for (std::size_t c = 0; c < 16; ++c) {
        ASSERT_FALSE(std::isnan(dq[row * 16 + c]));
        ASSERT_EQ(o[row * 16 + c] == 0, none);
        ASSERT_TRUE(!none || dq[row * 16 + c] == 0);
      }
    }
    EXPECT_EQ(empty, census.empty_queries) << attention_case(p).params;
    for (const char* name : {"dk", "dv"}) {
      for (const double d : r.at(name)) ASSERT_FALSE(std::isnan(d)) << name;
    }
  }
}

// --- dropout ---------------------------------------------------------------------------------------------------

// z of every (b, h, i, j), by q = 0, which makes all weights equal, and v the unit matrix: o[i, j] = z_ij / Tk.
Vector mask_of(const Tensors& r, std::size_t Tk) { return r.at("o") * static_cast<double>(Tk); }
P masked_problem(std::int64_t B, std::int64_t Tq, std::int64_t Tk) {
  return {
      .B = B, .Tq = Tq, .Tk = Tk, .H = 3, .Hkv = 1, .D = 4, .Dv = Tk, .dropout = 0.3, .seed = 21};
}
Tensors masking(const P& p) {
  Vector v(0.0, static_cast<std::size_t>(p.B * p.Tk * p.Dv));
  for (std::size_t i = 0; i < v.size(); ++i)
    v[i] = i / static_cast<std::size_t>(p.Dv) % static_cast<std::size_t>(p.Tk) ==
           i % static_cast<std::size_t>(p.Dv);
  return {{"q", Vector(0.0, static_cast<std::size_t>(p.B * p.Tq * p.H * p.D))}, {"v", v}};
}

TEST_P(Attention, DropoutKeepsItsShare) {
  const P p = masked_problem(2, 150, 200);
  const Vector z = mask_of(run_all(p, masking(p)), 200);
  double kept = 0;
  for (const double x : z) {
    ASSERT_TRUE(x == 0 || std::abs(x - 1 / 0.7) < 1e-4) << x;
    kept += x != 0;
  }
  const auto n = static_cast<double>(z.size());
  EXPECT_NEAR(kept / n, 0.7, 5 * std::sqrt(0.21 / n));
}

TEST_P(Attention, DropoutIsTheSameForEveryTilingAndForm) {
  const P p = masked_problem(2, 150, 200);
  const Vector z = mask_of(run_all(p, masking(p)), 200);
  // One sample of fewer queries and keys.
  const P less = masked_problem(1, 33, 70);
  const Vector y = mask_of(run_all(less, masking(less)), 70);
  for (std::size_t i = 0; i < y.size(); ++i) {
    const std::size_t j = i % 70, row = i / 70;  // (query, head)
    ASSERT_EQ(y[i] == 0, z[row * 200 + j] == 0) << "query " << row / 3 << " key " << j;
  }
  // Other forms of the same sets.
  const P square = masked_problem(2, 150, 150);
  const Vector dense = mask_of(run_all(square, masking(square)), 150);
  for (const P& same :
       {with(square, [](P& x) { x.form = Form::kBlocks, x.density = 1, x.block_size = 16; }),
        with(square, [](P& x) { x.form = Form::kDilated, x.segments = {150}, x.rates = {1}; }),
        with(square, [](P& x) { x.order = true; })}) {
    const Vector other = mask_of(run_all(same, masking(square)), 150);
    for (std::size_t i = 0; i < dense.size(); ++i) {
      ASSERT_EQ(dense[i] == 0, other[i] == 0) << attention_case(same).params << " element " << i;
    }
  }
}

// With do the unit matrix dv[j, i] is z_ij / Tk.
TEST_P(Attention, TheBackwardDropsTheSame) {
  const P p = with(masked_problem(1, 120, 120), [](P& x) { x.H = 1; });
  Tensors t = masking(p);
  t["do"] = t.at("v");
  const Tensors r = run_all(p, t);
  for (std::size_t i = 0; i < 120; ++i) {
    for (std::size_t j = 0; j < 120; ++j) {
      ASSERT_EQ(r.at("o")[i * 120 + j] == 0, r.at("dv")[j * 120 + i] == 0) << i << " " << j;
    }
  }
}

ANNULUS_EACH_DEVICE(Attention);

// --- the definition and the cases themselves -------------------------------------------------------------------

TEST(AttentionDefinition, AlphaWithoutAGradientIsThatOfConstants) {
  P p = with(dilated_problem(), [](P& x) {
    x.B = 1, x.Tq = x.Tk = 20, x.segments = {5, 20}, x.rates = {1, 2}, x.D = x.Dv = 4,
    x.stop_alpha_gradient = true, x.dlse = false;
  });
  const Case whole = attention_case(p);
  const Tensors t = define(whole, draw(whole));
  std::vector<Case> branches;
  for (std::size_t i = 0; i < 2; ++i) {
    branches.push_back(attention_case(
        with(p, [&](P& x) { x.segments = {p.segments[i]}, x.rates = {p.rates[i]}; })));
  }
  // sum_i alpha_i <do, o_i>, with alpha as it was at first.
  std::vector<Vector> alpha;
  for (const Case& c : branches) {
    Tensors own = t;
    define(c.calls[0], own);
    alpha.push_back(std::exp(Vector(own.at("lse") - t.at("lse"))));
  }
  const auto loss = [&](const Tensors& at) {
    double sum = 0;
    for (std::size_t i = 0; i < 2; ++i) {
      Tensors own = at;
      define(branches[i].calls[0], own);
      for (std::size_t e = 0; e < own.at("o").size(); ++e) {
        const std::size_t token = e / 16, h = e / 4 % 4;
        sum += alpha[i][h * 20 + token] * t.at("do")[e] * own.at("o")[e];
      }
    }
    return sum;
  };
  for (const char* name : {"q", "k", "v"}) {
    Rng rng(3);
    Tensors plus = t, minus = t;
    double expected = 0;
    for (std::size_t i = 0; i < t.at(name).size(); ++i) {
      const double v = rng.normal();
      plus[name][i] += 1e-5 * v;
      minus[name][i] -= 1e-5 * v;
      expected += v * t.at("d" + std::string(name))[i];
    }
    EXPECT_NEAR((loss(plus) - loss(minus)) / 2e-5, expected, 1e-7 * std::abs(expected) + 1e-8)
        << name;
  }
}

TEST(AttentionCases, CountPairsAsTheDefinitionHasThem) {
  std::vector<P> all = all_forms();
  all.push_back(with(dense_problem(), [](P& p) { p.Tk = 31, p.causal = true, p.window_left = 9; }));
  all.push_back(with(dense_problem(), [](P& p) { p.window_left = 9, p.window_right = 4; }));
  all.push_back(with(dense_problem(), [](P& p) { p.key_lengths = {3, 70}; }));
  all.push_back(with(dilated_problem(), [](P& p) { p.unite = true; }));
  all.push_back(
      with(block_problem(), [](P& p) { p.shared_list = true, p.Tk = 60, p.causal = true; }));
  for (const DilatedMode mode :
       {DilatedMode::kLongNet, DilatedMode::kGrouped, DilatedMode::kGroupedKv}) {
    for (const bool causal : {false, true}) {
      all.push_back(with(dilated_problem(), [&](P& p) {
        p.mode = mode, p.causal = causal, p.segments = {7, 20, 64}, p.rates = {1, 3, 9};
      }));
    }
  }
  for (const P& p : all)
    EXPECT_EQ(attention_pairs(p), attention_census(p).pairs) << attention_case(p).params;
}

}  // namespace
}  // namespace annulus::testing
