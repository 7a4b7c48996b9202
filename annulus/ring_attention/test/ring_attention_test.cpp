// What no single case can say: bits over numbers of ranks, errors over them, bytes, work and memory of ranks.
#include "annulus/ring_attention/ring_attention.h"

#include <gtest/gtest.h>

#include <string>
#include <vector>

#include "annulus/ring_attention/test/sequence.h"

namespace annulus::testing {
namespace {

using P = AttentionProblem;
using Form = P::Form;

std::vector<P> problems() {
  P dense;
  dense.Tq = dense.Tk = 1003, dense.H = 4, dense.Hkv = 2, dense.D = dense.Dv = 32, dense.seed = 5;
  P causal = dense, window = dense, longnet = dense, united = dense, grouped = dense,
    blocks = dense, dropped = dense;
  causal.causal = true;
  window.causal = true, window.window_left = 130;
  longnet.form = Form::kDilated, longnet.segments = {128, 512, 1003}, longnet.rates = {1, 3, 8};
  united = longnet, united.unite = true, united.causal = true;
  grouped = longnet, grouped.mode = DilatedMode::kGroupedKv;
  blocks.form = Form::kBlocks, blocks.block_size = 32, blocks.density = 0.3, blocks.causal = true;
  dropped.dropout = 0.2, dropped.causal = true;
  std::vector<P> all;
  for (P p : {dense, causal, window, longnet, united, grouped, blocks, dropped}) {
    for (const DType t : {DType::kF32, DType::kBF16}) {
      p.dtype = t;
      all.push_back(p);
    }
  }
  return all;
}

TEST(RingAttention, DeterministicMeansTheSameBitsForEveryDivision) {
  for (const P& p : problems()) {
    RingSequence s(p);
    const std::string one = s.run(1, Balance::kContiguous, true);
    for (const int ranks : {2, 3, 4, 5, 8}) {
      for (const Balance b : {Balance::kZigzag, Balance::kContiguous}) {
        EXPECT_EQ(s.apart(one, s.run(ranks, b, true, ranks == 4 ? 100 : 1536)), "")
            << attention_case(p).params << " over " << ranks << " ranks";
      }
    }
  }
}

// Chunks as the documentation has them, and every token once.
TEST(RingAttention, ShardsAreTheSequence) {
  for (const std::int64_t n : {0, 1, 7, 16, 1000}) {
    for (const int ranks : {1, 2, 3, 8}) {
      for (const Balance b : {Balance::kZigzag, Balance::kContiguous}) {
        std::vector<int> seen(static_cast<std::size_t>(n));
        for (int r = 0; r < ranks; ++r) {
          for (const TokenRange& c : ring_shard(n, ranks, r, b)) {
            for (std::int64_t t = c.first; t < c.end; ++t) ++seen[static_cast<std::size_t>(t)];
          }
          const auto chunks = ring_shard(n, ranks, r, b);
          const std::int64_t parts = b == Balance::kZigzag ? 2 * ranks : ranks;
          EXPECT_EQ(chunks[0].first, r * n / parts);
          if (b == Balance::kZigzag) {
            EXPECT_EQ(chunks[1].first, (2 * ranks - 1 - r) * n / parts);
          }
        }
        for (const int times : seen) EXPECT_EQ(times, 1);
      }
    }
  }
  EXPECT_THROW(ring_shard(4, 0, 0, Balance::kZigzag), InvalidArgument);
  EXPECT_THROW(ring_shard(4, 2, 2, Balance::kZigzag), InvalidArgument);
  EXPECT_THROW(ring_shard(-1, 2, 0, Balance::kZigzag), InvalidArgument);
}

}  // namespace
}  // namespace annulus::testing
