// What LRPE promises of tokens that say where they are: the bits of the calls that would say it otherwise. On the
// CPU, and on CUDA where there is a device.
#include <gtest/gtest.h>

#include <array>
#include <cstdint>
#include <numeric>
#include <vector>

#include "annulus/lrpe_cosine/lrpe_cosine.h"
#include "testing/dense.h"

namespace annulus::testing {
namespace {

class LrpeIds : public EachDevice {
 protected:
  // Forward and backward of (2, 3, L, D) as one call.
  struct Results {
    Dense y, dx, dtheta;
  };
  Results run(DType dtype, std::int64_t L, std::int64_t D, std::int64_t E,
              const LrpeCosineOptions& options) {
    Dense x(device(), dtype, {2, 3, L, D}), theta(device(), DType::kF32, {3, E}),
        dy(device(), dtype, {2, 3, L, 2 * D});
    x.normal(1), theta.normal(2), dy.normal(3);
    Results r{Dense(device(), dtype, {2, 3, L, 2 * D}), Dense(device(), dtype, {2, 3, L, D}),
              Dense(device(), DType::kF32, {3, E})};
    lrpe_cosine_forward(x.view(), theta.view(), r.y.view(), options, context);
    lrpe_cosine_backward(dy.view(), x.view(), theta.view(), r.dx.view(), r.dtheta.view(), options,
                         context);
    return r;
  }
  static void expect_equal(const Results& a, const Results& b, DType dtype) {
    EXPECT_TRUE(a.y.bytes() == b.y.bytes()) << name_of(dtype);
    EXPECT_TRUE(a.dx.bytes() == b.dx.bytes()) << name_of(dtype);
    EXPECT_TRUE(a.dtheta.bytes() == b.dtheta.bytes()) << name_of(dtype);
  }

  Context context;
};
ANNULUS_EACH_DEVICE(LrpeIds);

constexpr std::array kDTypes = {DType::kF64, DType::kF32, DType::kF16, DType::kBF16};

TEST_P(LrpeIds, ARangeEqualsAShape) {
  for (const DType dtype : kDTypes) {
    for (const std::int64_t first : {0ll, -70ll, 100000ll}) {
      constexpr std::int64_t kTokens = 300;
      LrpeCosineOptions by_shape, by_ids;
      by_shape.shape = {kTokens};
      by_shape.offset = first;
      Dense ids(device(), DType::kI64, {1, kTokens, 1});
      std::vector<double> values(kTokens);
      std::iota(values.begin(), values.end(), static_cast<double>(first));
      ids.write(values);
      by_ids.position_ids = ids.view();
      expect_equal(run(dtype, kTokens, 64, 64, by_shape), run(dtype, kTokens, 64, 64, by_ids),
                   dtype);
    }
  }
}

TEST_P(LrpeIds, CoordinatesEqualAGrid) {
  for (const DType dtype : kDTypes) {
    LrpeCosineOptions by_shape, by_ids;
    by_shape.shape = {5, 7, 9};
    std::vector<double> values;
    for (int i = 0; i < 5 * 7 * 9; ++i) {
      values.insert(values.end(), {i / 63 * 1.0, i / 9 % 7 * 1.0, i % 9 * 1.0});
    }
    Dense ids(device(), DType::kI32, {1, 315, 3});
    ids.write(values);
    by_ids.position_ids = ids.view();
    expect_equal(run(dtype, 315, 40, 14, by_shape), run(dtype, 315, 40, 14, by_ids), dtype);
  }
}

TEST_P(LrpeIds, PackedSequencesEqualSeparateCalls) {
  const std::vector<std::int64_t> lengths = {1, 40, 3, 8, 7, 130, 2, 2, 65};
  std::vector<double> values;
  for (const std::int64_t n : lengths) {
    for (std::int64_t s = 0; s < n; ++s) values.push_back(static_cast<double>(s));
  }
  const auto L = static_cast<std::int64_t>(values.size());
  for (const DType dtype : kDTypes) {
    for (const LrpeActivation activation :
         {LrpeActivation::kNone, LrpeActivation::kSilu, LrpeActivation::kSoftmaxFeatures}) {
      Dense x(device(), dtype, {1, 3, L, 128}), theta(device(), DType::kF32, {3, 128});
      Dense packed(device(), dtype, {1, 3, L, 256}), apart(device(), dtype, {1, 3, L, 256});
      Dense ids(device(), DType::kI64, {1, L, 1});
      x.normal(1), theta.normal(2), ids.write(values);
      LrpeCosineOptions options;
      options.activation = activation;
      options.position_ids = ids.view();
      lrpe_cosine_forward(x.view(), theta.view(), packed.view(), options, context);
      options.position_ids = {};
      std::int64_t first = 0;
      for (const std::int64_t n : lengths) {
        options.shape = {n};
        lrpe_cosine_forward(x.tokens(first, n), theta.view(), apart.tokens(first, n), options,
                            context);
        first += n;
      }
      EXPECT_TRUE(packed.bytes() == apart.bytes()) << name_of(dtype);
    }
  }
}

// Runs and single tokens back and forth, or runs alone: then a tile, which is 128 tokens of so many, has more anchors
// than the CPU keeps.
TEST_P(LrpeIds, PositionsInAnyOrderEqualSingleTokens) {
  constexpr std::int64_t kTokens = 1100;
  context.threads = 1;  // many small calls
  for (const bool singles : {true, false}) {
    Rng rng(5);
    std::vector<double> values;
    while (values.size() < kTokens) {
      const std::int64_t from = rng.below(2) ? rng.below(2000) - 1000 : rng.below(1ll << 31);
      const std::int64_t length = singles && rng.below(3) ? 1 + rng.below(4) : 8 + rng.below(4);
      for (std::int64_t s = 0; s < length && values.size() < kTokens; ++s) {
        values.push_back(static_cast<double>(from + s));
      }
    }
    for (const DType dtype : kDTypes) {
      Dense x(device(), dtype, {1, 16, kTokens, 32}), theta(device(), DType::kF32, {16, 32});
      Dense together(device(), dtype, {1, 16, kTokens, 64}),
          apart(device(), dtype, {1, 16, kTokens, 64});
      Dense ids(device(), DType::kI64, {1, kTokens, 1});
      x.normal(1), theta.normal(2), ids.write(values);
      LrpeCosineOptions options;
      options.position_ids = ids.view();
      lrpe_cosine_forward(x.view(), theta.view(), together.view(), options, context);
      options.position_ids = {};
      options.shape = {1};
      for (std::int64_t t = 0; t < kTokens; ++t) {
        options.offset = static_cast<std::int64_t>(values[static_cast<std::size_t>(t)]);
        lrpe_cosine_forward(x.tokens(t, 1), theta.view(), apart.tokens(t, 1), options, context);
      }
      EXPECT_TRUE(together.bytes() == apart.bytes()) << name_of(dtype);
    }
  }
}

}  // namespace
}  // namespace annulus::testing
