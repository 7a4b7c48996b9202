// A dense tensor on either device, for tests that call the library by hand, and how such a test is
// run on both devices.
#pragma once

#include <gtest/gtest.h>

#include <cstdint>
#include <cstring>
#include <ostream>
#include <string>
#include <utility>
#include <vector>

#include "annulus/core/buffer.h"
#include "annulus/core/tensor.h"
#include "annulus/cuda/memory.h"
#include "testing/case.h"
#include "testing/tensors.h"

namespace annulus {

// What GoogleTest shows of a parameter; without it, the bytes at its address.
inline void PrintTo(const Device& device, std::ostream* out) {
  *out << (device.type == DeviceType::kCPU ? "cpu" : "cuda");
}

}  // namespace annulus

namespace annulus::testing {

class Dense {
 public:
  Dense(Device device, DType dtype, std::vector<std::int64_t> shape)
      : dtype_(dtype), shape_(std::move(shape)), count_(1) {
    for (const std::int64_t s : shape_) count_ *= s;
    bytes_ = static_cast<std::size_t>(count_ * size_of(dtype));
    buffer_ = Buffer(device, bytes_);
  }
  Dense& normal(std::uint64_t seed) {
    Rng rng(seed);
    std::vector<double> values(static_cast<std::size_t>(count_));
    for (double& v : values) v = rng.normal();
    return write(values);
  }
  Dense& write(const std::vector<double>& values) {
    std::vector<std::byte> host(bytes_);
    const auto size = static_cast<std::size_t>(size_of(dtype_));
    for (std::size_t i = 0; i < values.size(); ++i) {
      const std::uint64_t bits = encode(values[i], dtype_);
      std::memcpy(host.data() + i * size, &bits, size);
    }
    copy_bytes(buffer_.data(), buffer_.device(), host.data(), kCPU, bytes_);
    return *this;
  }
  std::vector<std::byte> bytes() const {
    synchronize(buffer_.device());
    std::vector<std::byte> host(bytes_);
    copy_bytes(host.data(), kCPU, buffer_.data(), buffer_.device(), bytes_);
    return host;
  }
  std::vector<double> values() const {
    const std::vector<std::byte> host = bytes();
    std::vector<double> values(static_cast<std::size_t>(count_));
    const auto size = static_cast<std::size_t>(size_of(dtype_));
    for (std::size_t i = 0; i < values.size(); ++i) {
      std::uint64_t bits = 0;
      std::memcpy(&bits, host.data() + i * size, size);
      values[i] = decode(bits, dtype_);
    }
    return values;
  }
  TensorView view() const { return contiguous(buffer_.data(), dtype_, shape_, buffer_.device()); }
  // Tokens first .. first + count - 1 of a (B, H, L, D) tensor.
  TensorView tokens(std::int64_t first, std::int64_t count) const {
    TensorView v = view();
    v.data = static_cast<std::byte*>(v.data) + first * v.stride[2] * size_of(dtype_);
    v.shape[2] = count;
    return v;
  }
  TensorView batch(std::int64_t b) const {
    TensorView v = view();
    v.data = static_cast<std::byte*>(v.data) + b * v.stride[0] * size_of(dtype_);
    v.shape[0] = 1;
    return v;
  }

 private:
  DType dtype_;
  std::vector<std::int64_t> shape_;
  std::int64_t count_;
  std::size_t bytes_ = 0;
  Buffer buffer_;
};

// TEST_P of a suite derived from this runs once per device, and says why where there is none.
class EachDevice : public ::testing::TestWithParam<Device> {
 protected:
  void SetUp() override {
    if (device().type == DeviceType::kCUDA && !cuda::why_unavailable().empty()) {
      GTEST_SKIP() << "no CUDA device: " << cuda::why_unavailable();
    }
  }
  Device device() const { return GetParam(); }
};

#define ANNULUS_EACH_DEVICE(Suite)                                                 \
  INSTANTIATE_TEST_SUITE_P(All, Suite, ::testing::Values(kCPU, cuda_device(0)),    \
                           [](const ::testing::TestParamInfo<Device>& parameter) { \
                             return ::testing::PrintToString(parameter.param);     \
                           })

}  // namespace annulus::testing
