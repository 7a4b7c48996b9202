// walk_kernel for float.

#include "annulus/lrpe_cosine/cuda/walk.cuh"

namespace annulus::lrpe_cosine::cuda {
template void launch_walk<float, kVectorWidth<float>>(const Plan&, Args, void*);
template void launch_walk<float, 1>(const Plan&, Args, void*);
}  // namespace annulus::lrpe_cosine::cuda
