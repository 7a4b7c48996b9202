#include "annulus/attention/cuda/sm90/forward_launch.cuh"

namespace annulus::attention::cuda::sm90 {

bool available(const char* op) {
  // What was compiled for other devices has no instructions in it, and so hardly a register. Too few would be waited for.
  cudaFuncAttributes attributes;
  annulus::cuda::throw_on_error(
      cudaFuncGetAttributes(&attributes,
                            reinterpret_cast<const void*>(
                                forward_kernel<ForwardTiling<bfloat16, 64, 2, 128, 5, false>>)),
      op, "cudaFuncGetAttributes");
  return attributes.numRegs >= 168;  // which its warpgroups divide among them
}

template void forward_of<bfloat16>(const char*, const ForwardArgs&, cudaStream_t);

}  // namespace annulus::attention::cuda::sm90
