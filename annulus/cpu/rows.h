// Rows of tensors of any floating dtype and stride, in and out of scratch in the type arithmetic is done
// in, compiled for each instruction set in rows.cpp: what a kernel reads and writes beside its products.
// 16-bit types are widened exactly and rounded to nearest even. Deterministic: a row's sum depends on the
// instruction set and its length alone.
#pragma once

#include <concepts>
#include <cstddef>
#include <cstdint>

#include "annulus/core/dispatch.h"
#include "annulus/core/tensor.h"

namespace annulus::cpu {

// Element `offset` of a floating tensor, in the type arithmetic is done in.
template <class Real>
Real read_element(const TensorView& v, std::int64_t offset) {
  return visit_floating(v.dtype, [&]<class T>() {
    return static_cast<Real>(static_cast<compute_t<T>>(static_cast<const T*>(v.data)[offset]));
  });
}

template <class Real>
void write_element(const TensorView& v, std::int64_t offset, Real x) {
  visit_floating(v.dtype, [&]<class T>() {
    static_cast<T*>(v.data)[offset] = T(static_cast<compute_t<T>>(x));
  });
}

// n elements of a tensor, a stride apart.
struct Row {
  void* data;
  DType dtype;
  std::int64_t stride;
};
inline Row row_from(const TensorView& v, std::int64_t offset, std::int64_t stride) {
  return {static_cast<char*>(v.data) + offset * size_of(v.dtype), v.dtype, stride};
}
inline Row row_from(const Row& r, std::int64_t i) {
  return {static_cast<char*>(r.data) + i * r.stride * size_of(r.dtype), r.dtype, r.stride};
}
// v[i, :] or v[i, j, :] and so on: an index for each dimension but the last.
template <std::integral... Index>
Row row_at(const TensorView& v, Index... index) {
  std::int64_t offset = 0;
  std::size_t axis = 0;
  ((offset += index * v.stride[axis++]), ...);
  return row_from(v, offset, v.stride[axis]);
}

template <class Real>
struct Rows {
  void (*load)(const Row& from, std::int64_t n, Real* to);
  void (*store)(const Real* from, std::int64_t n, const Row& to);
  Real (*sum)(const Real* x, std::int64_t n);
};

template <class Real>
const Rows<Real>& rows();
template <>
const Rows<float>& rows<float>();
template <>
const Rows<double>& rows<double>();

}  // namespace annulus::cpu
