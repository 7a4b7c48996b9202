// Host side of the loop kernels: which instance, how many blocks fit, and the two ways to launch.
#pragma once

#include <cuda_runtime.h>

#include "annulus/cuda/check.h"
#include "annulus/cuda/launch.h"
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
  annulus::cuda::throw_on_error(
      cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize,
                           static_cast<int>(s.most_shared_bytes)),  // whoever else may launch it
      op, "shared memory of the ring loop");
  if (loop.together && annulus::cuda::launch_together(op, "launch of the ring loop", kernel, grid,
                                                      threads, s.shared_bytes, to.stream, loop)) {
    return;
  }
  loop.together = false;
  annulus::cuda::record_as_one_node(op, to.stream, [&](cudaStream_t recorded) {
    const auto launch = [&](std::int64_t first, std::int64_t last, unsigned phases) {
      Loop part = loop;
      part.first = first;
      part.last = last;
      part.phases = phases;
      kernel<<<grid, threads, s.shared_bytes, recorded>>>(part);
      annulus::cuda::check_launch(op, "launch of a part of the ring loop");
    };
    launch(loop.first, loop.last, kBegin);
    for (std::int64_t i = 0; i < loop.last - loop.first; ++i) {
      const std::int64_t t = Loop::kBackward ? loop.last - 1 - i : loop.first + i;
      launch(t, t + 1, kMultiply);
      launch(t, t + 1, kFinish);
    }
  });
}

}  // namespace annulus::ring_rnn::cuda::tensor
