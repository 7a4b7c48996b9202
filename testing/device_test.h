// Tests of device code: skipped, with the reason, where there is no GPU for it; arrays on the GPU.
#pragma once

#include <cuda_runtime.h>
#include <gtest/gtest.h>

#include <cstddef>
#include <string>
#include <vector>

#include "annulus/core/buffer.h"
#include "annulus/cuda/check.h"
#include "annulus/cuda/memory.h"

namespace annulus::testing {

class DeviceTest : public ::testing::Test {
 protected:
  void SetUp() override {
    const std::string why = annulus::cuda::why_unavailable();
    if (!why.empty()) GTEST_SKIP() << "no CUDA device: " << why;
    int major = 0;
    annulus::cuda::throw_on_error(
        cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, 0), "test", "capability");
    if (needs_hopper() && major != 9) GTEST_SKIP() << "needs compute capability 9.0";
  }
  virtual bool needs_hopper() const { return false; }

  // After a launch.
  static void finish() {
    annulus::cuda::throw_on_error(cudaGetLastError(), "test", "launch");
    annulus::cuda::throw_on_error(cudaDeviceSynchronize(), "test", "kernel");
  }
};
class HopperTest : public DeviceTest {
  bool needs_hopper() const override { return true; }
};

template <class T>
class DeviceArray {
 public:
  explicit DeviceArray(const std::vector<T>& values)
      : buffer_(cuda_device(0), values.size() * sizeof(T)) {
    copy_bytes(buffer_.data(), buffer_.device(), values.data(), kCPU, buffer_.bytes());
  }
  explicit DeviceArray(std::size_t count) : DeviceArray(std::vector<T>(count)) {}

  T* get() const { return static_cast<T*>(buffer_.data()); }
  std::vector<T> values() const {
    std::vector<T> v(buffer_.bytes() / sizeof(T));
    copy_bytes(v.data(), kCPU, buffer_.data(), buffer_.device(), buffer_.bytes());
    return v;
  }

 private:
  Buffer buffer_;
};

}  // namespace annulus::testing
