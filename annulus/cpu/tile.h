// Small matrix products from packed panels: what the recurrent and the attention kernels of the CPU
// are built from. A panel holds R rows (8 of them, say) of an operand over some depth, as
//
//   [term][depth / unit][R][unit]
//
// so that one step of a product reads it front to back. `unit` is how many elements along the depth
// one instruction sums (1 for a multiply-add, 4 for Arm's bfmmla, 32 for Intel's AMX); `terms` are
// the parts an operand is split into where several low-precision products make a better one
// (bf16x3, bf16x6). Within a unit the right operand may lie in another order than the left, as it
// does for AMX: a panel is packed for its side, and callers know no more of it than its size.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <type_traits>

#include "annulus/core/dtype.h"
#include "annulus/core/precision.h"

namespace annulus::cpu {

enum class Side : std::uint8_t { kLeft, kRight };

// What a panel is packed from: rows `ld` elements apart, as they lie in a tensor or in scratch. Tiles of
// float take f32 and widen f16 and bf16 on the way, tiles of double take f64.
struct Matrix {
  const void* data;
  DType dtype;
  std::int64_t ld;

  Matrix(const void* x, DType type, std::int64_t step) : data(x), dtype(type), ld(step) {}
  template <class T>
  Matrix(const T* x, std::int64_t step) : Matrix(x, dtype_of<T>, step) {}
};

// No tile of the result is larger, so that callers can keep parts of one on their stacks.
inline constexpr int kMaxTileRows = 32;
inline constexpr int kMaxTileCols = 32;

// One right operand, and what its product with each row of the left is multiplied by (nullptr: 1).
template <class Real>
struct Factor {
  const void* b;
  const Real* scale;
};

// Asks for to[f * rows + r] = sum_c s[r * ld + c] sum_d a[r][d] b_f[c][d] beside the product, `rows`
// being those of a whole tile.
template <class Real>
struct Dots {
  const Real* s;
  std::int64_t ld;
  Real* to;
};

struct TileShape {
  int rows, cols;       // of a tile of the result, R of its left and right panels
  int unit, terms;      // of a panel
  std::size_t element;  // bytes
  const char* name;     // "bfmmla"
};

template <class Real>
struct Tiles : TileShape {
  // R of a panel.
  int panel_rows(Side side) const { return side == Side::kLeft ? rows : cols; }
  // Bytes of a panel; a depth is padded with zeros to a whole number of units.
  std::int64_t panel_bytes(Side side, std::int64_t depth) const {
    // A unit is a power of two, and a division would be felt.
    const std::int64_t padded = (depth + unit - 1) & -static_cast<std::int64_t>(unit);
    return padded * panel_rows(side) * terms * static_cast<std::int64_t>(element);
  }
  // What multiply() may round `some` rows up to: y, scale and s have as many.
  int touched_rows(std::int64_t some) const {
    return static_cast<int>(std::min<std::int64_t>(rows, (some + 7) & -std::int64_t{8}));
  }

