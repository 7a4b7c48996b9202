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

}  // namespace annulus
