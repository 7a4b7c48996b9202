// Links by callbacks, over a transport that is as gloo is: it matches what is sent and received by pair and tag, ends the process
// where sizes differ (here: the test fails), and says of no request that it is through. To wait for one that is not would hang.
#include <gtest/gtest.h>

#include <atomic>
#include <chrono>
#include <cstring>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <thread>
#include <tuple>
#include <vector>

#include "annulus/dist/callbacks.h"
#include "annulus/dist/test/schedule.h"

namespace annulus::dist::testing {
namespace {

struct Request {
  std::byte* data;
  std::size_t bytes;
  bool through = false, dropped = false;
};
using Shared = std::shared_ptr<Request>;

struct Board {
  std::mutex mutex;
  std::map<std::tuple<int, int, int>, std::deque<Shared>> sent, awaited;  // by from, to, tag
  std::vector<std::string> wrong;

  void match(const std::tuple<int, int, int>& key) {
    auto& from = sent[key];
    auto& to = awaited[key];
    while (!from.empty() && !to.empty()) {
      const Shared out = from.front(), in = to.front();
      from.pop_front();
      to.pop_front();
      if (out->dropped || in->dropped) continue;
      if (out->bytes != in->bytes) wrong.push_back("sizes differ");
      const std::size_t most = std::min(out->bytes, in->bytes);
      std::memcpy(in->data, out->data, most - 1);
      std::atomic_ref<std::byte>(in->data[most - 1]).store(out->data[most - 1]);
      out->through = in->through = true;
    }
  }
};

struct Rank {
  Board* board;
  LinkCallbacks callbacks{};
  std::map<std::int64_t, Shared> requests;
  std::int64_t made = 0;
  bool interrupted = false, refuses = false;
  std::function<void(std::byte*, std::size_t)> damage;  // of what is sent

  Rank(Board& on, int rank, int size) : board(&on) {
    callbacks = {.self = this,
                 .rank = rank,
                 .size = size,
                 .send = send,
                 .receive = receive,
                 .finish = finish,
                 .pulse = pulse,
                 .release = release,
                 .why = {}};
  }

  std::int64_t begin(bool sends, int peer, int tag, std::byte* data, std::size_t bytes) {
    const std::lock_guard lock(board->mutex);
    if (refuses) {
      put(callbacks.why, "the cable is cut");
      return 0;
    }
    const int own = callbacks.rank;
    const std::tuple key{sends ? own : peer, sends ? peer : own, tag};
    const Shared request = std::make_shared<Request>(Request{data, bytes});
    if (sends && damage) damage(data, bytes);
    (sends ? board->sent : board->awaited)[key].push_back(request);
    requests[++made] = request;
    board->match(key);
    return made;
  }
  static Rank& of(void* self) { return *static_cast<Rank*>(self); }
  static std::int64_t send(void* self, std::int32_t to, std::int32_t tag, const void* data,
                           std::uint64_t bytes) {
    auto* mine = const_cast<std::byte*>(static_cast<const std::byte*>(data));
    return of(self).begin(true, to, tag, mine, bytes);
  }
  static std::int64_t receive(void* self, std::int32_t from, std::int32_t tag, void* data,
                              std::uint64_t bytes) {
    return of(self).begin(false, from, tag, static_cast<std::byte*>(data), bytes);
  }
  static std::int32_t finish(void* self, std::int64_t request) {
    Rank& rank = of(self);
    const std::lock_guard lock(rank.board->mutex);
    const auto found = rank.requests.find(request);
    if (found == rank.requests.end() || !found->second->through) {
      rank.board->wrong.push_back("a request is waited for that is not through");
      return 1;
    }
    rank.requests.erase(found);
    return 1;
  }
  static std::int32_t pulse(void* self) { return of(self).interrupted ? 0 : 1; }
  static void release(void* self) {
    Rank& rank = of(self);
    const std::lock_guard lock(rank.board->mutex);
    for (auto& [number, request] : rank.requests) request->dropped = true;
    rank.requests.clear();
  }
};

struct Ring {
  explicit Ring(int size, double deadline_s = 20) {
    for (int r = 0; r < size; ++r) ranks.push_back(std::make_unique<Rank>(board, r, size));
    for (auto& r : ranks) {
      groups.push_back(communicator_over(callback_link(r->callbacks), {.deadline_s = deadline_s}));
    }
  }
  // What each rank throws, of those that f is called for.
  std::vector<std::string> run(const std::function<void(int, Communicator&)>& f) {
    std::vector<std::string> errors(ranks.size());
    std::vector<std::thread> threads;
    for (std::size_t p = 0; p < ranks.size(); ++p) {
      threads.emplace_back([&, p] {
        try {
          f(static_cast<int>(p), *groups[p]);
        } catch (const RankLost& e) {
          errors[p] = "lost " + std::to_string(e.rank) + ": " + e.what();
        } catch (const std::exception& e) {
          errors[p] = e.what();
        }
      });
    }
    for (std::thread& t : threads) t.join();
    EXPECT_EQ(board.wrong, std::vector<std::string>{});
    return errors;
  }

