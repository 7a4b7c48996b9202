// Memory of the tensors and the scratch of cases, and copies of it.
//
// On the CPU every piece is an allocation of its own, and a copy is done when it returns. On CUDA a case takes a hundred
// pieces, and an allocation, a free or a copy that waits for the device each take as long as its kernels (where programs
// share the GPU, a turn of the others'): pieces are kept and handed out again, and copies are queued. All of it is on the
// default stream, as the calls of cases are, so that whoever has a piece next comes after whoever had it.
#pragma once

#include <cstddef>
#include <cstdint>
#include <utility>

#include "annulus/core/buffer.h"
#include "annulus/core/device.h"

namespace annulus::testing {

class TestMemory {
 public:
  // What the device reads and writes; what is copied there and back, which the host has (pinned, of CUDA).
  enum class Kind : std::uint8_t { kDevice, kHost };

  TestMemory() = default;
  TestMemory(Device device, Kind kind,
             std::size_t bytes);  // throws DeviceError when there is no room
  ~TestMemory();
  TestMemory(TestMemory&& other) noexcept { *this = std::move(other); }
  TestMemory& operator=(TestMemory&& other) noexcept {
    std::swap(device_, other.device_);
    std::swap(kind_, other.kind_);
    std::swap(bytes_, other.bytes_);
    std::swap(data_, other.data_);
    std::swap(own_, other.own_);
    return *this;
  }

  std::byte* data() const { return data_; }
  std::size_t bytes() const { return bytes_; }
  Device device() const { return device_; }
  bool defined() const { return data_ != nullptr; }

 private:
  Device device_ = kCPU;
  Kind kind_ = Kind::kDevice;
  std::size_t bytes_ = 0;
  std::byte* data_ = nullptr;
  Buffer own_;  // of the CPU
};

// Copies of one thread are numbered as they are queued.
using Ticket = std::uint64_t;

// A copy behind all that was queued before, from or to memory of Kind::kHost, which must not change until it is done.
Ticket queue_copy(Device device, void* to, const void* from, std::size_t bytes);

// Until the device has nothing left to do. What went wrong in a kernel is thrown here.
void finish(Device device);
// The same, unless that has been waited for since.
void finish(Device device, Ticket ticket);

// From now on every piece on the device is an allocation of its own, of the bytes asked for, and freed at once: for
// compute-sanitizer, which cannot see an access beyond a tensor that lies in a larger piece.
void allocate_exactly();

}  // namespace annulus::testing
