// walk_kernel and dtheta_kernel for float.

#include "annulus/lrpe_cosine/cuda/dtheta.cuh"
#include "annulus/lrpe_cosine/cuda/walk.cuh"

namespace annulus::lrpe_cosine::cuda {
template void launch_walk<float, kVectorWidth<float>>(const Plan&, Args, cudaStream_t);
template void launch_partials<float, kVectorWidth<float>>(const Plan&, Args, double*, cudaStream_t);
template void launch_walk<float, 1>(const Plan&, Args, cudaStream_t);
template void launch_partials<float, 1>(const Plan&, Args, double*, cudaStream_t);
}  // namespace annulus::lrpe_cosine::cuda
