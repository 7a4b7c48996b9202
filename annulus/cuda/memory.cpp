#include "annulus/cuda/memory.h"

#include "annulus/core/errors.h"

#if ANNULUS_HAVE_CUDA

#include <cuda_runtime_api.h>

#include "annulus/cuda/check.h"

namespace annulus::cuda {

namespace {

// By get(&p). Out of memory is an answer, not a fault: the sticky error is cleared and nullptr returned.
template <class Get>
void* allocate_by(Get&& get, const char* what, int device) {
  const DeviceGuard guard(device);
  void* p = nullptr;
  const cudaError_t error = get(&p);
  if (error == cudaErrorMemoryAllocation) {
    (void)cudaGetLastError();
    return nullptr;
  }
  throw_on_error(error, "memory", what);
  return p;
}

}  // namespace

bool built() { return true; }

int device_count() {
  int n = 0;
  if (cudaGetDeviceCount(&n) == cudaSuccess) return n;
  (void)cudaGetLastError();
  return 0;
}

std::string why_unavailable() {
  int n = 0;
  const cudaError_t error = cudaGetDeviceCount(&n);
  if (error != cudaSuccess) {
    (void)cudaGetLastError();
    return cudaGetErrorString(error);
  }
  return n == 0 ? "no CUDA device" : "";
}

DeviceInfo device_info(int device) {
  cudaDeviceProp p;
  throw_on_error(cudaGetDeviceProperties(&p, device), "memory", "cudaGetDeviceProperties");
  DeviceInfo info;
  info.name = p.name;
  info.major = p.major;
  info.minor = p.minor;
  info.multiprocessors = p.multiProcessorCount;
  info.total_bytes = p.totalGlobalMem;
  info.l2_bytes = static_cast<std::size_t>(p.l2CacheSize);
  throw_on_error(cudaDriverGetVersion(&info.driver_version), "memory", "cudaDriverGetVersion");
  throw_on_error(cudaRuntimeGetVersion(&info.runtime_version), "memory", "cudaRuntimeGetVersion");
  return info;
}

std::size_t free_bytes(int device) {
  const DeviceGuard guard(device);
  std::size_t free = 0;
  std::size_t total = 0;
  throw_on_error(cudaMemGetInfo(&free, &total), "memory", "cudaMemGetInfo");
  return free;
}

void* allocate(std::size_t bytes, int device) {
  return allocate_by([&](void** p) { return cudaMalloc(p, bytes); }, "cudaMalloc", device);
}

void free(void* p, int device) noexcept {
  int current = 0;
  if (cudaGetDevice(&current) == cudaSuccess && cudaSetDevice(device) == cudaSuccess) {
    (void)cudaFree(p);
    (void)cudaSetDevice(current);
  }
}

void* allocate_async(std::size_t bytes, int device, void* stream) {
  const auto get = [&](void** p) {
    return cudaMallocAsync(p, bytes, static_cast<cudaStream_t>(stream));
  };
  return allocate_by(get, "cudaMallocAsync", device);
}

void free_async(void* p, int device, void* stream) noexcept {
  int current = 0;  // the default stream is that of the current device
  if (cudaGetDevice(&current) == cudaSuccess && cudaSetDevice(device) == cudaSuccess) {
    (void)cudaFreeAsync(p, static_cast<cudaStream_t>(stream));
    (void)cudaSetDevice(current);
  }
}

void copy(void* dst, const void* src, std::size_t bytes) {
  throw_on_error(cudaMemcpy(dst, src, bytes, cudaMemcpyDefault), "memory", "cudaMemcpy");
  // From pageable memory cudaMemcpy returns when the bytes are staged, not when they have arrived, and a
  // non-blocking stream does not wait for the default one: without this a kernel there may read old bytes.
  throw_on_error(cudaStreamSynchronize(cudaStreamLegacy), "memory", "cudaStreamSynchronize");
}

void synchronize(int device) {
  const DeviceGuard guard(device);
  throw_on_error(cudaDeviceSynchronize(), "memory", "cudaDeviceSynchronize");
}

}  // namespace annulus::cuda

#else

namespace annulus::cuda {

namespace {
[[noreturn]] void not_built() {
  throw NotSupported("[memory] device must be cpu: this build has no CUDA backend");
}
}  // namespace

bool built() { return false; }
int device_count() { return 0; }
std::string why_unavailable() { return "this build has no CUDA backend (ANNULUS_CUDA=OFF)"; }
DeviceInfo device_info(int) { not_built(); }
std::size_t free_bytes(int) { not_built(); }
void* allocate(std::size_t, int) { not_built(); }
void free(void*, int) noexcept {}
void* allocate_async(std::size_t, int, void*) { not_built(); }
void free_async(void*, int, void*) noexcept {}
void copy(void*, const void*, std::size_t) { not_built(); }
void synchronize(int) { not_built(); }

}  // namespace annulus::cuda

#endif
