// Tests of tensors with more than 2^31 elements: on which devices they run, memory that a narrow index misreads.
#pragma once

#include <gtest/gtest.h>

#include <algorithm>
#include <cstdint>
#include <string>
#include <vector>

#include "annulus/core/buffer.h"
#include "testing/dense.h"

namespace annulus::testing {

inline constexpr double kGiB = 1024.0 * 1024.0 * 1024.0;

inline double free_gib(Device device) { return static_cast<double>(free_bytes(device)) / kGiB; }

class LargeTest : public EachDevice {
 protected:
  void SetUp() override {
    EachDevice::SetUp();
#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
    GTEST_SKIP() << "2^31 elements under a sanitizer take minutes";
#endif
  }
  // Leaves a tenth and two GiB to everybody else.
  bool has_room(double gib) const { return free_gib(device()) > 1.1 * gib + 2; }
  std::string no_room(double gib) const {
    return "needs " + std::to_string(gib) + " GiB of " + to_string(device()) + " memory, " +
           std::to_string(free_gib(device())) + " are free";
  }

  Context context_;
};

// bf16 memory whose element i is block[i mod block's size]; that size is odd, so an index that lost
// its upper bits finds another value.
class Periodic {
 public:
  Periodic(Device device, std::int64_t count, double size, std::uint64_t seed)
      : block_(1000003), buffer_(device, static_cast<std::size_t>(count) * sizeof(bfloat16)) {
    Rng rng(seed);
    for (bfloat16& v : block_) v = bfloat16(static_cast<float>(size * rng.normal()));
    fill();
  }
  void fill() {
    const std::size_t bytes = block_.size() * sizeof(bfloat16);
    for (std::size_t at = 0; at < buffer_.bytes(); at += bytes) {
      copy_bytes(static_cast<std::byte*>(buffer_.data()) + at, buffer_.device(), block_.data(),
                 kCPU, std::min(bytes, buffer_.bytes() - at));
    }
  }
  // What element i was filled with.
  double operator[](std::int64_t i) const {
    return static_cast<double>(
        static_cast<float>(block_[static_cast<std::size_t>(i) % block_.size()]));
  }
  void* data() const { return buffer_.data(); }
  const Buffer& buffer() const { return buffer_; }

 private:
  std::vector<bfloat16> block_;
  Buffer buffer_;
};

// What bf16 memory holds now.
inline std::vector<double> held(const Buffer& buffer, std::int64_t first, std::int64_t count) {
  std::vector<bfloat16> host(static_cast<std::size_t>(count));
  copy_bytes(host.data(), kCPU, static_cast<const bfloat16*>(buffer.data()) + first,
             buffer.device(), host.size() * sizeof(bfloat16));
  std::vector<double> v;
  for (const bfloat16 h : host) v.push_back(static_cast<double>(static_cast<float>(h)));
  return v;
}

}  // namespace annulus::testing
