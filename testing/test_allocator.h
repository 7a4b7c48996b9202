// An allocator for tests: counts, fails on demand, guards what it hands out with canaries and fills
// it with signalling NaN, so that scratch read before it is written shows up in the results.
#pragma once

#include <algorithm>
#include <array>
#include <cstddef>
#include <map>
#include <string>
#include <vector>

#include "annulus/core/buffer.h"
#include "annulus/core/context.h"
#include "annulus/core/errors.h"
#include "testing/tensors.h"

namespace annulus::testing {

class TestAllocator final : public Allocator {
 public:
  static constexpr std::size_t kGuard = 4096 + 16;  // what lies between is aligned as malloc's is

  // Fails the n-th allocation from now, counted from 0; -1: none.
  explicit TestAllocator(int fail_at = -1) : fail_at_(fail_at) {}

  void* allocate(std::size_t bytes, Device device, void*) override {
    if (calls_++ == fail_at_) {
      failed_ = true;
      return nullptr;
    }
    try {
      Buffer buffer(device, bytes + 2 * kGuard);
      if (device == kCPU) {
        fill(static_cast<std::byte*>(buffer.data()), buffer.bytes());
      } else {
        std::vector<std::byte> image(buffer.bytes());
        fill(image.data(), image.size());
        copy_bytes(buffer.data(), device, image.data(), kCPU, image.size());
      }
      void* p = static_cast<std::byte*>(buffer.data()) + kGuard;
      live_.emplace(p, std::move(buffer));
      held_ += bytes;
      peak_ = std::max(peak_, held_);
      return p;
    } catch (const DeviceError&) {
      return nullptr;
    }
  }

  void deallocate(void* p, std::size_t bytes, Device device, void*) noexcept override {
    const auto it = live_.find(p);
    if (it == live_.end() || it->second.bytes() != bytes + 2 * kGuard) {
      fault_ = "workspace was freed with another pointer or size than it was allocated with";
      return;
    }
    synchronize(device);  // the call may still be running
    const auto* block = static_cast<const std::byte*>(it->second.data());
    if (!guard_is_whole(block, device, 0) ||
        !guard_is_whole(block + kGuard + bytes, device, kGuard + bytes)) {
      fault_ = "workspace was written beyond its end or before its start";
    }
    live_.erase(it);
    held_ -= bytes;
  }

  bool failed() const { return failed_; }
  int calls() const { return calls_; }
  // Bytes handed out and not yet returned, at most so far.
  std::size_t peak() const { return peak_; }
  std::string fault() const {
    return !fault_.empty() ? fault_ : live_.empty() ? "" : "workspace was not freed";
  }

 private:
  // Byte i of a block: a bfloat16 or float made of it is a signalling NaN, a double is 1e307.
  static constexpr std::array<std::byte, 2> kPattern = {std::byte{0xa5}, std::byte{0x7f}};
  static void fill(std::byte* p, std::size_t bytes) {
    fill_pattern(p, bytes, kPattern.data(), kPattern.size());
  }
  // The guard that lies `first` bytes into its block.
  static bool guard_is_whole(const std::byte* p, Device device, std::size_t first) {
    std::array<std::byte, kGuard> after;
    copy_bytes(after.data(), kCPU, p, device, kGuard);
    for (std::size_t i = 0; i < kGuard; ++i) {
      if (after[i] != kPattern[(first + i) % 2]) return false;
    }
    return true;
  }

  int fail_at_;
  int calls_ = 0;
  bool failed_ = false;
  std::size_t held_ = 0;
  std::size_t peak_ = 0;
  std::string fault_;
  std::map<void*, Buffer> live_;
};

}  // namespace annulus::testing
