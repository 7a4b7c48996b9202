// All tiles of this machine against plain sums: packing from rows and columns, gathered and scaled,
// of 16 and of 32 bits, odd depths, tiles that are not full, several right operands, dots. Small whole numbers are exact
// in every arithmetic, so what is misplaced shows in full; random numbers show its error.

#include "annulus/cpu/tile.h"

#include <gtest/gtest.h>

#include <cmath>
#include <cstdlib>
#include <cstring>
#include <limits>
#include <memory>
#include <random>
#include <string>
#include <type_traits>
#include <vector>

namespace annulus::cpu {
namespace {

struct Panel {
  explicit Panel(std::int64_t bytes)
      : data(std::aligned_alloc(64, static_cast<std::size_t>((bytes + 63) / 64 * 64)), std::free) {}
  std::unique_ptr<void, void (*)(void*)> data;
};

// One operand: rows in the order of the product, and how they are given to the packing.
template <class Real>
struct Operand {
  std::vector<Real> value;  // [R][depth], zero from `valid` on
  Panel panel;
};

template <class Real>
class TileCheck {
 public:
  TileCheck(const Tiles<Real>& tiles, unsigned seed, bool whole)
      : tiles_(tiles), random_(seed), whole_(whole) {}

  // The largest error of the products and dots, relative to the sums of their terms' sizes.
  double worst() {
    double worst = 0;
    const std::int64_t depth = 1 + below(75);
    const int rows = 1 + below(tiles_.rows), count = 1 + below(3);
    const bool add = below(2) == 1, dots = below(2) == 1;
    const int touched = tiles_.touched_rows(rows);
    const Operand<Real> a = operand(Side::kLeft, rows, depth);
    std::vector<Operand<Real>> b;
    std::vector<std::vector<Real>> scale;
    std::vector<Factor<Real>> factors;
    for (int f = 0; f < count; ++f) {
      b.push_back(operand(Side::kRight, 1 + below(tiles_.cols), depth));
      scale.push_back(numbers(touched));
    }
    for (int f = 0; f < count; ++f) {
      const auto k = static_cast<std::size_t>(f);
      if (f == 1) scale[k].assign(scale[k].size(), Real(1));
      factors.push_back({b[k].panel.data.get(), f == 1 ? nullptr : scale[k].data()});
    }
    const std::int64_t ld = tiles_.cols + 3;
    const std::vector<Real> old = numbers(tiles_.rows * ld);
    const std::vector<Real> s = numbers(touched * ld);
    std::vector<Real> y = old, dot(static_cast<std::size_t>(count * tiles_.rows));
    const Dots<Real> asked = {s.data(), ld, dot.data()};
    tiles_.multiply(a.panel.data.get(), factors.data(), count, depth, rows, y.data(), ld, add,
                    dots ? &asked : nullptr);
    const auto at = [](const std::vector<Real>& v, std::int64_t i) {
      return static_cast<double>(v[static_cast<std::size_t>(i)]);
    };
    // What is not of the tile stays: columns beyond it, and rows that nobody asked for.
    for (int r = 0; r < tiles_.rows; ++r) {
      for (std::int64_t c = r < touched ? tiles_.cols : 0; c < ld; ++c) {
        EXPECT_EQ(at(y, r * ld + c), at(old, r * ld + c)) << "row " << r << ", column " << c;
      }
    }
    for (int r = 0; r < rows; ++r) {
      std::vector<double> sum_dot(b.size(), 0.0), size_dot(b.size(), 1e-3);
      for (int c = 0; c < tiles_.cols; ++c) {
        double sum = add ? at(old, r * ld + c) : 0, size = std::fabs(sum) + 1e-3;
        for (std::size_t f = 0; f < b.size(); ++f) {
          for (std::int64_t d = 0; d < depth; ++d) {
            const double term = at(a.value, r * depth + d) * at(b[f].value, c * depth + d);
            sum += term * at(scale[f], r);
            size += std::fabs(term * at(scale[f], r));
            sum_dot[f] += term * at(s, r * ld + c);
            size_dot[f] += std::fabs(term * at(s, r * ld + c));
          }
        }
        worst = std::max(worst, std::fabs(at(y, r * ld + c) - sum) / size);
      }
      for (std::size_t f = 0; dots && f < b.size(); ++f) {
        const double got = at(dot, static_cast<std::int64_t>(f) * tiles_.rows + r);
        worst = std::max(worst, std::fabs(got - sum_dot[f]) / size_dot[f]);
      }
    }
    return worst;
  }

