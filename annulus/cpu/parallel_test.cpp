#include "annulus/cpu/parallel.h"

#include <gtest/gtest.h>
#include <sys/resource.h>
#include <sys/wait.h>
#include <unistd.h>

#include <atomic>
#include <chrono>
#include <cstdint>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <mutex>
#include <set>
#include <string>
#include <thread>
#include <vector>

#include "annulus/core/errors.h"

namespace annulus::cpu {
namespace {

TEST(ParallelFor, EveryTaskOnceForAnyThreadCount) {
  for (const int threads : {0, 1, 2, 3, 8}) {
    for (const std::int64_t tasks : {0, 1, 2, 7, 1000}) {
      std::vector<std::atomic<int>> count(static_cast<std::size_t>(tasks));
      parallel_for(tasks, threads, [&](std::int64_t i) { ++count[static_cast<std::size_t>(i)]; });
      for (const auto& c : count) EXPECT_EQ(c, 1);
    }
  }
}

TEST(ParallelFor, TheFirstExceptionArrives) {
  for (const int threads : {1, 4}) {
    std::string what;
    try {
      parallel_for(100, threads, [](std::int64_t i) {
        if (i % 10 == 3) throw InvalidArgument("task " + std::to_string(i));
      });
    } catch (const InvalidArgument& e) {
      what = e.what();
    }
    EXPECT_EQ(what, "task 3");
  }
}

TEST(ParallelFor, FromManyThreadsAtOnce) {
  std::atomic<std::int64_t> sum{0};
  std::vector<std::thread> threads;
  for (int t = 0; t < 8; ++t) {
    threads.emplace_back([&] { parallel_for(100, 2, [&](std::int64_t i) { sum += i; }); });
  }
  for (std::thread& t : threads) t.join();
  EXPECT_EQ(sum, 8 * 4950);
}

// What a data loader does: its workers are forks of a process that has computed already.
TEST(ParallelFor, GoesOnInAChild) {
  const auto sum_of_100 = [] {
    std::atomic<std::int64_t> sum{0};
    parallel_for(100, 4, [&](std::int64_t i) { sum += i; });
    std::atomic<std::int64_t> items{0};
    run_team(4, [&](Member& m) {
      m.each(100, 3, [&](std::int64_t begin, std::int64_t end) { items += end - begin; });
    });
    return sum + items;
  };
  ASSERT_EQ(sum_of_100(), 5050);
  const pid_t child = fork();
  ASSERT_GE(child, 0);
  if (child == 0) {
    alarm(60);  // a child that waits for threads it does not have would wait for ever
    _exit(sum_of_100() == 5050 ? 0 : 1);
  }
  int status = 0;
  ASSERT_EQ(waitpid(child, &status, 0), child);
  EXPECT_TRUE(WIFEXITED(status) && WEXITSTATUS(status) == 0)
      << (WIFSIGNALED(status) ? "killed by signal " + std::to_string(WTERMSIG(status)) : "wrong");
  EXPECT_EQ(sum_of_100(), 5050);
}

// --- where threads cannot be started fewer do the same: OpenMP alone would end the process ---

#if !defined(__SANITIZE_ADDRESS__) && \
    !defined(__SANITIZE_THREAD__)  // they need the address space themselves

constexpr int kWanted = 16;

// From here on there is memory for the stacks of this many more threads; below 0, for any number.
void leave_room_for(int stacks) {
  rlimit limit{};
  getrlimit(RLIMIT_AS, &limit);
  limit.rlim_cur = limit.rlim_max;
  if (stacks >= 0) {
    pthread_attr_t attributes;
    std::size_t stack = 0;
    pthread_getattr_default_np(&attributes);
    pthread_attr_getstacksize(&attributes, &stack);
    std::uint64_t pages = 0;
    std::ifstream("/proc/self/statm") >> pages;
    const auto page = static_cast<std::uint64_t>(sysconf(_SC_PAGESIZE));
    limit.rlim_cur = pages * page + static_cast<std::uint64_t>(stacks) * stack + stack / 2;
  }
  setrlimit(RLIMIT_AS, &limit);
}

// Until those that were let go have left, whose stacks would be room that leave_room_for did not count.
void wait_until_threads_are(std::ptrdiff_t n) {
  const auto count = [] {
    return std::distance(std::filesystem::directory_iterator("/proc/self/task"), {});
  };
  for (int i = 0; i < 5000 && count() > n; ++i) {
    std::this_thread::sleep_for(std::chrono::milliseconds(1));
  }
}

// Threads that came to a team of `wanted`; 0 where one of the two ways to run did not do all its work.
int threads_that_come(int wanted) {
  std::mutex guard;
  std::set<std::thread::id> who;
  std::atomic<std::int64_t> items{0}, sum{0};
  run_team(wanted, [&](Member& m) {
    {
      const std::lock_guard lock(guard);
      who.insert(std::this_thread::get_id());
    }
    m.each(100, 3, [&](std::int64_t begin, std::int64_t end) { items += end - begin; });
  });
  parallel_for(100, wanted, [&](std::int64_t i) { sum += i; });
  return items == 100 && sum == 4950 ? static_cast<int>(who.size()) : 0;
}

// In a process of its own, whose exit code is what `f` returns and 100: OpenMP's own way out is 1.
template <class F>
void expect_of_new_process(int low, int high, F&& f) {
  GTEST_FLAG_SET(death_test_style, "threadsafe");
  const auto as_expected = [&](int status) {
    const int returned = WEXITSTATUS(status) - 100;
    return WIFEXITED(status) && returned >= low && returned <= high;
  };
  EXPECT_EXIT(_exit(100 + f()), as_expected, "");
}

TEST(FewThreads, NoneBesideTheCaller) {
  expect_of_new_process(1, 1, [] {
    leave_room_for(0);
    return threads_that_come(kWanted);
  });
}

TEST(FewThreads, AsManyAsThereAre) {
  expect_of_new_process(2, 4, [] {
    leave_room_for(3);
    return threads_that_come(kWanted);
  });
}

// OpenMP lets threads go when a team is smaller, and starts them again.
TEST(FewThreads, TheLimitCameBetweenTwoTeams) {
  expect_of_new_process(2, kWanted - 1, [] {
    if (threads_that_come(kWanted) != kWanted || threads_that_come(2) != 2) return 0;
    wait_until_threads_are(2);
    leave_room_for(0);
    return threads_that_come(kWanted);
  });
}

TEST(FewThreads, AllOfThemOnceTheyCanBeHad) {
  expect_of_new_process(kWanted, kWanted, [] {
    leave_room_for(0);
    if (threads_that_come(kWanted) != 1) return 0;
    leave_room_for(-1);
    std::this_thread::sleep_for(std::chrono::milliseconds(1100));
    return threads_that_come(kWanted);
  });
}

#endif

// --- teams: every item of a phase once, all of them before the next phase, for any number of threads ---

class TeamOf : public testing::TestWithParam<int> {};
// More than the machine has, and more than a team has ranges.
INSTANTIATE_TEST_SUITE_P(Threads, TeamOf, testing::Values(1, 2, 3, 8, 70));

TEST(Threads, AreNoMoreThanAnyMachineHas) {
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
