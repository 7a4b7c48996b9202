#include "annulus/attention/cuda/forward.cuh"

namespace annulus::attention::cuda {

template void forward_of<float16>(const char*, const ForwardArgs&, cudaStream_t);

}  // namespace annulus::attention::cuda
