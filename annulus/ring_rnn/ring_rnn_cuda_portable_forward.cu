// The forward loop for compute capability 8.0 and above.
#include "annulus/ring_rnn/ring_rnn_cuda_forward.cuh"
#include "annulus/ring_rnn/ring_rnn_cuda_launch.cuh"
#include "annulus/ring_rnn/ring_rnn_cuda_portable.cuh"

namespace annulus::ring::cuda::tensor {

void run_portable_forward(const Loop& loop, const char* op, cudaStream_t stream) {
  with_terms(loop.shape.terms,
             [&]<int Terms>() { launch_loop(portable_kernel<Terms, Forward>, loop, op, stream); });
}

}  // namespace annulus::ring::cuda::tensor
