// The backward loop for compute capability 8.0 and above.
#include "annulus/ring_rnn/cuda/backward_epilogue.cuh"
#include "annulus/ring_rnn/cuda/launch.cuh"
#include "annulus/ring_rnn/cuda/sm80/loop.cuh"

namespace annulus::ring_rnn::cuda::tensor {

void run_backward(const BackwardPass& pass, const GridOperands& x, const Sm80Tiling& tiling,
                  const Launch& launch) {
  with_terms(pass.layout.terms, [&]<int Terms>() {
    if (pass.dots != nullptr) {
      launch_loop(sm80_kernel<Terms, Backward<true>>, {pass, x, tiling}, launch);
    } else {
      launch_loop(sm80_kernel<Terms, Backward<false>>, {pass, x, tiling}, launch);
    }
  });
}

}  // namespace annulus::ring_rnn::cuda::tensor
