// What the benchmark needs of CUDA beyond the library: event timing with a cold L2, kernels that
// only move bytes, and ceilings. In a build without CUDA every function throws NotSupported.
#pragma once

#include <cstddef>
#include <functional>
#include <memory>
#include <vector>

#include "bench/ceilings.h"

namespace annulus::bench::gpu {

// Times launches with events, as triton.testing.do_bench does: before every repetition 256 MiB are
// written, which no L2 survives, then event, launch, event; nothing waits until the end.
class ColdTimer {
 public:
  ColdTimer();
  ~ColdTimer();
  ColdTimer(const ColdTimer&) = delete;
  ColdTimer& operator=(const ColdTimer&) = delete;
  // Runs the implementations in turn, `repetitions` times; one list of milliseconds each.
  std::vector<std::vector<double>> time(const std::vector<std::function<void()>>& implementations,
                                        int repetitions);

 private:
  struct State;
  std::unique_ptr<State> state_;
};

// Reads `in` streams and writes `out` streams of `bytes` each: every output vector is the exclusive
// or of all input vectors. One 16-byte vector a thread, 256 threads a block, a grid as large as the
// data (a persistent grid is 5-7 % slower on an H200). False when there is no kernel for the two
// counts.
bool can_move(std::size_t in, std::size_t out);
void move(const std::vector<const void*>& in, const std::vector<void*>& out, std::size_t bytes);

// A copy kernel, an empty launch, barriers, and cuBLAS's GEMM of 8192^3 (4096^3 in fp32).
Ceilings ceilings();

}  // namespace annulus::bench::gpu
