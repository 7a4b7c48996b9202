// CUDA errors become DeviceError at the call that saw them; launches, and what must be known before one. Only for
// files compiled with CUDA.
#pragma once

#include <cuda_runtime_api.h>

#include <cstddef>
#include <string>

#include "annulus/core/errors.h"
#include "annulus/core/info.h"

namespace annulus::cuda {

inline void throw_on_error(cudaError_t error, const char* op, const char* what) {
  if (error == cudaSuccess) return;
  (void)cudaGetLastError();  // cleared, so that the next call starts clean where the device allows
  // Appended, not "[" + ...: GCC 12 sees overlapping copies in that (its bug 105651).
  std::string message(1, '[');
  message.append(op).append("] ").append(what).append(" failed: ");
  message.append(cudaGetErrorName(error)).append(", ").append(cudaGetErrorString(error));
  throw DeviceError(message);
}

// Names the call in the message: ANNULUS_CUDA_CHECK("lrpe_cosine", cudaMemsetAsync(...)).
#define ANNULUS_CUDA_CHECK(op, call) ::annulus::cuda::throw_on_error((call), (op), #call)

// The current device for the length of a scope.
class DeviceGuard {
 public:
  explicit DeviceGuard(int device) {
    throw_on_error(cudaGetDevice(&previous_), "device", "cudaGetDevice");
    if (device != previous_) {
      throw_on_error(cudaSetDevice(device), "device", "cudaSetDevice");
      changed_ = true;
    }
  }
  ~DeviceGuard() {
    if (changed_) (void)cudaSetDevice(previous_);
  }
  DeviceGuard(const DeviceGuard&) = delete;
  DeviceGuard& operator=(const DeviceGuard&) = delete;

 private:
  int previous_ = 0;
  bool changed_ = false;
};

// After every <<<>>>: a bad launch configuration shows here, at the operator that made it.
inline void check_launch(const char* op, const char* kernel) {
  throw_on_error(cudaPeekAtLastError(), op, kernel);
}

// Can the current device run this kernel? Loading it is what fails on a GPU the library has neither
// machine code nor PTX for, so that is what is asked.
template <class Kernel>
Support kernel_support(Kernel* kernel, const std::string& architectures) {
  cudaFuncAttributes attributes;
  const cudaError_t error =
      cudaFuncGetAttributes(&attributes, reinterpret_cast<const void*>(kernel));
  if (error != cudaSuccess) {
    (void)cudaGetLastError();
    return {false, std::string(cudaGetErrorString(error)) + " (built for " + architectures + ")"};
  }
  return {true, "compute " + std::to_string(attributes.binaryVersion / 10) + "." +
                    std::to_string(attributes.binaryVersion % 10)};
}

// Before a launch that may have more than 48 KB of dynamic shared memory.
template <class Kernel>
void allow_shared(const char* op, const char* what, Kernel* kernel, std::size_t bytes) {
  throw_on_error(
      cudaFuncSetAttribute(reinterpret_cast<const void*>(kernel),
                           cudaFuncAttributeMaxDynamicSharedMemorySize, static_cast<int>(bytes)),
      op, what);
}

}  // namespace annulus::cuda
