// The forward loop for compute capability 8.0 and above.
#include "annulus/ring_rnn/cuda/forward_epilogue.cuh"
#include "annulus/ring_rnn/cuda/sm80/loop.cuh"

namespace annulus::ring_rnn::cuda::tensor {

void run_forward(const ForwardPass& pass, const GridOperands& x, const Sm80Tiling& tiling,
                 const Launch& launch) {
  launch_sm80<Forward>({pass, x, tiling}, launch);
}

}  // namespace annulus::ring_rnn::cuda::tensor
