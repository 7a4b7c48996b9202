// A Case brought to a device: its tensors allocated once and shared by name between its calls,
// filled, and ready to be run again and again.
#pragma once

#include <cstddef>
#include <cstdint>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "annulus/core/buffer.h"
#include "annulus/core/context.h"
#include "testing/case.h"
#include "testing/reference.h"

namespace annulus::bench {

// Throws std::logic_error: a suite named a call that its case does not have.
const testing::Call& find_call(const testing::Case& problem, const std::string& name);
std::size_t bytes_of(const testing::TensorSpec& spec);
// The library's own word on its scratch; shapes only, no memory is touched.
std::size_t workspace_of(const testing::Call& call, Device device);

class Problem {
 public:
  Problem(testing::Case problem, const std::vector<std::string>& calls, Device device);

  void run();  // all calls, in order; asynchronous on CUDA

  // The bytes the mathematics must read and write, and its flops.
  double bytes() const { return bytes_; }
  double flops() const { return flops_; }
  std::size_t workspace_bytes() const { return workspace_.bytes(); }

  // The first elements of a tensor, at most `count`; waits for what is still running.
  std::vector<double> values(const std::string& name, std::int64_t count) const;

  // For a mover: the large tensors of a call, cut in pieces of equal size, as (reads, writes).
  // `unit` is the size of a piece. Empty reads when the tensors do not divide.
  struct Pieces {
    std::vector<const void*> reads;
    std::vector<void*> writes;
    std::size_t unit = 0;
  };
  std::vector<Pieces> pieces() const;  // one entry a call

 private:
  struct Bound {
    const testing::Call* call;
    std::vector<TensorView> in, out;
  };
  testing::Case case_;
  Device device_;
  double bytes_ = 0, flops_ = 0;
  std::map<std::string, Buffer> tensors_;
  std::vector<Bound> bound_;
  Buffer workspace_;
  std::unique_ptr<BorrowedWorkspace> allocator_;
  Context context_;
};

// What the error figure of a row is.
struct Accuracy {
  double max_relative = 0;   // worst output: max |ours - fp64| / max |fp64|
  double guard_ratio = 0;    // worst output: relative rms / the policy's guard; > 1 is a failure
  std::string worst_output;  // "forward y"
  double zero_rows = 0;      // share of output rows that are all zeros
};
// Inputs and, in double, the outputs that they should give: one entry a call.
struct Expected {
  std::vector<testing::Values> inputs, outputs;
};
Expected expected_of(const testing::Case& problem, const std::vector<std::string>& calls);
Accuracy measure_accuracy(const testing::Case& problem, const std::vector<std::string>& calls,
                          Device device, const Expected& expected);

}  // namespace annulus::bench
