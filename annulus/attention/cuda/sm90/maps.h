// The maps by which the copy engine brings tiles of a call's tensors.
#pragma once

#include <cstdint>

#include "annulus/attention/cuda/arguments.cuh"
#include "annulus/cuda/tensor_map.h"

namespace annulus::attention::cuda::sm90 {

using namespace annulus::cuda;

// Of two (batch, rows, heads, columns) tensors whose tiles come together: k and v, or q and do.
struct Maps {
  TensorMap one, two;
  bool any = false;
};

// Whether there can be one: the copy engine knows neither negative strides nor those of expanded axes.
inline bool has_map(const Operand& t, std::int64_t batch, std::int64_t rows, std::int64_t heads) {
  const auto fits = [](std::int64_t size, std::int64_t elements) {
    return size <= 1 || (elements > 0 && elements < std::int64_t{1} << 38);
  };
  return batch > 0 && rows > 0 && heads > 0 && fits(rows, t.row) && fits(heads, t.head) &&
         fits(batch, t.batch);
}

// Boxes of `box` rows of a head, 64 columns each. None where rows follow an order.
template <class T>
Maps maps_of(const char* op, const Problem& p, const Operand& one, int one_columns,
             const Operand& two, int two_columns, std::int64_t rows, std::int64_t heads, int box) {
  Maps maps;
  maps.any = !p.order.defined() && has_map(one, p.B, rows, heads) && has_map(two, p.B, rows, heads);
  if (!maps.any) return maps;
  const auto map_of = [&](const Operand& t, int columns) {
    const std::int64_t shape[4] = {columns, rows, heads, p.B};
    // Strides of axes of size 1 may be anything, and are not used.
    const auto stride = [](std::int64_t size, std::int64_t elements) {
      return size > 1 ? elements * 2 : 16;
    };
    const std::int64_t strides[3] = {stride(rows, t.row), stride(heads, t.head),
                                     stride(p.B, t.batch)};
    const int boxes[4] = {64, box, 1, 1};
    return make_tensor_map(op, {dtype_of<T>, t.data, shape, strides, boxes, 128});
  };
  maps.one = map_of(one, one_columns);
  maps.two = map_of(two, two_columns);
  return maps;
}

}  // namespace annulus::attention::cuda::sm90
