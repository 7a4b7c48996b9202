// Every operator in CUDA graphs: a call is captured on a stream of its own, with scratch of exactly the
// size that was asked for, and replayed with new values in its inputs. A replay has the bits of a plain call,
// so a graph holds all it needs and nothing of the host's.
#include <gtest/gtest.h>

#include <cstdint>

#include "annulus/core/info.h"
#include "testing/cuda_graph.h"

namespace annulus::testing {
namespace {

class OperatorGraph : public EachOperator {};
INSTANTIATE_TEST_SUITE_P(All, OperatorGraph, ::testing::ValuesIn(cuda_targets()),
                         ::testing::PrintToStringParamName());

TEST_P(OperatorGraph, ReplaysWithNewInputsEqualPlainCalls) {
  for (const OperatorInfo& info : operators()) {
    if (info.name == op().op && !info.in_graphs) {
      GTEST_SKIP() << "its calls wait for others on the host, which no graph can";
    }
  }
  constexpr std::uint64_t kCases = 100;
  int moved = 0, calls = 0;
  for (std::uint64_t seed = 0; seed < kCases; ++seed) {
    const Case c = op().fuzz(seed);
    std::int64_t elements = 1;
    for (const TensorSpec& s : c.calls[0].inputs) elements *= numel_of(s) > 0 ? 1 : 0;
    if (elements == 0) continue;  // nothing to capture
    for (std::size_t i = 0; i < c.calls.size(); ++i) {
      SCOPED_TRACE(c.params + " " + c.calls[i].name);
      const Stream stream;
      PreparedCall work(c, i);
      work.draw(seed);
      const auto first = work.results_of(stream, [&] { work.run(stream); });
      const Graph graph(stream, [&] { work.run(stream); });
      const auto same = work.results_of(stream, [&] { graph.replay(stream); });
      EXPECT_TRUE(same == first) << "a replay has other bits";
      work.draw(seed + 1000000);
      const auto replayed = work.results_of(stream, [&] { graph.replay(stream); });
      const auto plain = work.results_of(stream, [&] { work.run(stream); });
      EXPECT_TRUE(replayed == plain) << "a replay with new inputs has other bits";
      moved += replayed != first;
      ++calls;
    }
  }
  EXPECT_GT(calls, static_cast<int>(kCases));
  EXPECT_GE(10 * moved, 9 * calls) << "new inputs changed nothing";
}

}  // namespace
}  // namespace annulus::testing
