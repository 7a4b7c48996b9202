// The hand-picked problems of attention (every edge, every fault of the implementations that the operators replace), and the
// registration of its operators' cases.
#include <array>
#include <string>
#include <utility>

#include "annulus/attention/test/cases.h"
#include "annulus/attention/test/named.h"

namespace annulus::testing {

namespace {

using P = AttentionProblem;
using Form = P::Form;
using Special = P::Special;

using Builder = NamedCases;

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
    // Of few numbers one has the say, and a bound on their mean square is none: there are more of them.
    b.add("edges of tiles",
          {.B = T < 3 ? 8 : 1, .Tq = T, .Tk = T, .D = 8, .Dv = 8, .causal = true, .dlse = true});
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
  b.add("one query and key", {.B = 8, .H = 2, .Hkv = 2, .D = 3, .Dv = 5, .dlse = true});
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
  for (const DType t : kAllDTypes) {
    b.add("a NaN in a key that a window leaves out of most", with(p, [&](P& x) {
            x.dtype = t, x.special = Special::kNanK, x.Tq = x.Tk = 140, x.window_left = 3,
            x.window_right = 2;
          }));
  }
}

void add_gradients(Builder& b) {
  for (const DType t : kAllDTypes) {
    const P p{.B = 2, .Tq = 30, .Tk = 41, .H = 4, .Hkv = 2, .D = 16, .Dv = 8, .dtype = t};
    b.add("dlse", with(p, [](P& x) { x.dlse = true; }));
    b.add("dq alone", with(p, [](P& x) { x.need_dkv = false; }));
    b.add("dk and dv alone", with(p, [](P& x) { x.need_dq = false, x.dlse = true; }));
    b.add("no lse", with(p, [](P& x) { x.lse = false; }));
    b.add("deterministic", with(p, [](P& x) { x.deterministic = true; }));
    b.add("deterministic, causal",
          with(p, [](P& x) { x.deterministic = x.causal = true, x.Tq = x.Tk = 300; }));
    b.add("dropout", with(p, [](P& x) { x.dropout = 0.25; }));
    b.add("dropout, dlse, causal",
          with(p, [](P& x) { x.dropout = 0.5, x.dlse = x.causal = true; }));
  }
}

// Keys of several tiles, and so many beside so few queries that blocks of threads share them.
void add_many_keys(Builder& b) {
  for (const DType t : kAllDTypes) {
    const P few{.B = 2, .Tq = 3, .Tk = 1500, .H = 4, .Hkv = 2, .D = 64, .Dv = 40, .dtype = t};
    b.add("few queries, many keys", few);
    b.add("few queries, many keys, causal, dlse",
          with(few, [](P& x) { x.causal = x.dlse = true, x.Tq = 70; }));
    b.add("few queries, key_lengths", with(few, [](P& x) { x.key_lengths = {1500, 700}; }));
    b.add("few queries, dropout", with(few, [](P& x) { x.dropout = 0.25; }));
    b.add("a long order", with(few, [](P& x) {
            x.B = x.H = x.Hkv = 1, x.Tq = x.Tk = 1100, x.D = x.Dv = 8, x.order = x.causal = true;
          }));
    for (const std::int64_t columns : {64, 128}) {
      const P p{.Tq = 200, .Tk = 430, .H = 2, .Hkv = 1, .D = columns, .Dv = columns, .dtype = t};
      b.add("several tiles of keys", p);
      b.add("several tiles of keys, a window",
            with(p, [](P& x) { x.window_left = 100, x.window_right = 30; }));
      b.add("several tiles of keys, dropout", with(p, [](P& x) { x.dropout = 0.25; }));
    }
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

constexpr std::array kHalves = {DType::kBF16, DType::kF16};

void add_long_rows(Builder& b) {
  for (const DType t : kHalves) {
    for (const std::int64_t D : {64, 128}) {
      const P p = long_rows(D, t);
      b.add("long rows", with(p, [](P& x) { x.B = 2; }));
      // Each is for a tile of other keys on Hopper: 160, 128 or 208.
      for (const std::int64_t keys : {310, 352, 416}) {
        b.add("long rows, GQA", with(p, [&](P& x) { x.Tq = 300, x.Tk = keys, x.H = 4; }));
      }
      b.add("long rows, causal", with(p, [](P& x) { x.causal = x.dlse = true, x.Tk = 531; }));
      b.add("long rows, causal, queries without a key",
            with(p, [](P& x) { x.causal = x.dlse = true, x.Tk = 200; }));
      b.add("long rows, a window", with(p, [](P& x) {
              x.window_left = 140, x.window_right = 33, x.Tq = 700, x.Tk = 690;
            }));
      b.add("long rows, GQA, key lengths", with(p, [](P& x) {
              x.B = 3, x.H = 4, x.key_lengths = {400, 129, 0}, x.dlse = true;
            }));
      b.add("long rows, no key", with(p, [](P& x) { x.Tk = 0, x.dlse = true; }));
      b.add("long rows, an order", with(p, [](P& x) { x.order = x.causal = true; }));
      b.add("long rows, deterministic", with(p, [](P& x) { x.deterministic = x.causal = true; }));
      b.add("long rows, portable", with(p, [](P& x) { x.portable = x.causal = true; }));
      for (const Special s :
           {Special::kNanQ, Special::kNanK, Special::kNanV, Special::kInfinityV}) {
        b.add("long rows, no number in one",
              with(p, [&](P& x) { x.special = s, x.causal = true; }));
        b.add("long rows, no number in one, a window",
              with(p, [&](P& x) { x.special = s, x.window_left = x.window_right = 20; }));
      }
    }
    for (const std::int64_t D : {64, 128}) {
      b.add("long rows, packed", with(long_rows(D, t), [](P& x) {
              x.form = Form::kVarlen, x.query_lengths = {300, 0, 77, 190},
              x.packed_key_lengths = {280, 5, 177, 190}, x.causal = true;
            }));
    }
    b.add("long rows of a few columns", with(long_rows(40, t), [](P& x) { x.Dv = 72; }));
  }
}

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
  for (const DType t : kHalves) {
    for (const std::int64_t D : {64, 128}) {
      const P own = with(long_rows(D, t), [](P& x) {
        x.form = Form::kDilated, x.Tq = x.Tk = 700, x.segments = {200, 400, 700},
        x.rates = {1, 2, 3};
      });
      b.add("LongNet, long rows", own);
      b.add("LongNet, long rows, causal, GQA",
            with(own, [](P& x) { x.causal = x.dlse = true, x.Hkv = 1; }));
      // Segments that rates divide and that divide the tokens, and are whole tiles or all of it.
      for (const DilatedOffsets offsets : {DilatedOffsets::kMod, DilatedOffsets::kBlock}) {
        b.add("LongNet, long rows, even", with(own, [&](P& x) {
                x.B = 2, x.H = 4, x.Hkv = 2, x.Tq = x.Tk = 512, x.offsets = offsets;
                x.segments = {256, 512, 512}, x.rates = {1, 2, 4};
              }));
      }
      b.add("LongNet, long rows, even, one segment", with(own, [](P& x) {
              x.segments = {700, 700}, x.rates = {1, 2};
            }));
      b.add("LongNet, long rows, alpha without a gradient",
            with(own, [](P& x) { x.stop_alpha_gradient = true; }));
      b.add("grouped, long rows",
            with(own, [](P& x) { x.mode = DilatedMode::kGrouped, x.H = x.Hkv = 3; }));
      b.add("grouped, long rows that every rate divides", with(own, [](P& x) {
              x.mode = DilatedMode::kGrouped, x.H = x.Hkv = 3;
              x.Tq = x.Tk = 720, x.segments = {240, 360, 720};
            }));
      b.add("grouped keys, long rows, causal", with(own, [](P& x) {
              x.mode = DilatedMode::kGroupedKv, x.H = 6, x.Hkv = 3, x.causal = true;
            }));
    }
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
  for (const DType t : kHalves) {
    for (const std::int64_t D : {64, 128}) {
      const P own = with(long_rows(D, t), [](P& x) {
        x.form = Form::kBlocks, x.block_size = 128, x.Tq = 500, x.Tk = 650, x.density = 0.4;
      });
      b.add("blocks, long rows", own);
      b.add("blocks, long rows, causal, GQA",
            with(own, [](P& x) { x.causal = x.dlse = true, x.H = 4, x.Tk = 500; }));
      b.add("blocks, long rows, an order", with(own, [](P& x) { x.order = true, x.Tk = 500; }));
      b.add("blocks, long rows, a NaN",
            with(own, [](P& x) { x.special = Special::kNanK, x.causal = true, x.Tk = 500; }));
    }
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

const CasesRegistration kDense(
    {.op = "attention",
     .named =
         [] {
           return built_by(add_sizes, add_empty, add_masks, add_heads, add_orders, add_key_lengths,
                           add_values, add_gradients, add_many_keys, add_varlen, add_long_rows,
                           add_not_finite);
         },
     .fuzz = [](std::uint64_t seed) { return attention_case(drawn_attention(seed)); },
     .bad_calls = attention_bad_calls,
     .sanitized = "every (dtype|width)|GQA|queries without a key|windows|an order, causal|"
                  "key_lengths, causal|packed sequences, causal|dropout|"
                  "long rows(|, causal|, a window|, an order|, packed|, deterministic)'"});
const CasesRegistration kDilated(
    {.op = "dilated_attention",
     .named = [] { return built_by(add_longnet, add_grouped); },
     .fuzz = [](std::uint64_t seed) { return attention_case(drawn_dilated_attention(seed)); },
     .bad_calls = dilated_attention_bad_calls,
     .sanitized =
         "'LongNet'|ragged|union, n|alpha without a gradient'|'grouped|sixteen|long rows"});
const CasesRegistration kBlocks(
    {.op = "block_sparse_attention",
     .named = [] { return built_by(add_blocks); },
     .fuzz = [](std::uint64_t seed) { return attention_case(drawn_block_sparse_attention(seed)); },
     .bad_calls = block_sparse_attention_bad_calls,
     .sanitized = "every size|few blocks|an order|GQA|long rows"});

}  // namespace

}  // namespace annulus::testing
