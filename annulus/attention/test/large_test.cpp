// Sequences whose square is beyond 2^31, up to a million tokens: some rows against the definition, which needs no other rows.
#include <gtest/gtest.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <cstdint>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "annulus/attention/attention.h"
#include "annulus/attention/ref.h"
#include "testing/memory/large.h"

namespace annulus::testing {
namespace {

constexpr std::int64_t kHeads = 2, kWidth = 16;
constexpr std::array<std::int64_t, 3> kLengths = {46341, 65537, 1048577};

class AttentionLarge : public LargeTest {
 protected:
  // q, k and v of one sample, on the device and here.
  struct Problem {
    Problem(Device device, std::int64_t queries, std::int64_t keys)
        : q(device, DType::kF32, {1, queries, kHeads, kWidth}),
          k(device, DType::kF32, {1, keys, 1, kWidth}),
          v(device, DType::kF32, {1, keys, 1, kWidth}),
          o(device, DType::kF32, {1, queries, kHeads, kWidth}),
          lse(device, DType::kF32, {1, kHeads, queries}) {
      q.normal(1), k.normal(2), v.normal(3);
    }
    Dense q, k, v, o, lse;
  };
  static double gib(std::int64_t queries,
                    std::int64_t keys) {  // here, where the definition has all of it in f64
    return static_cast<double>((queries * kHeads * 2 + keys * 2) * kWidth * 24) / kGiB;
  }

  // The first and the last queries, and some between them.
  template <class Options>
  void expect_rows(const Problem& p, std::int64_t queries, const Options& options) {
    const Dense q = here(p.q), k = here(p.k), v = here(p.v);
    const std::vector<double> o = p.o.values(), lse = p.lse.values();
    // Of a score of 40 f32 has no more than that.
    const double of_one = device().type == DeviceType::kCPU ? 1e-5 : 1e-4;
    const auto check = [&](const auto& definition) {
      for (const std::int64_t i : {std::int64_t{0}, std::int64_t{1}, queries / 3, queries / 2 + 1,
                                   queries - 2, queries - 1}) {
        for (std::int64_t h = 0; h < kHeads; ++h) {
          const auto row = definition.row(0, h, i);
          const double limit = of_one * std::max(1.0, std::abs(row.lse));
          const double own = lse[static_cast<std::size_t>(h * queries + i)];
          EXPECT_NEAR(own, row.lse, limit) << "lse of " << i;
          for (std::size_t c = 0; c < kWidth; ++c) {
            const double ours = o[static_cast<std::size_t>(i * kHeads + h) * kWidth + c];
            ASSERT_NEAR(ours, row.o[c], limit) << "o of query " << i << " head " << h;
          }
        }
      }
    };
    if constexpr (requires { options.window_left; }) {
      attention::with_definition<attention::Exact>(q.view(), k.view(), v.view(), options, {}, {},
                                                   check);
    } else {
      attention::with_definition<attention::Exact>(q.view(), k.view(), v.view(), options, check);
    }
  }

