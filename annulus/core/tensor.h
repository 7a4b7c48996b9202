// TensorView: what an operator's caller passes. Non-owning and trivially copyable; shape and
// strides are counted in elements and are 64-bit. Strided<T, Rank>: what a kernel gets, typed and
// indexed as x(b, h, t, c), so that no kernel computes an offset by hand.
#pragma once

#include <algorithm>
#include <array>
#include <cstdint>
#include <initializer_list>
#include <span>
#include <string>

#include "annulus/core/device.h"
#include "annulus/core/dtype.h"
#include "annulus/core/macros.h"

namespace annulus {

inline constexpr int kMaxRank = 6;

struct TensorView {
  void* data = nullptr;
  DType dtype = DType::kF32;
  Device device = kCPU;
  int rank = -1;  // -1: no tensor at all, which is how an optional argument is left out
  std::array<std::int64_t, kMaxRank> shape = {};
  std::array<std::int64_t, kMaxRank> stride = {};

  bool defined() const { return rank >= 0; }
  std::span<const std::int64_t> sizes() const {
    return {shape.data(), static_cast<std::size_t>(std::clamp(rank, 0, kMaxRank))};
  }
  std::span<const std::int64_t> strides() const { return {stride.data(), sizes().size()}; }

  // Number of elements; 0 if any extent is 0. Only for views whose sizes were checked.
  std::int64_t numel() const {
    std::int64_t n = defined() ? 1 : 0;
    for (int i = 0; i < rank; ++i) n *= shape[static_cast<std::size_t>(i)];
    return n;
  }
};

// A dense row-major view of memory the caller owns: contiguous(p, {2, 3, 4}).
template <class T>
TensorView contiguous(T* data, std::initializer_list<std::int64_t> shape, Device device = kCPU);
// The same with the dtype given at run time.
ANNULUS_API TensorView contiguous(void* data, DType dtype, std::span<const std::int64_t> shape,
                                  Device device = kCPU);
// Any strides, in elements.
ANNULUS_API TensorView strided(void* data, DType dtype, std::span<const std::int64_t> shape,
                               std::span<const std::int64_t> stride, Device device = kCPU);

// "(2, 3, 4)"
ANNULUS_API std::string shape_string(std::span<const std::int64_t> shape);

template <class T, int Rank>
struct Strided {
  T* data = nullptr;
  std::int64_t size[Rank] = {};
  std::int64_t stride[Rank] = {};

  template <class... I>
  ANNULUS_HD std::int64_t offset(I... i) const {
    static_assert(sizeof...(I) <= Rank, "more indices than dimensions");
    const std::int64_t index[] = {static_cast<std::int64_t>(i)...};
    std::int64_t o = 0;
    for (std::size_t k = 0; k < sizeof...(I); ++k) o += index[k] * stride[k];
    return o;
  }
  template <class... I>
  ANNULUS_HD T& operator()(I... i) const {
    static_assert(sizeof...(I) == Rank, "one index a dimension");
    return data[offset(i...)];
  }
};

// The typed view of a checked TensorView; the caller has made sure of dtype and rank.
template <class T, int Rank>
Strided<T, Rank> as_strided(const TensorView& v) {
  Strided<T, Rank> s;
  s.data = static_cast<T*>(v.data);
  for (int i = 0; i < Rank; ++i) {
    s.size[i] = v.shape[static_cast<std::size_t>(i)];
    s.stride[i] = v.stride[static_cast<std::size_t>(i)];
  }
  return s;
}

// Entry `index` of an i32 or i64 tensor, counted from its data.
inline std::int64_t integer_at(const TensorView& v, std::int64_t index) {
  return v.dtype == DType::kI64 ? static_cast<const std::int64_t*>(v.data)[index]
                                : static_cast<const std::int32_t*>(v.data)[index];
}

template <class T>
TensorView contiguous(T* data, std::initializer_list<std::int64_t> shape, Device device) {
  return contiguous(const_cast<std::remove_const_t<T>*>(data), dtype_of<std::remove_const_t<T>>,
                    std::span<const std::int64_t>(shape.begin(), shape.size()), device);
}

}  // namespace annulus
