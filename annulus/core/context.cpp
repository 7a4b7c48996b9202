#include "annulus/core/context.h"

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <map>
#include <mutex>
#include <string>

#include "annulus/core/buffer.h"
#include "annulus/core/errors.h"
#include "annulus/core/scratch.h"
#include "annulus/cuda/memory.h"

namespace annulus {

namespace {

void* allocate_on_cpu(std::size_t bytes) {
  return std::aligned_alloc(ScratchLayout::kAlignment, ScratchLayout::padded(bytes));
}

class DefaultAllocator final : public Allocator {
 public:
  void* allocate(std::size_t bytes, Device device, void* stream) override {
    return device.type == DeviceType::kCUDA ? cuda::allocate_async(bytes, device.index, stream)
                                            : allocate_on_cpu(bytes);
  }
  void deallocate(void* p, std::size_t, Device device, void* stream) noexcept override {
    if (device.type == DeviceType::kCPU) return std::free(p);
    cuda::free_async(p, device.index, stream);
  }
};

Allocator& allocator_of(const Context& context) {
  return context.allocator ? *context.allocator : default_allocator();
}

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

std::string Context::Backend::text() const {
  return std::string(device == DeviceType::kCPU ? "cpu, " : "cuda, ") + how;
}

std::string Context::last_backend(std::string_view op) const {
  for (const Backend& b : backends) {
    if (b.op == op) return b.text();
  }
  return {};
}

namespace {

// A line wherever an operator runs on something else than before, whatever the Context.
void log_change(const Context::Backend& b) {
  static const bool asked = [] {
    const char* text = std::getenv("ANNULUS_LOG");
    return text != nullptr && std::string_view(text) == "1";
  }();
  if (!asked) return;
  static std::mutex mutex;
  static auto& last = *new std::map<std::string, std::string>;  // threads may outlive main
  const std::lock_guard lock(mutex);
  std::string& before = last[b.op];
  if (before == b.text()) return;
  before = b.text();
  std::fprintf(stderr, "annulus: %s runs on %s\n", b.op, before.c_str());
}

}  // namespace

void Context::ran_on(const char* op, DeviceType device, const char* how) {
  const Backend now{op, device, how};
  const auto same_op = [&](const Backend& b) { return std::string_view(b.op) == op; };
  const auto found = std::find_if(backends.begin(), backends.end(), same_op);
  (found == backends.end() ? backends.emplace_back() : *found) = now;
  log_change(now);
}

Workspace::Workspace(Context& context, const char* op, Device device, std::size_t bytes)
    : context_(context), device_(device), bytes_(bytes) {
  if (bytes == 0) return;
  data_ = allocator_of(context).allocate(bytes, device, context.stream);
  if (data_ == nullptr) {
    throw DeviceError("[" + std::string(op) + "] could not allocate " + std::to_string(bytes) +
                      " bytes of workspace on " + to_string(device));
  }
  context.workspace_bytes += bytes;
  context.workspace_peak = std::max(context.workspace_peak, context.workspace_bytes);
}

std::byte* Workspace::data() const {
  const auto address = reinterpret_cast<std::uintptr_t>(data_);
  return static_cast<std::byte*>(data_) + (ScratchLayout::padded(address) - address);
}

Workspace::~Workspace() {
  if (data_ == nullptr) return;
  allocator_of(context_).deallocate(data_, bytes_, device_, context_.stream);
  context_.workspace_bytes -= bytes_;
}

Buffer::Buffer(Device device, std::size_t bytes) : device_(device), bytes_(bytes) {
  if (bytes == 0) return;
  data_ = device.type == DeviceType::kCUDA ? cuda::allocate(bytes, device.index)
                                           : allocate_on_cpu(bytes);
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
