// Random problems of attention: the same for a seed on every machine.
#include <algorithm>
#include <array>
#include <cmath>
#include <functional>
#include <vector>

#include "annulus/attention/test/cases.h"

namespace annulus::testing {

namespace {

using P = AttentionProblem;
using Form = P::Form;
using Special = P::Special;

constexpr std::array kAllDTypes = {DType::kF32, DType::kF16, DType::kBF16};

// Weight on the sizes where tiles begin and end.
std::int64_t draw_length(Rng& rng, std::int64_t most) {
  static constexpr std::int64_t kEdges[] = {2,  3,  7,  8,  9,  15, 16,  17,  31,  32,
                                            33, 63, 64, 65, 63, 65, 127, 128, 129, 257};
  const std::int64_t n = rng.below(3) ? rng.pick<std::int64_t>(kEdges) : 1 + rng.below(600);
  return std::max<std::int64_t>(1, std::min(n, most));
}

std::int64_t draw_width(Rng& rng) {
  static constexpr std::int64_t kWidths[] = {1,  3,  8,  16,  32,  33,  64,
                                             64, 80, 96, 128, 160, 192, 256};
  return rng.below(3) ? rng.pick<std::int64_t>(kWidths) : 1 + rng.below(256);
}

// What all forms have; B and H are what is left of `work` pairs times columns.
P draw_common(Rng& rng, Form form, std::uint64_t seed) {
  P p{.form = form};
  p.seed = seed;
  p.dtype = rng.pick<DType>(kAllDTypes);
  p.D = draw_width(rng);
  p.Dv = rng.below(3) ? p.D : draw_width(rng);
  const std::int64_t kind = rng.below(100);
  const auto work = static_cast<std::int64_t>(kind < 60   ? 1e5
                                              : kind < 95 ? 4e5
                                              : kind < 99 ? 2e6
                                                          : 1e7);
  const std::int64_t pairs = std::max<std::int64_t>(1, work / std::max(p.D, p.Dv));
  p.Tq = draw_length(rng, pairs);
  p.Tk = rng.below(2) ? draw_length(rng, std::max<std::int64_t>(1, pairs / p.Tq)) : p.Tq;
  while (p.Tq * p.Tk > pairs) (p.Tq > p.Tk ? p.Tq : p.Tk) /= 2;
  std::int64_t left = std::max<std::int64_t>(1, pairs / (p.Tq * p.Tk));
  const auto take = [&](std::int64_t most) {
    const std::int64_t n = 1 + rng.below(std::max<std::int64_t>(1, std::min(most, left)));
    left = std::max<std::int64_t>(1, left / n);
    return n;
  };
  p.Hkv = take(3);
  p.H = p.Hkv * take(rng.below(2) ? 1 : 8);
  p.B = take(3);
  // Two in five so small that finite differences are made of them.
  if (rng.below(5) < 2) {
    p.D = 1 + rng.below(12);
    p.Dv = rng.below(2) ? p.D : 1 + rng.below(12);
    p.Tq = 2 + rng.below(34);
    p.Tk = rng.below(2) ? 2 + rng.below(34) : p.Tq;
    p.Hkv = 1 + rng.below(2);
    p.H = p.Hkv * (1 + rng.below(2));
    p.B = 1 + rng.below(2);
  }
  p.causal = rng.below(2) == 0;
  if (rng.below(5) == 0)
    p.dropout = std::array{0.1, 0.3, 0.5}[static_cast<std::size_t>(rng.below(3))];
  const std::int64_t scale = rng.below(6);
  if (scale == 0) p.scale = 1e-3;
  // Scores of a few units, however long the rows are; of one beside tensors of 16 bits: where a weight is nearly 1, what is left
  // of ds is the rounding of o, which delta is made of.
  if (scale == 1) {
    p.scale = 30;
    p.q_size = (p.dtype == DType::kF32 ? 0.1 : 0.03) / std::sqrt(static_cast<double>(p.D));
  }
  p.dlse = rng.below(3) == 0;
  const std::int64_t needs = rng.below(8);
  p.need_dq = needs != 0;
  p.need_dkv = needs != 1;
  p.lse = rng.below(16) != 0;
  p.wide_integers = rng.below(2) == 0;
  if (rng.below(20) == 0) {
    p.special = static_cast<Special>(1 + rng.below(4));
    p.dropout = 0;  // a weight that is dropped times a NaN: either is right
    // A NaN makes its whole head and sample one: another must be there.
    if (p.Hkv < 2) p.H *= 2, p.Hkv = 2;
    // An infinity is one in o only where its weight is no zero: with no score far below the largest, in a form that keeps it.
    if (p.special == Special::kInfinityV && (p.dtype == DType::kF32 || p.scale)) {
      p.special = Special::kNanV;
    }
  }
  // Some fill the tiles of every kernel.
  Rng fills(p.seed ^ 0xf111);
  if (fills.below(40) == 0) {
    p.dtype = fills.below(2) ? DType::kBF16 : DType::kF16;
    p.D = 8 * (1 + fills.below(16));
    p.Dv = fills.below(2) ? p.D : 8 * (1 + fills.below(16));
    p.Tq = 65 + fills.below(300);
    p.Tk = fills.below(2) ? 1 + fills.below(400) : p.Tq;
    p.Hkv = p.special == Special::kNone ? 1 : 2;
    p.H = p.Hkv * (1 + fills.below(2));
    p.B = 1;
    p.dropout = 0;
    p.scale = {};
    p.q_size = 1;
    if (p.special == Special::kInfinityV) p.special = Special::kNanV;
  }
  p.deterministic = Rng(p.seed ^ 0xde7e).below(3) == 0;
  p.portable = Rng(p.seed ^ 0x9047).below(3) == 0;
  return p;
}

// Zero sizes, which prove little, in a few.
void draw_empty(Rng& rng, P& p) {
  const std::int64_t kind = rng.below(120);
  if (kind == 0) p.B = 0, p.key_lengths.clear();
  if (kind == 1) p.Tq = p.Tk = 0, p.key_lengths.clear();
  if (kind == 2) p.H = 0;
}

// Where most queries or keys have nothing to do, the outputs are zeros, which nearly any program gives: of those problems only
// a few are left as they are, and `relaxed` are the others. A query with one key has a gradient by dlse alone.
P proving(P p, const std::function<void(P&)>& relax) {
  constexpr double kMost = 0.7;
  const auto share = [](std::int64_t part, std::int64_t all) {
    return all == 0 ? 0 : static_cast<double>(part) / static_cast<double>(all);
  };
  AttentionCensus c = attention_census(p);
  if (std::max(share(c.empty_queries, c.queries), share(c.unseen_keys, c.keys)) > kMost &&
      Rng(p.seed ^ 0x4e1a).below(64) != 0) {
    relax(p);
    c = attention_census(p);
  }
  if (share(c.empty_queries + c.single_queries, c.queries) > kMost / 2) {
    p.dlse = true;
    p.dropout = 0;  // of one key z <do, v> and delta cancel, and what is left is the rounding of o
    // The weight of one key is 1 by luck in the naive program, and to a rounding of its score, which should be small, in others.
    p.scale = {};
    p.q_size = 1;
  }
  return p;
}

std::vector<std::int64_t> draw_lengths(Rng& rng, std::int64_t count, std::int64_t most) {
  std::vector<std::int64_t> lengths;
  for (std::int64_t i = 0; i < count; ++i) {
    lengths.push_back(rng.below(6) == 0 ? 0 : draw_length(rng, most));
  }
  return lengths;
}

}  // namespace

AttentionProblem drawn_attention(std::uint64_t seed) {
  Rng rng(seed);
  const bool packed = rng.below(4) == 0;
  P p = draw_common(rng, packed ? Form::kVarlen : Form::kDense, seed);
  if (packed) {
    const std::int64_t count = 1 + rng.below(5);
    const auto most =
        static_cast<std::int64_t>(std::sqrt(static_cast<double>(p.B * p.Tq * p.Tk / count))) + 1;
    p.query_lengths = draw_lengths(rng, count, most);
    p.packed_key_lengths = rng.below(2) ? draw_lengths(rng, count, most) : p.query_lengths;
    p = attention_totals(p);
  } else if (rng.below(4) == 0) {
    p.order = true;
    p.Tq = p.Tk = std::min(p.Tq, p.Tk);
  } else if (rng.below(4) == 0) {
    for (std::int64_t b = 0; b < p.B; ++b) p.key_lengths.push_back(rng.below(p.Tk + 1));
  }
  const auto bound = [&] {
    return rng.below(3) ? rng.below(std::max<std::int64_t>(1, p.Tk)) : rng.below(9);
  };
  if (rng.below(4) == 0) {
    const std::int64_t which = rng.below(3);
    if (which != 0) p.window_left = bound();
    if (which != 1) p.window_right = bound();
  }
  if (!packed) draw_empty(rng, p);
  return proving(p, [](P& x) {
    x.causal = false;
    x.window_left = x.window_right = -1;
    x.key_lengths.clear();
    if (x.form == Form::kVarlen) {
      x.packed_key_lengths = x.query_lengths = {x.Tq / 2 + 1, x.Tq / 3 + 1};
      x = attention_totals(x);
    }
  });
}

AttentionProblem drawn_dilated_attention(std::uint64_t seed) {
  Rng rng(seed);
  P p = draw_common(rng, Form::kDilated, seed);
  p.Tq = p.Tk = std::max(std::min(p.Tq, p.Tk), std::min<std::int64_t>(std::max(p.Tq, p.Tk), 40));
  p.mode = static_cast<DilatedMode>(rng.below(2) ? 0 : rng.below(3));
  const bool longnet = p.mode == DilatedMode::kLongNet;
  const std::int64_t branches = 1 + rng.below(longnet ? 4 : std::min<std::int64_t>(p.H, 4));
  std::int64_t w = 1 + rng.below(p.Tq), r = rng.below(8) ? 1 : 1 + rng.below(3);
  for (std::int64_t i = 0; i < branches; ++i) {
    p.segments.push_back(w);
    p.rates.push_back(r);
    // Geometric, as in the paper, or anything.
    w = rng.below(2) ? w * (2 + rng.below(2)) : 1 + rng.below(2 * p.Tq);
    r = rng.below(2) ? r * 2 : 1 + rng.below(7);
  }
  if (longnet) {
    p.offsets = rng.below(3) ? DilatedOffsets::kMod : DilatedOffsets::kBlock;
    p.unite = rng.below(4) == 0;
    p.stop_alpha_gradient = !p.unite && rng.below(4) == 0;
  }
  p.remainder_last = rng.below(2) == 0;
  draw_empty(rng, p);
  return proving(p, [](P& x) { x.rates.assign(x.rates.size(), 1); });
}

AttentionProblem drawn_block_sparse_attention(std::uint64_t seed) {
  static constexpr std::int64_t kSizes[] = {16, 16, 32, 64, 128};
  Rng rng(seed);
  P p = draw_common(rng, Form::kBlocks, seed);
  p.block_size = rng.pick<std::int64_t>(kSizes);
  p.density = std::array{0.3, 0.5, 0.8, 1.0}[static_cast<std::size_t>(rng.below(4))];
  p.shared_list = rng.below(2) == 0;
  if (rng.below(4) == 0) {
    p.order = true;
    p.Tq = p.Tk = std::min(p.Tq, p.Tk);
  }
  draw_empty(rng, p);
  return proving(p, [](P& x) { x.density = 1, x.causal = false; });
}

}  // namespace annulus::testing
