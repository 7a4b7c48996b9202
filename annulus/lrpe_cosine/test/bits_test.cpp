// Calls of LRPE that say the same in two ways have the same bits: a sequence cut in calls, sequences together and
// apart, tokens that say where they are, queries and keys at once, in place. On the CPU, and on CUDA where there is a
// device.
#include <gtest/gtest.h>

#include <array>
#include <cmath>
#include <cstdint>
#include <numeric>
#include <vector>

#include "annulus/lrpe_cosine/lrpe_cosine.h"
#include "annulus/lrpe_cosine/positions.h"
#include "testing/dense.h"

namespace annulus::testing {
namespace {

constexpr std::array kDTypes = {DType::kF64, DType::kF32, DType::kF16, DType::kBF16};
constexpr std::array kOfATokenAlone = {LrpeActivation::kNone, LrpeActivation::kSilu,
                                       LrpeActivation::kSoftmaxFeatures};
constexpr std::array kOfEachKind = {LrpeActivation::kNone, LrpeActivation::kSilu,
                                    LrpeActivation::kSoftmaxFeatures,
                                    LrpeActivation::kSoftmaxTokens};

// Some tokens of a call, or one sequence of it, and where they are.
struct Part {
  LrpePositions positions;
  std::int64_t first = 0, tokens = 0;  // 0: all
  std::int64_t sequence = -1;          // -1: all

  TensorView of(const Dense& t) const {
    return sequence >= 0 ? t.batch(sequence) : tokens > 0 ? t.tokens(first, tokens) : t.view();
  }
};

struct Whole {
  std::int64_t B, H, L, D, E;
  LrpePositions positions = {};
  DType dtype = DType::kBF16;
  LrpeActivation activation = LrpeActivation::kNone;
  enum { kForward, kDx, kAll } compared = kForward;
};

class LrpeBits : public EachDevice {
 protected:
  struct Results {
    Dense y, dx, dtheta;
  };

  void expect_equal(const Whole& w, const std::vector<Part>& parts) {
    Dense x(device(), w.dtype, {w.B, w.H, w.L, w.D}), theta(device(), DType::kF32, {w.H, w.E}),
        dy(device(), w.dtype, {w.B, w.H, w.L, 2 * w.D});
    x.normal(1), theta.normal(2), dy.normal(3);
    const auto run = [&](const std::vector<Part>& calls) {
      Results r{Dense(device(), w.dtype, {w.B, w.H, w.L, 2 * w.D}),
                Dense(device(), w.dtype, {w.B, w.H, w.L, w.D}),
                Dense(device(), DType::kF32, {w.H, w.E})};
      for (const Part& p : calls) {
        const LrpeCosineOptions options = cosine_options(p.positions, w.activation);
        lrpe_cosine_forward(p.of(x), theta.view(), p.of(r.y), options, context);
        if (w.compared == Whole::kForward) continue;
        lrpe_cosine_backward(p.of(dy), p.of(x), theta.view(), p.of(r.dx),
                             w.compared == Whole::kAll ? r.dtheta.view() : TensorView(), options,
                             context);
      }
      return r;
    };
    const Results together = run({{w.positions}}), apart = run(parts);
    SCOPED_TRACE(::testing::Message()
                 << name_of(w.dtype) << " of " << w.D << " columns, activation "
                 << static_cast<int>(w.activation) << ", " << parts.size() << " parts");
    EXPECT_TRUE(together.y.bytes() == apart.y.bytes());
    EXPECT_TRUE(w.compared < Whole::kDx || together.dx.bytes() == apart.dx.bytes());
    EXPECT_TRUE(w.compared < Whole::kAll || together.dtheta.bytes() == apart.dtheta.bytes());
  }

  Dense ids_of(const std::vector<double>& values, std::int64_t rows = 1, std::int64_t axes = 1,
               DType integer = DType::kI64) const {
    const auto tokens = static_cast<std::int64_t>(values.size()) / rows / axes;
    Dense ids(device(), integer, {rows, tokens, axes});
    ids.write(values);
    return ids;
  }

