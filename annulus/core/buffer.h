// Buffer: owning memory on either device, for programs that have no allocator of their own (the
// examples, the tests, the command line). The operators never use it.
#pragma once

#include <cstddef>
#include <cstdint>
#include <utility>

#include "annulus/core/device.h"
#include "annulus/core/macros.h"

namespace annulus {

class ANNULUS_API Buffer {
 public:
  Buffer() = default;
  Buffer(Device device, std::size_t bytes);  // throws DeviceError when there is no room
  ~Buffer();
  Buffer(Buffer&& other) noexcept { *this = std::move(other); }
  Buffer& operator=(Buffer&& other) noexcept {
    std::swap(device_, other.device_);
    std::swap(bytes_, other.bytes_);
    std::swap(data_, other.data_);
    return *this;
  }

  void* data() const { return data_; }
  std::size_t bytes() const { return bytes_; }
  Device device() const { return device_; }

 private:
  Device device_ = kCPU;
  std::size_t bytes_ = 0;
  void* data_ = nullptr;
};

// Copies between any two devices; returns when the copy is done.
ANNULUS_API void copy_bytes(void* dst, Device dst_device, const void* src, Device src_device,
                            std::size_t bytes);
// Waits until all work on the device is done (a no-op on the CPU).
ANNULUS_API void synchronize(Device device);

}  // namespace annulus