 private:
  static Dense here(const Dense& d) {
    const std::span<const std::int64_t> shape = d.view().sizes();
    Dense copy(kCPU, DType::kF32, {shape.begin(), shape.end()});
    copy.write(d.values());
    return copy;
  }
};

// A row is the sum of thousands of tiles: what one of them rounds, always the same way, shows here.
TEST_P(AttentionLarge, FewQueriesManyKeys) {
  for (const std::int64_t n : kLengths) {
    if (!has_room(gib(8, n))) GTEST_SKIP() << no_room(gib(8, n));
    for (const double scale : {0.25, 2.0}) {
      Problem p(device(), 8, n);
      const AttentionOptions options{.causal = true, .softmax_scale = scale};
      attention_forward(p.q.view(), p.k.view(), p.v.view(), p.o.view(), p.lse.view(), options,
                        context_);
      expect_rows(p, 8, options);
    }
  }
}

TEST_P(AttentionLarge, AWindow) {
  for (const std::int64_t n : kLengths) {
    if (!has_room(gib(n, n))) GTEST_SKIP() << no_room(gib(n, n));
    Problem p(device(), n, n);
    const AttentionOptions options{.causal = true, .window_left = 30};
    attention_forward(p.q.view(), p.k.view(), p.v.view(), p.o.view(), p.lse.view(), options,
                      context_);
    expect_rows(p, n, options);
  }
}

TEST_P(AttentionLarge, LongNet) {
  for (const std::int64_t n : kLengths) {
    if (!has_room(gib(n, n))) GTEST_SKIP() << no_room(gib(n, n));
    Problem p(device(), n, n);
    const std::array<std::int64_t, 3> segments = {64, 4096, n}, rates = {1, 64, 16384};
    DilatedAttentionOptions options;
    options.segment_lengths = segments;
    options.dilation_rates = rates;
    options.causal = true;
    dilated_attention_forward(p.q.view(), p.k.view(), p.v.view(), p.o.view(), p.lse.view(), options,
                              context_);
    expect_rows(p, n, options);
  }
}

// Every query sees its own block and the first.
TEST_P(AttentionLarge, Blocks) {
  for (const std::int64_t n : {kLengths[0], kLengths[1]}) {
    if (!has_room(gib(n, n))) GTEST_SKIP() << no_room(gib(n, n));
    Problem p(device(), n, n);
    std::vector<double> row_ptr = {0}, col_idx;
    for (std::int64_t x = 0; x < (n + 63) / 64; ++x) {
      col_idx.push_back(0);
      if (x > 0) col_idx.push_back(static_cast<double>(x));
      row_ptr.push_back(static_cast<double>(col_idx.size()));
    }
    const auto integers = [](Device where, DType t, std::vector<std::int64_t> shape,
                             const std::vector<double>& values) {
      Dense d(where, t, std::move(shape));
      d.write(values);
      return d;
    };
    const auto rows = static_cast<std::int64_t>(row_ptr.size()),
               blocks = static_cast<std::int64_t>(col_idx.size());
    const auto options_on = [&](const Dense& r, const Dense& c) {
      return BlockSparseAttentionOptions{
          .block_size = 64, .row_ptr = r.view(), .col_idx = c.view(), .causal = true};
    };
    const Dense r = integers(device(), DType::kI64, {1, rows}, row_ptr),
                c = integers(device(), DType::kI32, {blocks}, col_idx);
    block_sparse_attention_forward(p.q.view(), p.k.view(), p.v.view(), p.o.view(), p.lse.view(),
                                   options_on(r, c), context_);
    // The definition has a bit a pair of blocks: a million of them.
    const Dense own_r = integers(kCPU, DType::kI64, {1, rows}, row_ptr),
                own_c = integers(kCPU, DType::kI32, {blocks}, col_idx);
    expect_rows(p, n, options_on(own_r, own_c));
  }
}

// dk and dv of many keys from a few queries; dq, whose sums are as long.
TEST_P(AttentionLarge, BackwardOfManyKeys) {
  constexpr std::int64_t kQueries = 5, n = 65537;
  if (!has_room(gib(kQueries, 2 * n))) GTEST_SKIP() << no_room(gib(kQueries, 2 * n));
  const AttentionOptions options{.softmax_scale = 1.0};
  const auto gradients = [&](Device where, auto&& backward) {
    Problem p(where, kQueries, n);
    Dense d_o(where, DType::kF32, {1, kQueries, kHeads, kWidth});
    d_o.normal(4);
    std::array<Dense, 3> d = {Dense(where, DType::kF32, {1, kQueries, kHeads, kWidth}),
                              Dense(where, DType::kF32, {1, n, 1, kWidth}),
                              Dense(where, DType::kF32, {1, n, 1, kWidth})};
    backward(p, d_o, d);
    return std::array{d[0].values(), d[1].values(), d[2].values()};
  };
  const auto ours =
      gradients(device(), [&](Problem& p, const Dense& d_o, const std::array<Dense, 3>& d) {
        attention_forward(p.q.view(), p.k.view(), p.v.view(), p.o.view(), p.lse.view(), options,
                          context_);
        attention_backward(d_o.view(), {}, p.q.view(), p.k.view(), p.v.view(), p.o.view(),
                           p.lse.view(), d[0].view(), d[1].view(), d[2].view(), options, context_);
      });
  const auto exact =
      gradients(kCPU, [&](Problem& p, const Dense& d_o, const std::array<Dense, 3>& d) {
        attention::with_definition<attention::Exact>(
            p.q.view(), p.k.view(), p.v.view(), options, {}, {}, [&](const auto& definition) {
              definition.backward(d_o.view(), {}, d[0].view(), d[1].view(), d[2].view());
            });
      });
  const double limit = device().type == DeviceType::kCPU ? 2e-5 : 2e-4;
  for (std::size_t g = 0; g < 3; ++g) {
    double error = 0, size = 0;
    for (std::size_t i = 0; i < exact[g].size(); ++i) {
      error = std::max(error, std::abs(ours[g][i] - exact[g][i]));
      size = std::max(size, std::abs(exact[g][i]));
    }
    EXPECT_LT(error, limit * size) << "d"
                                   << "qkv"[g];
  }
}

ANNULUS_EACH_DEVICE(AttentionLarge);

}  // namespace
}  // namespace annulus::testing
