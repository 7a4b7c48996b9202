// The backward loop for compute capability 8.0 and above.
#include "annulus/ring_rnn/cuda/backward_epilogue.cuh"
#include "annulus/ring_rnn/cuda/launch.cuh"
#include "annulus/ring_rnn/cuda/sm80/loop.cuh"

namespace annulus::ring_rnn::cuda::tensor {

void run_portable_backward(const Loop& loop, bool dots, const char* op, cudaStream_t stream) {
  with_terms(loop.shape.terms, [&]<int Terms>() {
    if (dots) {
      launch_loop(portable_kernel<Terms, Backward<true>>, loop, op, stream);
    } else {
      launch_loop(portable_kernel<Terms, Backward<false>>, loop, op, stream);
    }
  });
}

}  // namespace annulus::ring_rnn::cuda::tensor
