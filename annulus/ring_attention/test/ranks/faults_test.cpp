// Every fault at every hop of ring attention and its backward, among threads. A case is a ring of its own; since most of a
// case is waiting, many run at once. In each every rank that is left must throw RankLost in time, with NaN in its outputs and its
// inputs as they were, all must name the same rank and hop, the communicator must then be closed, and a new ring must work.
#include <gtest/gtest.h>

#include <atomic>
#include <chrono>
#include <memory>
#include <mutex>
#include <string>
#include <thread>
#include <vector>

#include "annulus/dist/link.h"
#include "annulus/dist/test/fault.h"
#include "annulus/ring_attention/test/ranks/work.h"

namespace annulus::dist::testing {
namespace {

#if defined(__SANITIZE_THREAD__) || defined(__SANITIZE_ADDRESS__)
constexpr double kDeadline = 1.0,
                 kMore = 3.0;  // what is computed before a fault takes its time there
#else
constexpr double kDeadline = 0.4, kMore = 1.0;
#endif
constexpr std::size_t kThreadsAtOnce = 64;

struct Outcome {
  enum { kDone, kLost, kEnded, kWrong } how = kWrong;
  std::string what;
  int rank = -2, hop = -2;
  RankLost::Direction direction{};
  double seconds = 0;
};

Outcome run_rank(std::unique_ptr<Communicator>& group) {
  Outcome outcome;
  const auto start = std::chrono::steady_clock::now();
  try {
    RingWork::of(group->size()).run(*group);
    outcome.how = Outcome::kDone;
  } catch (const RankLost& e) {
    outcome = {Outcome::kLost, e.what(), e.rank, e.hop, e.direction, 0};
  } catch (const Killed&) {
    outcome.how = Outcome::kEnded;
  } catch (const Exited&) {
    group.reset();
    outcome.how = Outcome::kEnded;
  } catch (const std::bad_alloc&) {
    try {
      group->barrier();
    } catch (const RankLost& e) {
      outcome = {Outcome::kLost, e.what(), e.rank, e.hop, e.direction, 0};
    }
  } catch (const std::exception& e) {
    outcome.what = e.what();
  }
  outcome.seconds = std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
  return outcome;
}

std::vector<Outcome> run_ring(std::vector<std::unique_ptr<Communicator>>& ranks) {
  std::vector<Outcome> outcomes(ranks.size());
  std::vector<std::thread> threads;
  for (std::size_t p = 0; p < ranks.size(); ++p) {
    threads.emplace_back([&, p] { outcomes[p] = run_rank(ranks[p]); });
  }
  for (std::thread& t : threads) t.join();
  return outcomes;
}

// What is wrong with how the case came out; empty where nothing is. It may be that a thread was starved, where no more is wrong
// than that a rank was late or was taken for lost.
struct Verdict {
  std::string wrong;
  bool starved = true;
};
Verdict judge(const Fault& fault, int size) {
  const CommunicatorOptions options{.deadline_s = fault.deadline_s, .checksum = true};
  std::vector<std::unique_ptr<Communicator>> ranks;
  for (auto& link : local_links(size)) {
    ranks.push_back(communicator_over(with_fault(std::move(link), fault), options));
  }
  const std::vector<Outcome> outcomes = run_ring(ranks);

  std::string wrong;
  bool starved = true;
  const Outcome* first = nullptr;
  for (int p = 0; p < size; ++p) {
    const Outcome& o = outcomes[static_cast<std::size_t>(p)];
    const auto say = [&](const std::string& text, bool when_starved = false) {
      starved &= when_starved;
      wrong += "\n    rank " + std::to_string(p) + " " + text + " after " +
               std::to_string(o.seconds) + " s: " + o.what;
    };
    // A message too many is found with the next one from there. Of the forward that comes with the backward at the latest; of the
    // backward with the closing barrier, if at all: ranks that are through with it have their results, which are right.
    if (fault.kind == FaultKind::kDuplicate && fault.op != "ring_attention" &&
        o.how == Outcome::kDone) {
      continue;
    }
    if (fault.succeeds()) {
      if (o.how != Outcome::kDone) say("failed", o.how == Outcome::kLost);
      continue;
    }
    if (fault.ends(p)) {
      if (o.how != Outcome::kEnded) say("was not hit");
      continue;
    }
    if (o.how != Outcome::kLost) {
      say(o.how == Outcome::kDone ? "noticed nothing" : "failed otherwise");
      continue;
    }
    if (o.rank != fault.lost(size)) say("names another", true);
    if (!first) first = &o;
    if (o.hop != first->hop) say("names another hop than the first", true);
    if (o.direction != first->direction) say("names another direction than the first", true);
    // The rank that slept knows only when it wakes.
    const double slept = p != fault.rank                        ? 0
                         : fault.kind == FaultKind::kStop       ? 3
                         : fault.kind == FaultKind::kDelayTwice ? 2
                                                                : 0;
    if (o.seconds > (slept + 1) * fault.deadline_s + kMore) say("was late", true);
    try {
      ranks[static_cast<std::size_t>(p)]->barrier();
      say("is not closed");
    } catch (const RankLost& e) {
      if (std::string(e.what()).rfind("the communicator is closed: ", 0) != 0) say("says not so");
    }
  }
  if (wrong.empty() && !fault.succeeds()) {
    auto again = local_communicators(size, {.deadline_s = 10});
    for (const Outcome& o : run_ring(again)) {
      if (o.how == Outcome::kDone) continue;
      wrong += "\n    a new ring: " + o.what;
      starved = false;
    }
  }
  return {wrong, starved};
}

class Faults : public ::testing::TestWithParam<int> {};
INSTANTIATE_TEST_SUITE_P(P, Faults, ::testing::Values(2, 3, 4, 8));

TEST_P(Faults, OfEveryKindAtEveryHop) {
  const int size = GetParam();
  const std::vector<Fault> faults = every_fault(size, RingWork::stages(size), kDeadline);
  std::atomic<std::size_t> next{0};
  std::mutex guard;
  std::vector<Fault> again;
  std::vector<std::thread> workers;
  for (std::size_t w = 0; w < kThreadsAtOnce / static_cast<std::size_t>(size); ++w) {
    workers.emplace_back([&] {
      for (std::size_t i; (i = next++) < faults.size();) {
        const auto [wrong, starved] = judge(faults[i], size);
        if (wrong.empty()) continue;
        const std::lock_guard lock(guard);
        if (!starved) {
          ADD_FAILURE() << faults[i].text() << wrong;
          continue;
        }
        again.push_back(faults[i]);
        std::printf("again, by itself: %s%s\n", faults[i].text().c_str(), wrong.c_str());
      }
    });
  }
  for (std::thread& w : workers) w.join();
  // So many threads on few cores may starve one for longer than ranks wait to hear of each other's verdicts. What is no
  // starvation comes again, if not every time.
  EXPECT_LE(again.size(), 3U);
  for (const Fault& fault : again) {
    for (int i = 0; i < 5; ++i) EXPECT_EQ(judge(fault, size).wrong, "") << fault.text();
  }
  RecordProperty("cases", static_cast<int>(faults.size()));
  std::printf("%zu cases\n", faults.size());
}

}  // namespace
}  // namespace annulus::dist::testing
