// The backward loop for compute capability 9.0.
#include "annulus/ring_rnn/cuda/backward_epilogue.cuh"
#include "annulus/ring_rnn/cuda/launch.cuh"
#include "annulus/ring_rnn/cuda/sm90/loop.cuh"

namespace annulus::ring_rnn::cuda::tensor {

void run_hopper_backward(const Loop& loop, const char* op, cudaStream_t stream) {
  launch_hopper<Backward<false>>(loop, op, stream);
}

}  // namespace annulus::ring_rnn::cuda::tensor
