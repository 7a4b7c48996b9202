#include <gtest/gtest.h>

#include <array>
#include <cstdint>
#include <vector>

#include "annulus/lrpe_cosine/test/cases.h"
#include "testing/concurrent.h"
#include "testing/dense.h"

namespace annulus::testing {
namespace {

using Form = LrpeProblem::Form;

class LrpeThreads : public EachDevice {};
ANNULUS_EACH_DEVICE(LrpeThreads);

TEST_P(LrpeThreads, EightThreadsAtOnceEqualOneAlone) {
  std::vector<Case> cases;
  std::uint64_t seed = 77;
  for (const Form form :
       {Form::kCosine, Form::kCosineQk, Form::kRotateHalves, Form::kRotateInterleaved}) {
    for (const DType dtype : {DType::kF64, DType::kF32, DType::kF16, DType::kBF16}) {
      LrpeProblem p{.form = form, .B = 2, .H = 4, .Hk = 2, .D = 40, .E = 40, .shape = {33}};
      p.prefix = 2;
      p.dtype = dtype;
      p.offset_per_batch = true;
      static constexpr std::array kActivations = {LrpeActivation::kNone, LrpeActivation::kSilu,
                                                  LrpeActivation::kSoftmaxFeatures,
                                                  LrpeActivation::kSoftmaxTokens};
      if (form == Form::kCosine || form == Form::kCosineQk) p.activation = kActivations[seed % 4];
      p.seed = ++seed;
      cases.push_back(lrpe_case(p));
    }
  }
  expect_equal_bits_at_once(cases, device());
}

}  // namespace
}  // namespace annulus::testing
