// walk_kernel for 16 bits a column at a time, and double.

#include "annulus/lrpe_cosine/cuda/walk.cuh"

namespace annulus::lrpe_cosine::cuda {
template void launch_walk<float16, 1>(const Plan&, Args, cudaStream_t);
template void launch_walk<bfloat16, 1>(const Plan&, Args, cudaStream_t);
template void launch_walk<double, 1>(const Plan&, Args, cudaStream_t);
}  // namespace annulus::lrpe_cosine::cuda
