#include <gtest/gtest.h>

#include "annulus/annulus.h"
#include "testing/dense.h"

namespace annulus::testing {
namespace {

TEST(Backend, LastOneOfEachOperator) {
  Context context, other;
  EXPECT_EQ(context.last_backend("no_such_operator"), "");
  context.ran_on("backend_test_a", DeviceType::kCPU, "one way");
  context.ran_on("backend_test_b", DeviceType::kCUDA, "another");
  context.ran_on("backend_test_a", DeviceType::kCUDA, "a third");
  EXPECT_EQ(context.last_backend("backend_test_a"), "cuda, a third");
  EXPECT_EQ(context.last_backend("backend_test_b"), "cuda, another");
  EXPECT_EQ(context.backends.size(), 2u);
  EXPECT_EQ(other.last_backend("backend_test_a"), "");  // no Context knows of another's calls
}

TEST(Backend, OperatorsSayWhatTheyRanOn) {
  const Dense x(kCPU, DType::kF32, {1, 1, 3, 4}), theta(kCPU, DType::kF32, {1, 4}),
      y(kCPU, DType::kF32, {1, 1, 3, 8});
  Context context;
  LrpeCosineOptions options;
  options.shape = {3};
  lrpe_cosine_forward(x.view(), theta.view(), y.view(), options, context);
  EXPECT_EQ(context.last_backend("lrpe_cosine"), "cpu, " + cpu_features());
  const Dense states(kCPU, DType::kF32, {2, 3, 5}), angle(kCPU, DType::kF32, {2, 3}),
      amplitude(kCPU, DType::kF32, {2, 3});
  ring_readout_forward(states.view(), angle.view(), amplitude.view(), context);
  EXPECT_EQ(context.last_backend("ring_readout"), "cpu, " + cpu_features());
  // A call that is refused has not run.
  context.ran_on("ring_readout", DeviceType::kCUDA, "before");
  EXPECT_THROW(ring_readout_forward(states.view(), states.view(), amplitude.view(), context),
               InvalidArgument);
  EXPECT_EQ(context.last_backend("ring_readout"), "cuda, before");
}

}  // namespace
}  // namespace annulus::testing
