// The hops of ring attention without its arithmetic: K and V go around in buffers of their own, the next hop under way
// while this one computes; on the way back K and V go around again, and dK and dV follow one hop behind, gather what
// each rank adds, and need P hops to come home. Every value that arrives is checked.
#pragma once

#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include "annulus/dist/communicator.h"

namespace annulus::dist::testing {

// The bytes that one rank sends, as a planner would count them: all shards but the next rank's own, twice, then dK and
// dV of every shard, K and V being of equal length.
struct Shards {
  int size;
  std::size_t length;  // of the shortest
  // Of unequal length, as a sequence that P does not divide leaves them.
  std::size_t of(int owner) const { return length + static_cast<std::size_t>(owner) % 3; }
  std::uint64_t bytes_sent_by(int rank) const {
    std::uint64_t sum = 0;
    for (int owner = 0; owner < size && size > 1; ++owner) {
      const std::uint64_t both = 2 * sizeof(float) * of(owner);
      sum += owner == (rank + 1) % size ? both : 3 * both;
    }
    return sum;
  }
};

class Schedule {
 public:
  Schedule(Communicator& group, std::size_t length)
      : group_(group), P_(group.size()), r_(group.rank()), shards_{P_, length} {}

  // Throws std::logic_error where a value is wrong, and what the communicator throws.
  void run() {
    group_.agree("ring", "length " + std::to_string(shards_.length));
    rotate("rotate", false);
    rotate("rotate_back", true);
    group_.barrier();
  }

 private:
  using Buffer = std::vector<float>;
  struct Pair {  // K and V, or their gradients
    Buffer k, v;
  };
  static float value(int owner, std::size_t i, bool v) {
    return static_cast<float>(owner * 1000 + static_cast<int>(i % 500)) + (v ? 0.5F : 0.F);
  }
  int owner_at(int hop) const { return ((r_ - hop) % P_ + P_) % P_; }

  Pair sized_for(int owner) const {
    const std::size_t n = shards_.of(owner);
    return {Buffer(n, -1.F), Buffer(n, -1.F)};
  }
  std::unique_ptr<Transfer> begin(const char* op, int hop, const Pair& from, Pair& to) {
    const auto bytes = [](const Buffer& b) { return b.size() * sizeof(float); };
    const Part parts[] = {{from.k.data(), bytes(from.k), to.k.data(), bytes(to.k)},
                          {from.v.data(), bytes(from.v), to.v.data(), bytes(to.v)}};
    return group_.shift({.op = op, .hop = hop}, parts);
  }
  static void expect(bool holds, const char* what) {
    if (!holds) throw std::logic_error(std::string("WRONG VALUE: ") + what);
  }
  void check_kv(const Pair& kv, int owner) const {
    for (std::size_t i = 0; i < kv.k.size(); ++i) {
      expect(kv.k[i] == value(owner, i, false) && kv.v[i] == value(owner, i, true), "K or V");
    }
  }

  void rotate(const char* op, bool gradients) {
    Pair now = sized_for(r_), next, sums = sized_for(r_), sums_next;
    for (std::size_t i = 0; i < now.k.size(); ++i) {
      now.k[i] = value(r_, i, false);
      now.v[i] = value(r_, i, true);
    }
    const Pair mine = now;
    for (Buffer* b : {&sums.k, &sums.v}) b->assign(b->size(), 0.F);
    std::unique_ptr<Transfer> kv, home;
    for (int hop = 0; hop < P_; ++hop) {
      const int owner = owner_at(hop);
      if (hop + 1 < P_) {
        next = sized_for(owner_at(hop + 1));
        kv = begin(op, hop, now, next);
      }
      check_kv(now, owner);  // the compute
      if (gradients) {
        if (home) {
          home->wait();
          std::swap(sums, sums_next);
        }
        for (std::size_t i = 0; i < sums.k.size(); ++i) {
          sums.k[i] += static_cast<float>(r_ + 1);
          sums.v[i] += static_cast<float>(owner);
        }
        sums_next = sized_for(owner_at(hop + 1));
        home = begin("gradients", hop, sums, sums_next);
      }
      if (hop + 1 < P_) {
        kv->wait();
        if (hop == 0) expect(now.k == mine.k && now.v == mine.v, "an input has changed");
        std::swap(now, next);
      }
    }
    if (!gradients) return;
    home->wait();
    for (std::size_t i = 0; i < sums_next.k.size(); ++i) {
      expect(sums_next.k[i] == static_cast<float>(P_ * (P_ + 1) / 2), "dK");
      expect(sums_next.v[i] == static_cast<float>(P_ * r_), "dV");
    }
  }

  Communicator& group_;
  int P_, r_;
  Shards shards_;
};

}  // namespace annulus::dist::testing