  // multiply_panels() and pack_tiles() are multiply() and pack_rows() of several at once, in operands of one term.
  void check_many() {
    const std::int64_t depth = 1 + below(75), panels = 1 + below(3);
    const std::int64_t rows = (panels - 1) * tiles_.rows + 1 + below(tiles_.rows);
    const std::int64_t step = tiles_.panel_bytes(Side::kLeft, depth) + 128, ld = tiles_.cols;
    Panel left(panels * step);
    for (std::int64_t i = 0; i < panels; ++i) {
      const Operand<Real> a = operand(Side::kLeft, tiles_.rows, depth);
      std::memcpy(static_cast<std::byte*>(left.data.get()) + i * step, a.panel.data.get(),
                  static_cast<std::size_t>(step - 128));
    }
    const Operand<Real> b = operand(Side::kRight, tiles_.cols, depth);
    const bool add = below(2) == 1;
    const std::vector<Real> old = numbers(panels * tiles_.rows * ld);
    std::vector<Real> y = old, want = old;
    tiles_.multiply_panels(left.data.get(), step, b.panel.data.get(), depth, rows, y.data(), ld,
                           add);
    const Factor<Real> right{b.panel.data.get(), nullptr};
    for (std::int64_t i = 0; i < panels; ++i) {
      const int some =
          static_cast<int>(std::min<std::int64_t>(tiles_.rows, rows - i * tiles_.rows));
      tiles_.multiply(static_cast<std::byte*>(left.data.get()) + i * step, &right, 1, depth, some,
                      want.data() + i * tiles_.rows * ld, ld, add, nullptr);
    }
    for (std::int64_t i = 0; i < rows * ld; ++i) {
      const auto k = static_cast<std::size_t>(i);
      EXPECT_EQ(y[k], want[k]) << "element " << i;
    }
    if (tiles_.terms > 1) return;
    const int valid = 1 + below(tiles_.rows);
    const std::int64_t whole = panels * tiles_.cols, apart = (tiles_.rows + 1) * tiles_.cols;
    const std::vector<Real> x = numbers(panels * apart);
    std::vector<Real> as_rows(static_cast<std::size_t>(valid * whole));
    for (std::int64_t r = 0; r < valid; ++r) {
      for (std::int64_t d = 0; d < whole; ++d) {
        as_rows[static_cast<std::size_t>(r * whole + d)] =
            x[static_cast<std::size_t>(d / ld * apart + r * ld + d % ld)];
      }
    }
    const std::int64_t bytes = tiles_.panel_bytes(Side::kLeft, whole);
    const Panel got(bytes), plain(bytes);
    tiles_.pack_tiles(x.data(), apart, valid, whole, got.data.get());
    tiles_.pack_rows(Side::kLeft, Matrix(as_rows.data(), whole), valid, whole, plain.data.get());
    EXPECT_EQ(std::memcmp(got.data.get(), plain.data.get(), static_cast<std::size_t>(bytes)), 0);
  }

  // multiply_tiles() against plain sums. Rows beyond those asked for are read, and may hold anything.
  void check_tiles() {
    if (tiles_.multiply_tiles == nullptr) return;
    const std::int64_t depth = 1 + below(100), rows = 1 + below(3 * tiles_.rows);
    const std::int64_t whole = (rows + tiles_.rows - 1) / tiles_.rows * tiles_.rows;
    const std::int64_t cols = tiles_.cols, step = (whole + 1) * cols, ld = cols + 5;
    const std::int64_t size = (depth + cols - 1) / cols * step;
    std::vector<Real> a = numbers(size);
    const auto left = [&](std::int64_t r, std::int64_t d) -> Real& {
      return a[static_cast<std::size_t>(d / cols * step + r * cols + d % cols)];
    };
    for (std::int64_t r = rows; r < whole; ++r) {
      for (std::int64_t d = 0; d < depth; ++d) left(r, d) = std::numeric_limits<Real>::quiet_NaN();
    }
    std::vector<std::uint16_t> narrow;
    for (const Real x : a) narrow.push_back(bfloat16(static_cast<float>(x)).bits);
    const Operand<Real> b = operand(Side::kRight, tiles_.cols, depth);
    const bool add = below(2) == 1;
    const std::vector<Real> old = numbers(whole * ld);
    std::vector<Real> y = old;
    const void* from = a.data();
    if (tiles_.element == 2) from = narrow.data();
    tiles_.multiply_tiles(from, step, b.panel.data.get(), depth, rows, y.data(), ld, add);
    for (std::int64_t r = 0; r < whole; ++r) {
      for (std::int64_t c = 0; c < ld; ++c) {
        const auto k = static_cast<std::size_t>(r * ld + c);
        Real want = old[k];
        if (r < rows && c < cols) {
          want = add ? want : Real(0);
          for (std::int64_t d = 0; d < depth; ++d)
            want += left(r, d) * b.value[static_cast<std::size_t>(c * depth + d)];
        }
        EXPECT_EQ(y[k], want) << "row " << r << ", column " << c;
      }
    }
  }

