// Every pattern, every division and every edge of it by hand; and random ones.
#include <algorithm>
#include <array>
#include <vector>

#include "annulus/ring_attention/test/cases.h"

namespace annulus::testing {

namespace {

using P = AttentionProblem;
using Form = P::Form;

P dense(std::int64_t n) {
  P p;
  p.B = 2, p.Tq = p.Tk = n, p.H = 4, p.Hkv = 2, p.D = 16, p.Dv = 16;
  return p;
}
P longnet(std::int64_t n, std::vector<std::int64_t> w, std::vector<std::int64_t> r) {
  P p = dense(n);
  p.form = Form::kDilated;
  p.segments = std::move(w);
  p.rates = std::move(r);
  return p;
}
P blocks(std::int64_t n, std::int64_t size) {
  P p = dense(n);
  p.form = Form::kBlocks;
  p.block_size = size;
  p.density = 0.4;
  return p;
}
template <class F>
P with(P p, F&& f) {
  f(p);
  return p;
}

std::vector<P> patterns(std::int64_t n) {
  std::vector<P> all = {
      dense(n),
      with(dense(n), [](P& p) { p.causal = true; }),
      with(dense(n), [](P& p) { p.causal = true, p.window_left = 37; }),
      with(dense(n), [](P& p) { p.window_left = 20, p.window_right = 5, p.dropout = 0.3; }),
      with(dense(n), [](P& p) { p.Hkv = 4, p.Dv = 24, p.dlse = true; }),  // queries travel
      with(dense(n), [](P& p) { p.Hkv = 4, p.causal = true, p.dtype = DType::kBF16; }),
      with(dense(n), [](P& p) { p.causal = true, p.dtype = DType::kF16; }),
      longnet(n, {32, 64, 256}, {1, 2, 4}),
      with(longnet(n, {16, 48, 200}, {1, 3, 5}), [](P& p) { p.causal = true, p.dlse = true; }),
      with(longnet(n, {24, 100}, {1, 2}), [](P& p) { p.unite = true; }),
      with(longnet(n, {24, 100}, {1, 2}),
           [](P& p) { p.stop_alpha_gradient = true, p.offsets = DilatedOffsets::kBlock; }),
      with(longnet(n, {24, 100}, {1, 3}), [](P& p) { p.mode = DilatedMode::kGrouped; }),
      with(longnet(n, {24, 100, 150}, {1, 3, 2}),
           [](P& p) { p.mode = DilatedMode::kGroupedKv, p.Hkv = 1, p.causal = true; }),
      with(longnet(n, {24, 100}, {2, 3}), [](P& p) { p.Hkv = 4, p.dropout = 0.1; }),
      blocks(n, 16),
      with(blocks(n, 32), [](P& p) { p.causal = true, p.density = 0.7; }),
      with(blocks(n, 16), [](P& p) { p.Hkv = 4, p.shared_list = true, p.dtype = DType::kBF16; }),
  };
  for (std::size_t i = 0; i < all.size(); ++i) all[i].seed = 77 + i;
  return all;
}

std::vector<Case> named() {
  std::vector<Case> cases;
  const auto add = [&](const RingProblem& p) { cases.push_back(ring_attention_case(p)); };
  // Every pattern over every number of ranks; lengths that nothing divides.
  int turn = 0;
  for (const P& p : patterns(301)) {
    for (const int ranks : {1, 2, 3, 4, 5, 8}) {
      const Balance balance = ++turn % 3 == 0 ? Balance::kContiguous : Balance::kZigzag;
      add({p, ranks, balance, turn % 2 == 0, turn % 4 < 2 ? 1536 : 29});
    }
  }
  // Fewer tokens than chunks, and none.
  for (const std::int64_t n : {0, 1, 2, 3, 5, 9, 15}) {
    for (const bool same : {false, true}) {
      P p = with(dense(n), [&](P& x) { x.causal = n % 2 == 1, x.dlse = true; });
      p.seed = 1000 + static_cast<std::uint64_t>(n);
      add({p, 4, Balance::kZigzag, same, 2});
      p = with(longnet(n, {2, 6}, {1, 2}), [](P& x) { x.dlse = true; });
      add({p, 3, Balance::kContiguous, same, 1536});
    }
  }
  // Several slices of several tiles each.
  for (const bool same : {false, true}) {
    P p =
        with(dense(3500), [](P& x) { x.B = 1, x.H = x.Hkv = 1, x.D = x.Dv = 8, x.causal = true; });
    add({p, 2, Balance::kContiguous, same, 700});
    p = with(longnet(3500, {512, 2048}, {1, 3}),
             [](P& x) { x.B = 1, x.H = 2, x.Hkv = 1, x.D = x.Dv = 8; });
    add({p, 3, Balance::kZigzag, same, 400});
  }
  return cases;
}

Case fuzzed(std::uint64_t seed) {
  Rng rng(seed ^ 0x51a6);
  P p;
  switch (rng.below(3)) {
    case 0:
      p = drawn_attention(seed);
      break;
    case 1:
      p = drawn_dilated_attention(seed);
      break;
    default:
      p = drawn_block_sparse_attention(seed);
  }
  if (p.form == Form::kVarlen) p.form = Form::kDense, p.dlse = true;
  p.order = false;
  p.key_lengths.clear();
  const std::int64_t n = std::min(p.Tq, std::max<std::int64_t>(p.Tk, 40));
  if (n != p.Tk) {  // of queries with one key dlse alone has a gradient
    p.dlse = true;
    p.dropout = 0, p.scale = {}, p.q_size = 1;
  }
  p.Tq = p.Tk = n;
  p.deterministic = p.portable = false;
  static constexpr int kRanks[] = {1, 2, 2, 3, 4, 4, 5, 8};
  RingProblem ring{p, rng.pick<int>(kRanks)};
  ring.balance = rng.below(2) ? Balance::kZigzag : Balance::kContiguous;
  ring.deterministic = rng.below(2) == 0;
  if (rng.below(2)) ring.slice = 1 + rng.below(100);
  return ring_attention_case(ring);
}

const CasesRegistration kCases(
    {.op = "ring_attention", .named = named, .fuzz = fuzzed, .sanitized = "ranks=[34] "});

}  // namespace

}  // namespace annulus::testing
