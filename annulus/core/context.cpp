#include "annulus/core/context.h"

#include <algorithm>
#include <cstdlib>
#include <string>

#include "annulus/core/errors.h"
#include "annulus/core/scratch.h"
#include "annulus/cuda/memory.h"

namespace annulus {

namespace {

class DefaultAllocator final : public Allocator {
 public:
  void* allocate(std::size_t bytes, Device device, void* stream) override {
    if (device.type == DeviceType::kCUDA) return cuda::allocate_async(bytes, device.index, stream);
    return std::aligned_alloc(ScratchLayout::kAlignment, ScratchLayout::padded(bytes));
  }
  void deallocate(void* p, std::size_t, Device device, void* stream) noexcept override {
    if (device.type == DeviceType::kCUDA) {
      cuda::free_async(p, device.index, stream);
    } else {
      std::free(p);
    }
  }
};

}  // namespace

Allocator& default_allocator() {
  static DefaultAllocator allocator;
  return allocator;
}

void* BorrowedWorkspace::allocate(std::size_t bytes, Device, void*) {
  if (in_use_ || bytes > bytes_) return nullptr;
  in_use_ = true;
  return data_;
}

void BorrowedWorkspace::deallocate(void*, std::size_t, Device, void*) noexcept { in_use_ = false; }

Workspace::Workspace(Context& context, const char* op, Device device, std::size_t bytes)
    : context_(context), device_(device), bytes_(bytes) {
  if (bytes == 0) return;
  Allocator& allocator = context.allocator ? *context.allocator : default_allocator();
  data_ = allocator.allocate(bytes, device, context.stream);
  if (data_ == nullptr) {
    throw DeviceError("[" + std::string(op) + "] could not allocate " + std::to_string(bytes) +
                      " bytes of workspace on " + to_string(device));
  }
  context.workspace_bytes += bytes;
  context.workspace_peak = std::max(context.workspace_peak, context.workspace_bytes);
}

Workspace::~Workspace() {
  if (data_ == nullptr) return;
  Allocator& allocator = context_.allocator ? *context_.allocator : default_allocator();
  allocator.deallocate(data_, bytes_, device_, context_.stream);
  context_.workspace_bytes -= bytes_;
}

}  // namespace annulus
