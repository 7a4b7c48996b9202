// A small problem of each pattern.
#pragma once

#include <cstdint>
#include <utility>
#include <vector>

#include "annulus/attention/test/cases.h"

namespace annulus::testing::ring {

using P = AttentionProblem;
using Form = P::Form;

inline P dense(std::int64_t n) {
  P p;
  p.B = 2, p.Tq = p.Tk = n, p.H = 4, p.Hkv = 2, p.D = 16, p.Dv = 16;
  return p;
}
inline P longnet(std::int64_t n, std::vector<std::int64_t> w, std::vector<std::int64_t> r) {
  P p = dense(n);
  p.form = Form::kDilated;
  p.segments = std::move(w);
  p.rates = std::move(r);
  return p;
}
inline P blocks(std::int64_t n, std::int64_t size) {
  P p = dense(n);
  p.form = Form::kBlocks;
  p.block_size = size;
  p.density = 0.4;
  return p;
}

inline std::vector<P> patterns(std::int64_t n) {
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

}  // namespace annulus::testing::ring
