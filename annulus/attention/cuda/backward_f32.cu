#include "annulus/attention/cuda/key_gradient.cuh"
#include "annulus/attention/cuda/query_gradient.cuh"

namespace annulus::attention::cuda {

template void query_gradient_of<float>(const char*, const QueryGradientArgs&, cudaStream_t);
template void key_gradient_of<float>(const char*, const KeyGradientArgs&, cudaStream_t);

}  // namespace annulus::attention::cuda
