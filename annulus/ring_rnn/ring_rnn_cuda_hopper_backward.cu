// The backward loop for compute capability 9.0.
#include "annulus/ring_rnn/ring_rnn_cuda_backward.cuh"
#include "annulus/ring_rnn/ring_rnn_cuda_hopper.cuh"
#include "annulus/ring_rnn/ring_rnn_cuda_launch.cuh"

namespace annulus::ring::cuda::tensor {

void run_hopper_backward(const Loop& loop, const char* op, cudaStream_t stream) {
  launch_hopper<Backward<false>>(loop, op, stream);
}

}  // namespace annulus::ring::cuda::tensor
