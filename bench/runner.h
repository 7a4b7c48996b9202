// Measures a row: all implementations in turn (A, B, A, B, ...) with cold caches, the error against
// fp64, the floor, the memory.
#pragma once

#include <cstddef>
#include <functional>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "annulus/core/buffer.h"
#include "annulus/core/device.h"
#include "bench/ceilings.h"
#include "bench/gpu.h"
#include "bench/problem.h"
#include "bench/record.h"
#include "bench/suite.h"

namespace annulus::bench {

struct RunnerOptions {
  Device device = kCPU;
  int repetitions = 0;   // 0: as many as fit in `seconds`, at least 7
  double seconds = 0.8;  // a row, all implementations together
  std::string hardware;  // filled by the constructor when empty
  // Rows run over these processes, each of which has a runner and measures the same rows: times are the slowest rank's.
  Communicator* group = nullptr;
};

// The largest of each value over the ranks; the values themselves where there is no group.
void largest_of_ranks(Communicator* group, std::span<double> values);

// Memory this process may still take on the device.
std::size_t available_bytes(Device device);
// "Neoverse-V1, 2 cores" or "NVIDIA H200".
std::string hardware_name(Device device);
// Now, as 2025-11-15T13:37:00Z.
std::string iso_date();

class Runner {
 public:
  explicit Runner(const RunnerOptions& options);  // measures the ceilings

  // One record an implementation, and one more where the row states a memory figure. What cannot
  // run comes back as a skipped record with the reason; what throws, as a failed one, but over a group, whose other ranks wait.
  std::vector<Record> measure(const std::string& suite, const Row& row);

  const Ceilings& ceilings() const { return ceilings_; }
  const std::string& hardware() const { return options_.hardware; }

 private:
  // Milliseconds of every repetition, one list an implementation.
  using Runs = std::vector<std::function<void()>>;
  std::vector<std::vector<double>> time(const Runs& runs);
  std::vector<std::vector<double>> time_on_host(const Runs& runs);
  std::vector<Record> measure_or_throw(const Row& row, const Record& blank);
  int repetitions_for(double one_round_ms) const;

  RunnerOptions options_;
  Ceilings ceilings_;
  Expected expected_;                     // of the last row, and
  std::string expected_for_;              // which rows share it
  Buffer sweep_;                          // CPU: read between repetitions
  std::unique_ptr<gpu::ColdTimer> cuda_;  // CUDA
};

}  // namespace annulus::bench
