// walk_kernel and dtheta_kernel for vectors of float16.

#include "annulus/lrpe_cosine/cuda/dtheta.cuh"
#include "annulus/lrpe_cosine/cuda/walk.cuh"

namespace annulus::lrpe_cosine::cuda {
template void launch_walk<float16, kVectorWidth<float16>>(const Plan&, Args, cudaStream_t);
template void launch_partials<float16, kVectorWidth<float16>>(const Plan&, Args, double*,
                                                              cudaStream_t);
}  // namespace annulus::lrpe_cosine::cuda
