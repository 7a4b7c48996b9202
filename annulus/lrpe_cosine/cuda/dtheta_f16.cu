// dtheta_kernel for vectors of float16.

#include "annulus/lrpe_cosine/cuda/dtheta.cuh"

namespace annulus::lrpe_cosine::cuda {
template void launch_partials<float16, kVectorWidth<float16>>(const Plan&, Args, double*, void*);
}  // namespace annulus::lrpe_cosine::cuda
