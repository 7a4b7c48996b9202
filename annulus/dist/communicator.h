// A communicator: P ranks in a ring that hand buffers on to each other, with a deadline on everything.
//
// Every rank makes the same calls in the same order. One hop of a ring is begun, computed behind, and waited for:
//
//   auto ranks = annulus::local_communicators(4);           // P threads of this process, or
//   auto ring = annulus::mpi_communicator();                // P processes under mpirun (annulus/dist/mpi.h)
//   ring->agree("rotate", "T 1024, D 64, fp32");            // the same on all ranks, or nothing is sent
//   for (int hop = 0; hop < ring->size() - 1; ++hop) {
//     const annulus::Part parts[] = {{k, bytes, k_next, bytes}, {v, bytes, v_next, bytes}};
//     auto transfer = ring->shift({.op = "rotate", .hop = hop}, parts);   // to rank + 1, from rank - 1
//     compute(k, v);
//     transfer->wait();
//     std::swap(k, k_next), std::swap(v, v_next);
//   }
//
// When a rank dies, stops, is slower than the deadline, sends what is not due or damaged, or was called otherwise than
// the others, every rank that is left throws RankLost out of the call it is in (or of its next one), no later than
// the deadline and one second after it began to wait. All of them name the same rank and hop: whoever waits says for
// whom, so that a rank is not blamed for waiting for another. Receive buffers of that hop then hold nothing of
// meaning, send buffers are as they were, and the communicator is closed: each later call throws the same RankLost
// again. To go on, make a new communicator among the ranks that are left. A rank that fails by itself, for want of
// memory for one, says so by abandon(), and the others need not wait for their deadline.
//
// A communicator is used by one thread at a time and outlives its transfers. Buffers are in host memory, and those of
// shift() in a device's where sends_device_memory() says so (annulus/dist/nccl.h). What is sent
// is neither encrypted nor authenticated: ranks trust each other and the network between them.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "annulus/core/errors.h"
#include "annulus/core/macros.h"

namespace annulus {

// All ranks give the same.
struct CommunicatorOptions {
  double deadline_s = 120.0;  // of each wait; more than 0
  bool checksum = false;  // XXH64 of every message, compared on arrival; headers always have one
};

// One buffer each way. The sender's send_bytes must be what the receiver says it receives. Either may be 0.
struct Part {
  const void* send = nullptr;
  std::size_t send_bytes = 0;
  void* receive = nullptr;
  std::size_t receive_bytes = 0;
};

// Which hop of which operator this is, as messages say it and RankLost reports it.
struct Hop {
  std::string_view op;  // at most 15 characters count
  int hop = 0;
  int distance = 1;  // to rank + distance, from rank - distance, around the ring
  // Or to and from these; where one is kNobody, parts go the other way alone. Not to this rank itself.
  static constexpr int kByDistance = -1, kNobody = -2;
  int to = kByDistance, from = kByDistance;
};

// What this rank has sent so far.
struct Traffic {
  std::uint64_t messages = 0;
  std::uint64_t bytes = 0;           // of buffers: what a planner counts
  std::uint64_t overhead_bytes = 0;  // headers, agreements, notices
};

// A shift under way. What is sent is copied when it begins: send buffers may be used again at once. receive() returns
// when what was due is in the receive buffers, which are not read before; wait() when, beyond that, what was sent has
// been taken: a rank that is ahead of the next one waits for it there. One that is destroyed before it was waited for is
// given up: it never writes to its buffers after that.
class ANNULUS_API Transfer {
 public:
  Transfer() = default;
  Transfer(const Transfer&) = delete;
  Transfer& operator=(const Transfer&) = delete;
  virtual ~Transfer();
  virtual void receive() = 0;
  virtual void wait() = 0;
};

class ANNULUS_API Communicator {
 public:
  Communicator() = default;
  Communicator(const Communicator&) = delete;
  Communicator& operator=(const Communicator&) = delete;
  virtual ~Communicator();

  virtual int rank() const = 0;
  virtual int size() const = 0;
  virtual double deadline_s() const = 0;
  virtual void set_deadline_s(double seconds) = 0;  // the same on all ranks; of the next wait on
  virtual Traffic traffic() const = 0;

  // Parts of shift() may be in memory of this rank's device. The host is what orders them: their contents are complete
  // when shift() is called, and what was received is complete, for any stream, when receive() returns.
  virtual bool sends_device_memory() const { return false; }

  // Before an operator's first hop: `what` (shapes, dtypes, options, as readable text) must be the same on all ranks.
  // Where it is not, all throw RankLost with hop -1, which names the rank that differs from most, and how.
  virtual void agree(std::string_view op, std::string_view what) = 0;
  // In place of agree(), by a rank whose own call breaks a rule, which `why` says. Where all ranks refuse, each for its own
  // reason, nothing is lost and this returns; otherwise all throw RankLost with hop -1, of the first that refuses.
  virtual void refuse(std::string_view op, std::string_view why) = 0;

  // Begins to send every part to one rank and to receive every part from another; waits for nobody. Several may be
  // under way.
  virtual std::unique_ptr<Transfer> shift(const Hop& hop, std::span<const Part> parts) = 0;

  // This rank cannot go on: the others throw RankLost with `why` at once (over NCCL at their deadline: nothing reaches
  // them), and so does this one from its next call on.
  virtual void abandon(const std::string& why) noexcept = 0;

  // Made of shifts; a transport that has better may override them.
  // all: size() parts of mine.size() bytes each, in order of rank.
  virtual void all_gather(std::span<const std::byte> mine, std::span<std::byte> all);
  // The sum over ranks, added in order of rank: the same bits on all ranks and in every run.
  virtual void all_reduce(std::span<float> values);
  virtual void all_reduce(std::span<double> values);
  // Returns when all ranks have called it.
  virtual void barrier();
};

// P ranks of this process, [p] for the thread that is rank p. They meet at their first call.
ANNULUS_API std::vector<std::unique_ptr<Communicator>> local_communicators(
    int size, const CommunicatorOptions& options = {});

}  // namespace annulus
