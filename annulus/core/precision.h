// How matrix products are made: one enum and one table, for operators on either device, the tests'
// baselines and the benchmark's ceilings. An operand is split into `terms` parts of a narrower type,
// each what the ones before left over, and of the products of parts the `products` largest are summed.
// Sums are f32 (f64 for f64) in all of them.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>

#include "annulus/core/dtype.h"
#include "annulus/core/macros.h"

namespace annulus {

enum class Precision : std::uint8_t {
  kAuto,    // what the operator's header says for the tensors' dtype and device
  kFp32,    // as exact as f32 products are
  kBf16x6,  // operands split in three bf16, six products: as exact as fp32
  kBf16x3,  // operands split in two bf16, three products: about 5e-6 a product
  kTf32,    // operands rounded to 10 bits of mantissa
  kBf16,    // operands rounded to bf16
  kF16,     // operands rounded to f16
  kF64,     // f64 tensors alone
};

struct PrecisionFacts {
  const char* name;  // as options and records spell it
  int terms, products;
  DType element;      // a term's type; f32 also where the unit reads less of it
  int mantissa_bits;  // explicit ones of what the terms of an operand keep together
  Precision unit;     // a precision of one product that runs on the same units
  const char* keeps;  // of the operands, in words
};

inline constexpr std::array<PrecisionFacts, 8> kPrecisions{{
    {"auto", 0, 0, DType::kF32, 0, Precision::kAuto, "by dtype and device"},
    {"fp32", 1, 1, DType::kF32, 23, Precision::kFp32, "fp32 operands"},
    {"bf16x6", 3, 6, DType::kBF16, 23, Precision::kBf16, "three bf16 each, six products"},
    {"bf16x3", 2, 3, DType::kBF16, 15, Precision::kBf16, "two bf16 each, three products"},
    {"tf32", 1, 1, DType::kF32, 10, Precision::kTf32, "10 bits of mantissa each"},
    {"bf16", 1, 1, DType::kBF16, 7, Precision::kBf16, "one bf16 each"},
    {"f16", 1, 1, DType::kF16, 10, Precision::kBf16, "one f16 each"},  // bf16's rate everywhere
    {"f64", 1, 1, DType::kF64, 52, Precision::kF64, "f64 operands"},
}};

constexpr const PrecisionFacts& facts_of(Precision p) {
  return kPrecisions[static_cast<std::size_t>(p)];
}
constexpr const char* name_of(Precision p) { return facts_of(p).name; }

// Products of parts that count, of operands in so many terms.
ANNULUS_HD constexpr int products_of(int terms) { return terms * (terms + 1) / 2; }

// The same as a list, least first: the p-th multiplies term left[p] of the one by term right[p] of
// the other. The p-th entry is for operands in p terms.
struct TermProducts {
  int count;
  int left[6], right[6];
};
inline constexpr TermProducts kTermProducts[] = {
    {0, {}, {}},
    {1, {0}, {0}},
    {3, {1, 0, 0}, {0, 1, 0}},
    {6, {2, 1, 0, 1, 0, 0}, {0, 1, 2, 0, 1, 0}},
};

}  // namespace annulus
