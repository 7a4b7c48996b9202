// Errors of the elementary functions in units in the last place, and arithmetic that is fused or not.
#include "annulus/cuda/math.cuh"

#include <cmath>
#include <limits>
#include <vector>

#include "testing/device_test.h"

namespace annulus::testing {
namespace {

using namespace annulus::cuda;

template <class Real>
__global__ void sigmoid_kernel(const Real* x, int count, Real* y) {
  const int i = static_cast<int>(blockIdx.x * blockDim.x + threadIdx.x);
  if (i >= count) return;
  y[i] = sigmoid_of(x[i]);
  y[count + i] = sigmoid_with_tails(x[i]);
}

__global__ void fast_kernel(const float* x, int count, float* y) {
  const int i = static_cast<int>(blockIdx.x * blockDim.x + threadIdx.x);
  if (i >= count) return;
  y[i] = exp2_fast(x[i]);
  y[count + i] = inverse_fast(x[i]);
  y[2 * count + i] = sigmoid_fast(x[i]);
}

template <class Real>
__global__ void arithmetic_kernel(Real a, Real b, Real c, Real* y) {
  y[0] = fma_of(a, b, c);
  y[1] = add_of(mul_of(a, b), c);
}

// From -range to range, denser around 0.
template <class Real>
std::vector<Real> points(double range) {
  std::vector<Real> x;
  for (int i = -4000; i <= 4000; ++i) {
    const double t = i / 4000.0;
    x.push_back(static_cast<Real>(range * t * t * t));
  }
  return x;
}

class CudaMath : public DeviceTest {
 protected:
  template <class Real>
  void check_sigmoids(double range) {
    const std::vector<Real> x = points<Real>(range);
    const auto n = x.size();
    const DeviceArray<Real> dx(x), dy(2 * n);
    sigmoid_kernel<Real>
        <<<static_cast<unsigned>(n / 128 + 1), 128>>>(dx.get(), static_cast<int>(n), dy.get());
    finish();
    const std::vector<Real> y = dy.values();
    const auto smallest = static_cast<long double>(std::numeric_limits<Real>::min());
    for (std::size_t i = 0; i < n; ++i) {
      const long double expected = 1 / (1 + std::exp(-static_cast<long double>(x[i])));
      const auto size = static_cast<Real>(expected);
      const long double ulp = std::nextafter(size, std::numeric_limits<Real>::infinity()) - size;
      if (expected < smallest) {
        EXPECT_LE(y[i], smallest);  // sigmoid_of keeps no subnormal results
      } else {
        EXPECT_LE(std::abs(y[i] - expected), 4 * ulp) << "sigmoid of " << x[i];
      }
      EXPECT_LE(std::abs(y[n + i] - expected), 4 * ulp) << "sigmoid with tails of " << x[i];
    }
  }
  template <class Real>
  void check_arithmetic() {
    const Real e = std::numeric_limits<Real>::epsilon();
    const Real a = 1 + e, b = 1 - e, c = -1;  // a b = 1 - e^2 rounds to 1
    const DeviceArray<Real> dy(2);
    arithmetic_kernel<Real><<<1, 1>>>(a, b, c, dy.get());
    finish();
    EXPECT_EQ(dy.values(), (std::vector<Real>{-e * e, 0}));
  }
};

TEST_F(CudaMath, SigmoidsToTheLastPlaces) {
  check_sigmoids<float>(100);
  check_sigmoids<double>(700);
}

TEST_F(CudaMath, FastFunctionsAreRightTo17Bits) {
  const std::vector<float> x = points<float>(80);
  const auto n = x.size();
  const DeviceArray<float> dx(x), dy(3 * n);
  fast_kernel<<<static_cast<unsigned>(n / 128 + 1), 128>>>(dx.get(), static_cast<int>(n), dy.get());
  finish();
  const std::vector<float> y = dy.values();
  for (std::size_t i = 0; i < n; ++i) {
    const double v = x[i];
    EXPECT_NEAR(y[i], std::exp2(v), 0x1p-21 * std::exp2(v));
    if (std::abs(v) > 1e-30) {
      EXPECT_NEAR(y[n + i], 1 / v, std::abs(0x1p-22 / v));
    }
    const double sigmoid = 1 / (1 + std::exp(-v));
    EXPECT_NEAR(y[2 * n + i], sigmoid, 0x1p-17 * sigmoid);
  }
}

TEST_F(CudaMath, FusesWhatIsFusedAndNothingElse) {
  check_arithmetic<float>();
  check_arithmetic<double>();
}

}  // namespace
}  // namespace annulus::testing
