// The backward loop with s . u_k for compute capability 8.0 and above.
#include "annulus/ring_rnn/cuda/backward_epilogue.cuh"
#include "annulus/ring_rnn/cuda/sm80/loop.cuh"

namespace annulus::ring_rnn::cuda::tensor {

void run_backward_dots(const BackwardPass& pass, const GridOperands& x, const Sm80Tiling& tiling,
                       const Launch& launch) {
  launch_sm80<Backward<true>>({pass, x, tiling}, launch);
}

}  // namespace annulus::ring_rnn::cuda::tensor
