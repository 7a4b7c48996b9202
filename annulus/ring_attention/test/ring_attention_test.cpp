// What no single case can say: bits over numbers of ranks, errors over them, bytes, work and memory of ranks.
#include "annulus/ring_attention/ring_attention.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <chrono>
#include <cmath>
#include <functional>
#include <limits>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "annulus/core/values.h"
#include "annulus/ring_attention/test/patterns.h"
#include "annulus/ring_attention/test/sequence.h"
#include "annulus/ring_attention/test/shard.h"
#include "testing/memory/allocator.h"
#include "testing/reference.h"
#include "testing/suite.h"

namespace annulus::testing {
namespace {

using P = AttentionProblem;
using Form = P::Form;

// AddressSanitizer looks at accesses, of which some numbers of ranks and of tokens have all that there are.
const std::vector<int> kManyRanks = kSanitized ? std::vector{3, 8} : std::vector{1, 2, 3, 4, 5, 8};
constexpr std::int64_t kTokens = kSanitized ? 603 : 1003;

std::vector<P> problems() {
  P dense;
  dense.Tq = dense.Tk = kTokens, dense.H = 4, dense.Hkv = 2, dense.D = dense.Dv = 32,
  dense.seed = 5;
  P causal = dense, window = dense, longnet = dense, united = dense, grouped = dense,
    blocks = dense, dropped = dense;
  causal.causal = true;
  window.causal = true, window.window_left = 130;
  longnet.form = Form::kDilated, longnet.segments = {128, 512, kTokens}, longnet.rates = {1, 3, 8};
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
  // Columns that fill no vector, heads of several groups on one key, and f16.
  P narrow = causal, odd = longnet;
  narrow.D = narrow.Dv = 1;
  odd.D = 20, odd.Dv = 12, odd.dtype = DType::kF16, odd.Hkv = 1, odd.mode = DilatedMode::kGrouped;
  longnet.stop_alpha_gradient = true;
  for (P p : {narrow, odd, longnet}) all.push_back(p);
  return all;
}

TEST(RingAttention, DeterministicMeansTheSameBitsForEveryDivision) {
  for (const P& p : problems()) {
    RingSequence s(p);
    const std::string one = s.run(1, Balance::kContiguous, true);
    for (const int ranks : kManyRanks) {
      for (const Balance b : {Balance::kZigzag, Balance::kContiguous}) {
        EXPECT_EQ(s.apart(one, s.run(ranks, b, true, ranks == 4 ? 100 : 1536)), "")
            << attention_case(p).params << " over " << ranks << " ranks";
      }
    }
  }
}

// Slices that lie between two rows of a line, so that nothing of them comes.
TEST(RingAttention, DeterministicWhereASliceHasNoRowOfALine) {
  P p = ring::longnet(64, {64}, {8});
  p.H = p.Hkv = 2;
  RingSequence s(p);
  const std::string one = s.run(1, Balance::kContiguous, true);
  for (const int ranks : {1, 2, 5}) {
    EXPECT_EQ(s.apart(one, s.run(ranks, Balance::kZigzag, true, 2)), "") << ranks << " ranks";
  }
}

// The root of the mean square distance of all outputs from their definition in fp64, each relative to its own size, of the
// tensors that the last run filled.
double error_of(const RingSequence& s, const P& p) {
  const Case c = attention_case(p);
  double most = 0;
  for (const Call& call : c.calls) {
    Values values;
    std::vector<TensorView> in, out;
    const auto tensor = [&](const std::string& name) -> TensorView {
      const RingTensors& t = s.whole();
      const std::pair<const char*, TensorView> all[] = {{"q", t.q},
                                                        {"k", t.k},
                                                        {"v", t.v},
                                                        {"o", t.o},
                                                        {"lse", t.lse},
                                                        {"do", t.do_},
                                                        {"dlse", t.dlse},
                                                        {"dq", t.dq},
                                                        {"dk", t.dk},
                                                        {"dv", t.dv},
                                                        {"row_ptr", t.row_ptr},
                                                        {"col_idx", t.col_idx}};
      for (const auto& [n, v] : all) {
        if (name == n) return v;
      }
      throw std::logic_error("no tensor is called " + name);
    };
    const auto add = [&](const std::vector<TensorSpec>& specs, bool output,
                         std::vector<TensorView>& views) {
      for (const TensorSpec& spec : specs) {
        if (!is_floating(spec.dtype)) {
          values.emplace_back();
          views.push_back(tensor(spec.name));
          continue;
        }
        values.push_back(output ? std::vector<double>(static_cast<std::size_t>(numel_of(spec)))
                                : load_values<double>(tensor(spec.name)));
        views.push_back(contiguous(values.back().data(), DType::kF64, spec.shape));
      }
    };
    values.reserve(call.inputs.size() + call.outputs.size());
    add(call.inputs, false, in);
    add(call.outputs, true, out);
    call.reference(in, out);
    for (std::size_t i = 0; i < call.outputs.size(); ++i) {
      const std::vector<double> got = load_values<double>(tensor(call.outputs[i].name));
      const std::vector<double>& want = values[in.size() + i];
      const double error = relative_error(got, want);
      if (std::isnan(error)) return error;
      most = std::max(most, error);
    }
  }
  return most;
}

// What is carried from rank to rank is fp32 and rounded once.
TEST(RingAttention, ErrorsDoNotGrowWithTheRanks) {
  std::vector<P> all;
  for (const DType t : {DType::kF32, DType::kBF16, DType::kF16}) {
    for (const bool causal : {false, true}) {
      P p;
      p.Tq = p.Tk = 300, p.H = p.Hkv = 2, p.D = p.Dv = 32, p.seed = 3;
      p.dtype = t, p.causal = causal;
      all.push_back(p);
    }
  }
  for (const P& p : ring::patterns(151)) all.push_back(p);
  for (const P& p : all) {
    RingSequence s(p);
    s.run(1, Balance::kZigzag, false);
    const double one = error_of(s, p);
    for (const int ranks : {2, 4, 8}) {
      s.run(ranks, Balance::kZigzag, false);
      EXPECT_LE(error_of(s, p), 1.25 * one)
          << attention_case(p).params << " over " << ranks << " ranks";
    }
  }
}

TEST(RingAttention, EqualsOneDeviceForEveryPatternAndNumberOfRanks) {
  int turn = 0;
  for (const P& p : ring::patterns(301)) {
    RingSequence s(p);
    s.run_alone();
    for (const int ranks : kManyRanks) {
      const Balance balance = ++turn % 3 == 0 ? Balance::kContiguous : Balance::kZigzag;
      const RingProblem problem{p, ranks, balance, turn % 2 == 0, turn % 4 < 2 ? 1536 : 29};
      const auto group = local_communicators(ranks, {.deadline_s = 60});
      EXPECT_NO_THROW(on_ranks(ranks, [&](int rank) {
        s.run_as_rank(problem, *group[static_cast<std::size_t>(rank)]);
      })) << ring_attention_case(problem).params;
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

// --- calls that break a rule ---

struct Said {
  std::string text;
  bool invalid = false, lost = false;
  int rank = -1;
};

// What every rank's call says; `spoil` changes what a rank passes.
std::vector<Said> on_all(std::vector<std::unique_ptr<Communicator>>& group, const RingProblem& p,
                         const RingSequence& s, bool backward,
                         const std::function<void(int rank, RingProblem&, RingTensors&)>& spoil) {
  std::vector<Said> said(group.size());
  on_ranks(static_cast<int>(group.size()), [&](int rank) {
    const auto r = static_cast<std::size_t>(rank);
    RingShard shard(p, rank, s.whole());
    RingTensors t = shard.view();
    RingProblem own = p;
    spoil(rank, own, t);
    Context context;
    context.threads = 1;
    try {
      backward ? ring_backward(own, t, *group[r], context)
               : ring_forward(own, t, *group[r], context);
    } catch (const InvalidArgument& e) {
      said[r] = {e.what(), true, false, -1};
    } catch (const RankLost& e) {
      said[r] = {e.what(), false, true, e.rank};
    }
  });
  return said;
}

TEST(RingAttention, ACallThatIsWrongOnAllRanksIsRefusedOnAllAndTheNextWorks) {
  const RingProblem p{ring::dense(20), 3};
  RingSequence s(p.attention);
  auto group = local_communicators(3, {.deadline_s = 20});
  using Spoil = std::function<void(int, RingProblem&, RingTensors&)>;
  struct Rule {
    const char* argument;
    bool backward;
    Spoil spoil;
  };
  const Rule rules[] = {
      {"q", false,
       [](int, RingProblem&, RingTensors& t) { --t.q.shape[1], --t.o.shape[1], --t.lse.shape[2]; }},
      {"k", false, [](int, RingProblem&, RingTensors& t) { --t.k.shape[1], --t.v.shape[1]; }},
      {"o", false, [](int, RingProblem&, RingTensors& t) { t.o = {}; }},
      {"lse", true, [](int, RingProblem&, RingTensors& t) { t.lse = {}; }},
      {"dq", true, [](int, RingProblem&, RingTensors& t) { t.dq = {}; }},
      {"dk", true, [](int, RingProblem&, RingTensors& t) { t.dk = t.dv = {}; }},
      {"slice", false, [](int, RingProblem& x, RingTensors&) { x.slice = -1; }},
      {"balance", false, [](int, RingProblem& x, RingTensors&) { x.balance = Balance{7}; }},
      {"dropout", false, [](int, RingProblem& x, RingTensors&) { x.attention.dropout = 1; }},
  };
  for (const Rule& rule : rules) {
    for (const Said& said : on_all(group, p, s, rule.backward, rule.spoil)) {
      EXPECT_TRUE(said.invalid) << rule.argument << ": " << said.text;
      EXPECT_NE(said.text.find(std::string("] ") + rule.argument), std::string::npos) << said.text;
    }
  }
  for (const Said& said : on_all(group, p, s, false, [](int, RingProblem&, RingTensors&) {})) {
    EXPECT_EQ(said.text, "");
  }
}

TEST(RingAttention, ASliceLongerThanTheSequenceIsAllOfIt) {
  RingSequence s(ring::dense(100));
  s.run_alone();
  const auto group = local_communicators(2);
  on_ranks(2, [&](int rank) {
    for (const bool same_bits : {false, true}) {
      EXPECT_NO_THROW(s.run_as_rank({ring::dense(100), 2, Balance::kZigzag, same_bits,
                                     std::numeric_limits<std::int64_t>::max()},
                                    *group[static_cast<std::size_t>(rank)]));
    }
  });
}

TEST(RingAttention, AQueryForScratchRefusesRanksThatAreNone) {
  RingSequence s(ring::dense(8));
  const RingTensors& t = s.whole();
  for (const auto& [ranks, rank] : {std::pair(0, 0), {2, 2}, {2, -1}}) {
    EXPECT_THROW(ring_attention_forward_workspace(t.q, t.k, t.v, AttentionOptions{}, {.tokens = 8},
                                                  ranks, rank),
                 InvalidArgument);
  }
}

// One rank is called otherwise: it is named by all, at once, and says itself what is wrong where it breaks a rule.
TEST(RingAttention, ARankThatIsCalledOtherwiseIsLostBeforeAnyDataMoves) {
  const RingProblem p{ring::dense(20), 3};
  RingSequence s(p.attention);
  using Spoil = std::function<void(RingProblem&, RingTensors&)>;
  const std::pair<bool, Spoil> all[] = {
      {true, [](RingProblem&, RingTensors& t) { --t.k.shape[1], --t.v.shape[1]; }},
      {false, [](RingProblem& x, RingTensors&) { x.attention.causal = true; }},
      {false, [](RingProblem& x, RingTensors&) { x.attention.window_left = 3; }},
      {false, [](RingProblem& x, RingTensors&) { x.attention.scale = 0.1; }},
      {false, [](RingProblem& x, RingTensors&) { x.deterministic = true; }},
      {false, [](RingProblem& x, RingTensors&) { x.attention.dropout = 0.1; }},
      {false, [](RingProblem& x, RingTensors&) { x.slice = 3; }},
  };
  for (const auto& [invalid, spoil] : all) {
    for (const int one : {0, 1}) {
      auto group = local_communicators(3, {.deadline_s = 20});
      const auto start = std::chrono::steady_clock::now();
      const auto said = on_all(group, p, s, false, [&](int rank, RingProblem& x, RingTensors& t) {
        if (rank == one) spoil(x, t);
      });
      EXPECT_LT(std::chrono::steady_clock::now() - start, std::chrono::seconds(5));
      for (std::size_t r = 0; r < said.size(); ++r) {
        if (static_cast<int>(r) == one && invalid) {
          EXPECT_TRUE(said[r].invalid) << said[r].text;
          continue;
        }
        EXPECT_TRUE(said[r].lost) << said[r].text;
        EXPECT_EQ(said[r].rank, one) << said[r].text;
        EXPECT_EQ(
            said[r].text.find("refuses its own call: [ring_attention] k must") != std::string::npos,
            invalid)
            << said[r].text;
      }
    }
  }
}

// A rank without memory for its scratch says so, and the others hear it; where none has any, the next call still works.
TEST(RingAttention, ARankWithoutMemoryForItsScratchSaysSo) {
  const RingProblem p{ring::dense(20), 2};
  RingSequence s(p.attention);
  constexpr int kAll = -1;
  for (const int poor : {0, 1, kAll}) {
    auto group = local_communicators(2, {.deadline_s = 20});
    std::vector<std::string> said(2);
    on_ranks(2, [&](int rank) {
      RingShard shard(p, rank, s.whole());
      TestAllocator fails(0);
      Context context;
      if (rank == poor || poor == kAll) context.allocator = &fails;
      try {
        ring_forward(p, shard.view(), *group[static_cast<std::size_t>(rank)], context);
      } catch (const RankLost& e) {
        said[static_cast<std::size_t>(rank)] = e.what();
        EXPECT_EQ(e.rank, poor);
      } catch (const DeviceError& e) {
        said[static_cast<std::size_t>(rank)] = e.what();
        EXPECT_TRUE(rank == poor || poor == kAll);
      }
      context.allocator = nullptr;
      if (poor == kAll) {
        EXPECT_NO_THROW(
            ring_forward(p, shard.view(), *group[static_cast<std::size_t>(rank)], context));
      }
    });
    for (const std::string& text : said) {
      EXPECT_NE(text.find("could not allocate"), std::string::npos) << text;
    }
  }
}

}  // namespace
}  // namespace annulus::testing
