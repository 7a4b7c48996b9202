#include "annulus/core/tensor.h"

#include <string>

#include "annulus/core/checked.h"
#include "annulus/core/errors.h"

namespace annulus {

namespace {

void set_shape(TensorView& v, std::span<const std::int64_t> shape) {
  if (shape.size() > kMaxRank) {
    throw InvalidArgument("[tensor] rank must be at most " + std::to_string(kMaxRank) + " but is " +
                          std::to_string(shape.size()));
  }
  v.rank = static_cast<int>(shape.size());
  for (std::size_t i = 0; i < shape.size(); ++i) v.shape[i] = shape[i];
}

}  // namespace

TensorView contiguous(void* data, DType dtype, std::span<const std::int64_t> shape, Device device) {
  TensorView v;
  v.data = data;
  v.dtype = dtype;
  v.device = device;
  set_shape(v, shape);
  std::int64_t step = 1;
  for (std::size_t i = shape.size(); i-- > 0;) {
    v.stride[i] = step;
    step = checked_mul(step, shape[i] > 0 ? shape[i] : 1, "tensor");
  }
  return v;
}

TensorView strided(void* data, DType dtype, std::span<const std::int64_t> shape,
                   std::span<const std::int64_t> stride, Device device) {
  if (shape.size() != stride.size()) {
    throw InvalidArgument("[tensor] stride must have as many entries as shape, " +
                          std::to_string(shape.size()) + ", but has " +
                          std::to_string(stride.size()));
  }
  TensorView v;
  v.data = data;
  v.dtype = dtype;
  v.device = device;
  set_shape(v, shape);
  for (std::size_t i = 0; i < stride.size(); ++i) v.stride[i] = stride[i];
  return v;
}

std::string shape_string(std::span<const std::int64_t> shape) {
  std::string s = "(";
  for (std::size_t i = 0; i < shape.size(); ++i) {
    if (i > 0) s += ", ";
    s += std::to_string(shape[i]);
  }
  return s + (shape.size() == 1 ? ",)" : ")");
}

}  // namespace annulus
