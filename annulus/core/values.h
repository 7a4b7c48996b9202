// A tensor on the CPU, of any dtype and strides, as the numbers it holds: what definitions, baselines and
// tests compute with. Row-major order; nothing here is fast.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <type_traits>
#include <vector>

#include "annulus/core/dispatch.h"
#include "annulus/core/tensor.h"

namespace annulus {

// f(i, offset) for the i-th element, its offset from v.data in elements. A row of the last dimension is a loop of its
// own: tests walk as many elements here as they compute with.
template <class F>
void for_each_offset(const TensorView& v, F&& f) {
  std::array<std::int64_t, kMaxRank> index{};
  const auto last = static_cast<std::size_t>(v.rank > 0 ? v.rank - 1 : 0);
  const std::int64_t columns = v.rank > 0 ? v.shape[last] : 1;
  const std::int64_t step = v.rank > 0 ? v.stride[last] : 0;
  const std::int64_t count = v.numel();
  std::int64_t row = 0;
  for (std::int64_t i = 0; i < count; i += columns) {
    for (std::int64_t c = 0; c < columns; ++c) f(static_cast<std::size_t>(i + c), row + c * step);
    for (std::size_t d = last; d-- > 0;) {
      row += v.stride[d];
      if (++index[d] < v.shape[d]) break;
      row -= v.stride[d] * v.shape[d];
      index[d] = 0;
    }
  }
}

// f.operator()<T>() with T what an element is stored as.
template <class F>
void visit_stored(DType t, F&& f) {
  switch (t) {
    case DType::kI32:
      return f.template operator()<std::int32_t>();
    case DType::kI64:
      return f.template operator()<std::int64_t>();
    case DType::kBool:
      return f.template operator()<std::uint8_t>();
    default:
      return visit_floating(t, f);
  }
}

// What a T is computed in: itself, or float for the 16-bit types.
template <class T>
using wide_t = std::conditional_t<std::is_arithmetic_v<T>, T, float>;

// Empty for a tensor that is not there.
template <class C>
std::vector<C> load_values(const TensorView& v) {
  std::vector<C> values(static_cast<std::size_t>(v.numel()));
  visit_stored(v.dtype, [&]<class T>() {
    for_each_offset(v, [&](std::size_t i, std::int64_t offset) {
      values[i] = static_cast<C>(static_cast<wide_t<T>>(static_cast<const T*>(v.data)[offset]));
    });
  });
  return values;
}

// Rounds to v's dtype. A tensor that is not there takes nothing.
template <class C>
void store_values(const TensorView& v, const std::vector<C>& values) {
  visit_stored(v.dtype, [&]<class T>() {
    for_each_offset(v, [&](std::size_t i, std::int64_t offset) {
      static_cast<T*>(v.data)[offset] = static_cast<T>(static_cast<wide_t<T>>(values[i]));
    });
  });
}

}  // namespace annulus
