// Blocks of a list: a sweep a row of blocks.
#pragma once

#include <cstdint>

#include "annulus/attention/pattern.h"
#include "annulus/attention/pattern/dense.h"
#include "annulus/core/macros.h"

namespace annulus::attention {

struct Blocks {
  std::int64_t queries = 0, keys = 0, size = 64;
  bool causal = false;
  Integers row_ptr;              // of head 0
  std::int64_t head_stride = 0;  // from a head's to the next; 0: one list for all
  const std::int32_t* col_idx = nullptr;
  std::int64_t col_stride = 1, col_count = 0;

  ANNULUS_HD std::int64_t rows() const { return (queries + size - 1) / size; }
  ANNULUS_HD std::int64_t sweeps() const { return rows(); }
  ANNULUS_HD std::int64_t longest() const { return size; }
  ANNULUS_HD std::int64_t per_cell() const { return rows() > 0 ? rows() : 1; }

  // All but the list.
  ANNULUS_HD Sweep row(std::int64_t b, std::int64_t i) const {
    Sweep s;
    s.sample = b;
    const std::int64_t first = i * size;
    s.queries = {first, 1, queries - first < size ? queries - first : size};
    s.keys = {0, 1, keys};
    if (causal) s.band.highest = keys - queries;
    return s;
  }
  ANNULUS_HD Sweep sweep(std::int64_t b, std::int64_t h, std::int64_t i) const {
    Sweep s = row(b, i);
    s.blocks = blocks(h, i);
    return s;
  }
  ANNULUS_HD BlockList blocks(std::int64_t h, std::int64_t i) const {
    Integers row = row_ptr;
    row.stride = 1;
    const std::int64_t at = h * head_stride + i * row_ptr.stride;
    const std::int64_t from = row.at(at, col_count);
    const std::int64_t to = row.at(at + row_ptr.stride, col_count);
    return {col_idx + from * col_stride, col_stride, to > from ? to - from : 0, size};
  }

  ANNULUS_HD bool counts(std::int64_t, std::int64_t, std::int64_t) const { return true; }
  static constexpr bool kIntervals = true;
};

}  // namespace annulus::attention
