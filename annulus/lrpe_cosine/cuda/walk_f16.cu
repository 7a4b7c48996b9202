// walk_kernel for vectors of float16.

#include "annulus/lrpe_cosine/cuda/walk.cuh"

namespace annulus::lrpe_cosine::cuda {
template void launch_walk<float16, kVectorWidth<float16>>(const Plan&, Args, void*);
}  // namespace annulus::lrpe_cosine::cuda
