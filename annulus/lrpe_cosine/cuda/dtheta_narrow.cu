// dtheta_kernel for 16 bits a column at a time, and double.

#include "annulus/lrpe_cosine/cuda/dtheta.cuh"

namespace annulus::lrpe_cosine::cuda {
template void launch_partials<float16, 1>(const Plan&, Args, double*, cudaStream_t);
template void launch_partials<bfloat16, 1>(const Plan&, Args, double*, cudaStream_t);
template void launch_partials<double, 1>(const Plan&, Args, double*, cudaStream_t);
}  // namespace annulus::lrpe_cosine::cuda
