#include "annulus/attention/cuda/sm80/forward.cuh"

namespace annulus::attention::cuda {

template void forward_of<bfloat16>(const char*, const ForwardArgs&, cudaStream_t);

}  // namespace annulus::attention::cuda
