// The test of the tests, with attention: faults of this family of operators, most of them real ones of the programs that these
// replace. The runner must report every one, by the check named.
#include <gtest/gtest.h>

#include <cmath>
#include <utility>
#include <vector>

#include "annulus/attention/test/cases.h"
#include "testing/planted_bugs.h"

namespace annulus::testing {
namespace {

using P = AttentionProblem;
using Form = P::Form;

const P kSmall{
    .B = 2, .Tq = 9, .Tk = 9, .H = 4, .Hkv = 2, .D = 8, .Dv = 8, .dlse = true, .seed = 4};
const P kLongNet{.form = Form::kDilated,
                 .B = 1,
                 .Tq = 14,
                 .Tk = 14,
                 .H = 2,
                 .Hkv = 2,
                 .D = 8,
                 .Dv = 8,
                 .segments = {4, 14},
                 .rates = {1, 2},
                 .seed = 4};
const P kBlocks{.form = Form::kBlocks,
                .B = 1,
                .Tq = 40,
                .Tk = 40,
                .H = 3,
                .Hkv = 3,
                .D = 4,
                .Dv = 4,
                .block_size = 16,
                .density = 0.6,
                .seed = 4};

Case of(const P& p) { return sound(attention_case(p)); }

// Computes another problem on the same tensors: an operator that misreads its options.
Bug computing(const P& wrong, std::size_t call = kForward) {
  return [of = attention_case(wrong).calls[call]](const Right&, Tensors& t) { define(of, t); };
}

// Heads 1 and 2 of four change places; (B, T, 4, row), or (B, 4, T) with its T as the row.
Vector with_heads_swapped(const Vector& v, std::size_t row) {
  Vector r = v;
  for (std::size_t i = 0; i < v.size(); ++i) {
    const std::size_t h = i / row % 4;
    if (h == 1) r[i] = v[i + row];
    if (h == 2) r[i] = v[i - row];
  }
  return r;
}

std::vector<Planted> wrong_numbers() {
  const P causal = with(kSmall, [](P& p) { p.causal = true; });
  const P fewer_keys = with(causal, [](P& p) { p.Tk = 5; });
  const P windowed = with(kSmall, [](P& p) { p.window_left = 3, p.window_right = 1; });
  const P padded = with(kSmall, [](P& p) { p.key_lengths = {9, 5}; });
  const P dropped = with(kSmall, [](P& p) { p.dropout = 0.25; });
  const P ordered = with(causal, [](P& p) { p.order = true; });
  const P united = with(kLongNet, [](P& p) { p.unite = true; });
  const P stopped = with(kLongNet, [](P& p) { p.stop_alpha_gradient = true; });
  const P grouped = with(kLongNet, [](P& p) { p.mode = DilatedMode::kGrouped, p.H = p.Hkv = 3; });
  return {
      {"causal off by one", "forward o", of(causal),
       computing(with(kSmall, [](P& p) { p.window_right = 1; }))},
      {"causal without the end's alignment", "forward o", of(fewer_keys),
       computing(with(fewer_keys, [](P& p) { p.causal = false, p.window_right = 4; }))},
      {"the last keys dropped", "forward o", of(kSmall),
       [](const Right&, Tensors& t) {
         t["key_lengths"] = {8.0, 8.0};
         define(attention_case(with(kSmall,
                                    [](P& p) {
                                      p.key_lengths = {8, 8};
                                    }))
                    .calls[kForward],
                t);
       }},
      {"keys of the padding counted", "forward o", of(padded), computing(kSmall)},
      {"the last segment filled up with keys of zeros", "forward lse", of(kLongNet),
       after([](Tensors& t) {
         for (std::size_t i = 12; i < t["lse"].size(); i += 14)
           t["lse"][i] = std::log1p(std::exp(t["lse"][i]));
       })},
      {"a window off by one", "forward o", of(windowed),
       computing(with(windowed, [](P& p) { p.window_left = 4; }))},
      {"query heads take key heads in turn", "forward o", of(kSmall),
       [](const Right& right, Tensors& t) {
         t["q"] = with_heads_swapped(t["q"], 8);
         right(t);
         t["o"] = with_heads_swapped(t["o"], 8);
         t["lse"] = with_heads_swapped(t["lse"], 9);
       }},
      {"dk of one of the heads that share a key", "backward dk", of(kSmall),
       after([](Tensors& t) { t["dk"] *= 0.5; })},
      {"dk without the scale", "backward dk", of(kSmall),
       after([](Tensors& t) { t["dk"] *= std::sqrt(8.0); })},
      {"dlse ignored", "backward dq", of(kSmall), given([](Tensors& t) { t["dlse"] = 0.0; })},
      {"dlse with the wrong sign", "backward dk", of(kSmall),
       given([](Tensors& t) { t["dlse"] = -t["dlse"]; })},
      {"the order ignored", "forward o", of(ordered), computing(causal)},
      {"the order taken for its inverse", "forward o", of(ordered), given([](Tensors& t) {
         Vector inverse = t["order"];
         for (std::size_t r = 0; r < inverse.size(); ++r) {
           inverse[static_cast<std::size_t>(t["order"][r])] = static_cast<double>(r);
         }
         t["order"] = inverse;
       })},
      {"a union that counts keys twice", "forward o", of(united), computing(kLongNet)},
      {"branches that count a key once", "forward lse", of(kLongNet), computing(united)},
      {"alpha without a gradient where it has one", "backward dq", of(kLongNet),
       computing(stopped, kBackward)},
      {"alpha with a gradient where it has none", "backward dk", of(stopped),
       computing(kLongNet, kBackward)},
      {"groups in the reverse order", "forward o", of(grouped),
       computing(with(grouped,
                      [](P& p) {
                        p.segments = {14, 4}, p.rates = {2, 1};
                      }))},
      {"heads left over to the last group", "forward o", of(grouped),
       computing(with(grouped, [](P& p) { p.remainder_last = true; }))},
      {"dilated queries where only keys are", "forward o",
       of(with(grouped, [](P& p) { p.mode = DilatedMode::kGroupedKv; })), computing(grouped)},
      {"weights that are kept are not scaled", "forward o", of(dropped),
       after([](Tensors& t) { t["o"] *= 0.75; })},
      {"the backward drops others", "backward dv", of(dropped),
       computing(with(dropped, [](P& p) { p.seed = 5; }), kBackward)},
      {"dropout in lse", "forward lse", of(dropped), after([](Tensors& t) { t["lse"] *= 1.01; })},
      {"the block list of the first head for all", "forward o",
       misreading(of(kBlocks), kForward, [](auto& in) { in[3].stride[0] = 0; })},
      {"blocks that are not causal", "forward o", of(with(kBlocks, [](P& p) { p.causal = true; })),
       computing(kBlocks)},
      {"a finite number stands for no key", "where the reference is -inf", of(fewer_keys),
       after([](Tensors& t) {
         for (double& v : t["lse"]) v = std::isinf(v) ? -1e30 : v;
       })},
      {"a query without a key sees all of them", "forward o", of(fewer_keys), after([](Tensors& t) {
         for (double& v : t["o"]) v = v == 0 ? 0.1 : v;
       })},
      {"0 times a NaN of a later key", "where the reference is",
       of(with(causal, [](P& p) { p.special = P::Special::kNanV; })), after([](Tensors& t) {
         const Vector o = t["o"];
         for (std::size_t i = 0; i < o.size(); ++i) {
           for (std::size_t j = i % 32; j < o.size(); j += 32) {
             if (i / 288 == j / 288 && std::isnan(o[j])) t["o"][i] = o[j];
           }
         }
       })},
      {"0 times a NaN of the do of a query that sees other keys", "backward dv",
       of(with(windowed, [](P& p) { p.special = P::Special::kNanDo; })), after([](Tensors& t) {
         const Vector dv = t["dv"];
         for (std::size_t i = 0; i < dv.size(); ++i) {
           for (std::size_t j = i % 16; j < dv.size(); j += 16) {
             if (i / 144 == j / 144 && std::isnan(dv[j])) t["dv"][i] = dv[j];
           }
         }
       })},
  };
}

TEST(PlantedBugsOfAttention, EveryOneIsKilled) { expect_all_killed(wrong_numbers()); }

TEST(PlantedBugsOfAttention, WithoutABugNothingIsReported) {
  for (const P& p : {kSmall, kLongNet, kBlocks}) {
    for (const DType t : {DType::kF32, DType::kF16, DType::kBF16}) {
      expect_sound(of(with(p, [&](P& x) { x.dtype = t; })));
    }
  }
  expect_sound(of(with(kLongNet, [](P& p) { p.stop_alpha_gradient = true; })));
  expect_sound(of(with(kSmall, [](P& p) { p.causal = true, p.Tk = 5; })));
  expect_sound(of({.form = Form::kVarlen,
                   .H = 2,
                   .Hkv = 1,
                   .D = 4,
                   .Dv = 4,
                   .query_lengths = {5, 0, 3},
                   .packed_key_lengths = {5, 2, 4},
                   .dlse = true,
                   .seed = 4}));
}

}  // namespace
}  // namespace annulus::testing
