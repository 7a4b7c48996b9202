// The forward loop for compute capability 9.0.
#include "annulus/ring_rnn/cuda/forward_epilogue.cuh"
#include "annulus/ring_rnn/cuda/sm90/loop.cuh"

namespace annulus::ring_rnn::cuda::tensor {
template void run_loop(const Sm90Loop<Forward>&, const Launch&);
}  // namespace annulus::ring_rnn::cuda::tensor
