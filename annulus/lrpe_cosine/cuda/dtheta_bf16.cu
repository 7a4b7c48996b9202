// dtheta_kernel for vectors of bfloat16.

#include "annulus/lrpe_cosine/cuda/dtheta.cuh"

namespace annulus::lrpe_cosine::cuda {
template void launch_partials<bfloat16, kVectorWidth<bfloat16>>(const Plan&, Args, double*, void*);
}  // namespace annulus::lrpe_cosine::cuda
