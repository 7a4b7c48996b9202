#include <gtest/gtest.h>

#include <cstdint>
#include <vector>

#include "annulus/ring_rnn/ring_rnn_cases.h"
#include "testing/concurrent.h"
#include "testing/dense.h"

namespace annulus::testing {
namespace {

class RingRnnThreads : public EachDevice {};
ANNULUS_EACH_DEVICE(RingRnnThreads);

TEST_P(RingRnnThreads, EightAtOnceEqualOneAlone) {
  std::vector<Case> cases;
  std::uint64_t seed = 77;
  for (const DType dtype : {DType::kF64, DType::kF32, DType::kF16, DType::kBF16}) {
    for (const RingPrecision precision :
         {RingPrecision::kAuto, RingPrecision::kFp32, RingPrecision::kBf16x3}) {
      RingRnnProblem p;
      p.B = 9, p.T = 4, p.K = 3, p.N = 35;
      p.dtype = dtype;
      p.precision = dtype == DType::kF64 ? RingPrecision::kAuto : precision;
      p.activation = static_cast<RingActivation>(seed % 4);
      p.checkpoint = static_cast<std::int64_t>(seed % 3);
      p.drive = p.reset = p.mask = p.h_n = p.dh_n = p.readout = true;
      p.alpha_form = RingRnnProblem::Parameter::kPerNeuron;
      p.gradients = kRingAllGradients;
      p.seed = ++seed;
      cases.push_back(ring_rnn_case(p));
    }
    cases.push_back(ring_readout_case({.B = 3, .T = 5, .N = 35, .dtype = dtype, .seed = ++seed}));
  }
  expect_equal_bits_at_once(cases, device());
}

}  // namespace
}  // namespace annulus::testing
