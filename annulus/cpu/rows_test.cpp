// Rows of every type, stride and length: what is loaded, stored and summed, and what is left alone.
#include "annulus/cpu/rows.h"

#include <gtest/gtest.h>

#include <cmath>
#include <limits>
#include <vector>

namespace annulus::cpu {
namespace {

constexpr std::int64_t kMost =
    83;  // past whole vectors, and groups of them, of every instruction set

template <class T>
double number(T x) {
  return static_cast<double>(static_cast<compute_t<T>>(x));
}

template <class T, class Real>
void check() {
  const Rows<Real>& rows = cpu::rows<Real>();
  for (std::int64_t n = 0; n <= kMost; ++n) {
    for (const std::int64_t stride : {1, 3, 0, -2}) {
      const std::int64_t first = stride < 0 ? -stride * kMost : 0;
      std::vector<T> memory(static_cast<std::size_t>(kMost * 3 + 1));
      for (std::size_t i = 0; i < memory.size(); ++i) {
        memory[i] = T(static_cast<float>(std::sin(static_cast<double>(i))));
      }
      const TensorView v = contiguous(memory.data(), {static_cast<std::int64_t>(memory.size())});
      const Row row = row_from(v, first, stride);
      const auto place = [&](std::int64_t i) {
        return static_cast<std::size_t>(first + i * stride);
      };

      std::vector<Real> loaded(static_cast<std::size_t>(n) + 1, Real(77));
      rows.load(row, n, loaded.data());
      double sum = 0;
      for (std::int64_t i = 0; i < n; ++i) {
        const Real exact = static_cast<Real>(static_cast<compute_t<T>>(memory[place(i)]));
        ASSERT_EQ(loaded[static_cast<std::size_t>(i)], exact) << "element " << i << " of " << n;
        sum += static_cast<double>(exact);
      }
      EXPECT_EQ(loaded.back(), Real(77)) << "written past " << n;
      EXPECT_NEAR(static_cast<double>(rows.sum(loaded.data(), n)), sum, 1e-5);

      if (stride == 0 && n > 1) continue;  // one element written by many
      // A third is no number of any of the types: it is rounded, as the type itself rounds.
      std::vector<Real> values;
      for (std::int64_t i = 0; i < n; ++i) values.push_back(static_cast<Real>(i - 40) / Real(3));
      if (n > 2) values[2] = std::numeric_limits<Real>::quiet_NaN();
      std::vector<T> before = memory;
      rows.store(values.data(), n, row);
      for (std::int64_t i = 0; i < n; ++i) {
        const T expected = T(static_cast<compute_t<T>>(values[static_cast<std::size_t>(i)]));
        const auto got = number(memory[place(i)]);
        if (i == 2) {
          EXPECT_TRUE(std::isnan(got));
        } else {
          ASSERT_EQ(got, number(expected)) << "element " << i << " of " << n;
        }
        before[place(i)] = memory[place(i)];
      }
      for (std::size_t i = 0; i < memory.size(); ++i) {
        if (!std::isnan(number(memory[i]))) {
          ASSERT_EQ(number(memory[i]), number(before[i])) << "beside the row, " << i;
        }
      }
    }
  }
}

TEST(Rows, OfFloats) { check<float, float>(); }
TEST(Rows, OfBfloat16) { check<bfloat16, float>(); }
TEST(Rows, OfFloat16) { check<float16, float>(); }
TEST(Rows, OfDoublesInFloat) { check<double, float>(); }
TEST(Rows, InDouble) {
  check<double, double>();
  check<float, double>();
  check<bfloat16, double>();
  check<float16, double>();
}

TEST(Rows, AtAnIndex) {
  float memory[2 * 3 * 4] = {};
  const TensorView v = contiguous(memory, {2, 3, 4});
  EXPECT_EQ(row_at(v, 1, 2).data, memory + 12 + 8);
  EXPECT_EQ(row_from(row_at(v, 1, 2), 3).data, memory + 23);
  EXPECT_EQ(row_at(v, 1, 2).stride, 1);
}

}  // namespace
}  // namespace annulus::cpu
