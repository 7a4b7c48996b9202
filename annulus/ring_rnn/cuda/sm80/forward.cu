// The forward loop for compute capability 8.0 and above.
#include "annulus/ring_rnn/cuda/forward_epilogue.cuh"
#include "annulus/ring_rnn/cuda/launch.cuh"
#include "annulus/ring_rnn/cuda/sm80/loop.cuh"

namespace annulus::ring_rnn::cuda::tensor {

void run_portable_forward(const Loop& loop, const char* op, cudaStream_t stream) {
  with_terms(loop.shape.terms,
             [&]<int Terms>() { launch_loop(portable_kernel<Terms, Forward>, loop, op, stream); });
}

}  // namespace annulus::ring_rnn::cuda::tensor
