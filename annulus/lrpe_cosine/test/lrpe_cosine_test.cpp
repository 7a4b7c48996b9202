// What LRPE promises of values beyond the limits of its cases: the phase against independent arithmetic, scores that
// depend on differences alone, long sums, bfloat16's roundings, extreme values. (Calls that have the same bits:
// bits_test.cpp.) On the CPU, and on CUDA where there is a device.
#include <gtest/gtest.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <cstdint>
#include <limits>
#include <numeric>
#include <vector>

#include "annulus/core/errors.h"
#include "annulus/lrpe_cosine/lrpe_cosine.h"
#include "annulus/lrpe_cosine/positions.h"
#include "annulus/lrpe_cosine/ref.h"
#include "annulus/lrpe_cosine/test/cases.h"
#include "testing/dense.h"
#include "testing/limits.h"

namespace annulus::testing {
namespace {

// The limits that operators have beyond the common policy.
constexpr bool equals(const CaseLimits& a, const CaseLimits& b) {
  return a.ulp_f16_bf16 == b.ulp_f16_bf16 && a.cancelled_f16_bf16 == b.cancelled_f16_bf16 &&
         a.relative_f32 == b.relative_f32 && a.relative_f64 == b.relative_f64;
}
static_assert(equals(kLrpeProductLimits, {1, 0, 2e-7, 1e-12}));
static_assert(equals(kLrpeSoftmaxLimits, {1, 0, 1e-6, 1e-12}));
static_assert(equals(kLrpeRotateLimits, {1, 2e-7, 2e-7, 1e-12}));

class Lrpe : public EachDevice {
 protected:
  // y of x, and the definition's of the same numbers.
  struct Compared {
    std::vector<double> got, want;
  };
  Compared forward(const Dense& x, const Dense& theta, const LrpeCosineOptions& options) {
    std::vector<std::int64_t> wide = shape_of(x);
    wide[3] *= 2;
    Dense y(device(), x.view().dtype, wide), exact(kCPU, DType::kF64, wide);
    lrpe_cosine_forward(x.view(), theta.view(), y.view(), options, context);
    reference::lrpe_cosine_forward(as_f64(x).view(), as_f64(theta).view(), exact.view(), options);
    return {y.values(), exact.values()};
  }
  static Dense as_f64(const Dense& t) {
    Dense wide(kCPU, DType::kF64, shape_of(t));
    wide.write(t.values());
    return wide;
  }
  static std::vector<std::int64_t> shape_of(const Dense& t) {
    const TensorView v = t.view();
    return {v.sizes().begin(), v.sizes().end()};
  }

