// The backward loop with s . u_k for compute capability 8.0 and above.
#include "annulus/ring_rnn/cuda/backward_epilogue.cuh"
#include "annulus/ring_rnn/cuda/sm80/loop.cuh"

namespace annulus::ring_rnn::cuda::tensor {
template void run_loop(const Sm80Loop<Backward<true>>&, const Launch&);
}  // namespace annulus::ring_rnn::cuda::tensor
