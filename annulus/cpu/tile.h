// Small matrix products from packed panels: what the recurrent and the attention kernels of the CPU
// are built from. A panel holds R rows (8 of them, say) of an operand over some depth, as
//
//   [term][depth / unit][R][unit]
//
// so that one step of a product reads it front to back. `unit` is how many elements along the depth
// one instruction sums (1 for a multiply-add, 4 for Arm's bfmmla); `terms` are the parts an operand
// is split into where several low-precision products make a better one (bf16x3, bf16x6).
#pragma once

#include <cstddef>
#include <cstdint>

#include "annulus/core/macros.h"

namespace annulus::cpu {

enum class Arithmetic : std::uint8_t {
  kPlain,   // the type's own products
  kBf16,    // operands rounded to bfloat16 (to nearest, ties to even), sums in f32
  kBf16x3,  // operands split in two, three products
  kBf16x6,  // operands split in three, six products
};

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

template <class Real>
struct Tiles {
  int rows, cols;       // of a tile of the result, R of its left and right panels
  int unit, terms;      // of a panel
  std::size_t element;  // bytes
  const char* name;     // "bfmmla 8x8"

  // Bytes of a panel of R rows; a depth is padded with zeros to a whole number of units.
  std::int64_t panel_bytes(int R, std::int64_t depth) const {
    // A unit is a power of two, and a division would be felt.
    const std::int64_t padded = (depth + unit - 1) & -static_cast<std::int64_t>(unit);
    return padded * R * terms * static_cast<std::int64_t>(element);
  }

  // Panel of R rows from x[r * ld + d], r < valid; rows beyond are zero.
  void (*pack_rows)(const Real* x, std::int64_t ld, int valid, std::int64_t depth, int R, void* to);
  // Panel of R rows from scale[d] * x[index[d] * ld + r]. No index: d itself. No scale: 1.
  void (*pack_columns)(const Real* x, std::int64_t ld, const std::int32_t* index, const Real* scale,
                       int valid, std::int64_t depth, int R, void* to);
  // y[r * ldy + c] = (add ? y : 0) + sum_f scale_f[r] sum_d a[r][d] b_f[c][d] for r < rows, all
  // columns. `rows` may be rounded up to what the kernel has: y, scale and s have all rows. `dots`
  // may be nullptr.
  void (*multiply)(const void* a, const Factor<Real>* factors, int count, std::int64_t depth,
                   int rows, Real* y, std::int64_t ldy, bool add, const Dots<Real>* dots);
};

// The tiles for this machine; the same object for the life of the process.
template <class Real>
ANNULUS_API const Tiles<Real>& tiles(Arithmetic arithmetic);

template <>
ANNULUS_API const Tiles<float>& tiles<float>(Arithmetic arithmetic);
template <>
ANNULUS_API const Tiles<double>& tiles<double>(Arithmetic arithmetic);  // kPlain alone

namespace detail {
// By machine: nullptr where the instructions are not there.
const Tiles<float>* bf16_tiles_arm(Arithmetic arithmetic);
const Tiles<float>* bf16_tiles_x86(Arithmetic arithmetic);
}  // namespace detail

}  // namespace annulus::cpu
