// dtheta_kernel for float.

#include "annulus/lrpe_cosine/cuda/dtheta.cuh"

namespace annulus::lrpe_cosine::cuda {
template void launch_partials<float, kVectorWidth<float>>(const Plan&, Args, double*, void*);
template void launch_partials<float, 1>(const Plan&, Args, double*, void*);
}  // namespace annulus::lrpe_cosine::cuda
