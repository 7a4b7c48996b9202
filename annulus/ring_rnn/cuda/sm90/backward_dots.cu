// The backward loop with s . u_k for compute capability 9.0.
#include "annulus/ring_rnn/cuda/backward_epilogue.cuh"
#include "annulus/ring_rnn/cuda/sm90/loop.cuh"

namespace annulus::ring_rnn::cuda::tensor {
template void run_loop(const Sm90Loop<Backward<true>>&, const Launch&);
}  // namespace annulus::ring_rnn::cuda::tensor