  Context context;
};
ANNULUS_EACH_DEVICE(Lrpe);

lrpe_cosine::SinCos<double> exact_phase(double theta, std::int64_t position) {
  return lrpe_cosine::Exact::turned(lrpe_cosine::Exact::frequency(theta), position);
}

// The reference and the kernels share phase.h, so it has a witness of its own: position * theta in
// quadruple precision, exact for these sizes, reduced by a 2pi of 113 bits.
#if defined(__SIZEOF_FLOAT128__) || (defined(__LDBL_MANT_DIG__) && __LDBL_MANT_DIG__ == 113)
#if defined(__LDBL_MANT_DIG__) && __LDBL_MANT_DIG__ == 113
using Quad = long double;
#else
__extension__ using Quad = __float128;
#endif

// 2pi as three doubles, from its hexadecimal
// expansion 6.487ED5110B4611A62633145C06E0E68948127044...
Quad two_pi() {
  return static_cast<Quad>(0x6.487ed5110b46p0) + static_cast<Quad>(0x1.1a62633145c06p-52) +
         static_cast<Quad>(0xe.0e68948127044p-108);
}

double reduced_angle(std::int64_t position, double theta) {
  const Quad product = static_cast<Quad>(position) * static_cast<Quad>(theta);
  const Quad turns = product / two_pi();
  auto whole = static_cast<Quad>(static_cast<std::int64_t>(turns));
  return static_cast<double>(product - whole * two_pi());
}

TEST(LrpePhase, AgreesWithQuadruplePrecision) {
  Rng rng(1);
  for (int i = 0; i < 20000; ++i) {
    const double theta = rng.normal() * std::pow(10.0, -static_cast<double>(rng.below(5)));
    const std::int64_t position =
        i % 3 == 0 ? rng.below(1000) : (rng.below(1ll << 32) - (1ll << 31)) * (i % 2 ? 1 : -1);
    const double angle = reduced_angle(position, theta);
    const auto [s, c] = exact_phase(theta, position);
    ASSERT_NEAR(s, std::sin(angle), 2e-15) << position << " * " << theta;
    ASSERT_NEAR(c, std::cos(angle), 2e-15) << position << " * " << theta;
  }
}
#else
TEST(LrpePhase, AgreesWithQuadruplePrecision) { GTEST_SKIP() << "no type of 113 bits here"; }
#endif

TEST(LrpePhase, SmallExactCases) {
  EXPECT_EQ(exact_phase(0.75, 0).sin, 0.0);
  EXPECT_EQ(exact_phase(0.75, 0).cos, 1.0);
  EXPECT_NEAR(exact_phase(-0.75, 3).sin, std::sin(-2.25), 4e-16);
  EXPECT_NEAR(exact_phase(-0.75, 3).cos, std::cos(-2.25), 4e-16);
}

TEST(LrpeReference, RotatingBackIsTheInverse) {
  for (const bool interleaved : {false, true}) {
    const LrpeRotateOptions options{.shape = {5}, .offset = 7, .interleaved = interleaved};
    Dense x(kCPU, DType::kF64, {1, 2, 5, 8}), theta(kCPU, DType::kF64, {2, 4});
    Dense y(kCPU, DType::kF64, {1, 2, 5, 8}), back(kCPU, DType::kF64, {1, 2, 5, 8});
    x.normal(1), theta.normal(2);
    reference::lrpe_rotate_forward(x.view(), theta.view(), y.view(), options);
    reference::lrpe_rotate_backward(y.view(), {}, theta.view(), back.view(), {}, options);
    const std::vector<double> got = back.values(), want = x.values();
    for (std::size_t i = 0; i < want.size(); ++i) EXPECT_NEAR(got[i], want[i], 1e-14);
  }
}

// What the encoding is for: <y_q(s), y_k(t)> depends on s - t alone, at any distance from the
// origin. Two hundred draws of values, positions, shift, form and type; both factors
// are right to 2e-7 (f64: 1e-12) of their size, so the score is to twice that of |q| |k|.
TEST_P(Lrpe, ScoresDependOnDifferencesOnly) {
  double worst = 0;
  for (std::uint64_t draw = 0; draw < 200; ++draw) {
    Rng rng(draw ^ 0xd1ff);
    const bool rotate = rng.below(2) == 0;
    const DType dtype = rng.below(2) == 0 ? DType::kF32 : DType::kF64;
    const std::int64_t D = 2 * (1 + rng.below(64)), width = rotate ? D : 2 * D;
    const DType theta_dtype = rng.below(2) == 0 ? DType::kF32 : dtype;
    Dense q(device(), dtype, {1, 1, 1, D}), k(device(), dtype, {1, 1, 1, D});
    Dense theta(device(), theta_dtype, {1, rotate ? D / 2 : D});
    Dense yq(device(), dtype, {1, 1, 1, width}), yk(device(), dtype, {1, 1, 1, width});
    q.normal(3 * draw + 1), k.normal(3 * draw + 2), theta.normal(3 * draw + 3);
    const auto encode_at = [&](const Dense& x, std::int64_t position, Dense& y) {
      const LrpePositions at{.shape = {1}, .offset = position};
      if (rotate) {
        lrpe_rotate_forward(x.view(), theta.view(), y.view(), rotate_options(at), context);
      } else {
        lrpe_cosine_forward(x.view(), theta.view(), y.view(), cosine_options(at), context);
      }
      return y.values();
    };
    const auto dot = [](const std::vector<double>& a, const std::vector<double>& b) {
      return std::inner_product(a.begin(), a.end(), b.begin(), 0.0);
    };
    const auto score = [&](std::int64_t s, std::int64_t t) {
      return dot(encode_at(q, s, yq), encode_at(k, t, yk));
    };
    const std::int64_t s = rng.below(2001) - 1000, t = rng.below(2001) - 1000;
    const double near = score(s, t);
    // Of every size up to 2^31, both ways.
    const std::int64_t shift =
        (rng.below(2) == 0 ? 1 : -1) * (1 + rng.below(std::int64_t{1} << (1 + rng.below(31))));
    const double size = std::sqrt(dot(q.values(), q.values()) * dot(k.values(), k.values()));
    const double error = std::abs(score(s + shift, t + shift) - near) / size;
    const double limit = dtype == DType::kF32 ? 4e-7 : 2e-12;
    worst = std::max(worst, error / limit);
    EXPECT_LE(error, limit) << "draw " << draw << ": " << (rotate ? "rotate" : "cosine")
                            << " D=" << D << " " << name_of(dtype) << " theta "
                            << name_of(theta_dtype) << " s=" << s << " t=" << t
                            << " shift=" << shift;
  }
  RecordProperty("worst_ratio", std::to_string(worst));
}

// 32 768 tokens, so positions of five digits times sums of both signs: dtheta to 1e-6 of its largest value,
// and the same bits again, whatever the number of threads.
TEST_P(Lrpe, ThetaGradientOfLongSequences) {
  const std::int64_t B = 2, H = 2, L = 32768, D = 8;
  const LrpeCosineOptions options{.shape = {L}};
  for (const DType dtype : {DType::kF32, DType::kBF16}) {
    Dense x(device(), dtype, {B, H, L, D}), dy(device(), dtype, {B, H, L, 2 * D});
    Dense theta(device(), DType::kF32, {H, D}), dtheta(device(), DType::kF32, {H, D});
    x.normal(1), dy.normal(2), theta.normal(3);
    Dense exact(kCPU, DType::kF64, {H, D});
    reference::lrpe_cosine_backward(as_f64(dy).view(), as_f64(x).view(), as_f64(theta).view(), {},
                                    exact.view(), options);
    std::vector<std::byte> first;
    for (const int threads : {1, 2, 4, 8}) {
      context.threads = threads;
      lrpe_cosine_backward(dy.view(), x.view(), theta.view(), {}, dtheta.view(), options, context);
      const std::vector<std::byte> bits = dtheta.bytes();
      if (first.empty()) first = bits;
      EXPECT_TRUE(first == bits) << threads << " threads";
    }
    double error = 0, largest = 0;
    const std::vector<double> got = dtheta.values(), want = exact.values();
    for (std::size_t i = 0; i < want.size(); ++i) {
      error = std::max(error, std::abs(got[i] - want[i]));
      largest = std::max(largest, std::abs(want[i]));
    }
    EXPECT_LE(error, 1e-6 * largest) << name_of(dtype);
  }
}

// Rounding to bfloat16 may cut off (the CPU does): still a neighbour of the exact value, and right on average.
TEST_P(Lrpe, BFloat16IsANeighbourAndRightOnAverage) {
  const std::int64_t n = 1500, D = 64;
  Dense x(device(), DType::kBF16, {1, 1, n, D}), theta(device(), DType::kF32, {1, D});
  x.normal(21), theta.normal(22);
  const auto [got, want] = forward(x, theta, {.shape = {n}});
  double largest = 0, sum = 0, squares = 0, count = 0;
  for (std::size_t i = 0; i < want.size(); ++i) {
    if (std::abs(want[i]) < 0x1p-100) continue;  // the sines of position 0
    const double away = (got[i] - want[i]) / ulp_at(want[i], DType::kBF16);
    largest = std::max(largest, std::abs(away));
    sum += std::copysign(away, away * want[i]);  // away from zero is positive
    squares += away * away;
    ++count;
  }
  EXPECT_LE(largest, 0.72);
  EXPECT_LE(std::abs(sum / count), 0.01);
  EXPECT_LE(std::sqrt(squares / count), 0.32);  // rounding to nearest: 0.289
}

// Close to a zero of the phase a product of sines loses what the ulp of a small value needs.
TEST_P(Lrpe, BFloat16NearAZeroOfThePhase) {
  struct Place {
    float theta;
    std::int64_t position;
  };
  // Two that a search found at 1.02 and 1.01 ulp, when the limit for exact phases was 1.6e-4; then some at random.
  std::vector<Place> places = {{0.681118846f, 356626703}, {0.431963354f, 255234388}};
  Rng rng(31);
  while (places.size() < 300) {
    const Place p{static_cast<float>(rng.normal()), rng.below(1ll << 31)};
    const auto [s, c] = exact_phase(static_cast<double>(p.theta), p.position);
    if (std::abs(s * c) > 1e-5 && std::abs(s * c) < 5e-4) places.push_back(p);
  }
  Dense x(device(), DType::kBF16, {1, 1, 1, 4}), theta(device(), DType::kF32, {1, 4});
  Dense y(device(), DType::kBF16, {1, 1, 1, 8});
  const std::vector<double> in = {1.4765625, 1.0, -1.9921875, 0.7109375};
  x.write(in);
  for (const Place& p : places) {
    const auto t = static_cast<double>(p.theta);
    theta.write({t, t, t, t});
    lrpe_cosine_forward(x.view(), theta.view(), y.view(), {.shape = {1}, .offset = p.position},
                        context);
    const auto [s, c] = exact_phase(t, p.position);
    const std::vector<double> got = y.values();
    for (std::size_t i = 0; i < 8; ++i) {
      const double want = in[i % 4] * (i < 4 ? c : s);
      EXPECT_LE(std::abs(got[i] - want), ulp_at(want, DType::kBF16))
          << got[i] << " for " << want << ", theta " << t << " position " << p.position;
    }
  }
}

TEST_P(Lrpe, BFloat16KeepsWhatItHolds) {
  const double largest = 0x1.fep127, infinity = std::numeric_limits<double>::infinity();
  const std::vector<double> special = {largest,    -largest,    0x1p-133, 1.0078125, 0.0, -0.0,
                                       0x1.fep-14, 0x1.02p-126, infinity, -infinity, 3.0, -7.0};
  const auto D = static_cast<std::int64_t>(special.size());
  std::vector<double> rows;
  for (int t = 0; t < 41; ++t) rows.insert(rows.end(), special.begin(), special.end());
  Dense x(device(), DType::kBF16, {1, 1, 41, D}), theta(device(), DType::kF32, {1, D});
  Dense y(device(), DType::kBF16, {1, 1, 41, 2 * D});
  x.write(rows), theta.normal(23);
  lrpe_cosine_forward(x.view(), theta.view(), y.view(), {.shape = {40}, .prefix = 1}, context);
  const std::vector<double> values = y.values();
  for (std::int64_t t = 0; t < 41; ++t) {
    for (std::int64_t c = 0; c < D; ++c) {
      const double in = special[static_cast<std::size_t>(c)];
      const double cosine = values[static_cast<std::size_t>(t * 2 * D + c)];
      // A prefix token and position 0 change nothing, and what is finite never overflows.
      if (t < 2) {
        EXPECT_EQ(cosine, in) << "token " << t << " column " << c;
      }
      EXPECT_EQ(std::isfinite(cosine), std::isfinite(in)) << "token " << t << " column " << c;
    }
  }
}

// Where e^-x overflows, sigmoid and silu are still far from the smallest number.
TEST_P(Lrpe, SigmoidAndSiluOfLargeNegativeNumbers) {
  const std::int64_t n = 40, D = 8;
  std::vector<double> numbers;
  for (int i = 0; i < n * D; ++i) numbers.push_back(std::round(-60.0 - i % 44) + i % 2 * 0.5);
  for (const DType dtype : {DType::kF32, DType::kBF16}) {
    Dense x(device(), dtype, {1, 1, n, D}), theta(device(), DType::kF32, {1, D});
    x.write(numbers), theta.normal(24);
    for (const auto activation : {LrpeActivation::kSigmoid, LrpeActivation::kSilu}) {
      const auto [got, want] = forward(x, theta, {.shape = {n}, .activation = activation});
      for (std::size_t i = 0; i < want.size(); ++i) {
        const double unit =
            dtype == DType::kF32 ? std::abs(want[i]) * 1e-5 + 0x1p-140 : ulp_at(want[i], dtype);
        EXPECT_LE(std::abs(got[i] - want[i]), unit)
            << name_of(dtype) << " " << want[i] << " at " << i;
      }
    }
  }
}

// The mean that a softmax's gradient subtracts is never larger than the largest gradient.
TEST_P(Lrpe, SoftmaxOfLargeGradients) {
  const std::int64_t n = 50, D = 16;
  for (const auto activation : {LrpeActivation::kSoftmaxFeatures, LrpeActivation::kSoftmaxTokens}) {
    Dense x(device(), DType::kBF16, {1, 1, n, D}), theta(device(), DType::kF32, {1, D});
    Dense dy(device(), DType::kBF16, {1, 1, n, 2 * D}), dx(device(), DType::kBF16, {1, 1, n, D});
    x.normal(25);
    theta.write(std::vector<double>(D, 0.0));
    dy.write(std::vector<double>(static_cast<std::size_t>(n * 2 * D), 0x1p110));
    lrpe_cosine_backward(dy.view(), x.view(), theta.view(), dx.view(), {},
                         {.shape = {n}, .activation = activation}, context);
    // All gradients are equal, so that nothing is left but rounding.
    for (const double v : dx.values()) ASSERT_LE(std::abs(v), 0x1p94);
  }
}

// `..._workspace` reads device, dtypes and shapes only, so that it can be asked before there is
// memory.
TEST_P(Lrpe, WorkspaceNeedsNoData) {
  const auto like = [&](std::initializer_list<std::int64_t> shape) {
    return contiguous(nullptr, DType::kF32, {shape.begin(), shape.size()}, device());
  };
  const TensorView x = like({2, 3, 8, 16}), theta = like({3, 16});
  LrpePositions at{.shape = {8}};
  EXPECT_NO_THROW(lrpe_cosine_forward_workspace(x, theta, cosine_options(at)));
  EXPECT_NO_THROW(lrpe_cosine_backward_workspace(x, theta, true, cosine_options(at)));
  EXPECT_NO_THROW(lrpe_rotate_backward_workspace(x, like({3, 8}), true, rotate_options(at)));
  at.offsets = contiguous(nullptr, DType::kI64, std::array<std::int64_t, 1>{2}, device());
  EXPECT_NO_THROW(lrpe_cosine_forward_workspace(x, theta, cosine_options(at)));
  const auto of_columns = [&](std::int64_t D) {
    return lrpe_cosine_forward_workspace(like({1, 1, 4, D}), like({1, D}), {.shape = {4}});
  };
  EXPECT_NO_THROW(of_columns(1 << 20));
  EXPECT_THROW(of_columns(1808504320951936), InvalidArgument);  // no size wraps
}

}  // namespace
}  // namespace annulus::testing