  Board board;
  std::vector<std::unique_ptr<Rank>> ranks;
  std::vector<std::unique_ptr<Communicator>> groups;
};

bool begins(const std::string& text, const std::string& with) { return text.rfind(with, 0) == 0; }
bool has(const std::string& text, const std::string& part) {
  return text.find(part) != std::string::npos;
}

TEST(Callbacks, ValuesArriveAndRequestsAreForgotten) {
  for (const int size : {1, 2, 3, 4}) {
    Ring ring(size);
    std::size_t before = 0;
    for (int round = 0; round < 20; ++round) {
      const auto errors = ring.run([](int, Communicator& group) {
        Schedule(group, 5000).run();  // of more than one size, above and below what is pooled
        Schedule(group, 50).run();
      });
      for (const std::string& e : errors) EXPECT_EQ(e, "");
      std::size_t open = 0;
      for (const auto& rank : ring.ranks) open += rank->requests.size();
      if (round == 4) before = open;
      if (round > 4) {
        EXPECT_LE(open, before + static_cast<std::size_t>(size * size * 4));
      }
    }
  }
}

TEST(Callbacks, ARankThatDoesNotComeIsLost) {
  Ring ring(3, 0.4);
  const auto start = std::chrono::steady_clock::now();
  const auto errors = ring.run([](int rank, Communicator& group) {
    if (rank != 1) Schedule(group, 50).run();
  });
  EXPECT_LE(std::chrono::steady_clock::now() - start, std::chrono::milliseconds(1400));
  EXPECT_TRUE(begins(errors[0], "lost 1: ")) << errors[0];
  EXPECT_TRUE(begins(errors[2], "lost 1: ")) << errors[2];
}

TEST(Callbacks, WhatTheTransportSaysIsSaid) {
  Ring ring(2, 0.4);
  ring.ranks[0]->refuses = true;
  const auto errors = ring.run([](int, Communicator& group) { Schedule(group, 50).run(); });
  EXPECT_TRUE(begins(errors[0], "lost 1: ") && has(errors[0], "the cable is cut")) << errors[0];
  EXPECT_TRUE(begins(errors[1], "lost 0: ")) << errors[1];
}

TEST(Callbacks, AWaitCanBeInterrupted) {
  Ring ring(2, 10);
  ring.ranks[0]->interrupted = true;
  const auto errors = ring.run([](int rank, Communicator& group) {
    try {
      if (rank == 1) group.barrier();
      if (rank == 0) group.barrier(), std::this_thread::sleep_for(std::chrono::milliseconds(300));
      group.barrier();
    } catch (const Interrupted& e) {
      group.abandon(e.what());
      throw;
    }
  });
  EXPECT_EQ(errors[0], "the call was interrupted");
  EXPECT_TRUE(begins(errors[1], "lost 0: ") && has(errors[1], "interrupted")) << errors[1];
}

TEST(Callbacks, ADamagedEndIsNoticed) {
  Ring ring(2, 0.4);
  ring.ranks[1]->damage = [](std::byte* data, std::size_t bytes) {
    if (bytes > 300 && bytes < 700) return;  // greetings and notices
    data[bytes - 10] ^= std::byte{1};
  };
  const auto errors = ring.run([](int, Communicator& group) { Schedule(group, 5000).run(); });
  EXPECT_TRUE(begins(errors[0], "lost 1: ") && has(errors[0], "damaged")) << errors[0];
}

}  // namespace
}  // namespace annulus::dist::testing
