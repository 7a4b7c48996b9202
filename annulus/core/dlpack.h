// DLPack in and out. Both functions are templates over the DLTensor type, so this header needs no
// DLPack header itself and works with whichever version the caller includes:
//   #include <dlpack/dlpack.h>
//   TensorView x = annulus::from_dlpack(managed->dl_tensor);
#pragma once

#include <algorithm>
#include <cstdint>
#include <iterator>
#include <string>

#include "annulus/core/errors.h"
#include "annulus/core/tensor.h"

namespace annulus {

namespace dlpack_detail {
// Codes fixed by the DLPack specification.
inline constexpr int kCPUDevice = 1, kCUDADevice = 2, kCUDAHost = 3, kCUDAManaged = 13;
struct Code {
  DType dtype;
  int code, bits;  // the code: 0 integer, 2 float, 4 bfloat, 6 boolean
};
inline constexpr Code kCodes[] = {{DType::kF64, 2, 64},  {DType::kF32, 2, 32}, {DType::kF16, 2, 16},
                                  {DType::kBF16, 4, 16}, {DType::kI32, 0, 32}, {DType::kI64, 0, 64},
                                  {DType::kBool, 6, 8}};
}  // namespace dlpack_detail

// A view of the DLPack tensor's memory, which the DLPack owner keeps alive. strides == nullptr
// means row-major.
template <class DLTensorType>
TensorView from_dlpack(const DLTensorType& t) {
  namespace d = dlpack_detail;
  if (t.ndim < 0 || t.ndim > kMaxRank) {
    throw InvalidArgument("[from_dlpack] tensor must have 0 to " + std::to_string(kMaxRank) +
                          " dimensions but has " + std::to_string(t.ndim));
  }
  const int code = static_cast<int>(t.dtype.code);
  const int bits = static_cast<int>(t.dtype.bits);
  TensorView v;
  if (t.dtype.lanes != 1) {
    throw InvalidArgument("[from_dlpack] dtype must have one lane but has " +
                          std::to_string(t.dtype.lanes));
  }
  const auto found = std::find_if(std::begin(d::kCodes), std::end(d::kCodes),
                                  [&](d::Code c) { return c.code == code && c.bits == bits; });
  if (found == std::end(d::kCodes)) {
    throw InvalidArgument(
        "[from_dlpack] dtype must be one of f64, f32, f16, bf16, i32, i64, bool but has code " +
        std::to_string(code) + " and " + std::to_string(bits) + " bits");
  }
  v.dtype = found->dtype;
  const int device = static_cast<int>(t.device.device_type);
  if (device == d::kCPUDevice || device == d::kCUDAHost) {
    v.device = kCPU;
  } else if (device == d::kCUDADevice || device == d::kCUDAManaged) {
    v.device = cuda_device(static_cast<int>(t.device.device_id));
  } else {
    throw InvalidArgument("[from_dlpack] device must be CPU or CUDA but has type " +
                          std::to_string(device));
  }
  v.data = static_cast<char*>(t.data) + t.byte_offset;
  v.rank = static_cast<int>(t.ndim);
  std::int64_t dense = 1;
  for (int i = v.rank - 1; i >= 0; --i) {
    const auto k = static_cast<std::size_t>(i);
    v.shape[k] = t.shape[i];
    if (v.shape[k] < 0) {
      throw InvalidArgument("[from_dlpack] shape must have no negative size but has " +
                            std::to_string(v.shape[k]));
    }
    v.stride[k] = t.strides ? t.strides[i] : dense;
    if (v.shape[k] > 0 && __builtin_mul_overflow(dense, v.shape[k], &dense)) {
      throw InvalidArgument("[from_dlpack] a size must fit in 63 bits but the shape's does not");
    }
  }
  return v;
}

// Fills `t` to describe the view's memory. Shape and stride pointers lead into `v`, so `v` must
// outlive `t`; ownership does not move.
template <class DLTensorType>
void to_dlpack(TensorView& v, DLTensorType& t) {
  namespace d = dlpack_detail;
  t.data = v.data;
  t.byte_offset = 0;
  t.ndim = v.rank;
  t.shape = v.shape.data();
  t.strides = v.stride.data();
  t.dtype.lanes = 1;
  for (const d::Code c : d::kCodes) {
    if (c.dtype != v.dtype) continue;
    t.dtype.code = static_cast<std::uint8_t>(c.code);
    t.dtype.bits = static_cast<std::uint8_t>(c.bits);
  }
  const int device = v.device.type == DeviceType::kCUDA ? d::kCUDADevice : d::kCPUDevice;
  t.device.device_type = static_cast<decltype(t.device.device_type)>(device);
  t.device.device_id = v.device.index;
}

}  // namespace annulus
