// The Hilbert order: every cell once, neighbours follow each other, and fewer blocks than row-major at equal coverage.
#include <gtest/gtest.h>

#include <algorithm>
#include <cstdint>
#include <cstdlib>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "annulus/attention/attention.h"
#include "annulus/core/errors.h"

namespace annulus {
namespace {

using Shape = std::vector<std::int64_t>;

std::int64_t cells_of(const Shape& shape) {
  std::int64_t n = 1;
  for (const std::int64_t s : shape) n *= s;
  return n;
}
Shape hilbert(const Shape& shape) {
  Shape order(static_cast<std::size_t>(cells_of(shape)), -1);
  hilbert_order(shape, contiguous(order.data(), {cells_of(shape)}));
  return order;
}
// The coordinates of a cell by its row-major number.
Shape place_of(const Shape& shape, std::int64_t cell) {
  Shape at(shape.size());
  for (std::size_t i = shape.size(); i-- > 0;) {
    at[i] = cell % shape[i];
    cell /= shape[i];
  }
  return at;
}

TEST(HilbertOrder, HasEveryCellOnce) {
  std::vector<Shape> shapes = {{48, 80},    {1, 300}, {300, 1}, {33, 64, 7},
                               {1, 1, 100}, {0, 5},   {4, 0, 3}};
  for (std::int64_t n = 0; n < 20; ++n) {
    shapes.push_back({n});
    for (std::int64_t m = 1; m < 20; m += 3) {
      shapes.push_back({n, m});
      shapes.push_back({m, 3, n});
    }
  }
  for (const Shape& shape : shapes) {
    const Shape order = hilbert(shape);
    const std::set<std::int64_t> there(order.begin(), order.end());
    ASSERT_EQ(there.size(), order.size()) << shape_string(shape);
    if (order.empty()) continue;
    ASSERT_EQ(*there.begin(), 0) << shape_string(shape);
    ASSERT_EQ(*there.rbegin(), cells_of(shape) - 1) << shape_string(shape);
  }
}

TEST(HilbertOrder, CellsOfACubeAreFollowedByNeighbours) {
  for (const Shape& shape :
       {Shape{64}, {2, 2}, {8, 8}, {64, 64}, {2, 2, 2}, {4, 4, 4}, {16, 16, 16}}) {
    const Shape order = hilbert(shape);
    for (std::size_t r = 1; r < order.size(); ++r) {
      const Shape a = place_of(shape, order[r - 1]), b = place_of(shape, order[r]);
      std::int64_t distance = 0;
      for (std::size_t i = 0; i < a.size(); ++i) distance += std::abs(a[i] - b[i]);
      ASSERT_EQ(distance, 1) << shape_string(shape) << " at rank " << r;
    }
  }
}

// Pairs of blocks of 64 ranks that hold a pair of cells at most `radius` apart on both axes: what a block list must have
// so that every cell sees its neighbourhood.
std::size_t blocks_needed(const Shape& shape, const Shape& order, std::int64_t radius) {
  constexpr std::int64_t kBlock = 64;
  Shape rank(order.size());
  for (std::size_t r = 0; r < order.size(); ++r) {
    rank[static_cast<std::size_t>(order[r])] = static_cast<std::int64_t>(r);
  }
  std::set<std::pair<std::int64_t, std::int64_t>> blocks;
  for (std::int64_t y = 0; y < shape[0]; ++y) {
    for (std::int64_t x = 0; x < shape[1]; ++x) {
      for (std::int64_t v = std::max<std::int64_t>(0, y - radius);
           v <= std::min(shape[0] - 1, y + radius); ++v) {
        for (std::int64_t u = std::max<std::int64_t>(0, x - radius);
             u <= std::min(shape[1] - 1, x + radius); ++u) {
          const auto block = [&](std::int64_t row, std::int64_t column) {
            return rank[static_cast<std::size_t>(row * shape[1] + column)] / kBlock;
          };
          blocks.insert({block(y, x), block(v, u)});
        }
      }
    }
  }
  return blocks.size();
}

TEST(HilbertOrder, SavesBlocksAtEqualCoverage) {
  const Shape shape = {48, 80};
  Shape rows(static_cast<std::size_t>(cells_of(shape)));
  for (std::size_t i = 0; i < rows.size(); ++i) rows[i] = static_cast<std::int64_t>(i);
  for (const std::int64_t radius : {3, 5, 8}) {
    const std::size_t by_rows = blocks_needed(shape, rows, radius);
    const std::size_t by_curve = blocks_needed(shape, hilbert(shape), radius);
    RecordProperty("radius_" + std::to_string(radius),
                   std::to_string(by_curve) + " of " + std::to_string(by_rows));
    EXPECT_LT(by_curve, by_rows) << "radius " << radius;
  }
}

TEST(HilbertOrder, RefusesWhatItCannotDo) {
  Shape order(6);
  const TensorView six = contiguous(order.data(), {6});
  const auto refused = [](const char* argument, auto&& call) {
    try {
      call();
      ADD_FAILURE() << "took a bad " << argument;
    } catch (const InvalidArgument& e) {
      EXPECT_NE(std::string(e.what()).find("[hilbert_order] " + std::string(argument)),
                std::string::npos)
          << e.what();
    }
  };
  refused("shape", [&] { hilbert_order(Shape{}, six); });
  refused("shape", [&] { hilbert_order(Shape{1, 2, 3, 1}, six); });
  refused("shape", [&] { hilbert_order(Shape{-2, -3}, six); });
  refused("shape", [&] { hilbert_order(Shape{1ll << 40, 1ll << 40}, six); });
  refused("order", [&] { hilbert_order(Shape{7}, six); });
  refused("order", [&] { hilbert_order(Shape{6}, {}); });
  TensorView wrong = six;
  wrong.dtype = DType::kI32;
  refused("order", [&] { hilbert_order(Shape{6}, wrong); });
  wrong = six;
  wrong.stride[0] = 0;
  refused("order", [&] { hilbert_order(Shape{6}, wrong); });
  wrong = six;
  wrong.device = cuda_device(0);
  refused("order", [&] { hilbert_order(Shape{6}, wrong); });
  hilbert_order(Shape{2, 3}, six);
}

TEST(HilbertOrder, WritesAnyStride) {
  Shape memory(18, -7);
  TensorView order = contiguous(memory.data(), {6});
  order.stride[0] = 3;
  hilbert_order(Shape{2, 3}, order);
  const Shape dense = hilbert({2, 3});
  for (std::size_t i = 0; i < memory.size(); ++i) {
    EXPECT_EQ(memory[i], i % 3 == 0 ? dense[i / 3] : -7);
  }
}

}  // namespace
}  // namespace annulus
