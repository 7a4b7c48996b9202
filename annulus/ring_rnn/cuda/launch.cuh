// Host side of the loop kernels: which instance, how many blocks fit, and the two ways to launch.
#pragma once

#include "annulus/cuda/check.h"
#include "annulus/cuda/one_graph.h"
#include "annulus/cuda/persistent.cuh"
#include "annulus/ring_rnn/cuda/tensor.cuh"

namespace annulus::ring_rnn::cuda::tensor {

// All steps in one launch, or two launches a step to the same bits.
template <class Loop>
void launch_loop(void (*kernel)(Loop), Loop loop, const Launch& to) {
  const LaunchSize& s = loop.tiling.launch;
  const char* const op = to.op;
  const auto grid = static_cast<unsigned>(s.grid);
  const auto threads = static_cast<unsigned>(s.threads);
  // Always the most: it is the function's, and another thread may be about to launch it, too.
  allow_shared(op, "shared memory of the ring loop", kernel, s.most_shared_bytes);
  if (loop.together && launch_together(op, "launch of the ring loop", kernel, grid, threads,
                                       s.shared_bytes, to.stream, loop)) {
    return;
  }
  loop.together = false;
  record_as_one_node(op, to.stream, [&](cudaStream_t recorded) {
    const auto launch = [&](std::int64_t first, std::int64_t last, unsigned phases) {
      Loop part = loop;
      part.first = first;
      part.last = last;
      part.phases = phases;
      kernel<<<grid, threads, s.shared_bytes, recorded>>>(part);
      check_launch(op, "launch of a part of the ring loop");
    };
    launch(loop.first, loop.last, kBegin);
    for (std::int64_t step = loop.first; step < loop.last; ++step) {
      const std::int64_t t = loop.time(step);
      launch(t, t + 1, kMultiply);
      launch(t, t + 1, kFinish);
    }
  });
}

}  // namespace annulus::ring_rnn::cuda::tensor
