// The backward loop with s . u_k for compute capability 9.0.
#include "annulus/ring_rnn/cuda/backward_epilogue.cuh"
#include "annulus/ring_rnn/cuda/sm90/loop.cuh"

namespace annulus::ring_rnn::cuda::tensor {

void run_backward_dots(const BackwardPass& pass, const GridOperands& x, const Sm90Tiling& tiling,
                       const Launch& launch) {
  launch_sm90<Backward<true>>({pass, x, tiling}, launch);
}

}  // namespace annulus::ring_rnn::cuda::tensor
