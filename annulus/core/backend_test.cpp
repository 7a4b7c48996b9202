#include "annulus/core/backend.h"

#include <gtest/gtest.h>

#include <thread>
#include <vector>

#include "annulus/annulus.h"
#include "testing/dense.h"

namespace annulus::testing {
namespace {

TEST(Backend, LastOneOfEachOperator) {
  EXPECT_EQ(last_backend("no_such_operator"), "");
  ran_on("backend_test_a", DeviceType::kCPU, "one way");
  ran_on("backend_test_b", DeviceType::kCUDA, "another");
  ran_on("backend_test_a", DeviceType::kCUDA, "a third");
  EXPECT_EQ(last_backend("backend_test_a"), "cuda, a third");
  EXPECT_EQ(last_backend("backend_test_b"), "cuda, another");
}

TEST(Backend, ManyThreadsTakeOneSlotAnOperator) {
  std::vector<std::thread> threads;
  for (int i = 0; i < 8; ++i) {
    threads.emplace_back([] {
      for (int k = 0; k < 100; ++k) {
        ran_on("backend_test_c", DeviceType::kCPU, "c");
        ran_on("backend_test_d", DeviceType::kCUDA, "d");
      }
    });
  }
  for (std::thread& t : threads) t.join();
  int c = 0, d = 0;
  for (const auto& [op, backend] : last_backends()) {
    c += op == "backend_test_c" && backend == "cpu, c" ? 1 : 0;
    d += op == "backend_test_d" && backend == "cuda, d" ? 1 : 0;
  }
  EXPECT_EQ(c, 1);
  EXPECT_EQ(d, 1);
}

TEST(Backend, OperatorsSayWhatTheyRanOn) {
  const Dense x(kCPU, DType::kF32, {1, 1, 3, 4}), theta(kCPU, DType::kF32, {1, 4}),
      y(kCPU, DType::kF32, {1, 1, 3, 8});
  Context context;
  LrpeCosineOptions options;
  options.shape = {3};
  lrpe_cosine_forward(x.view(), theta.view(), y.view(), options, context);
  EXPECT_EQ(last_backend("lrpe_cosine"), "cpu, " + cpu_features());
  const Dense states(kCPU, DType::kF32, {2, 3, 5}), angle(kCPU, DType::kF32, {2, 3}),
      amplitude(kCPU, DType::kF32, {2, 3});
  ring_readout_forward(states.view(), angle.view(), amplitude.view(), context);
  EXPECT_EQ(last_backend("ring_readout"), "cpu, " + cpu_features());
  // A call that is refused has not run.
  ran_on("ring_readout", DeviceType::kCUDA, "before");
  EXPECT_THROW(ring_readout_forward(states.view(), states.view(), amplitude.view(), context),
               InvalidArgument);
  EXPECT_EQ(last_backend("ring_readout"), "cuda, before");
}

}  // namespace
}  // namespace annulus::testing
