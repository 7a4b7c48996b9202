// Teams: every item of a phase once, all of them before the next phase, for any number of threads.

#include <gtest/gtest.h>

#include <atomic>
#include <cstdint>
#include <vector>

#include "annulus/cpu/parallel.h"

namespace annulus::cpu {
namespace {

class TeamOf : public testing::TestWithParam<int> {};
// More than the machine has, and more than a team has ranges.
INSTANTIATE_TEST_SUITE_P(Threads, TeamOf, testing::Values(1, 2, 3, 8, 70));

// OpenMP ends the process where a thread cannot be started.
TEST(Threads, AreNoMoreThanCanBeStarted) {
  EXPECT_EQ(resolve_threads(7), 7);
  EXPECT_LE(resolve_threads(1'000'000), 1024);
}

TEST_P(TeamOf, DoesEveryItemOnceBeforeTheNextPhase) {
  constexpr std::int64_t kItems = 173;
  constexpr int kPhases = 200;
  std::vector<std::int64_t> value(kItems, 0), next(kItems, 0);
  std::atomic<int> wrong{0};
  run_team(GetParam(), [&](Member& m) {
    for (int phase = 0; phase < kPhases; ++phase) {
      const auto& from = phase % 2 == 0 ? value : next;
      auto& to = phase % 2 == 0 ? next : value;
      // Reads what another item wrote in the phase before: a phase begun early would be seen.
      m.each(kItems, 1 + phase % 7, [&](std::int64_t begin, std::int64_t end) {
        if (begin < 0 || begin >= end || end > kItems) ++wrong;
        for (std::int64_t i = begin; i < end; ++i) {
          const auto other = static_cast<std::size_t>((i * 31 + 7) % kItems);
          if (from[other] != phase) ++wrong;
          to[static_cast<std::size_t>(i)] = from[other] + 1;
        }
      });
    }
  });
  EXPECT_EQ(wrong, 0);
  for (const std::int64_t v : kPhases % 2 == 0 ? value : next) EXPECT_EQ(v, kPhases);
}

TEST_P(TeamOf, TakesPhasesOfAnySize) {
  std::vector<std::atomic<int>> done(1000);
  std::atomic<int> once{0};
  run_team(GetParam(), [&](Member& m) {
    for (const std::int64_t items : {0, 1, 2, 1000, 5, 0, 64, 65, 999}) {
      m.each(items, 3, [&](std::int64_t begin, std::int64_t end) {
        for (std::int64_t i = begin; i < end; ++i) ++done[static_cast<std::size_t>(i)];
      });
      m.once([&] { ++once; });
    }
  });
  EXPECT_EQ(once, 9);
  for (std::size_t i = 0; i < done.size(); ++i) {
    int expected = 0;
    for (const std::size_t items : {0, 1, 2, 1000, 5, 0, 64, 65, 999})
      expected += i < items ? 1 : 0;
    EXPECT_EQ(done[i], expected) << "item " << i;
  }
}

}  // namespace
}  // namespace annulus::cpu
