// The planner against what communicators count, against pairs counted one by one, and what it refuses.
#include "annulus/ring_attention/ring_attention_plan.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <chrono>
#include <cmath>
#include <functional>
#include <limits>
#include <numeric>
#include <string>
#include <vector>

#include "annulus/attention/test/parts.h"
#include "annulus/ring_attention/test/cases.h"
#include "annulus/ring_attention/test/patterns.h"
#include "annulus/ring_attention/test/sequence.h"
#include "testing/suite.h"

namespace annulus::testing {
namespace {

using ring::Form;
using ring::P;
using ring::patterns;

RingTraffic planned(const RingProblem& p, const RingTensors& whole, int rank) {
  const P& a = p.attention;
  const auto chunks = ring_shard(a.Tq, p.ranks, rank, p.balance);
  const std::int64_t rows = chunks[0].count() + chunks[1].count();
  const auto view = [&](std::int64_t heads, std::int64_t columns) {
    const std::int64_t shape[] = {a.B, rows, heads, columns};
    return contiguous(nullptr, a.dtype, shape);
  };
  const auto of = [&](const auto& options) {
    return ring_attention_traffic(view(a.H, a.D), view(a.Hkv, a.D), view(a.Hkv, a.Dv), options,
                                  p.options(), p.ranks, rank);
  };
  if (a.form == Form::kDilated) return of(dilated_options(a));
  if (a.form == Form::kBlocks) return of(block_options(a, whole.row_ptr, whole.col_idx, {}));
  return of(dense_options(a, {}, {}));
}

// What the communicators of all ranks count, forward and then backward.
std::vector<RingTraffic> counted(const RingProblem& p, const RingTensors& whole) {
  std::vector<RingTraffic> all(static_cast<std::size_t>(p.ranks));
  for (const bool backward : {false, true}) {
    auto group = local_communicators(p.ranks, {.deadline_s = 60});
    run_ranks(p, whole, backward, [&](int rank, const RingTensors& shard) {
      Context context;
      context.threads = 1;
      const auto at = static_cast<std::size_t>(rank);
      Communicator& mine = *group[at];
      backward ? ring_backward(p, shard, mine, context) : ring_forward(p, shard, mine, context);
      (backward ? all[at].backward : all[at].forward) = mine.traffic().bytes;
    });
  }
  return all;
}

RingPlanProblem plan_problem(const RingProblem& p) {
  const P& a = p.attention;
  return {.tokens = a.Tq,
          .heads = a.H,
          .kv_heads = a.Hkv,
          .head_dim = a.D,
          .ranks = p.ranks,
          .batch = a.B,
          .dtype = a.dtype,
          .causal = a.causal,
          .window_left = a.window_left,
          .window_right = a.window_right,
          .balance = p.balance,
          .slice = p.slice};
}

TEST(RingPlan, BytesAreThoseThatCommunicatorsCount) {
  const std::vector<int> some = kSanitized ? std::vector{4} : std::vector{2, 3, 4, 8};
  for (const P& problem : patterns(203)) {
    const RingSequence sequence(problem);
    for (const int ranks : some) {
      for (const Balance balance : {Balance::kZigzag, Balance::kContiguous}) {
        for (const bool deterministic : {false, true}) {
          const RingProblem p{problem, ranks, balance, deterministic, ranks == 4 ? 17 : 1536};
          const auto real = counted(p, sequence.whole());
          for (int r = 0; r < ranks; ++r) {
            const RingTraffic plan = planned(p, sequence.whole(), r);
            const RingTraffic& saw = real[static_cast<std::size_t>(r)];
            EXPECT_EQ(plan.forward, saw.forward)
                << ring_attention_case(p).params << ", forward of rank " << r;
            EXPECT_EQ(plan.backward, saw.backward)
                << ring_attention_case(p).params << ", backward of rank " << r;
          }
        }
      }
    }
  }
}

TEST(RingPlan, DenseFiguresAreTheExactOnes) {
  for (P problem : patterns(403)) {
    if (problem.form != Form::kDense) continue;
    problem.Dv = problem.D;
    for (const std::int64_t tokens : {3, 403, 1000}) {
      problem.Tq = problem.Tk = tokens;
      for (const int ranks : {1, 2, 3, 4, 8}) {
        for (const Balance balance : {Balance::kZigzag, Balance::kContiguous}) {
          const RingProblem p{problem, ranks, balance, false, 100};
          double most[2] = {0, 0}, sum[2] = {0, 0};
          for (int r = 0; r < ranks; ++r) {
            const RingTraffic t = planned(p, {}, r);
            const double each[2] = {static_cast<double>(t.forward),
                                    static_cast<double>(t.backward)};
            for (int i = 0; i < 2; ++i) most[i] = std::max(most[i], each[i]), sum[i] += each[i];
          }
          const RingPlan plan = plan_ring(plan_problem(p));
          const std::string what = ring_attention_case(p).params;
          EXPECT_EQ(plan.forward.bytes.max, most[0]) << what;
          EXPECT_EQ(plan.backward.bytes.max, most[1]) << what;
          EXPECT_NEAR(plan.forward.bytes.mean, sum[0] / ranks, 1e-9 * sum[0]) << what;
          EXPECT_NEAR(plan.backward.bytes.mean, sum[1] / ranks, 1e-9 * sum[1]) << what;
        }
      }
    }
  }
}

// Pairs of a rank's queries with all keys they see, one by one.
std::vector<std::int64_t> pairs_of_ranks(const RingPlanProblem& p) {
  std::vector<std::int64_t> all;
  for (int r = 0; r < p.ranks; ++r) {
    std::int64_t pairs = 0;
    for (const TokenRange& chunk : ring_shard(p.tokens, p.ranks, r, p.balance)) {
      for (std::int64_t i = chunk.first; i < chunk.end; ++i) {
        for (std::int64_t j = 0; j < p.tokens; ++j) {
          if (p.causal && j > i) continue;
          if (p.window_left >= 0 && j < i - p.window_left) continue;
          if (p.window_right >= 0 && j > i + p.window_right) continue;
          ++pairs;
        }
      }
    }
    all.push_back(pairs);
  }
  return all;
}

TEST(RingPlan, WorkIsThatOfPairs) {
  for (const std::int64_t tokens : {5, 64, 403}) {
    for (const auto& [left, right] : {std::pair(-1, -1), {20, 45}, {0, -1}, {-1, 7}, {1000, 0}}) {
      for (const bool causal : {false, true}) {
        for (const Balance balance : {Balance::kZigzag, Balance::kContiguous}) {
          for (const int ranks : {1, 3, 4, 8}) {
            const RingPlanProblem p{.tokens = tokens,
                                    .heads = 6,
                                    .kv_heads = 2,
                                    .head_dim = 16,
                                    .ranks = ranks,
                                    .batch = 2,
                                    .causal = causal,
                                    .window_left = left,
                                    .window_right = right,
                                    .balance = balance};
            const auto pairs = pairs_of_ranks(p);
            const auto most = static_cast<double>(*std::max_element(pairs.begin(), pairs.end()));
            const auto sum =
                static_cast<double>(std::accumulate(pairs.begin(), pairs.end(), std::int64_t{0}));
            const RingPlan plan = plan_ring(p);
            const double each = 2.0 * 6 * 16;
            EXPECT_EQ(plan.forward.flops.max, 4 * each * most) << tokens << " " << ranks;
            EXPECT_NEAR(plan.forward.flops.mean, 4 * each * sum / ranks, 1e-9 * each * sum);
            EXPECT_NEAR(plan.backward.flops.mean, 10 * each * sum / ranks, 1e-9 * each * sum);
          }
        }
      }
    }
  }
}

TEST(RingPlan, ZigzagIsBalanced) {
  for (const int ranks : {4, 8}) {
    RingPlanProblem p{.tokens = 4096, .heads = 4, .kv_heads = 4, .ranks = ranks, .causal = true};
    const RingPlan zigzag = plan_ring(p);
    EXPECT_LE(zigzag.forward.work_balance(), 1.02);
    EXPECT_LE(zigzag.backward.work_balance(), 1.02);
    p.balance = Balance::kContiguous;
    EXPECT_NEAR(plan_ring(p).forward.work_balance(), (2.0 * ranks - 1) / ranks, 0.001);
  }
}

TEST(RingPlan, LongNetSendsTheSameHoweverLongTheSequence) {
  for (const Balance balance : {Balance::kZigzag, Balance::kContiguous}) {
    for (const bool causal : {false, true}) {
      std::vector<RingTraffic> most;
      for (const int ranks : {8, 16, 32}) {
        // 128 tokens a rank; segments within a shard, of two and of four. A sequence has two of them at least.
        P a = ring::longnet(128 * ranks, {64, 256, 512}, {1, 2, 4});
        a.causal = causal;
        const RingProblem p{a, ranks, balance, false, 1536};
        RingTraffic here;
        for (int r = 0; r < ranks; ++r) {
          const RingTraffic t = planned(p, {}, r);
          here.forward = std::max(here.forward, t.forward);
          here.backward = std::max(here.backward, t.backward);
        }
        most.push_back(here);
      }
      EXPECT_GT(most[0].forward, 0u);
      EXPECT_EQ(most[1], most[0]) << most[1].forward << " " << most[0].forward;
      EXPECT_EQ(most[2], most[0]) << most[2].forward << " " << most[0].forward;
    }
  }
}

// --- memory ---

struct Workspaces {
  std::size_t forward = 0, backward = 0;
};
Workspaces workspaces(const RingPlanProblem& p, int rank) {
  const auto chunks = ring_shard(p.tokens, p.ranks, rank, p.balance);
  const std::int64_t rows = chunks[0].count() + chunks[1].count();
  const auto view = [&](std::int64_t heads) {
    const std::int64_t shape[] = {p.batch, rows, heads, p.head_dim};
    return contiguous(nullptr, p.dtype, shape);
  };
  const AttentionOptions options{.causal = p.causal};
  const RingOptions ring{.tokens = p.tokens, .balance = p.balance, .slice = p.slice};
  return {ring_attention_forward_workspace(view(p.heads), view(p.kv_heads), view(p.kv_heads),
                                           options, ring, p.ranks, rank),
          ring_attention_backward_workspace(view(p.heads), view(p.kv_heads), view(p.kv_heads),
                                            options, ring, p.ranks, rank)};
}

// Of sequences so long that what does not fall is little: messages of a slice, and tiles.
TEST(RingPlan, ScratchOfARankFallsAsOneOverRanks) {
  for (const auto& [heads, kv_heads] : {std::pair(32, 32), {32, 8}, {4, 4}, {1, 1}}) {
    RingPlanProblem p{
        .tokens = 1 << 20, .heads = heads, .kv_heads = kv_heads, .head_dim = 128, .causal = true};
    p.slice = 1536;  // of the CPU
    const Workspaces one = workspaces(p, 0);
    for (const int ranks : {2, 4, 8}) {
      p.ranks = ranks;
      const Workspaces each = workspaces(p, 0);
      const auto share = [&](std::size_t all, std::size_t part) {
        return static_cast<double>(part) * ranks / static_cast<double>(all);
      };
      EXPECT_NEAR(share(one.forward, each.forward), 1, 0.1)
          << heads << "/" << kv_heads << " heads, " << ranks;
      EXPECT_NEAR(share(one.backward, each.backward), 1, 0.1)
          << heads << "/" << kv_heads << " heads, " << ranks;
    }
  }
}

// Beyond what a plan counts, a CPU has tiles, which do not grow with the sequence; and in the backward of few heads sums of the keys'
// gradients for each of several threads, which are bounded.
TEST(RingPlan, MemoryIsTheScratchOfTheCpuWithoutItsTiles) {
  for (const std::int64_t kv_heads : {32, 4}) {
    std::vector<std::int64_t> tiles;
    for (const std::int64_t tokens : {1 << 17, 1 << 18, 1 << 20}) {
      const RingPlanProblem p{.tokens = tokens,
                              .heads = 32,
                              .kv_heads = kv_heads,
                              .head_dim = 64,
                              .ranks = 8,
                              .dtype = DType::kF32};
      const RingPlan plan = plan_ring(p);
      const Workspaces real = workspaces(p, 0);
      const auto rest = [](std::size_t bytes, const RingMemory& m) {
        return static_cast<std::int64_t>(bytes) - m.carried - m.messages;
      };
      constexpr std::int64_t kMiB = 1 << 20;
      tiles.push_back(rest(real.forward, plan.forward.memory));
      EXPECT_GT(tiles.back(), 0);
      EXPECT_LT(tiles.back(), 64 * kMiB);
      const std::int64_t chunk_sums = tokens / 16 * kv_heads * 2 * 64 * 4;
      const std::int64_t more = rest(real.backward, plan.backward.memory);
      EXPECT_GT(more, 0) << tokens;
      EXPECT_LT(more, 64 * kMiB + (kv_heads < 16 ? chunk_sums + 256 * kMiB : 0)) << tokens;
    }
    EXPECT_EQ(tiles[1], tiles[0]);
    EXPECT_EQ(tiles[2], tiles[0]);
  }
}

// --- time ---

TEST(RingPlan, HidesFromTheLengthThatTheFormulaGives) {
  // Full: 4 m^2 H D / F >= 2 m Hkv D b / B, m >= (b / 2) (Hkv / H) (F / B); causal zigzag twice that.
  RingPlanProblem p{.tokens = 8 * 20'000,
                    .heads = 32,
                    .kv_heads = 32,
                    .head_dim = 128,
                    .ranks = 8,
                    .link_bytes_per_s = 50e9,
                    .flops_per_s = 600e12};
  EXPECT_EQ(plan_ring(p).forward.hides_from, 12'000);
  EXPECT_TRUE(plan_ring(p).forward.hides());
  p.tokens = 8 * 10'000;
  EXPECT_EQ(plan_ring(p).forward.hides_from, 12'000);
  EXPECT_FALSE(plan_ring(p).forward.hides());
  EXPECT_EQ(plan_ring(p).forward.hidden_hops, 0);
  p.kv_heads = 4;
  EXPECT_EQ(plan_ring(p).forward.hides_from, 1'500);
  EXPECT_TRUE(plan_ring(p).forward.hides());
  p.causal = true;
  EXPECT_NEAR(static_cast<double>(plan_ring(p).forward.hides_from.value_or(0)), 3'000, 3);
  p.window_left = 100;
  EXPECT_FALSE(plan_ring(p).forward.hides_from.has_value());
}

TEST(RingPlan, TimeIsAtLeastThatOfWorkAndOfTransfers) {
  for (const double link : {1e9, 50e9, 450e9}) {
    for (const bool causal : {false, true}) {
      const RingPlan plan = plan_ring({.tokens = 1 << 17,
                                       .heads = 32,
                                       .kv_heads = 8,
                                       .head_dim = 128,
                                       .ranks = 8,
                                       .link_bytes_per_s = link,
                                       .flops_per_s = 400e12,
                                       .causal = causal,
                                       .slice = 1536});
      for (const RingPassPlan* pass : {&plan.forward, &plan.backward}) {
        EXPECT_GE(pass->time_s, pass->compute_s.max * (1 - 1e-12));
        EXPECT_GE(pass->time_s, pass->transfer_s.max * (1 - 1e-12));
        EXPECT_LE(pass->time_s, (pass->compute_s.max + pass->transfer_s.max) * 1.001);
        if (!pass->hides()) continue;
        EXPECT_LE(pass->time_s, pass->compute_s.max * 1.01);
      }
      // What the ring has over a gather: no more bytes, and less time and memory.
      EXPECT_LE(plan.forward.bytes.max, plan.gather_forward.bytes);
      EXPECT_LE(plan.forward.time_s, plan.gather_forward.time_s * 1.001);
      EXPECT_LT(plan.backward.memory.total(), plan.gather_backward.memory.total());
    }
  }
}

TEST(RingPlan, OneRankSendsNothing) {
  const RingPlan plan = plan_ring({.tokens = 1000, .heads = 2, .kv_heads = 1});
  EXPECT_EQ(plan.forward.bytes.max, 0);
  EXPECT_EQ(plan.backward.bytes.max, 0);
  EXPECT_EQ(plan.forward.hops, 0);
  EXPECT_TRUE(plan.forward.hides());
  EXPECT_EQ(plan.forward.time_s, plan.forward.compute_s.max);
  EXPECT_EQ(plan.gather_forward.bytes, 0);
  EXPECT_EQ(plan.forward.memory.messages, 0);
  const RingPlan nothing = plan_ring({.tokens = 0, .ranks = 4});
  EXPECT_EQ(nothing.forward.time_s, 0);
  EXPECT_EQ(nothing.forward.work_balance(), 1);
}

TEST(RingPlan, AHundredMillionTokensOverAThousandRanksTakeLittleTime) {
  const auto begin = std::chrono::steady_clock::now();
  const RingPlan plan = plan_ring({.tokens = 100'000'000,
                                   .heads = 64,
                                   .kv_heads = 8,
                                   .head_dim = 128,
                                   .ranks = 1024,
                                   .link_bytes_per_s = 50e9,
                                   .flops_per_s = 400e12,
                                   .causal = true});
  const std::chrono::duration<double> took = std::chrono::steady_clock::now() - begin;
#if defined(NDEBUG) && !defined(__SANITIZE_ADDRESS__) && !defined(__SANITIZE_THREAD__)
  EXPECT_LT(took.count(), 5);  // 0.1 on an idle machine
#endif
  // n (n + 1) / 2 pairs
  EXPECT_NEAR(plan.forward.flops.mean * 1024 / (4.0 * 64 * 128 * 5.00000005e15), 1, 1e-9);
  EXPECT_LE(plan.forward.work_balance(), 1.02);
}

TEST(RingPlan, SaysWhatDoesNotFit) {
  RingPlanProblem p{.tokens = 1 << 20, .heads = 32, .kv_heads = 32, .head_dim = 128, .ranks = 8};
  EXPECT_TRUE(plan_ring(p).fits);
  const double most = static_cast<double>(plan_ring(p).backward.memory.total());
  p.memory_bytes = most;
  EXPECT_TRUE(plan_ring(p).fits);
  EXPECT_FALSE(plan_ring(p).gather_fits);
  p.memory_bytes = most - 1;
  EXPECT_FALSE(plan_ring(p).fits);
}

void expect_refused(const RingPlanProblem& p, const char* argument, const char* rule) {
  try {
    plan_ring(p);
    ADD_FAILURE() << argument << " was taken";
  } catch (const InvalidArgument& e) {
    EXPECT_NE(std::string(e.what()).find(std::string("[plan_ring] ") + argument), std::string::npos)
        << e.what();
    EXPECT_NE(std::string(e.what()).find(rule), std::string::npos) << e.what();
  }
}

TEST(RingPlan, RefusesWhatCannotBe) {
  const auto refuse = [](const char* argument, const char* rule,
                         const std::function<void(RingPlanProblem&)>& f) {
    RingPlanProblem p{.tokens = 1024, .heads = 8, .kv_heads = 2, .ranks = 4};
    f(p);
    expect_refused(p, argument, rule);
  };
  using R = RingPlanProblem;
  const double nan = std::numeric_limits<double>::quiet_NaN();
  const double infinity = std::numeric_limits<double>::infinity();
  refuse("tokens", "between 0", [](R& p) { p.tokens = -1; });
  refuse("tokens", "between 0", [](R& p) { p.tokens = 1'000'000'001; });
  refuse("ranks", "between 1", [](R& p) { p.ranks = 0; });
  refuse("ranks", "between 1", [](R& p) { p.ranks = -4; });
  refuse("ranks", "4096", [](R& p) { p.ranks = 4097; });
  refuse("batch", "between 1", [](R& p) { p.batch = 0; });
  refuse("heads", "between 1", [](R& p) { p.heads = 0; });
  refuse("kv_heads", "between 1", [](R& p) { p.kv_heads = 0; });
  refuse("kv_heads", "between 1 and 8", [](R& p) { p.kv_heads = 16; });
  refuse("kv_heads", "divide heads", [](R& p) { p.kv_heads = 3; });
  refuse("head_dim", "between 1 and 256", [](R& p) { p.head_dim = 0; });
  refuse("head_dim", "between 1 and 256", [](R& p) { p.head_dim = 257; });
  refuse("slice", "between 1", [](R& p) { p.slice = 0; });
  for (const double x : {0.0, -1.0, nan, infinity}) {
    refuse("link_bytes_per_s", "more than 0", [x](R& p) { p.link_bytes_per_s = x; });
    refuse("flops_per_s", "more than 0", [x](R& p) { p.flops_per_s = x; });
  }
  for (const double x : {-1.0, nan, infinity}) {
    refuse("memory_bytes", "at least 0", [x](R& p) { p.memory_bytes = x; });
  }
  refuse("dtype", "f32, f16 or bf16", [](R& p) { p.dtype = DType::kI64; });
  refuse("balance", "one of Balance", [](R& p) { p.balance = static_cast<Balance>(7); });
  refuse("a size", "63 bits",
         [](R& p) { p.tokens = 1'000'000'000, p.heads = p.kv_heads = 1 << 22; });
}

TEST(RingPlan, TrafficHasTheRulesOfACall) {
  const std::int64_t shape[] = {1, 16, 2, 8}, other[] = {1, 15, 2, 8};
  const TensorView q = contiguous(nullptr, DType::kF32, shape),
                   bad = contiguous(nullptr, DType::kF32, other);
  const RingOptions ring{.tokens = 64};
  EXPECT_NO_THROW(ring_attention_traffic(q, q, q, AttentionOptions{}, ring, 4, 3));
  EXPECT_THROW(ring_attention_traffic(q, q, q, AttentionOptions{}, ring, 4, 4), InvalidArgument);
  EXPECT_THROW(ring_attention_traffic(q, q, q, AttentionOptions{}, ring, 0, 0), InvalidArgument);
  EXPECT_THROW(ring_attention_traffic(bad, bad, bad, AttentionOptions{}, ring, 4, 0),
               InvalidArgument);
  EXPECT_THROW(ring_attention_traffic(q, q, q, DilatedAttentionOptions{}, ring, 4, 0),
               InvalidArgument);
}

}  // namespace
}  // namespace annulus::testing
