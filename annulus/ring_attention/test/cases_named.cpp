// Every pattern, every division and every edge of it by hand; and random ones.
#include <algorithm>
#include <array>
#include <vector>

#include "annulus/ring_attention/test/cases.h"
#include "annulus/ring_attention/test/patterns.h"

namespace annulus::testing {

namespace {

using namespace ring;

std::vector<Case> named() {
  std::vector<Case> cases;
  const auto add = [&](const RingProblem& p) { cases.push_back(ring_attention_case(p)); };
  // Every pattern over two numbers of ranks, in turns (ring_attention_test.cpp has all of both, once each); a length that nothing
  // divides.
  int turn = 0;
  constexpr int kRanks[] = {1, 2, 3, 4, 5, 8};
  for (P p : patterns(131)) {
    p.B = 1;
    for (const int ranks : {kRanks[turn % 6], kRanks[(turn + 3) % 6]}) {
      const Balance balance = ++turn % 3 == 0 ? Balance::kContiguous : Balance::kZigzag;
      add({p, ranks, balance, turn % 2 == 0, turn % 4 < 2 ? 1536 : 29});
    }
  }
  // So small that calls which break a rule are made of them.
  for (const P& p :
       {with(dense(9), [](P& x) { x.dlse = true; }), longnet(9, {4, 9}, {1, 2}), blocks(20, 16)}) {
    add({p, 1, Balance::kContiguous});
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

const CasesRegistration kCases({.op = "ring_attention",
                                .named = named,
                                .fuzz = fuzzed,
                                .sanitized = "ranks=[34] ",
                                .one_in = 50});

}  // namespace

}  // namespace annulus::testing
