// The tensors of a whole sequence, what one device makes of them, and what ranks do: for tests of many ranks at once.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "annulus/core/buffer.h"
#include "annulus/ring_attention/test/cases.h"

namespace annulus::testing {

class RingSequence {
 public:
  // All tensors are drawn or zero; the same for a problem's seed everywhere.
  explicit RingSequence(const AttentionProblem& problem, Device device = kCPU);

  // All outputs of both calls over local ranks, as bytes.
  std::string run(int ranks, Balance balance, bool deterministic, std::int64_t slice = 1536);
  // Where bits differ from another run's, by output.
  std::string apart(const std::string& one, const std::string& two) const;

  // Both calls on one device, into the tensors.
  void run_alone();
  // Both calls as one rank of a group, and what comes of them compared with the tensors, which run_alone() filled. Throws
  // std::logic_error where a value is wrong, where a call failed and left anything but NaN in its outputs, or where an input
  // has changed; and what the calls throw. `same_bits`: as the tensors are, to the bit (of run() with `deterministic`).
  void run_as_rank(const RingProblem& ring, Communicator& group, bool same_bits = false) const;

  const RingTensors& whole() const { return whole_; }

 private:
  AttentionProblem problem_;
  std::vector<Buffer> memory_;
  RingTensors whole_;
};

}  // namespace annulus::testing
