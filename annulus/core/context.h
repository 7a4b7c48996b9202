// Context: everything a call needs that is not a tensor or an option. It is passed by reference and
// never global: the CUDA stream, the number of CPU threads, the determinism flag and the allocator
// for scratch. One Context belongs to one thread at a time; two threads use two.
#pragma once

#include <cstddef>
#include <cstdint>

#include "annulus/core/device.h"
#include "annulus/core/macros.h"

namespace annulus {

// Where scratch memory comes from. allocate returns memory aligned to 256 bytes, or nullptr when
// there is none; it may throw nothing else. `stream` is the CUDA stream the memory is used on.
class ANNULUS_API Allocator {
 public:
  virtual ~Allocator() = default;
  virtual void* allocate(std::size_t bytes, Device device, void* stream) = 0;
  virtual void deallocate(void* p, std::size_t bytes, Device device, void* stream) noexcept = 0;
};

// Aligned malloc on the CPU, cudaMallocAsync on CUDA (stream-ordered, so legal inside graph
// capture).
ANNULUS_API Allocator& default_allocator();

// Hands out one caller-owned block: `..._workspace()` says how large it must be. It serves one
// operator call at a time and returns nullptr when asked for a byte more than it has.
class ANNULUS_API BorrowedWorkspace final : public Allocator {
 public:
  BorrowedWorkspace(void* data, std::size_t bytes) : data_(data), bytes_(bytes) {}
  void* allocate(std::size_t bytes, Device device, void* stream) override;
  void deallocate(void* p, std::size_t bytes, Device device, void* stream) noexcept override;

 private:
  void* data_;
  std::size_t bytes_;
  bool in_use_ = false;
};

struct ANNULUS_API Context {
  void* stream = nullptr;  // cudaStream_t; nullptr is CUDA's default stream
  int threads = 0;         // CPU threads; 0 = all the process may use. Results never depend on it.
  bool deterministic =
      false;  // ask for bit-equal repeats where an operator has a faster path without
  Allocator* allocator = nullptr;  // nullptr: default_allocator()

  // Scratch bytes held now and at most so far, over all calls with this Context.
  std::size_t workspace_bytes = 0;
  std::size_t workspace_peak = 0;
};

// One block of scratch for the length of a call. Throws DeviceError, naming the operator and the
// size, when the allocator has none. Zero bytes ask the allocator for nothing.
class ANNULUS_API Workspace {
 public:
  Workspace(Context& context, const char* op, Device device, std::size_t bytes);
  ~Workspace();
  Workspace(const Workspace&) = delete;
  Workspace& operator=(const Workspace&) = delete;

  std::byte* data() const { return static_cast<std::byte*>(data_); }
  std::size_t bytes() const { return bytes_; }

  // Carves the block up, front to back; every piece starts on a 256-byte boundary, as
  // piece() counts it.
  template <class T>
  T* take(std::int64_t count) {
    T* p = reinterpret_cast<T*>(data() + used_);
    used_ += piece(static_cast<std::size_t>(count) * sizeof(T));
    return p;
  }
  // The bytes a piece takes up within a block.
  static constexpr std::size_t piece(std::size_t bytes) { return (bytes + 255) / 256 * 256; }

 private:
  Context& context_;
  Device device_;
  std::size_t bytes_;
  std::size_t used_ = 0;
  void* data_ = nullptr;
};

}  // namespace annulus
