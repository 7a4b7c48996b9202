// Rows of a tensor along a line of a pattern, in the form that products are packed from.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>

#include "annulus/attention/pattern.h"
#include "annulus/attention/pattern/dense.h"
#include "annulus/core/dispatch.h"
#include "annulus/core/tensor.h"
#include "annulus/cpu/rows.h"
#include "annulus/cpu/tile.h"

namespace annulus::attention::cpu {

using annulus::cpu::Matrix;
using annulus::cpu::Row;

// Rows that pack_columns() takes at once; 0: all. Where there is such a number, packing asks for the next rows itself, too, which
// otherwise HeadRows::ask_for() does a tile of keys ahead. (Measured on Sapphire Rapids, 3 % of a forward with its backward in f32 and 9 %
// in bf16; all at once and far ahead on Neoverse. Both, or a few rows a tile ahead between the pieces of each product, were no faster and
// 4 % slower on a Skylake Xeon.)
#if defined(__x86_64__)
inline constexpr std::int64_t kNearRows = 16;
#else
inline constexpr std::int64_t kNearRows = 0;
#endif

// Rows first .. end-1 of an operand, which will be packed next.
inline void bring_near(const Matrix& x, std::int64_t first, std::int64_t end,
                       std::int64_t columns) {
  const std::int64_t bytes = columns * size_of(x.dtype), step = x.ld * size_of(x.dtype);
  const auto* row = static_cast<const std::byte*>(x.data) + first * step;
  for (std::int64_t r = first; r < end; ++r, row += step) {
    for (std::int64_t b = 0; b < bytes; b += 64) __builtin_prefetch(row + b);
  }
}

// Rows that will be written soon.
inline void bring_to_write(const Row& row, std::int64_t columns) {
  if constexpr (kNearRows == 0) return;
  const std::int64_t bytes = columns * row.stride * size_of(row.dtype);
  for (std::int64_t b = 0; b < bytes; b += 64) {
    __builtin_prefetch(static_cast<const std::byte*>(row.data) + b, 1);
  }
}

// x[b, :, head, :], its rows by rank; the first of them is row `first` of the pattern.
class HeadRows {
 public:
  HeadRows(const TensorView& x, std::int64_t b, std::int64_t head, const TensorView& order,
           std::int64_t first = 0)
      : x_(x), base_(b * x.stride[0] + head * x.stride[2] - first * x.stride[1]) {
    if (order.defined()) order_ = {order.data, order.dtype == DType::kI64, order.stride[0]};
  }

  std::int64_t token(std::int64_t rank) const { return order_.defined() ? order_.at(rank) : rank; }
  Row row(std::int64_t rank) const {
    return annulus::cpu::row_from(x_, base_ + token(rank) * x_.stride[1], x_.stride[3]);
  }
  // Rows of a line that will be packed soon are brought near: a step from one to the next is more than a core foresees.
  void ask_for(const Line& line, Range part) const {
    if constexpr (kNearRows > 0) return;
    const std::int64_t bytes = x_.shape[3] * size_of(x_.dtype);
    for (std::int64_t i = part.first; i < part.end; ++i) {
      const auto* from = static_cast<const std::byte*>(row(line.at(i)).data);
      for (std::int64_t b = 0; b < bytes; b += 64) __builtin_prefetch(from + b, 0, 2);
    }
  }
  // Rows part.first .. part.end-1 of a line: where they are, if they lie a constant distance apart and each in one piece, else as
  // copied to `stage`, which has room for them.
  Matrix matrix(const Line& line, Range part, std::byte* stage) const {
    const std::int64_t columns = x_.shape[3];
    if (!order_.defined() && (x_.stride[3] == 1 || columns == 1)) {
      return {row(line.at(part.first)).data, x_.dtype, line.step * x_.stride[1]};
    }
    visit_floating(x_.dtype, [&]<class T>() {
      T* to = reinterpret_cast<T*>(stage);
      for (std::int64_t i = part.first; i < part.end; ++i, to += columns) {
        const Row from = row(line.at(i));
        const T* p = static_cast<const T*>(from.data);
        for (std::int64_t c = 0; c < columns; ++c) to[c] = p[c * from.stride];
      }
    });
    return {stage, x_.dtype, columns};
  }

 private:
  const TensorView& x_;
  std::int64_t base_;
  Integers order_;
};

// Panels of a product's operand in one term, one behind the other.
class Panels {
 public:
  Panels(const annulus::cpu::Tiles<float>& tiles, annulus::cpu::Side side, std::byte* at)
      : tiles_(tiles), side_(side), at_(at) {}

  static std::int64_t bytes(const annulus::cpu::Tiles<float>& tiles, annulus::cpu::Side side,
                            std::int64_t rows, std::int64_t depth) {
    const std::int64_t panels = (rows + tiles.panel_rows(side) - 1) / tiles.panel_rows(side);
    return panels * tiles.panel_bytes(side, depth);
  }

  // The operand's rows are x's rows.
  void pack_rows(const Matrix& x, std::int64_t rows, std::int64_t depth) {
    step_ = tiles_.panel_bytes(side_, depth);
    const std::int64_t R = tiles_.panel_rows(side_);
    for (std::int64_t r = 0; r < rows; r += R) {
      const Matrix from(static_cast<const std::byte*>(x.data) + r * x.ld * size_of(x.dtype),
                        x.dtype, x.ld);
      if constexpr (kNearRows > 0) bring_near(x, r + R, std::min(rows, r + 2 * R), depth);
      tiles_.pack_rows(side_, from, static_cast<int>(std::min(R, rows - r)), depth,
                       at_ + r / R * step_);
    }
  }
  // The operand's rows are x's columns: some of its rows for all panels after the other, while they are near. (Rows lie a power of
  // two apart, and would be out of the nearest cache when the next panel is packed: an eighth of a forward's time on AVX-512.)
  void pack_columns(const Matrix& x, std::int64_t columns, std::int64_t depth) {
    step_ = tiles_.panel_bytes(side_, depth);
    const std::int64_t R = tiles_.panel_rows(side_);
    const std::int64_t near =
        kNearRows > 0 ? std::max<std::int64_t>(kNearRows, tiles_.unit) : depth;
    for (std::int64_t d = 0; d < depth; d += near) {
      if constexpr (kNearRows > 0) bring_near(x, d + near, std::min(depth, d + 2 * near), columns);
      for (std::int64_t r = 0; r < columns; r += R) {
        const Matrix from(static_cast<const std::byte*>(x.data) + (d * x.ld + r) * size_of(x.dtype),
                          x.dtype, x.ld);
        tiles_.pack_columns(
            side_, from, nullptr, nullptr, static_cast<int>(std::min(R, columns - r)),
            std::min(near, depth - d),
            at_ + r / R * step_ + d * R * static_cast<std::int64_t>(tiles_.element));
      }
    }
  }
  // The i-th, from some depth on, which is a multiple of the unit. (Of operands in one term alone.)
  const std::byte* panel(std::int64_t i, std::int64_t depth = 0) const {
    return at_ + i * step_ +
           depth * tiles_.panel_rows(side_) * static_cast<std::int64_t>(tiles_.element);
  }
  // Bytes from a panel to the next.
  std::int64_t step() const { return step_; }

 private:
  const annulus::cpu::Tiles<float>& tiles_;
  annulus::cpu::Side side_;
  std::byte* at_;
  std::int64_t step_ = 0;
};

}  // namespace annulus::attention::cpu