  // Whether a panel can be packed straight from a tensor of this type.
  static bool packs(DType dtype) {
    return dtype == dtype_of<Real> || (sizeof(Real) == 4 && size_of(dtype) == 2);
  }
  // Panel from x[r][d], r < valid; rows beyond are zero.
  void (*pack_rows)(Side side, const Matrix& x, int valid, std::int64_t depth, void* to);
  // Panel from scale[d] * x[index[d]][r]. No index: d itself. No scale: 1.
  void (*pack_columns)(Side side, const Matrix& x, const std::int32_t* index, const Real* scale,
                       int valid, std::int64_t depth, void* to);
  // Left panel from x[r][d] that lies as tiles of a result: d / cols of them `step` apart, each [row][cols]. (cols is a multiple
  // of unit.) Packs whole tiles.
  void (*pack_tiles)(const Real* x, std::int64_t step, int valid, std::int64_t depth, void* to);
  // y[r * ldy + c] = (add ? y : 0) + sum_f scale_f[r] sum_d a[r][d] b_f[c][d] for r < rows, all
  // columns; in rows up to touched_rows(rows) it may leave anything. `dots` may be nullptr.
  void (*multiply)(const void* a, const Factor<Real>* factors, int count, std::int64_t depth,
                   int rows, Real* y, std::int64_t ldy, bool add, const Dots<Real>* dots);
  // The same for many rows and one right operand: left panels lie `step` bytes apart, tiles of y below one another. A call a tile
  // would cost a short product an eighth of its time.
  void (*multiply_panels)(const void* a, std::int64_t step, const void* b, std::int64_t depth,
                          std::int64_t rows, Real* y, std::int64_t ldy, bool add);
  // The same with a left operand that lies as tiles of a result, in the elements of a panel: depth / cols of them `step` elements
  // apart, each [rows][cols], of which whole tiles of rows are read. nullptr where it has to be packed.
  void (*multiply_tiles)(const void* a, std::int64_t step, const void* b, std::int64_t depth,
                         std::int64_t rows, Real* y, std::int64_t ldy, bool add);
};

// The tiles for this machine, of kFp32 or a precision whose terms are bf16 (f64: kF64 alone); the same
// object for the life of the process.
template <class Real>
const Tiles<Real>& tiles(Precision precision);

template <>
const Tiles<float>& tiles<float>(Precision precision);
template <>
const Tiles<double>& tiles<double>(Precision precision);

namespace detail {
// Calls f with the type that the rows of x have, and the first of them.
template <class Real, class Call>
void visit_rows(const Matrix& x, Call&& f) {
  if constexpr (std::is_same_v<Real, float>) {
    if (x.dtype == DType::kBF16) return f(static_cast<const bfloat16*>(x.data));
    if (x.dtype == DType::kF16) return f(static_cast<const float16*>(x.data));
  }
  f(static_cast<const Real*>(x.data));
}

// pack_tiles() by a call a tile, for operands in one term.
template <class Real, int kTileRows, int kTileCols, std::size_t kElement, auto kPackRows>
void pack_each(const Real* x, std::int64_t step, int valid, std::int64_t depth, void* to) {
  auto* p = static_cast<std::byte*>(to);
  for (std::int64_t d = 0; d < depth; d += kTileCols, x += step) {
    kPackRows(Side::kLeft, Matrix(x, kTileCols), valid, kTileCols, p);
    p += kTileRows * kTileCols * static_cast<std::int64_t>(kElement);
  }
}

// multiply_panels() by a call a tile.
template <class Real, int kTileRows, auto kMultiply>
void multiply_each(const void* a, std::int64_t step, const void* b, std::int64_t depth,
                   std::int64_t rows, Real* y, std::int64_t ldy, bool add) {
  const Factor<Real> right{b, nullptr};
  for (std::int64_t r = 0; r < rows; r += kTileRows) {
    kMultiply(static_cast<const std::byte*>(a) + r / kTileRows * step, &right, 1, depth,
              static_cast<int>(std::min<std::int64_t>(kTileRows, rows - r)), y + r * ldy, ldy, add,
              nullptr);
  }
}

// By machine: nullptr where the instructions are not there. tiles() takes the first there is; tests
// try them all.
const Tiles<float>* bf16_tiles_arm(Precision precision);
const Tiles<float>* bf16_tiles_amx(Precision precision);
const Tiles<float>* bf16_tiles_x86(Precision precision);
const Tiles<float>* float_tiles_highway(Precision precision);  // everywhere

// Of tiles for one, two and three terms of bf16 those that a precision takes.
inline const Tiles<float>* of_terms(Precision precision, const Tiles<float>* one,
                                    const Tiles<float>* two, const Tiles<float>* three) {
  const PrecisionFacts& facts = facts_of(precision);
  if (facts.element != DType::kBF16) return nullptr;
  return facts.terms == 1 ? one : facts.terms == 2 ? two : three;
}
}  // namespace detail

}  // namespace annulus::cpu
