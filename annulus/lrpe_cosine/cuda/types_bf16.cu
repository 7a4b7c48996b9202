// walk_kernel and dtheta_kernel for vectors of bfloat16.

#include "annulus/lrpe_cosine/cuda/dtheta.cuh"
#include "annulus/lrpe_cosine/cuda/walk.cuh"

namespace annulus::lrpe_cosine::cuda {
template void launch_walk<bfloat16, kVectorWidth<bfloat16>>(const Plan&, Args, cudaStream_t);
template void launch_partials<bfloat16, kVectorWidth<bfloat16>>(const Plan&, Args, double*,
                                                                cudaStream_t);
}  // namespace annulus::lrpe_cosine::cuda
