// Context: everything a call needs that is not a tensor or an option. It is passed by reference and
// never global: the CUDA stream, the number of CPU threads and the allocator for scratch; and what the
// calls say about themselves. One Context belongs to one thread at a time; two threads use two.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "annulus/core/device.h"
#include "annulus/core/macros.h"

namespace annulus {

// Where scratch memory comes from. allocate returns memory at any address, or nullptr when there is
// none; it may throw nothing else. `stream` is the CUDA stream the memory is used on.
class ANNULUS_API Allocator {
 public:
  virtual ~Allocator() = default;
  virtual void* allocate(std::size_t bytes, Device device, void* stream) = 0;
  virtual void deallocate(void* p, std::size_t bytes, Device device, void* stream) noexcept = 0;
};

// Aligned malloc on the CPU, cudaMallocAsync on CUDA (stream-ordered, so legal inside graph
// capture).
ANNULUS_API Allocator& default_allocator();

// Hands out one caller-owned block, at any address: `..._workspace()` says how large it must be. It
// serves one operator call at a time and returns nullptr when asked for a byte more than it has.
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
  // CPU threads; 0: all the process may use. Fewer run where no more can be started. Results never depend on it.
  int threads = 0;
  Allocator* allocator = nullptr;  // nullptr: default_allocator()
  // On CUDA only kernels whose results are always the same to the bit: none that adds with atomics. On the CPU it is always so.
  bool deterministic = false;
  // On CUDA only kernels that run on every GPU the library knows, where it has faster ones for this one: to test and to
  // measure them.
  bool portable = false;

  // Scratch bytes held now and at most so far, over all calls with this Context.
  std::size_t workspace_bytes = 0;
  std::size_t workspace_peak = 0;

  // What the last call of an operator with this Context ran on: "cpu, bfmmla 8x8", "cuda, tensor cores
  // in clusters"; empty where there was none. Operators as their errors name them: "ring_rnn",
  // "ring_rnn_backward", ... With ANNULUS_LOG=1 in the environment every change of it in the process
  // is a line on stderr.
  std::string last_backend(std::string_view op) const;
  struct Backend {
    const char* op;
    DeviceType device;
    const char* how;

    std::string text() const;
  };
  std::vector<Backend> backends =
      {};  // of all operators that were called, in the order of their first

  // Operators say so when they have run; the texts last as long as the process. The second is for
  // those with one implementation a device.
  void ran_on(const char* op, DeviceType device, const char* how);
  void ran_on(const char* op, DeviceType device, const char* on_cpu, const char* on_cuda) {
    ran_on(op, device, device == DeviceType::kCPU ? on_cpu : on_cuda);
  }
};

}  // namespace annulus
