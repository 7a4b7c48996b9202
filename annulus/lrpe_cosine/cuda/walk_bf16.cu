// walk_kernel for vectors of bfloat16.

#include "annulus/lrpe_cosine/cuda/walk.cuh"

namespace annulus::lrpe_cosine::cuda {
template void launch_walk<bfloat16, kVectorWidth<bfloat16>>(const Plan&, Args, void*);
}  // namespace annulus::lrpe_cosine::cuda
