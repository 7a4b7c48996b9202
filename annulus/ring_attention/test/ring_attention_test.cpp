// What no single case can say: bits over numbers of ranks, errors over them, bytes, work and memory of ranks.
#include "annulus/ring_attention/ring_attention.h"

#include <gtest/gtest.h>

#include <atomic>
#include <cstring>
#include <string>
#include <utility>
#include <vector>

#include "annulus/attention/test/parts.h"
#include "annulus/ring_attention/rows.h"
#include "annulus/ring_attention/test/cases.h"
#include "testing/tensors.h"

namespace annulus::testing {
namespace {

using P = AttentionProblem;
using Form = P::Form;

// Dense tensors of a whole sequence, and the results of a run over ranks.
struct Sequence {
  explicit Sequence(const P& p) : problem(p) {
    Rng rng(p.seed);
    const auto make = [&](std::vector<std::int64_t> shape, DType t, bool drawn) {
      std::int64_t n = 1;
      for (const std::int64_t s : shape) n *= s;
      memory.emplace_back(static_cast<std::size_t>(n * size_of(t)));
      for (std::int64_t i = 0; i < n && drawn; ++i) {
        const std::uint64_t bits = encode(rng.normal(), t);
        std::memcpy(memory.back().data() + i * size_of(t), &bits,
                    static_cast<std::size_t>(size_of(t)));
      }
      return contiguous(memory.back().data(), t, shape);
    };
    const std::vector<std::int64_t> q = {p.B, p.Tq, p.H, p.D}, k = {p.B, p.Tq, p.Hkv, p.D},
                                    v = {p.B, p.Tq, p.Hkv, p.Dv}, o = {p.B, p.Tq, p.H, p.Dv},
                                    lse = {p.B, p.H, p.Tq};
    whole.q = make(q, p.dtype, true);
    whole.k = make(k, p.dtype, true);
    whole.v = make(v, p.dtype, true);
    whole.do_ = make(o, p.dtype, true);
    whole.dlse = p.dlse ? make(lse, DType::kF32, true) : TensorView{};
    whole.o = make(o, p.dtype, false);
    whole.lse = make(lse, DType::kF32, false);
    whole.dq = make(q, p.dtype, false);
    whole.dk = make(k, p.dtype, false);
    whole.dv = make(v, p.dtype, false);
    for (const NamedIntegers& i : integers_of(p)) {
      TensorView view = make(i.shape, i.dtype, false);
      for (std::size_t e = 0; e < i.values.size(); ++e) {
        if (i.dtype == DType::kI64) static_cast<std::int64_t*>(view.data)[e] = i.values[e];
        if (i.dtype == DType::kI32) {
          static_cast<std::int32_t*>(view.data)[e] = static_cast<std::int32_t>(i.values[e]);
        }
      }
      (std::string(i.name) == "row_ptr" ? whole.row_ptr : whole.col_idx) = view;
    }
  }

  // Where bits differ from another run's, by output.
  std::string apart(const std::string& one, const std::string& two) const {
    std::string text;
    std::size_t at = 0;
    const std::pair<const char*, TensorView> all[] = {
        {"o", whole.o}, {"lse", whole.lse}, {"dq", whole.dq}, {"dk", whole.dk}, {"dv", whole.dv}};
    for (const auto& [name, t] : all) {
      const auto size = static_cast<std::size_t>(size_of(t.dtype));
      std::int64_t count = 0, first = -1;
      for (std::int64_t i = 0; i < t.numel(); ++i, at += size) {
        if (one.compare(at, size, two, at, size) == 0) continue;
        if (count++ == 0) first = i;
      }
      if (count > 0) {
        text += std::string(" ") + name + ": " + std::to_string(count) + " of " +
                std::to_string(t.numel()) + ", the first " + std::to_string(first);
      }
    }
    return text;
  }

  // All outputs of both calls, as bytes.
  std::string run(int ranks, Balance balance, bool deterministic, std::int64_t slice = 1536) {
    const RingProblem ring{problem, ranks, balance, deterministic, slice};
    run_ranks(ring, whole, false);
    run_ranks(ring, whole, true);
    std::string bytes;
    for (const TensorView* t : {&whole.o, &whole.lse, &whole.dq, &whole.dk, &whole.dv}) {
      bytes.append(static_cast<const char*>(t->data),
                   static_cast<std::size_t>(t->numel() * size_of(t->dtype)));
    }
    return bytes;
  }

  P problem;
  std::vector<std::vector<char>> memory;
  RingTensors whole;
};

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
    Sequence s(p);
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
