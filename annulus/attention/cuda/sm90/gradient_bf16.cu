#include "annulus/attention/cuda/sm90/gradient.cuh"

namespace annulus::attention::cuda::sm90 {

template void gradient_of<bfloat16>(const char*, const GradientArgs&, cudaStream_t);

}  // namespace annulus::attention::cuda::sm90
