#include "annulus/core/buffer.h"

#include <cstdlib>
#include <cstring>
#include <string>

#include "annulus/core/errors.h"
#include "annulus/core/scratch.h"
#include "annulus/cuda/memory.h"

namespace annulus {

Buffer::Buffer(Device device, std::size_t bytes) : device_(device), bytes_(bytes) {
  if (bytes == 0) return;
  data_ = device.type == DeviceType::kCUDA
              ? cuda::allocate(bytes, device.index)
              : std::aligned_alloc(ScratchLayout::kAlignment, ScratchLayout::padded(bytes));
  if (data_ == nullptr) {
    throw DeviceError("[buffer] could not allocate " + std::to_string(bytes) + " bytes on " +
                      to_string(device));
  }
}

Buffer::~Buffer() {
  if (data_ == nullptr) return;
  if (device_.type == DeviceType::kCUDA) {
    cuda::free(data_, device_.index);
  } else {
    std::free(data_);
  }
}

void copy_bytes(void* dst, Device dst_device, const void* src, Device src_device,
                std::size_t bytes) {
  if (bytes == 0) return;
  if (dst_device.type == DeviceType::kCPU && src_device.type == DeviceType::kCPU) {
    std::memcpy(dst, src, bytes);
  } else {
    cuda::copy(dst, src, bytes);
  }
}

void synchronize(Device device) {
  if (device.type == DeviceType::kCUDA) cuda::synchronize(device.index);
}

}  // namespace annulus
