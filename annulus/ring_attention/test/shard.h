// One rank's shards of the tensors of a call, dense copies on the same device, and the way to them and back.
#pragma once

#include <cstdint>
#include <utility>
#include <vector>

#include "annulus/core/buffer.h"
#include "annulus/ring_attention/test/cases.h"

namespace annulus::testing {

// Of one tensor, of which an axis is the tokens.
class TensorShard {
 public:
  TensorShard(const RingProblem& p, int rank, const TensorView& whole, std::size_t axis);
  const TensorView& view() const { return view_; }
  void cut();   // from the whole
  void join();  // to it

 private:
  template <class F>
  void each(F&& f);
  void copy_whole(bool to_host);

  TensorView whole_, view_;
  std::size_t axis_;
  std::array<TokenRange, 2> chunks_;
  std::vector<char> memory_;  // the shard, on the host
  std::vector<char> copy_;  // of the whole, where that lies on a device, from its lowest address on
  std::int64_t lowest_ = 0;
  Buffer on_device_;
};

class RingShard {
 public:
  RingShard(const RingProblem& p, int rank, const RingTensors& whole);
  const RingTensors& view() const { return view_; }
  // The outputs of a call, to the whole.
  void join(bool backward);
  // Zeros in the outputs of both.
  void clear_outputs();

 private:
  RingTensors view_;
  std::vector<std::pair<TensorView RingTensors::*, TensorShard>> all_;
};

}  // namespace annulus::testing
