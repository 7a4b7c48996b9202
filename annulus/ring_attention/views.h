// Parts of tensors.
#pragma once

#include <cstdint>

#include "annulus/core/dtype.h"
#include "annulus/core/tensor.h"

namespace annulus::ring {

inline TensorView narrow(TensorView v, std::size_t axis, std::int64_t first, std::int64_t count) {
  if (v.data != nullptr) {
    v.data = static_cast<char*>(v.data) + first * v.stride[axis] * size_of(v.dtype);
  }
  v.shape[axis] = count;
  return v;
}

// (B, H, T) as (B, T, H, 1), and back.
inline TensorView as_rows(const TensorView& v) {
  TensorView r = v;
  r.rank = 4;
  r.shape = {v.shape[0], v.shape[2], v.shape[1], 1};
  r.stride = {v.stride[0], v.stride[2], v.stride[1], 1};
  return r;
}
inline TensorView as_lanes(const TensorView& v) {
  TensorView r = v;
  r.rank = 3;
  r.shape = {v.shape[0], v.shape[2], v.shape[1]};
  r.stride = {v.stride[0], v.stride[2], v.stride[1]};
  return r;
}

}  // namespace annulus::ring
