// The hand-picked problems of attention (every edge, every fault of the implementations that the operators replace), the
// fuzzer's distribution, and the registration of both.
#include <algorithm>
#include <array>
#include <cmath>
#include <functional>
#include <string>
#include <utility>

#include "annulus/attention/test/cases.h"

namespace annulus::testing {

namespace {

using P = AttentionProblem;
using Form = P::Form;
using Special = P::Special;

constexpr std::array kAllDTypes = {DType::kF32, DType::kF16, DType::kBF16};

class Builder {
 public:
  Case& add(const std::string& name, P p) {
    p.seed = 1000 + cases_.size();
    p.wide_integers = p.seed % 2 == 0;
    cases_.push_back(attention_case(p));
    cases_.back().params = "'" + name + "' " + cases_.back().params;
    return cases_.back();
  }
  void add_dtypes(const std::string& name, P p) {
    for (const DType t : kAllDTypes) {
      p.dtype = t;
      add(name, p);
    }
  }
  std::vector<Case> take() { return std::move(cases_); }

 private:
  std::vector<Case> cases_;
};

template <class F>
P with(P p, F change) {
  change(p);
  return p;
}

// --- attention -------------------------------------------------------------------------------------------------

void add_sizes(Builder& b) {
  b.add_dtypes("every dtype", {.B = 2, .Tq = 37, .Tk = 37, .H = 3, .Hkv = 3, .D = 16, .Dv = 16});
  b.add_dtypes("causal",
               {.B = 2, .Tq = 70, .Tk = 70, .H = 2, .Hkv = 2, .D = 32, .Dv = 32, .causal = true});
  for (const std::int64_t D : {1, 3, 8, 64, 80, 96, 128, 160, 192, 256}) {
    for (const DType t : kAllDTypes) {
      P p{.B = 1, .Tq = 33, .Tk = 70, .H = 2, .Hkv = 1, .D = D, .Dv = D, .dtype = t};
      p.causal = D % 64 == 0;
      b.add("every width", p);
    }
  }
  for (const auto& [D, Dv] :
       {std::pair{64, 32}, {32, 64}, {96, 128}, {192, 128}, {256, 1}, {1, 256}, {5, 7}}) {
    b.add_dtypes("Dv is not D", {.B = 1, .Tq = 20, .Tk = 45, .H = 2, .Hkv = 2, .D = D, .Dv = Dv});
  }
  for (const std::int64_t T : {1, 2, 15, 16, 17, 31, 32, 33, 63, 64, 65, 127, 128, 129, 257}) {
    b.add("edges of tiles", {.Tq = T, .Tk = T, .D = 8, .Dv = 8, .causal = true, .dlse = true});
    b.add("edges of tiles of keys",
          {.Tq = 3, .Tk = T, .D = 8, .Dv = 8, .dtype = DType::kBF16, .dlse = true});
    b.add("edges of tiles of queries", {.Tq = T, .Tk = 5, .D = 8, .Dv = 8, .dtype = DType::kF16});
  }
  b.add("more queries than any tile", {.Tq = 1500, .Tk = 9, .H = 2, .D = 4, .Dv = 4});
  b.add("more keys than any tile", {.Tq = 9, .Tk = 1500, .H = 2, .D = 4, .Dv = 4});
  b.add("many heads and samples", {.B = 5, .Tq = 7, .Tk = 9, .H = 24, .Hkv = 8, .D = 4, .Dv = 4});
}

void add_empty(Builder& b) {
  const P p{.B = 2, .Tq = 5, .Tk = 7, .H = 4, .Hkv = 2, .D = 8, .Dv = 8, .dlse = true};
  b.add("no sample", with(p, [](P& x) { x.B = 0; }));
  b.add("no query", with(p, [](P& x) { x.Tq = 0; }));
  b.add("no key", with(p, [](P& x) { x.Tk = 0; }));
  b.add("no key, causal", with(p, [](P& x) { x.Tk = 0, x.causal = true; }));
  b.add("no head", with(p, [](P& x) { x.H = x.Hkv = 0; }));
  b.add("no query head", with(p, [](P& x) { x.H = 0; }));
  b.add("nothing", with(p, [](P& x) { x.B = x.Tq = x.Tk = x.H = x.Hkv = 0; }));
  b.add("one key", with(p, [](P& x) { x.Tk = 1; }));
  b.add("one query and key", {.D = 3, .Dv = 5, .dlse = true});
  b.add("one decoded token", {.B = 3,
                              .Tq = 1,
                              .Tk = 130,
                              .H = 8,
                              .Hkv = 2,
                              .D = 16,
                              .Dv = 16,
                              .dtype = DType::kBF16,
                              .causal = true});
}

void add_masks(Builder& b) {
  for (const DType t : kAllDTypes) {
    b.add("causal, fewer queries than keys", {.B = 2,
                                              .Tq = 20,
                                              .Tk = 51,
                                              .H = 2,
                                              .Hkv = 2,
                                              .D = 16,
                                              .Dv = 16,
                                              .dtype = t,
                                              .causal = true});
    b.add("causal, queries without a key", {.B = 2,
                                            .Tq = 51,
                                            .Tk = 20,
                                            .H = 2,
                                            .Hkv = 2,
                                            .D = 16,
                                            .Dv = 16,
                                            .dtype = t,
                                            .causal = true,
                                            .dlse = true});
  }
  b.add("causal, one query has a key",
        {.Tq = 40, .Tk = 1, .D = 4, .Dv = 4, .causal = true, .dlse = true});
  const P square{.Tq = 75, .Tk = 75, .H = 2, .Hkv = 2, .D = 8, .Dv = 8};
  for (const auto& [left, right] : {std::pair{0, 0},
                                    {0, -1},
                                    {-1, 0},
                                    {3, 5},
                                    {16, 0},
                                    {64, 64},
                                    {-1, 7},
                                    {7, -1},
                                    {1000, 1000}}) {
    for (const bool causal : {false, true}) {
      b.add("windows", with(square, [&](P& p) {
              p.window_left = left, p.window_right = right, p.causal = causal;
              p.dlse = left == 0;
            }));
    }
  }
  b.add("a window beyond every number",
        with(square, [](P& p) { p.window_left = p.window_right = INT64_MAX; }));
  b.add_dtypes("a window, fewer queries than keys", with(square, [](P& p) {
                 p.Tq = 21, p.window_left = 30, p.window_right = 2, p.causal = true;
               }));
  b.add("a window, more queries than keys",
        with(square, [](P& p) { p.Tk = 30, p.window_left = 5, p.window_right = 3; }));
  b.add("a window that leaves whole tiles of keys unseen",
        with(square, [](P& p) { p.Tq = 10, p.Tk = 300, p.window_left = 8; }));
  b.add("a window, one tile of queries of many", with(square, [](P& p) {
          p.Tq = p.Tk = 300, p.D = p.Dv = 4, p.window_left = 70, p.causal = true;
        }));
}

void add_heads(Builder& b) {
  for (const auto& [H, Hkv] : {std::pair{4, 1}, {4, 2}, {6, 2}, {8, 1}, {3, 3}}) {
    for (const DType t : kAllDTypes) {
      b.add("GQA", {.B = 2,
                    .Tq = 35,
                    .Tk = 35,
                    .H = H,
                    .Hkv = Hkv,
                    .D = 16,
                    .Dv = 24,
                    .dtype = t,
                    .causal = H == 4});
    }
  }
}

void add_orders(Builder& b) {
  const P p{.B = 2, .Tq = 70, .Tk = 70, .H = 2, .Hkv = 2, .D = 8, .Dv = 8, .order = true};
  b.add("an order that nothing depends on", p);
  b.add_dtypes("an order, causal", with(p, [](P& x) { x.causal = true; }));
  b.add("an order, a window", with(p, [](P& x) { x.window_left = 9, x.window_right = 4; }));
  b.add("an order, dropout", with(p, [](P& x) { x.causal = true, x.dropout = 0.3; }));
  b.add("an order of one token", with(p, [](P& x) { x.Tq = x.Tk = 1, x.dlse = true; }));
  b.add("an order of none", with(p, [](P& x) { x.Tq = x.Tk = 0; }));
}

void add_key_lengths(Builder& b) {
  const P p{
      .B = 3, .Tq = 33, .Tk = 66, .H = 2, .Hkv = 2, .D = 8, .Dv = 8, .key_lengths = {66, 17, 64}};
  b.add_dtypes("key_lengths", p);
  b.add_dtypes("key_lengths, causal", with(p, [](P& x) { x.causal = true, x.dlse = true; }));
  b.add("a sample without keys", with(p, [](P& x) { x.key_lengths = {0, 5, 66}, x.dlse = true; }));
  b.add("no sample has keys", with(p, [](P& x) { x.key_lengths = {0, 0, 0}, x.causal = true; }));
  b.add("key_lengths, a window", with(p, [](P& x) {
          x.key_lengths = {40, 1, 65}, x.window_left = 6, x.dlse = true;
        }));
  b.add("key_lengths, dropout", with(p, [](P& x) { x.dropout = 0.2; }));
}

void add_values(Builder& b) {
  const P p{.B = 1, .Tq = 40, .Tk = 40, .H = 2, .Hkv = 2, .D = 16, .Dv = 16};
  b.add_dtypes("scale 1e-3", with(p, [](P& x) { x.scale = 1e-3; }));
  b.add_dtypes("scale 30, scores of some tens",
               with(p, [](P& x) { x.scale = 30, x.q_size = 0.1; }));
  b.add("scale 0", with(p, [](P& x) { x.scale = 0; }));
  b.add("a negative scale", with(p, [](P& x) { x.scale = -0.5; }));
  for (const DType t : kAllDTypes) {
    // A sum of exponents that is not counted from the largest overflows.
    Case& c = b.add("scores of +-1e4", with(p, [&](P& x) { x.dtype = t, x.scale = 1e3; }));
    c.draw = [usual = c.draw](Rng& rng, const TensorSpec& s, std::span<double> v) {
      usual(rng, s, v);
      // Small integers: the scores are exact, and what is left of softmax is a few equal weights.
      if (s.name == "q" || s.name == "k") {
        for (double& x : v) x = static_cast<double>(rng.below(3) - 1);
      }
    };
  }
  for (const DType t : kAllDTypes) {
    for (const Special special :
         {Special::kNanQ, Special::kNanK, Special::kNanV, Special::kInfinityV}) {
      if (special == Special::kInfinityV && t == DType::kF32) continue;  // bf16x3 makes a NaN of it
      b.add("a value that is no number", with(p, [&](P& x) { x.dtype = t, x.special = special; }));
      b.add("a value that is no number, causal",
            with(p, [&](P& x) { x.dtype = t, x.special = special, x.causal = true; }));
    }
  }
  b.add("a NaN in a key that a window leaves out of most", with(p, [](P& x) {
          x.special = Special::kNanK, x.Tq = x.Tk = 140, x.window_left = 3, x.window_right = 2;
        }));
}

void add_gradients(Builder& b) {
  for (const DType t : kAllDTypes) {
    const P p{.B = 2, .Tq = 30, .Tk = 41, .H = 4, .Hkv = 2, .D = 16, .Dv = 8, .dtype = t};
    b.add("dlse", with(p, [](P& x) { x.dlse = true; }));
    b.add("dq alone", with(p, [](P& x) { x.need_dkv = false; }));
    b.add("dk and dv alone", with(p, [](P& x) { x.need_dq = false, x.dlse = true; }));
    b.add("no lse", with(p, [](P& x) { x.lse = false; }));
    b.add("dropout", with(p, [](P& x) { x.dropout = 0.25; }));
    b.add("dropout, dlse, causal",
          with(p, [](P& x) { x.dropout = 0.5, x.dlse = x.causal = true; }));
  }
}

void add_varlen(Builder& b) {
  const P p{.form = Form::kVarlen,
            .H = 4,
            .Hkv = 2,
            .D = 8,
            .Dv = 8,
            .query_lengths = {5, 1, 33, 16},
            .packed_key_lengths = {5, 1, 33, 16}};
  b.add_dtypes("packed sequences", p);
  b.add_dtypes("packed sequences, causal", with(p, [](P& x) { x.causal = true; }));
  b.add_dtypes("packed, other numbers of keys", with(p, [](P& x) {
                 x.packed_key_lengths = {9, 3, 20, 70};
               }));
  b.add("packed, causal, other numbers of keys", with(p, [](P& x) {
          x.packed_key_lengths = {9, 3, 20, 70}, x.causal = x.dlse = true;
        }));
  b.add("packed, empty sequences", with(p, [](P& x) {
          x.query_lengths = {0, 5, 0, 0, 8, 0}, x.packed_key_lengths = {0, 5, 0, 0, 8, 0};
        }));
  b.add("packed, sequences without queries or keys", with(p, [](P& x) {
          x.query_lengths = {4, 0, 3, 6}, x.packed_key_lengths = {6, 7, 0, 9}, x.dlse = true;
        }));
  b.add("packed, one sequence",
        with(p, [](P& x) { x.query_lengths = x.packed_key_lengths = {65}; }));
  b.add("packed, no sequence", with(p, [](P& x) { x.query_lengths = x.packed_key_lengths = {}; }));
  b.add("packed, no row", with(p, [](P& x) { x.query_lengths = x.packed_key_lengths = {0, 0}; }));
  b.add("packed, a window", with(p, [](P& x) { x.window_left = 4, x.window_right = 2; }));
  b.add("packed, a window longer than sequences",
        with(p, [](P& x) { x.window_left = 20, x.causal = true; }));
  b.add("packed, dropout", with(p, [](P& x) { x.dropout = 0.3; }));
  b.add(
      "packed, edges of tiles", with(p, [](P& x) {
        x.H = x.Hkv = 1, x.query_lengths = x.packed_key_lengths = {63, 64, 65, 1}, x.causal = true;
      }));
  b.add("packed, many of one token", with(p, [](P& x) {
          x.dlse = true, x.query_lengths = x.packed_key_lengths = std::vector<std::int64_t>(40, 1);
        }));
}

// --- dilated ---------------------------------------------------------------------------------------------------

void add_longnet(Builder& b) {
  const P p{.form = Form::kDilated,
            .B = 2,
            .Tq = 64,
            .Tk = 64,
            .H = 4,
            .Hkv = 4,
            .D = 8,
            .Dv = 8,
            .segments = {16, 32, 64},
            .rates = {1, 2, 4}};
  const auto sized = [&](std::int64_t n, std::vector<std::int64_t> w, std::vector<std::int64_t> r) {
    return with(p, [&](P& x) {
      x.B = 1, x.Tq = x.Tk = n, x.segments = std::move(w), x.rates = std::move(r);
    });
  };
  b.add_dtypes("LongNet", p);
  b.add_dtypes("LongNet, causal", with(p, [](P& x) { x.causal = true; }));
  b.add("LongNet, rate 1 and one segment: dense", sized(70, {70}, {1}));
  b.add("LongNet, ragged n", sized(67, {16, 32, 64}, {1, 2, 4}));
  b.add("LongNet, ragged n, causal",
        with(sized(67, {16, 32, 64}, {1, 2, 4}), [](P& x) { x.causal = true; }));
  b.add("LongNet, rates that do not divide segments", sized(90, {10, 25, 70}, {1, 3, 6}));
  b.add("LongNet, segments longer than the sequence", sized(13, {8, 64, 4096}, {1, 2, 3}));
  b.add("LongNet, rates beyond the segment",
        with(sized(40, {4, 8}, {1, 20}), [](P& x) { x.H = x.Hkv = 12; }));
  b.add("LongNet, no rate 1: queries without keys",
        with(sized(50, {16, 32}, {2, 4}), [](P& x) { x.dlse = true; }));
  b.add("LongNet, one branch of rate 3", with(sized(50, {20}, {3}), [](P& x) { x.dlse = true; }));
  b.add("LongNet, the same branch twice", sized(40, {16, 16}, {1, 1}));
  b.add("LongNet, the paper's rates, more heads than any",
        with(sized(96, {8, 16, 32, 64, 96}, {1, 2, 4, 6, 12}),
             [](P& x) { x.H = x.Hkv = 6, x.D = x.Dv = 4; }));
  b.add("LongNet, sixteen branches",
        with(sized(48, {1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 16, 24, 32, 48},
                   {1, 1, 2, 1, 2, 3, 1, 2, 3, 4, 5, 1, 2, 3, 4, 5}),
             [](P& x) { x.H = x.Hkv = 2, x.D = x.Dv = 4; }));
  for (const bool causal : {false, true}) {
    b.add("LongNet, offsets by blocks of heads",
          with(p, [&](P& x) { x.offsets = DilatedOffsets::kBlock, x.causal = causal; }));
    b.add("LongNet, offsets by blocks, rates that do not divide the heads",
          with(sized(61, {16, 40}, {1, 3}), [&](P& x) {
            x.H = x.Hkv = 5, x.offsets = DilatedOffsets::kBlock, x.causal = causal;
          }));
    b.add_dtypes("union, nested", with(p, [&](P& x) { x.unite = true, x.causal = causal; }));
    b.add("union, not nested", with(sized(77, {12, 20, 50}, {1, 3, 2}),
                                    [&](P& x) { x.unite = true, x.causal = causal; }));
    b.add("union, offsets by blocks", with(sized(53, {9, 40}, {2, 3}), [&](P& x) {
            x.unite = true, x.offsets = DilatedOffsets::kBlock, x.causal = causal;
          }));
    b.add_dtypes("alpha without a gradient",
                 with(p, [&](P& x) { x.stop_alpha_gradient = true, x.causal = causal; }));
    b.add("alpha without a gradient, queries without keys, dlse",
          with(sized(45, {16, 32}, {2, 3}),
               [&](P& x) { x.stop_alpha_gradient = x.dlse = true, x.causal = causal; }));
    b.add("LongNet, GQA", with(p, [&](P& x) { x.Hkv = 2, x.causal = causal, x.Dv = 12; }));
    b.add("LongNet, dropout", with(p, [&](P& x) { x.dropout = 0.25, x.causal = causal; }));
    b.add("union, dropout",
          with(p, [&](P& x) { x.dropout = 0.25, x.unite = true, x.causal = causal; }));
    b.add("alpha without a gradient, dropout", with(p, [&](P& x) {
            x.dropout = 0.25, x.stop_alpha_gradient = true, x.causal = causal;
          }));
    b.add("LongNet, dlse", with(p, [&](P& x) { x.dlse = true, x.causal = causal; }));
  }
  b.add("LongNet, a NaN", with(p, [](P& x) { x.special = Special::kNanK; }));
  b.add("LongNet, segments of one token", with(sized(20, {1}, {1}), [](P& x) { x.dlse = true; }));
  b.add("LongNet, a segment beyond every number", sized(20, {INT64_MAX, 5}, {1, INT64_MAX}));
  b.add("LongNet, edges of tiles",
        with(sized(258, {129, 258}, {1, 2}), [](P& x) { x.H = x.Hkv = 2, x.D = x.Dv = 4; }));
  for (const std::int64_t n : {0, 1, 2}) {
    b.add("LongNet, hardly a token", with(sized(n, {4, 8}, {1, 2}), [](P& x) { x.dlse = true; }));
  }
  b.add("LongNet, no head", with(p, [](P& x) { x.H = x.Hkv = 0; }));
  b.add("LongNet, no sample", with(p, [](P& x) { x.B = 0; }));
  b.add("LongNet, dq alone", with(p, [](P& x) { x.need_dkv = false; }));
  b.add("LongNet, dk and dv alone", with(p, [](P& x) { x.need_dq = false; }));
  b.add("LongNet, no lse", with(p, [](P& x) { x.lse = false; }));
}

void add_grouped(Builder& b) {
  const P p{.form = Form::kDilated,
            .B = 2,
            .Tq = 67,
            .Tk = 67,
            .H = 3,
            .Hkv = 3,
            .D = 8,
            .Dv = 8,
            .segments = {16, 32, 64},
            .rates = {1, 2, 4},
            .mode = DilatedMode::kGrouped};
  for (const DilatedMode mode : {DilatedMode::kGrouped, DilatedMode::kGroupedKv}) {
    const std::string name = mode == DilatedMode::kGrouped ? "grouped" : "grouped, all queries";
    for (const bool causal : {false, true}) {
      const P own = with(p, [&](P& x) { x.mode = mode, x.causal = causal, x.dlse = causal; });
      b.add_dtypes(name, own);
      for (const bool last : {false, true}) {
        b.add(name + ", heads left over",
              with(own, [&](P& x) { x.H = x.Hkv = 5, x.remainder_last = last; }));
        b.add(name + ", GQA",
              with(own, [&](P& x) { x.H = 8, x.Hkv = 2, x.remainder_last = last; }));
      }
      b.add(name + ", GQA that shares a key among groups",
            with(own, [](P& x) { x.H = 6, x.Hkv = 1, x.Dv = 5; }));
      b.add(name + ", rates that do not divide segments", with(own, [](P& x) {
              x.segments = {10, 25, 70}, x.rates = {3, 4, 6};
            }));
      b.add(name + ", segments longer than the sequence",
            with(own, [](P& x) { x.Tq = x.Tk = 11; }));
      b.add(name + ", rates beyond the segment", with(own, [](P& x) {
              x.Tq = x.Tk = 30, x.segments = {4, 8, 2}, x.rates = {1, 20, 50};
            }));
      b.add(name + ", dropout", with(own, [](P& x) { x.dropout = 0.25; }));
      b.add(name + ", one group", with(own, [](P& x) { x.segments = {20}, x.rates = {3}; }));
    }
    b.add(name + ", no head", with(p, [&](P& x) { x.mode = mode, x.H = x.Hkv = 0; }));
    b.add(name + ", no token", with(p, [&](P& x) { x.mode = mode, x.Tq = x.Tk = 0; }));
    b.add(name + ", a NaN", with(p, [&](P& x) { x.mode = mode, x.special = Special::kNanV; }));
  }
}

// --- blocks ----------------------------------------------------------------------------------------------------

void add_blocks(Builder& b) {
  const P p{.form = Form::kBlocks,
            .B = 2,
            .Tq = 70,
            .Tk = 70,
            .H = 3,
            .Hkv = 3,
            .D = 8,
            .Dv = 8,
            .block_size = 16,
            .density = 0.5};
  b.add_dtypes("blocks", p);
  for (const std::int64_t size : {16, 32, 64, 128}) {
    const P own = with(p, [&](P& x) {
      x.B = 1, x.block_size = size, x.Tq = 2 * size + 5, x.Tk = 3 * size - 7, x.D = x.Dv = 4,
      x.dlse = true;
    });
    for (const bool shared : {false, true}) {
      b.add("blocks of every size", with(own, [&](P& x) { x.shared_list = shared; }));
      b.add("blocks of every size, causal",
            with(own, [&](P& x) { x.shared_list = shared, x.causal = true; }));
    }
    b.add("blocks of every size, f16", with(own, [&](P& x) { x.dtype = DType::kF16; }));
    b.add("blocks of every size, bf16",
          with(own, [&](P& x) { x.dtype = DType::kBF16, x.D = x.Dv = 64, x.H = x.Hkv = 1; }));
  }
  b.add("all blocks", with(p, [](P& x) { x.density = 1; }));
  b.add("all blocks, causal", with(p, [](P& x) { x.density = 1, x.causal = true; }));
  b.add("few blocks: rows without one", with(p, [](P& x) { x.density = 0.1, x.dlse = true; }));
  b.add("no block", with(p, [](P& x) { x.density = 0; }));
  b.add("one short block", with(p, [](P& x) { x.Tq = x.Tk = 9, x.density = 1; }));
  b.add("blocks, more queries than keys, causal",
        with(p, [](P& x) { x.Tk = 40, x.causal = x.dlse = true; }));
  b.add("blocks, GQA", with(p, [](P& x) { x.H = 6, x.Hkv = 2; }));
  b.add("blocks, GQA, one list",
        with(p, [](P& x) { x.H = 6, x.Hkv = 2, x.shared_list = true, x.Dv = 20; }));
  b.add("blocks, an order", with(p, [](P& x) { x.order = true; }));
  b.add("blocks, an order, causal", with(p, [](P& x) { x.order = x.causal = x.dlse = true; }));
  b.add("blocks, dropout", with(p, [](P& x) { x.dropout = 0.25; }));
  b.add("blocks, an order, dropout", with(p, [](P& x) { x.dropout = 0.25, x.order = true; }));
  b.add("blocks, a NaN", with(p, [](P& x) { x.special = Special::kNanV; }));
  b.add("blocks, wide heads", with(p, [](P& x) { x.D = 96, x.Dv = 160, x.H = x.Hkv = 1; }));
  b.add("blocks, no query", with(p, [](P& x) { x.Tq = 0; }));
  b.add("blocks, no key", with(p, [](P& x) { x.Tk = 0; }));
  b.add("blocks, no head", with(p, [](P& x) { x.H = x.Hkv = 0, x.shared_list = true; }));
  b.add("blocks, no sample", with(p, [](P& x) { x.B = 0; }));
  b.add("blocks, dq alone", with(p, [](P& x) { x.need_dkv = false; }));
  b.add("blocks, dk and dv alone", with(p, [](P& x) { x.need_dq = false; }));
  b.add("blocks, no lse", with(p, [](P& x) { x.lse = false; }));
}

template <class... F>
std::vector<Case> built_by(F... add) {
  Builder b;
  (add(b), ...);
  return b.take();
}

// --- random problems -------------------------------------------------------------------------------------------

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

Case fuzz_attention(std::uint64_t seed) {
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
  return attention_case(proving(p, [](P& x) {
    x.causal = false;
    x.window_left = x.window_right = -1;
    x.key_lengths.clear();
    if (x.form == Form::kVarlen) {
      x.packed_key_lengths = x.query_lengths = {x.Tq / 2 + 1, x.Tq / 3 + 1};
      x = attention_totals(x);
    }
  }));
}

Case fuzz_dilated(std::uint64_t seed) {
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
  return attention_case(proving(p, [](P& x) { x.rates.assign(x.rates.size(), 1); }));
}

Case fuzz_blocks(std::uint64_t seed) {
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
  return attention_case(proving(p, [](P& x) { x.density = 1, x.causal = false; }));
}

const CasesRegistration kDense(
    {.op = "attention",
     .named =
         [] {
           return built_by(add_sizes, add_empty, add_masks, add_heads, add_orders, add_key_lengths,
                           add_values, add_gradients, add_varlen);
         },
     .fuzz = fuzz_attention,
     .bad_calls = attention_bad_calls,
     .sanitized = "every (dtype|width)|GQA|queries without a key|windows|an order, causal|"
                  "key_lengths, causal|packed sequences, causal|dropout"});
const CasesRegistration kDilated(
    {.op = "dilated_attention",
     .named = [] { return built_by(add_longnet, add_grouped); },
     .fuzz = fuzz_dilated,
     .bad_calls = dilated_attention_bad_calls,
     .sanitized = "'LongNet'|ragged|union, n|alpha without a gradient'|'grouped|sixteen"});
const CasesRegistration kBlocks({.op = "block_sparse_attention",
                                 .named = [] { return built_by(add_blocks); },
                                 .fuzz = fuzz_blocks,
                                 .bad_calls = block_sparse_attention_bad_calls,
                                 .sanitized = "every size|few blocks|an order|GQA"});

}  // namespace

}  // namespace annulus::testing
