// Errors of the elementary functions in units in the last place, and arithmetic that is fused or is
// not.
#include "annulus/cuda/math.cuh"

#include <cmath>
#include <limits>
#include <vector>

#include "testing/device_test.h"

namespace annulus::testing {
namespace {

using namespace annulus::cuda;

enum Function { kExp, kExp2, kErf, kTanh, kSigmoid, kSigmoidTails, kFunctions };
constexpr int kFast = 3;  // exp2_fast, inverse_fast, sigmoid_fast

template <class Real>
__global__ void function_kernel(const Real* x, int count, Real* y) {
  const int i = static_cast<int>(blockIdx.x * blockDim.x + threadIdx.x);
  if (i >= count) return;
  y[kExp * count + i] = exp_of(x[i]);
  y[kExp2 * count + i] = exp2_of(x[i]);
  y[kErf * count + i] = erf_of(x[i]);
  y[kTanh * count + i] = tanh_of(x[i]);
  y[kSigmoid * count + i] = sigmoid_of(x[i]);
  y[kSigmoidTails * count + i] = sigmoid_with_tails(x[i]);
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
  y[2] = max_of(a, c);
  y[3] = max_of(Real(NAN), c);
}

long double exact(int function, long double x) {
  switch (function) {
    case kExp:
      return std::exp(x);
    case kExp2:
      return std::exp2(x);
    case kErf:
      return std::erf(x);
    case kTanh:
      return std::tanh(x);
    default:
      return 1 / (1 + std::exp(-x));
  }
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
  void check_functions(double range) {
    const std::vector<Real> x = points<Real>(range);
    const auto n = x.size();
    const DeviceArray<Real> dx(x), dy(kFunctions * n);
    function_kernel<Real>
        <<<static_cast<unsigned>(n / 128 + 1), 128>>>(dx.get(), static_cast<int>(n), dy.get());
    finish();
    const std::vector<Real> y = dy.values();
    // What CUDA promises of each, and the roundings of the quotient.
    const double ulps[kFunctions] = {2, 2, 2, 2, 4, 4};
    const auto smallest = static_cast<long double>(std::numeric_limits<Real>::min());
    for (int f = 0; f < kFunctions; ++f) {
      for (std::size_t i = 0; i < n; ++i) {
        const long double expected = exact(f, x[i]);
        const Real ours = y[static_cast<std::size_t>(f) * n + i];
        // sigmoid_of keeps no subnormal results.
        if (f == kSigmoid && expected < smallest) {
          EXPECT_LE(ours, smallest);
          continue;
        }
        const auto rounded = static_cast<Real>(expected);
        if (std::isinf(rounded)) {
          EXPECT_EQ(ours, rounded);
          continue;
        }
        const Real size = std::abs(rounded);
        const long double ulp = std::nextafter(size, std::numeric_limits<Real>::infinity()) - size;
        EXPECT_LE(std::abs(ours - expected), static_cast<long double>(ulps[f]) * ulp)
            << "function " << f << " of " << x[i];
      }
    }
  }
  template <class Real>
  void check_arithmetic() {
    const Real e = std::numeric_limits<Real>::epsilon();
    const Real a = 1 + e, b = 1 - e, c = -1;  // a b = 1 - e^2 rounds to 1
    const DeviceArray<Real> dy(4);
    arithmetic_kernel<Real><<<1, 1>>>(a, b, c, dy.get());
    finish();
    const std::vector<Real> y = dy.values();
    EXPECT_EQ(y[0], -e * e);
    EXPECT_EQ(y[1], 0);
    EXPECT_EQ(y[2], a);
    EXPECT_EQ(y[3], c);
  }
};

TEST_F(CudaMath, FunctionsToTheLastPlaces) {
  check_functions<float>(100);
  check_functions<double>(700);
}

TEST_F(CudaMath, FastFunctionsAreRightTo17Bits) {
  const std::vector<float> x = points<float>(80);
  const auto n = x.size();
  const DeviceArray<float> dx(x), dy(kFast * n);
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
