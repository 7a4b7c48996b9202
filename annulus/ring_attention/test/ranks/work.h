// What ranks do while faults hit them: ring attention, forward and backward, of a sequence that all of them can make and whose
// results on one device they know.
#pragma once

#include <map>
#include <mutex>
#include <vector>

#include "annulus/dist/test/fault.h"
#include "annulus/ring_attention/test/patterns.h"
#include "annulus/ring_attention/test/sequence.h"

namespace annulus::dist::testing {

class RingWork {
 public:
  // Dense, so that every rank has something for every other in every hop. Of an odd number of ranks keys travel in the backward, of
  // an even one queries.
  RingWork(int ranks, std::int64_t tokens, Device device = kCPU)
      : problem_{annulus::testing::ring::dense(tokens), ranks, Balance::kContiguous},
        sequence_((problem_.attention.Hkv = ranks % 2 == 1 ? 2 : 4, problem_.attention), device) {
    sequence_.run_alone();
  }
  // Made once.
  static const RingWork& of(int ranks) {
    static std::mutex guard;
    static std::map<int, RingWork> all;
    const std::lock_guard lock(guard);
    return all.try_emplace(ranks, ranks, 53).first->second;
  }

  // Throws std::logic_error where something is wrong, and what the operator throws.
  void run(Communicator& group) const { sequence_.run_as_rank(problem_, group); }

  // Hops 0 and 1 are a rank's own chunks; then come those of the ranks before it. Gradients go back the same way.
  static std::vector<Stage> stages(int ranks) {
    const auto there = [](int hop) { return hop - 1; };
    const auto back = [](int hop) { return 1 - hop; };
    return {{"ring_attention", ranks - 1, 2, there},
            {"ring_backward", ranks - 1, 2, there},
            {"ring_gradients", ranks - 1, 2, back}};
  }

 private:
  annulus::testing::RingProblem problem_;
  annulus::testing::RingSequence sequence_;
};

}  // namespace annulus::dist::testing
