// The loop of the general backward for 16-bit tensors. (All types in one file took a minute to compile.)
#include "annulus/ring_rnn/cuda/simt/backward_loop.cuh"

namespace annulus::ring_rnn::cuda::general {
template void launch_backward_loop<float16>(const Plan&, const Args&, const BackwardScratch<float>&,
                                            unsigned*, cudaStream_t);
template void launch_backward_loop<bfloat16>(const Plan&, const Args&,
                                             const BackwardScratch<float>&, unsigned*,
                                             cudaStream_t);
}  // namespace annulus::ring_rnn::cuda::general