  Context context;
};
ANNULUS_EACH_DEVICE(LrpeBits);

std::vector<double> range(std::int64_t first, std::int64_t count) {
  std::vector<double> values(static_cast<std::size_t>(count));
  std::iota(values.begin(), values.end(), static_cast<double>(first));
  return values;
}

TEST_P(LrpeBits, PrefillAndDecode) {
  std::vector<Part> parts = {{{.shape = {26}, .prefix = 4, .offset = 100000}, 0, 30}};
  for (std::int64_t t = 30; t < 41; ++t) {
    parts.push_back({{.shape = {1}, .offset = 100000 + t - 4}, t, 1});
  }
  for (const DType dtype : kDTypes) {
    for (const LrpeActivation activation : kOfATokenAlone) {
      expect_equal(
          {2, 3, 41, 20, 20, {.shape = {37}, .prefix = 4, .offset = 100000}, dtype, activation},
          parts);
    }
  }
}

// One sequence by a shape, whose prefix ends among the tokens of a CUDA thread, and its halves. The CPU's tiles are
// short.
TEST_P(LrpeBits, ALongSequenceAndItsParts) {
  const std::int64_t length = device() == kCPU ? 2400 : 24000, prefix = 37, cut = length / 2 + 1;
  for (const DType dtype : kDTypes) {
    expect_equal({1, 6, length, 64, 64, {.shape = {length - prefix}, .prefix = prefix}, dtype},
                 {{{.shape = {cut - prefix}, .prefix = prefix}, 0, cut},
                  {{.shape = {length - cut}, .offset = cut - prefix}, cut, length - cut}});
  }
}

TEST_P(LrpeBits, OffsetsPerSequence) {
  const std::vector<double> values = {5, -123456, 2147483000};
  std::vector<Part> parts;
  for (std::int64_t b = 0; b < 3; ++b) {
    const auto offset = 3 + static_cast<std::int64_t>(values[static_cast<std::size_t>(b)]);
    parts.push_back({{.shape = {7}, .prefix = 2, .offset = offset}, 0, 0, b});
  }
  for (const DType integer : {DType::kI32, DType::kI64}) {
    Dense offsets(device(), integer, {3});
    offsets.write(values);
    const LrpePositions positions{
        .shape = {7}, .prefix = 2, .offset = 3, .offsets = offsets.view()};
    expect_equal({3, 2, 9, 16, 16, positions, DType::kF32}, parts);
  }
}

// Sequences share the making of their phases, several at a time where there are many rows: each is what it is alone.
TEST_P(LrpeBits, ManySequences) {
  for (Whole w : {Whole{7, 12, 300, 128, 128}, Whole{3, 400, 70, 8, 8}}) {
    w.positions = {.shape = {w.L - 3}, .prefix = 3};
    w.compared = Whole::kDx;
    std::vector<Part> parts;
    for (std::int64_t b = 0; b < w.B; ++b) parts.push_back({w.positions, 0, 0, b});
    for (const LrpeActivation activation : kOfEachKind) {
      w.activation = activation;
      expect_equal(w, parts);
    }
  }
}

// Tokens that say where they are: the bits of the calls that would say it otherwise.

TEST_P(LrpeBits, IdsOfARange) {
  for (const DType dtype : kDTypes) {
    for (const std::int64_t first : {0ll, -70ll, 100000ll}) {
      const Dense ids = ids_of(range(first, 300));
      Whole w{2, 3, 300, 64, 64, {.position_ids = ids.view()}, dtype};
      w.compared = Whole::kAll;
      expect_equal(w, {{{.shape = {300}, .offset = first}}});
    }
  }
}

TEST_P(LrpeBits, IdsOfAGrid) {
  std::vector<double> values;
  for (int i = 0; i < 5 * 7 * 9; ++i) {
    values.insert(values.end(), {i / 63 * 1.0, i / 9 % 7 * 1.0, i % 9 * 1.0});
  }
  const Dense ids = ids_of(values, 1, 3, DType::kI32);
  for (const DType dtype : kDTypes) {
    Whole w{2, 3, 315, 40, 14, {.position_ids = ids.view()}, dtype};
    w.compared = Whole::kAll;
    expect_equal(w, {{{.shape = {5, 7, 9}}}});
  }
}

TEST_P(LrpeBits, IdsOfPackedSequences) {
  std::vector<double> values;
  std::vector<Part> parts;
  for (const std::int64_t n : {1, 40, 3, 8, 7, 130, 2, 2, 65}) {
    parts.push_back({{.shape = {n}}, static_cast<std::int64_t>(values.size()), n});
    for (const double s : range(0, n)) values.push_back(s);
  }
  const Dense ids = ids_of(values);
  const auto L = static_cast<std::int64_t>(values.size());
  for (const DType dtype : kDTypes) {
    for (const LrpeActivation activation : kOfATokenAlone) {
      expect_equal({1, 3, L, 128, 128, {.position_ids = ids.view()}, dtype, activation}, parts);
    }
  }
}

// Runs and single tokens back and forth, or runs alone: then a tile, which is 128 tokens of so many, has more anchors
// than the CPU keeps.
TEST_P(LrpeBits, IdsInAnyOrder) {
  constexpr std::int64_t kTokens = 1100;
  context.threads = 1;  // many small calls
  for (const bool singles : {true, false}) {
    Rng rng(5);
    std::vector<double> values;
    while (values.size() < kTokens) {
      const std::int64_t from =
          rng.below(2) ? rng.below(2000) - 1000 : rng.below(1ll << 41) - (1ll << 40);
      const std::int64_t length = singles && rng.below(3) ? 1 + rng.below(4) : 8 + rng.below(4);
      for (const double s : range(from, length)) values.push_back(s);
    }
    values.resize(kTokens);
    std::vector<Part> parts;
    for (std::int64_t t = 0; t < kTokens; ++t) {
      const auto offset = static_cast<std::int64_t>(values[static_cast<std::size_t>(t)]);
      parts.push_back({{.shape = {1}, .offset = offset}, t, 1});
    }
    const Dense ids = ids_of(values);
    for (const DType dtype : kDTypes) {
      expect_equal({1, 16, kTokens, 32, 32, {.position_ids = ids.view()}, dtype}, parts);
    }
  }
}

// Enough tokens for several to a CUDA thread, of one sequence or of four.
TEST_P(LrpeBits, IdsOfManySequences) {
  const std::int64_t L = device() == kCPU ? 600 : 6000;
  for (const bool shared : {false, true}) {
    std::vector<double> values;
    std::vector<Part> parts;
    for (std::int64_t b = 0; b < 4; ++b) {
      const std::int64_t start = shared ? 77 : 1000 * b * b - 500;
      parts.push_back({{.shape = {L}, .offset = start}, 0, 0, b});
      if (shared && b > 0) continue;
      for (const double s : range(start, L)) values.push_back(s);
    }
    const Dense ids = ids_of(values, shared ? 1 : 4);
    const auto compare = [&](DType dtype, std::int64_t D, LrpeActivation activation) {
      expect_equal({4, 6, L, D, D, {.position_ids = ids.view()}, dtype, activation, Whole::kDx},
                   parts);
    };
    for (const LrpeActivation a : kOfEachKind) compare(DType::kBF16, 128, a);
    compare(DType::kF32, 64, LrpeActivation::kNone);
    compare(DType::kF16, 27, LrpeActivation::kNone);  // one column at a time
    compare(DType::kF64, 24, LrpeActivation::kNone);
  }
}

TEST_P(LrpeBits, QueriesAndKeys) {
  const LrpeCosineOptions options{.shape = {17}, .prefix = 2};
  for (const DType dtype : kDTypes) {
    Dense q(device(), dtype, {2, 6, 19, 24}), k(device(), dtype, {2, 2, 19, 24});
    Dense theta(device(), DType::kF32, {2, 24}), repeated(device(), DType::kF32, {6, 24});
    q.normal(1), k.normal(2), theta.normal(3);
    std::vector<double> rows;
    const std::vector<double> t = theta.values();
    for (long h = 0; h < 6; ++h) {
      rows.insert(rows.end(), t.begin() + h / 3 * 24, t.begin() + h / 3 * 24 + 24);
    }
    repeated.write(rows);
    Dense yq(device(), dtype, {2, 6, 19, 48}), yk(device(), dtype, {2, 2, 19, 48});
    Dense zq(device(), dtype, {2, 6, 19, 48}), zk(device(), dtype, {2, 2, 19, 48});
    lrpe_cosine_qk_forward(q.view(), k.view(), theta.view(), yq.view(), yk.view(), options,
                           context);
    lrpe_cosine_forward(q.view(), repeated.view(), zq.view(), options, context);
    lrpe_cosine_forward(k.view(), theta.view(), zk.view(), options, context);
    EXPECT_TRUE(yq.bytes() == zq.bytes()) << name_of(dtype);
    EXPECT_TRUE(yk.bytes() == zk.bytes()) << name_of(dtype);
  }
}

TEST_P(LrpeBits, RotateInPlace) {
  for (const DType dtype : kDTypes) {
    for (const bool interleaved : {false, true}) {
      SCOPED_TRACE(::testing::Message() << name_of(dtype) << " interleaved " << interleaved);
      const LrpeRotateOptions options{.shape = {19}, .interleaved = interleaved};
      Dense x(device(), dtype, {2, 3, 19, 26}), theta(device(), DType::kF32, {3, 13});
      Dense y(device(), dtype, {2, 3, 19, 26}), dx(device(), dtype, {2, 3, 19, 26});
      x.normal(1), theta.normal(2);
      lrpe_rotate_forward(x.view(), theta.view(), y.view(), options, context);
      lrpe_rotate_backward(y.view(), {}, theta.view(), dx.view(), {}, options, context);
      lrpe_rotate_forward(x.view(), theta.view(), x.view(), options, context);
      EXPECT_TRUE(x.bytes() == y.bytes());
      lrpe_rotate_backward(y.view(), {}, theta.view(), y.view(), {}, options, context);
      EXPECT_TRUE(dx.bytes() == y.bytes());
    }
  }
}

// Partial rotary turns the columns before the rest as if they were all there are, and no bit of the rest changes.
TEST_P(LrpeBits, PartialRotary) {
  const std::int64_t B = 2, H = 3, L = 19, D = 40, turning = 16;
  const auto first = [&](TensorView v) {
    v.shape[3] = turning;
    return v;
  };
  // Bits of any kind, a NaN's payload included, in the columns that pass through.
  std::vector<double> payload(static_cast<std::size_t>(B * H * L * D));
  Rng rng(7);
  for (double& v : payload) v = static_cast<double>(rng.below(1ll << 31));
  for (const bool interleaved : {false, true}) {
    SCOPED_TRACE(::testing::Message() << "interleaved " << interleaved);
    const LrpeRotateOptions options{.shape = {L}, .interleaved = interleaved};
    Dense x(device(), DType::kI32, {B, H, L, D}), y(device(), DType::kI32, {B, H, L, D}),
        theta(device(), DType::kF32, {H, turning / 2});
    const auto as_float = [](const Dense& t) {
      TensorView v = t.view();
      v.dtype = DType::kF32;
      return v;
    };
    x.write(payload), theta.normal(2);
    const TensorView from = as_float(x), to = as_float(y);
    for (const bool backward : {false, true}) {
      const auto turn = [&](const TensorView& in, const TensorView& out) {
        if (backward) {
          lrpe_rotate_backward(in, {}, theta.view(), out, {}, options, context);
        } else {
          lrpe_rotate_forward(in, theta.view(), out, options, context);
        }
      };
      y.write(payload);
      turn(first(from), first(to));
      const std::vector<std::byte> want = y.bytes();
      y.write(std::vector<double>(payload.size(), -1.0));
      turn(from, to);
      EXPECT_TRUE(y.bytes() == want);
      y.write(payload);
      turn(to, to);
      EXPECT_TRUE(y.bytes() == want) << "in place";
    }
  }
}

// Queries and keys as a projection leaves them, token by token side by side with the values, turned where they are: the
// bits of two calls apart, and the values untouched. Theta has a row per group, or one.
TEST_P(LrpeBits, RotateQueriesAndKeysOfAProjection) {
  const std::int64_t B = 2, L = 21, D = 32, Hq = 6, Hk = 2, width = (Hq + 2 * Hk) * D;
  for (const DType dtype : kDTypes) {
    for (const std::int64_t rows : {Hk, std::int64_t{1}}) {
      for (const std::int64_t E : {D / 2, D / 8}) {
        SCOPED_TRACE(::testing::Message() << name_of(dtype) << " rows " << rows << " E " << E);
        const LrpeRotateOptions options{.shape = {L - 2}, .prefix = 2, .interleaved = E == D / 8};
        Dense qkv(device(), dtype, {B, L, Hq + 2 * Hk, D}),
            want(device(), dtype, {B, L, Hq + 2 * Hk, D});
        Dense theta(device(), DType::kF32, {rows, E}), repeated(device(), DType::kF32, {Hq, E});
        theta.normal(3);
        std::vector<double> all;
        const std::vector<double> t = theta.values();
        for (long h = 0; h < Hq; ++h) {
          const auto row = t.begin() + h * rows / Hq * E;
          all.insert(all.end(), row, row + E);
        }
        repeated.write(all);
        const auto heads = [&](const Dense& of, std::int64_t begin, std::int64_t count) {
          TensorView v = of.view();
          v.data = static_cast<std::byte*>(v.data) + begin * D * size_of(dtype);
          v.shape = {B, count, L, D};
          v.stride = {L * width, D, width, 1};
          return v;
        };
        qkv.normal(1), want.normal(1);
        const TensorView q = heads(qkv, 0, Hq), k = heads(qkv, Hq, Hk);
        const TensorView q1 = heads(want, 0, Hq), k1 = heads(want, Hq, Hk);
        lrpe_rotate_qk_forward(q, k, theta.view(), q, k, options, context);
        lrpe_rotate_forward(q1, repeated.view(), q1, options, context);
        lrpe_rotate_forward(k1, theta.view(), k1, options, context);
        EXPECT_TRUE(qkv.bytes() == want.bytes());
        lrpe_rotate_qk_backward(q, k, {}, {}, theta.view(), q, k, {}, options, context);
        lrpe_rotate_backward(q1, {}, repeated.view(), q1, {}, options, context);
        lrpe_rotate_backward(k1, {}, theta.view(), k1, {}, options, context);
        EXPECT_TRUE(qkv.bytes() == want.bytes()) << "backward";
      }
    }
  }
}

// Dense and strided columns take different ways; a sine of -0 (half a turn, exactly) showed it.
TEST_P(LrpeBits, AZeroHasOneSignInEveryLayout) {
  const LrpeCosineOptions options{.shape = {1}, .offset = 1};
  const std::int64_t D = 32;
  for (const DType dtype : kDTypes) {
    Dense x(device(), dtype, {1, 1, 1, D}), theta(device(), DType::kF32, {1, D});
    Dense y(device(), dtype, {1, 1, 1, 2 * D}), wide(device(), dtype, {1, 1, 1, 4 * D});
    x.write(std::vector<double>(D, 1.0));
    theta.write(std::vector<double>(D, -3.4061215e-19));
    lrpe_cosine_forward(x.view(), theta.view(), y.view(), options, context);
    TensorView strided = wide.view();
    strided.shape[3] = 2 * D;
    strided.stride[3] = 2;
    lrpe_cosine_forward(x.view(), theta.view(), strided, options, context);
    const std::vector<double> dense = y.values(), spread = wide.values();
    for (std::size_t c = 0; c < dense.size(); ++c) {
      EXPECT_EQ(dense[c], spread[2 * c]);
      EXPECT_EQ(std::signbit(dense[c]), std::signbit(spread[2 * c])) << name_of(dtype);
    }
  }
}

}  // namespace
}  // namespace annulus::testing
