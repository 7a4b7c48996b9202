// An allocator for tests: counts, fails on demand, guards what it hands out with canaries and fills
// it with signalling NaN, so that scratch read before it is written shows up in the results.
#pragma once

#include <algorithm>
#include <array>
#include <cstddef>
#include <exception>
#include <map>
#include <string>
#include <vector>

#include "annulus/core/context.h"
#include "annulus/core/errors.h"
#include "testing/memory/memory.h"
#include "testing/memory/tensors.h"

namespace annulus::testing {

class TestAllocator final : public Allocator {
 public:
  static constexpr std::size_t kGuard = 4096 + 16;  // what lies between is aligned as malloc's is

  // Fails the n-th allocation from now, counted from 0; -1: none.
  explicit TestAllocator(int fail_at = -1) : fail_at_(fail_at) {}

  void* allocate(std::size_t bytes, Device device, void* stream) override {
    if (calls_++ == fail_at_) {
      failed_ = true;
      return nullptr;
    }
    try {
      TestMemory block(device, TestMemory::Kind::kDevice, bytes + 2 * kGuard);
      if (device == kCPU) {
        fill(block.data(), block.bytes());
      } else {
        queue_fill(block, device);
        if (stream != nullptr) finish(device);  // which need not wait for what is queued
      }
      void* p = block.data() + kGuard;
      live_.emplace(p, std::move(block));
      held_ += bytes;
      peak_ = std::max(peak_, held_);
      return p;
    } catch (const DeviceError&) {
      return nullptr;
    }
  }

  void deallocate(void* p, std::size_t bytes, Device device, void* stream) noexcept override {
    const auto it = live_.find(p);
    if (it == live_.end() || it->second.bytes() != bytes + 2 * kGuard) {
      fault_ = "workspace was freed with another pointer or size than it was allocated with";
      return;
    }
    try {  // the call may still be running
      if (stream != nullptr) finish(device);
      const std::byte* block = it->second.data();
      Guards guards{TestMemory(device, TestMemory::Kind::kHost, 2 * kGuard), kGuard + bytes};
      queue_copy(device, guards.image.data(), block, kGuard);
      guards.ticket =
          queue_copy(device, guards.image.data() + kGuard, block + kGuard + bytes, kGuard);
      left_.push_back(std::move(guards));
      if (device == kCPU) look_at_guards();
    } catch (const std::exception& e) {
      fault_ = e.what();
    }
    live_.erase(it);
    held_ -= bytes;
  }

  bool failed() const { return failed_; }
  int calls() const { return calls_; }
  // Bytes handed out and not yet returned, at most so far.
  std::size_t peak() const { return peak_; }
  std::string fault() {
    look_at_guards();
    return !fault_.empty() ? fault_ : live_.empty() ? "" : "workspace was not freed";
  }

 private:
  // Byte i of a block: a bfloat16 or float made of it is a signalling NaN, a double is 1e307.
  static constexpr std::array<std::byte, 2> kPattern = {std::byte{0xa5}, std::byte{0x7f}};
  static void fill(std::byte* p, std::size_t bytes) {
    fill_pattern(p, bytes, kPattern.data(), kPattern.size());
  }
  // The same on a device, from one image that is never written again.
  static void queue_fill(const TestMemory& block, Device device) {
    static const TestMemory& image = *[&] {  // never destroyed: copies may be reading it
      auto* made = new TestMemory(device, TestMemory::Kind::kHost, std::size_t{1} << 20);
      fill(made->data(), made->bytes());
      return made;
    }();
    for (std::size_t done = 0; done < block.bytes(); done += image.bytes()) {
      queue_copy(device, block.data() + done, image.data(),
                 std::min(image.bytes(), block.bytes() - done));
    }
  }

  // What was around a block when it was freed.
  struct Guards {
    TestMemory image;    // both, one behind the other
    std::size_t second;  // how far into the block the second lies
    Ticket ticket = 0;
  };
  void look_at_guards() {
    for (const Guards& g : left_) {
      finish(g.image.device(), g.ticket);
      for (std::size_t i = 0; i < 2 * kGuard; ++i) {
        const std::size_t at = i < kGuard ? i : g.second + i - kGuard;
        if (g.image.data()[i] == kPattern[at % 2]) continue;
        fault_ = "workspace was written beyond its end or before its start";
        break;
      }
    }
    left_.clear();
  }

  int fail_at_;
  int calls_ = 0;
  bool failed_ = false;
  std::size_t held_ = 0;
  std::size_t peak_ = 0;
  std::string fault_;
  std::map<void*, TestMemory> live_;
  std::vector<Guards> left_;  // not looked at yet
};

}  // namespace annulus::testing
