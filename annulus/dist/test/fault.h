// Faults, injected between a communicator and its link by (rank, operator, hop, direction): what is above the link, the
// protocol and whatever operator runs on it, is the real thing.
#pragma once

#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "annulus/dist/link.h"

namespace annulus::dist::testing {

enum class FaultKind {
  kNone,
  // of the rank
  kKill,        // gone without a word
  kStop,        // silent for three deadlines, then goes on
  kExit,        // leaves: its communicator is destroyed on the way
  kDelayHalf,   // half a deadline late: nothing is wrong
  kDelayTwice,  // two deadlines late
  kNoMemory,    // std::bad_alloc
  // of one message
  kDrop,
  kDuplicate,
  kReorder,  // comes after the next one
  kFlipPayload,
  kFlipHeader,
  kWrongBytes,  // a shorter payload than is due, and a header that says so
  kMute,        // this message and all after it vanish, those that come only from there
  // of what a rank says in the handshake
  kVersion,
  kSize,
  kSameRank,
  kShape,
};
const char* name_of(FaultKind kind);
// By name; false where there is none.
bool find_fault(const std::string& name, FaultKind& kind);

struct Fault {
  FaultKind kind = FaultKind::kNone;
  int rank = 0;
  std::string op;  // "hello" for the handshake
  int hop = 0;
  bool receiving = false;  // it hits the message that comes, not the one that goes
  int distance = 1;        // which comes from rank - distance
  double deadline_s = 1;
  // What real processes do instead of throwing Killed and Exited; they do not return.
  std::function<void()> kill, stop, exit;

  std::string text() const;
  bool succeeds() const { return kind == FaultKind::kNone || kind == FaultKind::kDelayHalf; }
  // Of the ranks, this one ends without an error to report.
  bool ends(int r) const {
    return r == rank && (kind == FaultKind::kKill || kind == FaultKind::kExit);
  }
  // Whom all that are left must name: a receiver blames the sender for what became of a message.
  int lost(int size) const;
};

struct Killed {};
struct Exited {};

std::unique_ptr<Link> with_fault(std::unique_ptr<Link> link, Fault fault);

// What `fault` is of, in a schedule of `size` ranks with these operators: every fault at every hop, each at another
// rank, in either direction where that makes a difference.
struct Stage {
  std::string op;
  int hops;
  int first = 0;                                                 // of them
  std::function<int(int hop)> distance = [](int) { return 1; };  // that its messages go
};
std::vector<Fault> every_fault(int size, const std::vector<Stage>& stages, double deadline_s);

}  // namespace annulus::dist::testing
