// Numbers that are not finite, in one row of q, k or do: what a query attends or a key is attended by has them, by the
// definition, and nothing else has.
#include "annulus/attention/test/named.h"

namespace annulus::testing {

void add_not_finite(NamedCases& b) {
  using P = AttentionProblem;
  using Special = P::Special;
  constexpr std::array kOfAll = {Special::kNanDo, Special::kInfinityDo, Special::kInfinityQ,
                                 Special::kInfinityK};
  // bf16x3 makes a NaN of an infinity, which in v is one in o.
  constexpr std::array kOfF32 = {Special::kNanQ, Special::kNanK, Special::kNanV};
  for (const DType t : {DType::kBF16, DType::kF32}) {
    for (const std::int64_t D : {64, 128}) {
      // More than two tiles of either, and neither a multiple of one: tails are part of it.
      const P p = with(long_rows(D, t), [](P& x) { x.Tq = 290, x.Tk = 333; });
      const auto add = [&](Special s) {
        b.add("not finite, causal", with(p, [&](P& x) { x.special = s, x.causal = true; }));
        b.add("not finite, a window",
              with(p, [&](P& x) { x.special = s, x.window_left = x.window_right = 20; }));
      };
      for (const Special s : kOfAll) add(s);
      if (t == DType::kF32) {
        for (const Special s : kOfF32) add(s);
      }
    }
  }
  // Where all see all and every tile is whole, Hopper's gradient does not look for them.
  for (const std::int64_t D : {64, 128}) {
    const P p = with(long_rows(D, DType::kBF16), [](P& x) { x.Tq = x.Tk = 256; });
    for (const Special s : kOfAll) {
      b.add("not finite, whole tiles", with(p, [&](P& x) { x.special = s; }));
    }
  }
  // The gradients' other kernels: those that are deterministic, and those of any GPU; and what a key has of several heads.
  const P p = with(long_rows(64, DType::kBF16), [](P& x) { x.causal = true, x.Tk = 450; });
  for (const Special s : kOfAll) {
    b.add("not finite, deterministic",
          with(p, [&](P& x) { x.special = s, x.deterministic = true; }));
    b.add("not finite, portable", with(p, [&](P& x) { x.special = s, x.portable = true; }));
    b.add("not finite, GQA, dlse",
          with(p, [&](P& x) { x.special = s, x.H = 4, x.dlse = true, x.dtype = DType::kF16; }));
  }
}

}  // namespace annulus::testing
