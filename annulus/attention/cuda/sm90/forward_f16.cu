#include "annulus/attention/cuda/sm90/forward_launch.cuh"

namespace annulus::attention::cuda::sm90 {

template void forward_of<float16>(const char*, const ForwardArgs&, cudaStream_t);

}  // namespace annulus::attention::cuda::sm90
