// The loop of the general backward for f64 and f32 tensors. (All types in one file took a minute to compile.)
#include "annulus/ring_rnn/cuda/simt/backward_loop.cuh"

namespace annulus::ring_rnn::cuda::general {
template void launch_backward_loop<double>(const Plan&, const Args&, const BackwardScratch<double>&,
                                           unsigned*, cudaStream_t);
template void launch_backward_loop<float>(const Plan&, const Args&, const BackwardScratch<float>&,
                                          unsigned*, cudaStream_t);
}  // namespace annulus::ring_rnn::cuda::general
