// Communicators of threads: what they promise when nothing goes wrong, and what they refuse.
#include <gtest/gtest.h>

#include <algorithm>

#include <atomic>
#include <chrono>
#include <cmath>
#include <cstring>
#include <functional>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "annulus/dist/communicator.h"
#include "annulus/dist/message.h"
#include "annulus/dist/test/schedule.h"

namespace annulus::dist::testing {
namespace {

// f(communicator of rank p) on a thread for each p; the first error of each rank, empty where there was none.
std::vector<std::string> on_all(std::vector<std::unique_ptr<Communicator>>& ranks,
                                const std::function<void(Communicator&)>& f) {
  std::vector<std::string> errors(ranks.size());
  std::vector<std::thread> threads;
  for (std::size_t p = 0; p < ranks.size(); ++p) {
    threads.emplace_back([&, p] {
      try {
        f(*ranks[p]);
      } catch (const std::exception& e) {
        errors[p] = e.what();
      }
    });
  }
  for (std::thread& t : threads) t.join();
  return errors;
}

void expect_fine(const std::vector<std::string>& errors) {
  for (const std::string& e : errors) EXPECT_EQ(e, "");
}

class Ranks : public ::testing::TestWithParam<int> {};
INSTANTIATE_TEST_SUITE_P(P, Ranks, ::testing::Values(1, 2, 3, 4, 5, 8));

TEST_P(Ranks, HandBuffersAroundAndSendWhatAPlannerCounts) {
  for (const bool checksum : {false, true}) {
    for (const std::size_t length : {0, 1, 1000}) {
      auto ranks = local_communicators(GetParam(), {.checksum = checksum});
      expect_fine(on_all(ranks, [&](Communicator& c) {
        Schedule(c, length).run();
        if (c.traffic().bytes != Shards{c.size(), length}.bytes_sent_by(c.rank())) {
          throw std::logic_error("sent " + std::to_string(c.traffic().bytes) + " bytes");
        }
      }));
    }
  }
}

TEST_P(Ranks, GatherAndAddInOrderOfRank) {
  const int P = GetParam();
  // Sums whose value depends on the order they are made in.
  const auto term = [](int p, std::size_t i) {
    return static_cast<float>(std::sin(static_cast<double>(i) + 0.1) * std::pow(10.0, 7 - 2 * p));
  };
  for (const std::size_t n : {0, 1, 3, 97}) {
    auto ranks = local_communicators(P);
    std::vector<std::vector<float>> sums(static_cast<std::size_t>(P));
    expect_fine(on_all(ranks, [&](Communicator& c) {
      std::vector<float>& sum = sums[static_cast<std::size_t>(c.rank())];
      std::vector<double> wide(n, c.rank());
      for (std::size_t i = 0; i < n; ++i) sum.push_back(term(c.rank(), i));
      c.all_reduce(std::span(sum));
      c.all_reduce(std::span(wide));
      for (const double w : wide) {
        if (w != P * (P - 1) / 2) throw std::logic_error("sum of doubles");
      }
      std::vector<std::int32_t> mine(n, c.rank()), all(n * static_cast<std::size_t>(P));
      c.all_gather(std::as_bytes(std::span(mine)), std::as_writable_bytes(std::span(all)));
      for (std::size_t i = 0; i < all.size(); ++i) {
        if (all[i] != static_cast<std::int32_t>(i / n)) throw std::logic_error("gathered");
      }
      c.barrier();
    }));
    for (std::size_t i = 0; i < n; ++i) {
      float expected = term(0, i);
      for (int p = 1; p < P; ++p) expected += term(p, i);
      for (const auto& sum : sums) EXPECT_EQ(sum[i], expected);
    }
  }
}

TEST(Barrier, NobodyLeavesBeforeAllHaveCome) {
  constexpr int kRanks = 5, kRounds = 50;
  auto ranks = local_communicators(kRanks);
  std::atomic<int> came{0};
  expect_fine(on_all(ranks, [&](Communicator& c) {
    for (int round = 1; round <= kRounds; ++round) {
      ++came;
      c.barrier();
      if (came < round * kRanks) throw std::logic_error("left early");
      c.barrier();
    }
  }));
}

TEST(Transfer, SeveralAtOnceInAnyDirection) {
  auto ranks = local_communicators(4);
  expect_fine(on_all(ranks, [&](Communicator& c) {
    int mine = c.rank(), got[3] = {-1, -1, -1};
    std::vector<std::unique_ptr<Transfer>> transfers;
    for (int d = 1; d < 4; ++d) {
      const Part part{&mine, sizeof mine, &got[d - 1], sizeof mine};
      transfers.push_back(c.shift({.op = "all", .hop = d, .distance = -d}, {&part, 1}));
    }
    for (auto t = transfers.rbegin(); t != transfers.rend(); ++t) (*t)->wait();
    for (int d = 1; d < 4; ++d) {
      if (got[d - 1] != (c.rank() + d) % 4) throw std::logic_error("another rank's");
    }
  }));
}

TEST(Transfer, OneThatIsGivenUpLeavesItsBuffersAlone) {
  auto ranks = local_communicators(2);
  expect_fine(on_all(ranks, [&](Communicator& c) {
    int mine = 7, got = -1;
    const Part part{&mine, sizeof mine, &got, sizeof got};
    c.shift({.op = "given_up"}, {&part, 1}).reset();
    c.barrier();
    if (got != -1) throw std::logic_error("written to");
  }));
}

// --- what ranks must have in common ---

TEST(Agreement, NamesTheRankThatDiffersAndHow) {
  auto ranks = local_communicators(4, {.deadline_s = 5});
  const auto errors = on_all(ranks, [](Communicator& c) {
    c.agree("ring_attention", c.rank() == 2 ? "T 1000, D 32" : "T 1000, D 64");
  });
  for (std::size_t p = 0; p < 4; ++p) {
    EXPECT_NE(errors[p].find("[ring_attention] rank 2"), std::string::npos) << errors[p];
    EXPECT_NE(errors[p].find("has call 'D 32', most have 'D 64'"), std::string::npos) << errors[p];
  }
}

TEST(Agreement, SeesBeyondWhatItPrints) {
  auto ranks = local_communicators(3, {.deadline_s = 5});
  const auto errors = on_all(ranks, [](Communicator& c) {
    c.agree("ring", std::string(1000, 'x') + (c.rank() == 1 ? "a" : "b"));
  });
  for (const std::string& e : errors) {
    EXPECT_NE(e.find("rank 1"), std::string::npos) << e;
    EXPECT_NE(e.find("differs from most after its first 511 characters"), std::string::npos) << e;
  }
}

TEST(Agreement, OfCallsOfManyWordsSaysTheClauseThatDiffers) {
  const struct {
    std::string most, other, most_clause, other_clause;
  } calls[] = {{"scale 0.125, seed 7", "scale 0.25, seed 7", "scale 0.125", "scale 0.25"},
               {"last", "lasting", "last", "lasting"},
               {"a, b, c", "a, d, c", "b", "d"},
               {"a", "a, b", "", "b"},
               {"a, b", "a", "b", ""}};
  for (const auto& call : calls) {
    auto ranks = local_communicators(3, {.deadline_s = 5});
    const auto errors = on_all(ranks, [&](Communicator& c) {
      c.agree("ring", "tokens 4096, B 1 H 8, " + (c.rank() == 1 ? call.other : call.most));
    });
    const std::string says =
        "has call '" + call.other_clause + "', most have '" + call.most_clause + "' (";
    for (const std::string& e : errors) EXPECT_NE(e.find(says), std::string::npos) << e;
  }
}

// Whoever refuses is who is named, also where most do, or where there is no most.
TEST(Agreement, NamesTheFirstRankThatRefusesItsCallAndWhy) {
  const struct {
    int size;
    std::vector<int> refuse;
  } groups[] = {{2, {0}}, {2, {1}}, {3, {1, 2}}, {3, {0, 1}}, {4, {3}}};
  for (const auto& g : groups) {
    auto ranks = local_communicators(g.size, {.deadline_s = 5});
    const auto errors = on_all(ranks, [&](Communicator& c) {
      if (std::ranges::count(g.refuse, c.rank()) > 0) {
        c.refuse("ring", "rule " + std::to_string(c.rank()));
      } else {
        c.agree("ring", "T 1000");
      }
    });
    const std::string first = std::to_string(g.refuse.front());
    for (const std::string& e : errors) {
      EXPECT_NE(e.find("[ring] rank " + first), std::string::npos) << e;
      EXPECT_NE(e.find("refuses its own call: rule " + first + " ("), std::string::npos) << e;
    }
  }
}

TEST(Agreement, WhereAllRefuseNothingIsLost) {
  auto ranks = local_communicators(3, {.deadline_s = 5});
  expect_fine(on_all(ranks, [](Communicator& c) {
    c.refuse("ring", "rule " + std::to_string(c.rank()));
    c.agree("ring", "T 1000");
    Schedule(c, 10).run();
  }));
}

TEST(Agreement, OfCallsInAnotherOrderThereIsNone) {
  auto ranks = local_communicators(2, {.deadline_s = 5});
  const auto errors = on_all(ranks, [](Communicator& c) {
    if (c.rank() == 0) c.barrier();
    float x = 0;
    c.all_reduce(std::span(&x, 1));
  });
  for (const std::string& e : errors) EXPECT_NE(e.find("is lost"), std::string::npos) << e;
}

TEST(Hellos, AreComparedFieldByField) {
  std::vector<Hello> hellos(5);
  const auto reset = [&] {
    for (int r = 0; r < 5; ++r) {
      Hello& h = hellos[static_cast<std::size_t>(r)] = {};
      h.rank = r;
      h.size = 5;
      put(h.op, "this");
    }
  };
  reset();
  EXPECT_FALSE(compare(hellos));
  const std::pair<const char*, std::function<void(Hello&)>> changes[] = {
      {"rank 2", [](Hello& h) { h.rank = 2; }},
      {"has P 4, most have 5", [](Hello& h) { h.size = 4; }},
      {"has protocol 9, most have 2", [](Hello& h) { h.protocol = 9; }},
      {"library version 0.9", [](Hello& h) { put(h.version, "0.9"); }},
      {"has checksums on, most have off", [](Hello& h) { h.checksum = 1; }},
      {"deadline_s 3", [](Hello& h) { h.deadline_s = 3; }},
      {"'other'", [](Hello& h) { put(h.op, "other"); }},
      {"after its first 511", [](Hello& h) { h.digest = 1; }},
      {"refuses its own call", [](Hello& h) { h.refuses = 1; }},
  };
  for (const auto& [text, change] : changes) {
    reset();
    change(hellos[3]);
    const auto found = compare(hellos);
    ASSERT_TRUE(found) << text;
    EXPECT_EQ(found->rank, 3);
    EXPECT_NE(found->what.find(text), std::string::npos) << found->what;
  }
  // Before any call they need not have the same deadline: what refuses the one that has none comes after.
  reset();
  for (Hello& h : hellos) put(h.op, "");
  hellos[3].deadline_s = 3;
  EXPECT_FALSE(compare(hellos));
}

// --- what is left of a communicator after a loss ---

TEST(Lost, TheCommunicatorIsClosedSaysSoAndANewOneWorks) {
  auto ranks = local_communicators(3, {.deadline_s = 0.2});
  std::vector<int> inputs{1, 2, 3};
  const auto errors = on_all(ranks, [&](Communicator& c) {
    if (c.rank() == 1) return;
    int& mine = inputs[static_cast<std::size_t>(c.rank())];
    int got = 0;
    const Part part{&mine, sizeof mine, &got, sizeof got};
    try {
      c.shift({.op = "once", .hop = 4}, {&part, 1})->wait();
      throw std::logic_error("nobody was missed");
    } catch (const RankLost& e) {
      if (e.rank != 1 || e.waited_s < 0.1 || e.waited_s > 1.2) throw std::logic_error(e.what());
    }
    try {
      c.barrier();
      throw std::logic_error("still open");
    } catch (const RankLost& e) {
      if (e.rank != 1) throw std::logic_error(e.what());
      if (std::string(e.what()).rfind("the communicator is closed: ", 0) != 0) throw;
    }
  });
  expect_fine(errors);
  EXPECT_EQ(inputs, (std::vector<int>{1, 2, 3}));
  auto left = local_communicators(2);
  expect_fine(on_all(left, [](Communicator& c) { Schedule(c, 10).run(); }));
}

// Rank 3 waits for rank 2, which is slow, then waits for rank 1, which is gone: not rank 2 is to blame.
TEST(Lost, WhoWaitsForAnotherIsNotBlamed) {
  constexpr double kDeadline = 1;
  auto ranks = local_communicators(4, {.deadline_s = kDeadline});
  const auto errors = on_all(ranks, [&](Communicator& c) {
    int mine = 0, got = 0;
    const Part part{&mine, sizeof mine, &got, sizeof got};
    for (int hop = 0; hop < 3; ++hop) {
      auto transfer = c.shift({.op = "slow", .hop = hop}, {&part, 1});
      if (hop == 1 && c.rank() == 1) {  // gone: it takes and sends nothing any more
        std::this_thread::sleep_for(std::chrono::duration<double>(2.5 * kDeadline));
      }
      if (hop == 1 && c.rank() == 2) {  // slow: half a deadline
        std::this_thread::sleep_for(std::chrono::duration<double>(0.5 * kDeadline));
      }
      transfer->wait();
    }
  });
  for (const std::string& e : errors) {
    EXPECT_NE(e.find("[slow] rank 1"), std::string::npos) << e;
  }
}

TEST(Lost, ARankThatGivesUpIsKnownAtOnce) {
  auto ranks = local_communicators(4, {.deadline_s = 60});
  const auto errors = on_all(ranks, [](Communicator& c) {
    c.barrier();
    if (c.rank() == 2) c.abandon("out of memory");
    c.barrier();
  });
  for (const std::string& e : errors) {
    EXPECT_NE(e.find("rank 2"), std::string::npos) << e;
    EXPECT_NE(e.find("it gave up: out of memory"), std::string::npos) << e;
  }
}

TEST(BadCalls, AreRefused) {
  EXPECT_THROW(local_communicators(0), InvalidArgument);
  EXPECT_THROW(local_communicators(-1), InvalidArgument);
  for (const double deadline : {0.0, -1.0, std::nan(""), HUGE_VAL}) {
    EXPECT_THROW(local_communicators(2, {.deadline_s = deadline}), InvalidArgument);
  }
  auto alone = std::move(local_communicators(1)[0]);
  EXPECT_THROW(alone->set_deadline_s(0), InvalidArgument);
  std::byte a[4]{}, b[8]{};
  EXPECT_THROW(alone->all_gather(a, b), InvalidArgument);
  const Part part{a, 4, b, 8};
  EXPECT_THROW(alone->shift({.op = "x"}, {&part, 1}), InvalidArgument);
  alone->all_gather(a, std::span(b).first(4));
}

// --- messages ---

std::uint64_t sum_of(std::string_view text) { return xxh64(std::as_bytes(std::span(text))); }

TEST(Xxh64, HasTheValuesOfItsSpecification) {
  EXPECT_EQ(sum_of(""), 0xEF46DB3751D8E999);
  EXPECT_EQ(sum_of("a"), 0xD24EC4F1A98C6E5B);
  EXPECT_EQ(sum_of("abc"), 0x44BC2CF5AD770999);
  EXPECT_EQ(sum_of("Nobody inspects the spammish repetition"), 0xFBCEA83C8A378BF1);
  std::string text;  // every remainder of 32
  std::uint64_t all = 0;
  for (int i = 0; i < 100; ++i) {
    all = all * 31 + sum_of(text);
    text += static_cast<char>('!' + i % 90);
  }
  EXPECT_EQ(all, 0x19411785B4E726DB);
}

TEST(Message, TextIsCutBetweenCharacters) {
  char field[8];
  const auto cut = [&](const char* text) {
    put(field, text);
    return std::string(text_of(field));
  };
  EXPECT_EQ(cut("seven c"), "seven c");
  EXPECT_EQ(cut("eight ch"), "eight c");
  EXPECT_EQ(cut("abcdef\u00e9"), "abcdef");  // two bytes, of which one has room
  EXPECT_EQ(cut("abcde\u00e9"), "abcde\u00e9");
  EXPECT_EQ(cut("abcd\U0001f600"), "abcd");
}

TEST(Message, IsOnlyItselfWhateverBitIsFlipped) {
  const std::string payload = "twenty bytes, or so.";
  Header header;
  put(header.op, "op");
  const Message message = make_message(header, std::as_bytes(std::span(payload)), true);
  Header due = header;
  due.bytes = payload.size();
  due.has_sum = 1;
  EXPECT_EQ(why_not(message, due), "");
  for (std::size_t bit = 0; bit < 8 * message.bytes().size(); ++bit) {
    Message other = message.copy();
    other.bytes()[bit / 8] ^= std::byte{1} << bit % 8;
    EXPECT_NE(why_not(other, due), "") << "bit " << bit;
  }
}

}  // namespace
}  // namespace annulus::dist::testing
