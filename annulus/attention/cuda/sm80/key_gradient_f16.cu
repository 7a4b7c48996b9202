#include "annulus/attention/cuda/sm80/key_gradient.cuh"

namespace annulus::attention::cuda {

template void key_gradient_of<float16>(const char*, const KeyGradientArgs&, cudaStream_t);

}  // namespace annulus::attention::cuda
