// Tests on every device: by hand with dense tensors (testing/memory/tensors.h), or of every registered operator.
#pragma once

#include <gtest/gtest.h>

#include <initializer_list>
#include <ostream>
#include <string>
#include <vector>

#include "annulus/cuda/memory.h"
#include "testing/case.h"
#include "testing/memory/tensors.h"
#include "testing/suite.h"

namespace annulus {

// What GoogleTest shows of a parameter; without it, the bytes at its address.
inline void PrintTo(const Device& device, std::ostream* out) {
  *out << (device.type == DeviceType::kCPU ? "cpu" : "cuda");
}

}  // namespace annulus

namespace annulus::testing {

inline void skip_without(Device device) {
  if (device.type == DeviceType::kCUDA && !cuda::why_unavailable().empty()) {
    GTEST_SKIP() << "no CUDA device: " << cuda::why_unavailable();
  }
}

// TEST_P of a suite derived from this runs once per device, and says why where there is none.
class EachDevice : public ::testing::TestWithParam<Device> {
 protected:
  void SetUp() override { skip_without(device()); }
  Device device() const { return GetParam(); }
};

#define ANNULUS_EACH_DEVICE(Suite)                                              \
  INSTANTIATE_TEST_SUITE_P(All, Suite, ::testing::Values(kCPU, cuda_device(0)), \
                           ::testing::PrintToStringParamName())

struct Target {
  const OperatorCases* op;
  Device device;
};

inline std::vector<Target> targets_on(std::initializer_list<Device> devices) {
  std::vector<Target> all;
  for (const OperatorCases& op : all_cases()) {
    for (const Device device : devices) all.push_back({&op, device});
  }
  return all;
}
inline std::vector<Target> all_targets() { return targets_on({kCPU, cuda_device(0)}); }
inline std::vector<Target> cuda_targets() { return targets_on({cuda_device(0)}); }

// The names of parameters, in GoogleTest's listings and in ctest's.
inline std::ostream& operator<<(std::ostream& out, const Target& t) {
  return out << t.op->op << (t.device.type == DeviceType::kCPU ? "_cpu" : "_cuda");
}

// TEST_P of a suite derived from this runs once per operator and device, and says why where there is none.
class EachOperator : public ::testing::TestWithParam<Target> {
 protected:
  void SetUp() override { skip_without(device()); }
  const OperatorCases& op() const { return *GetParam().op; }
  Device device() const { return GetParam().device; }
};

#define ANNULUS_EACH_OPERATOR(Suite)                                       \
  INSTANTIATE_TEST_SUITE_P(All, Suite, ::testing::ValuesIn(all_targets()), \
                           ::testing::PrintToStringParamName())

}  // namespace annulus::testing
