#include "annulus/attention/cuda/sm80/query_gradient.cuh"

namespace annulus::attention::cuda {

template void query_gradient_of<float>(const char*, const QueryGradientArgs&, cudaStream_t);

}  // namespace annulus::attention::cuda
