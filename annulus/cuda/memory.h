// The CUDA runtime calls that C++ files need, behind plain types, so that only files under cuda/
// and
// *_cuda.cu see CUDA headers. In a build without CUDA every one of them throws NotSupported.
#pragma once

#include <cstddef>
#include <string>

namespace annulus::cuda {

struct DeviceInfo {
  std::string name;
  int major = 0;
  int minor = 0;
  int multiprocessors = 0;
  std::size_t total_bytes = 0;
  std::size_t l2_bytes = 0;
  int driver_version = 0;
  int runtime_version = 0;
};

bool built();                   // this library was compiled with CUDA
int device_count();             // 0 without CUDA, without a driver, or without a device
std::string why_unavailable();  // empty when device 0 can be used
DeviceInfo device_info(int device);
std::size_t free_bytes(int device);

void* allocate(std::size_t bytes, int device);  // nullptr when out of memory
void free(void* p, int device) noexcept;
void* allocate_async(std::size_t bytes, int device, void* stream);  // likewise
void free_async(void* p, int device, void* stream) noexcept;
void copy(void* dst, const void* src, std::size_t bytes);
void synchronize(int device);

}  // namespace annulus::cuda
