#include "annulus/attention/cuda/sm80/gradient.cuh"

namespace annulus::attention::cuda {

template void gradient_of<bfloat16, 128>(const char*, const GradientArgs&, cudaStream_t);

}  // namespace annulus::attention::cuda
