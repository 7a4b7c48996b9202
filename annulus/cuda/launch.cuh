// Launches of kernels that follow each other closely: from compute capability 9.0 on the blocks of a kernel may come to the
// device while the last ones of the kernel before it are at work, which saves a launch's latency, 1 to 2 us, of a chain of
// short ones.
#pragma once

#include <cuda_runtime.h>

#include <cstddef>

#include "annulus/cuda/check.h"

namespace annulus::cuda {

// The first thing a kernel does that is launched this way: all that came before it in the stream is done, and seen. The
// next kernel may come then, and wait here itself.
__device__ __forceinline__ void await_previous_kernel() {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.wait; griddepcontrol.launch_dependents;" ::: "memory");
#endif
}

// kernel(args...), which calls await_previous_kernel() before it reads or writes global memory.
template <class... Params, class... Args>
void launch_kernel(const char* op, const char* name, void (*kernel)(Params...), dim3 blocks,
                   int threads, std::size_t shared, cudaStream_t stream, const Args&... args) {
  constexpr std::size_t kAlwaysAllowed = 48 * 1024;
  if (shared > kAlwaysAllowed) allow_shared(op, name, kernel, shared);
  cudaLaunchAttribute early{};
  early.id = cudaLaunchAttributeProgrammaticStreamSerialization;
  early.val.programmaticStreamSerializationAllowed = 1;
  int device = 0, major = 0;
  throw_on_error(cudaGetDevice(&device), op, name);
  throw_on_error(cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, device), op,
                 name);
  cudaLaunchConfig_t config{};
  config.gridDim = blocks;
  config.blockDim = dim3(static_cast<unsigned>(threads));
  config.dynamicSmemBytes = shared;
  config.stream = stream;
  config.attrs = &early;
  config.numAttrs = major >= 9 ? 1 : 0;
  throw_on_error(cudaLaunchKernelEx(&config, kernel, static_cast<Params>(args)...), op, name);
}

}  // namespace annulus::cuda