 private:
  int below(int n) { return static_cast<int>(random_() % static_cast<unsigned>(n)); }
  Real number() {
    return whole_ ? static_cast<Real>(below(7) - 3)
                  : static_cast<Real>(std::normal_distribution<double>()(random_));
  }
  std::vector<Real> numbers(std::int64_t n) {
    std::vector<Real> v(static_cast<std::size_t>(n));
    for (Real& x : v) x = number();
    return v;
  }

  // x as a tensor may hold it, in `kept`: in 16 bits, which small whole numbers survive and others are rounded to.
  Matrix as_matrix(std::vector<Real>& x, std::int64_t ld, std::vector<std::uint16_t>& kept) {
    if constexpr (std::is_same_v<Real, float>) {
      const auto narrowed = [&]<class T>(T) {
        for (Real& v : x) {
          kept.push_back(T(v).bits);
          v = static_cast<Real>(T(v));
        }
        return Matrix(kept.data(), dtype_of<T>, ld);
      };
      if (const int which = below(3); which > 0) {
        return which == 1 ? narrowed(bfloat16()) : narrowed(float16());
      }
    }
    return {x.data(), ld};
  }

  // Packed from rows, or from columns in another order and with a factor each.
  Operand<Real> operand(Side side, int valid, std::int64_t depth) {
    const auto size = static_cast<std::size_t>(tiles_.panel_rows(side) * depth);
    Operand<Real> o{std::vector<Real>(size, Real(0)), Panel(tiles_.panel_bytes(side, depth))};
    const auto value = [&](std::int64_t r, std::int64_t d) -> Real& {
      return o.value[static_cast<std::size_t>(r * depth + d)];
    };
    std::vector<std::uint16_t> kept;
    if (below(2) == 0) {
      const std::int64_t ld = depth + below(4);
      std::vector<Real> x = numbers(valid * ld);
      const Matrix matrix = as_matrix(x, ld, kept);
      for (std::int64_t r = 0; r < valid; ++r) {
        for (std::int64_t d = 0; d < depth; ++d)
          value(r, d) = x[static_cast<std::size_t>(r * ld + d)];
      }
      tiles_.pack_rows(side, matrix, valid, depth, o.panel.data.get());
      return o;
    }
    const std::int64_t ld = valid + below(4);
    std::vector<Real> x = numbers(depth * ld);
    const Matrix matrix = as_matrix(x, ld, kept);
    const bool gather = below(2) == 1, scaled = below(2) == 1;
    const std::vector<Real> scale = numbers(depth);
    std::vector<std::int32_t> index;
    for (std::int64_t d = 0; d < depth; ++d) {
      index.push_back(below(static_cast<int>(depth)));
      const std::int64_t from = gather ? index.back() : d;
      for (std::int64_t r = 0; r < valid; ++r) {
        value(r, d) = x[static_cast<std::size_t>(from * ld + r)] *
                      (scaled ? scale[static_cast<std::size_t>(d)] : Real(1));
      }
    }
    tiles_.pack_columns(side, matrix, gather ? index.data() : nullptr,
                        scaled ? scale.data() : nullptr, valid, depth, o.panel.data.get());
    return o;
  }

  const Tiles<Real>& tiles_;
  std::mt19937 random_;
  bool whole_;
};

template <class Real>
void check(const Tiles<Real>& t, double limit) {
  SCOPED_TRACE(std::string(t.name) + ", " + std::to_string(t.rows) + " x " +
               std::to_string(t.cols));
  for (unsigned seed = 0; seed < 300; ++seed) {
    EXPECT_EQ(TileCheck<Real>(t, seed, true).worst(), 0) << "whole numbers, seed " << seed;
    EXPECT_LE(TileCheck<Real>(t, seed, false).worst(), limit) << "seed " << seed;
    TileCheck<Real>(t, seed, true).check_many();
    TileCheck<Real>(t, seed, true).check_tiles();
    if (testing::Test::HasFailure()) return;
  }
}

// Not only the tiles that operators get here: the others run on other machines of the same kind.
void check_all(Precision precision, double limit) {
  for (const Tiles<float>* t :
       {detail::bf16_tiles_arm(precision), detail::bf16_tiles_amx(precision),
        detail::bf16_tiles_x86(precision), detail::float_tiles_highway(precision)}) {
    if (t != nullptr) check(*t, limit);
  }
}

// Limits: of the size of the terms, twice the worst that rounding of operands and sums may do.
TEST(Tile, F64) { check(tiles<double>(Precision::kF64), 1e-14); }
TEST(Tile, F32) { check(tiles<float>(Precision::kFp32), 2e-6); }
TEST(Tile, Bf16) { check_all(Precision::kBf16, 2e-2); }
TEST(Tile, Bf16x3) { check_all(Precision::kBf16x3, 6e-5); }
TEST(Tile, Bf16x6) { check_all(Precision::kBf16x6, 2e-6); }

}  // namespace
}  // namespace annulus::cpu
