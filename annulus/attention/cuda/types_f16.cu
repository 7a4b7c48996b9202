#include "annulus/attention/cuda/types.cuh"

namespace annulus::attention::cuda {

template void forward_of<float16>(const char*, const ForwardArgs&, cudaStream_t);
template void query_gradient_of<float16>(const char*, const QueryGradientArgs&, cudaStream_t);
template void key_gradient_of<float16>(const char*, const KeyGradientArgs&, cudaStream_t);

}  // namespace annulus::attention::cuda
