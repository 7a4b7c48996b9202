// Problems of the ring RNN for tests that call it by hand.
#pragma once

#include <algorithm>
#include <cstdint>
#include <vector>

#include "annulus/ring_rnn/test/cases.h"
#include "testing/by_hand.h"

namespace annulus::testing {

// Live dynamics with every optional input but the readout, and all gradients.
inline RingRnnProblem live(DType dtype, std::int64_t B, std::int64_t T, std::int64_t K,
                           std::int64_t N) {
  RingRnnProblem p{.B = B, .T = T, .K = K, .N = N, .dtype = dtype};
  p.J0 = -0.5 / static_cast<double>(std::max<std::int64_t>(N, 1));
  p.J1 = 0.8;
  p.alpha = 0.3;
  p.actions = RingRnnProblem::Actions::kSparse;
  p.drive = p.reset = p.reset_state = p.mask = p.h_n = p.dh_n = true;
  p.gradients = kRingAllGradients;
  p.seed = 1;
  return p;
}
// Without any of them.
inline RingRnnProblem plain(RingRnnProblem p) {
  p.drive = p.reset = p.reset_state = p.mask = false;
  return p;
}

// Every precision a device has.
inline std::vector<Precision> precisions_of(Device device, DType dtype) {
  if (dtype == DType::kF64) return {Precision::kAuto};
  std::vector<Precision> all = {Precision::kAuto, Precision::kFp32, Precision::kBf16x6,
                                Precision::kBf16x3, Precision::kBf16};
  if (device.type == DeviceType::kCUDA) {
    all.push_back(Precision::kTf32);
    if (dtype == DType::kF16) all.push_back(Precision::kF16);
  }
  return all;
}

}  // namespace annulus::testing
