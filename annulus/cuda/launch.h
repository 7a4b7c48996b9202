// Launches and what must be known before one: whether this GPU has code for a kernel at all.
#pragma once

#include <cuda_runtime_api.h>

#include <string>

#include "annulus/core/info.h"
#include "annulus/cuda/check.h"

namespace annulus::cuda {

// After every <<<>>>: a bad launch configuration shows here, at the operator that made it.
inline void check_launch(const char* op, const char* kernel) {
  throw_on_error(cudaPeekAtLastError(), op, kernel);
}

// Can the current device run this kernel? Loading it is what fails on a GPU the library has neither
// machine code nor PTX for, so that is what is asked.
template <class Kernel>
Support kernel_support(Kernel* kernel, const std::string& architectures) {
  int device = 0;
  cudaError_t error = cudaGetDevice(&device);
  cudaFuncAttributes attributes;
  if (error == cudaSuccess)
    error = cudaFuncGetAttributes(&attributes, reinterpret_cast<const void*>(kernel));
  if (error != cudaSuccess) {
    (void)cudaGetLastError();
    return {false, std::string(cudaGetErrorString(error)) + " (built for " + architectures + ")"};
  }
  return {true, "compute " + std::to_string(attributes.binaryVersion / 10) + "." +
                    std::to_string(attributes.binaryVersion % 10)};
}

}  // namespace annulus::cuda
