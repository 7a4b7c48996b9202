// The forward loop for compute capability 9.0.
#include "annulus/ring_rnn/cuda/forward_epilogue.cuh"
#include "annulus/ring_rnn/cuda/sm90/loop.cuh"

namespace annulus::ring_rnn::cuda::tensor {

void run_forward(const ForwardPass& pass, const GridOperands& x, const Sm90Tiling& tiling,
                 const Launch& launch) {
  launch_sm90<Forward>({pass, x, tiling}, launch);
}

}  // namespace annulus::ring_rnn::cuda::tensor
