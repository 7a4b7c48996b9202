// CUDA errors become DeviceError at the call that saw them. Only for files compiled with CUDA.
#pragma once

#include <cuda_runtime_api.h>

#include <string>

#include "annulus/core/errors.h"

namespace annulus::cuda {

inline void throw_on_error(cudaError_t error, const char* op, const char* what) {
  if (error == cudaSuccess) return;
  (void)cudaGetLastError();  // clear it, so that the next call starts clean where the device allows
                             // it
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

}  // namespace annulus::cuda
