// What LRPE promises of tokens that say where they are: the bits of the calls that would say it otherwise. Calls are
// large enough here for CUDA's threads to go through several tokens, or sequences. On the CPU, and on CUDA where there is a
// device.
#include <gtest/gtest.h>

#include <array>
#include <cstdint>
#include <numeric>
#include <string>
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
      const std::int64_t from =
          rng.below(2) ? rng.below(2000) - 1000 : rng.below(1ll << 41) - (1ll << 40);
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

// Forward and gradient of x, of many tokens: by one call, and sequence by sequence with a shape each.
struct Many {
  LrpeActivation activation = LrpeActivation::kNone;
  bool shared = false;  // one row of position_ids for all sequences
  std::int64_t columns = 128;
};
class LrpeManyIds : public LrpeIds {
 protected:
  static constexpr std::int64_t kB = 4, kH = 6;
  // Enough for several tokens a CUDA thread, of one sequence or of four; the CPU's tiles are short.
  std::int64_t tokens() const { return device() == kCPU ? 600 : 6000; }

  // Sequence b counts from here.
  static std::int64_t start(std::int64_t b, bool shared) {
    return shared ? 77 : 1000 * b * b - 500;
  }

  void compare(DType dtype, const Many& many) {
    const std::int64_t D = many.columns, L = tokens();
    Dense x(device(), dtype, {kB, kH, L, D}), theta(device(), DType::kF32, {kH, D});
    Dense dy(device(), dtype, {kB, kH, L, 2 * D});
    Dense y(device(), dtype, {kB, kH, L, 2 * D}), dx(device(), dtype, {kB, kH, L, D});
    Dense y_apart(device(), dtype, {kB, kH, L, 2 * D}), dx_apart(device(), dtype, {kB, kH, L, D});
    x.normal(1), theta.normal(2), dy.normal(3);
    const std::int64_t rows = many.shared ? 1 : kB;
    Dense ids(device(), DType::kI64, {rows, L, 1});
    std::vector<double> values;
    for (std::int64_t b = 0; b < rows; ++b) {
      for (std::int64_t t = 0; t < L; ++t) {
        values.push_back(static_cast<double>(start(b, many.shared) + t));
      }
    }
    ids.write(values);
    LrpeCosineOptions options;
    options.activation = many.activation;
    options.position_ids = ids.view();
    lrpe_cosine_forward(x.view(), theta.view(), y.view(), options, context);
    lrpe_cosine_backward(dy.view(), x.view(), theta.view(), dx.view(), {}, options, context);
    options.position_ids = {};
    options.shape = {L};
    for (std::int64_t b = 0; b < kB; ++b) {
      options.offset = start(b, many.shared);
      lrpe_cosine_forward(x.batch(b), theta.view(), y_apart.batch(b), options, context);
      lrpe_cosine_backward(dy.batch(b), x.batch(b), theta.view(), dx_apart.batch(b), {}, options,
                           context);
    }
    const std::string what = std::string(name_of(dtype)) + " of " + std::to_string(D) +
                             (many.shared ? ", shared" : ", own") + ", activation " +
                             std::to_string(static_cast<int>(many.activation));
    EXPECT_TRUE(y.bytes() == y_apart.bytes()) << what;
    EXPECT_TRUE(dx.bytes() == dx_apart.bytes()) << what;
  }
};
ANNULUS_EACH_DEVICE(LrpeManyIds);

TEST_P(LrpeManyIds, EqualSeparateCalls) {
  for (const bool shared : {false, true}) {
    for (const LrpeActivation activation :
         {LrpeActivation::kNone, LrpeActivation::kSilu, LrpeActivation::kSoftmaxFeatures,
          LrpeActivation::kSoftmaxTokens}) {
      compare(DType::kBF16, {.activation = activation, .shared = shared});
    }
    compare(DType::kF32, {.shared = shared, .columns = 64});
    compare(DType::kF16, {.shared = shared, .columns = 27});  // one column at a time
    compare(DType::kF64, {.shared = shared, .columns = 24});
  }
}

// One sequence by a shape, whose prefix ends among the tokens of a thread, against its halves.
TEST_P(LrpeManyIds, ALongSequenceEqualsItsParts) {
  const std::int64_t length = 4 * tokens(), prefix = 37, cut = length / 2 + 1;
  for (const DType dtype : kDTypes) {
    Dense x(device(), dtype, {1, kH, length, 64}), theta(device(), DType::kF32, {kH, 64});
    Dense whole(device(), dtype, {1, kH, length, 128}),
        parts(device(), dtype, {1, kH, length, 128});
    x.normal(1), theta.normal(2);
    LrpeCosineOptions options;
    options.prefix = prefix;
    options.shape = {length - prefix};
    lrpe_cosine_forward(x.view(), theta.view(), whole.view(), options, context);
    options.shape = {cut - prefix};
    lrpe_cosine_forward(x.tokens(0, cut), theta.view(), parts.tokens(0, cut), options, context);
    options.prefix = 0;
    options.offset = cut - prefix;
    options.shape = {length - cut};
    lrpe_cosine_forward(x.tokens(cut, length - cut), theta.view(), parts.tokens(cut, length - cut),
                        options, context);
    EXPECT_TRUE(whole.bytes() == parts.bytes()) << name_of(dtype);
  }
}

}  // namespace
}  // namespace annulus::testing
