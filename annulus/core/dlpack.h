// DLPack in and out. Both functions are templates over the DLTensor type, so this header needs no
// DLPack header itself and works with whichever version the caller includes:
//   #include <dlpack/dlpack.h>
//   TensorView x = annulus::from_dlpack(managed->dl_tensor);
#pragma once

#include <cstdint>
#include <string>

#include "annulus/core/checked.h"
#include "annulus/core/errors.h"
#include "annulus/core/tensor.h"

namespace annulus {

namespace dlpack_detail {
// Codes fixed by the DLPack specification.
inline constexpr int kCPUDevice = 1, kCUDADevice = 2, kCUDAHost = 3, kCUDAManaged = 13;
inline constexpr int kInt = 0, kFloat = 2, kBfloat = 4, kBool = 6;
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
  if (code == d::kFloat && bits == 64) {
    v.dtype = DType::kF64;
  } else if (code == d::kFloat && bits == 32) {
    v.dtype = DType::kF32;
  } else if (code == d::kFloat && bits == 16) {
    v.dtype = DType::kF16;
  } else if (code == d::kBfloat && bits == 16) {
    v.dtype = DType::kBF16;
  } else if (code == d::kInt && bits == 32) {
    v.dtype = DType::kI32;
  } else if (code == d::kInt && bits == 64) {
    v.dtype = DType::kI64;
  } else if (code == d::kBool && bits == 8) {
    v.dtype = DType::kBool;
  } else {
    throw InvalidArgument(
        "[from_dlpack] dtype must be one of f64, f32, f16, bf16, i32, i64, bool but has code " +
        std::to_string(code) + " and " + std::to_string(bits) + " bits");
  }
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
    if (v.shape[k] > 0) dense = checked_mul(dense, v.shape[k], "from_dlpack");
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
  t.dtype.bits = static_cast<std::uint8_t>(8 * size_of(v.dtype));
  const int code = v.dtype == DType::kBF16   ? d::kBfloat
                   : v.dtype == DType::kBool ? d::kBool
                   : is_floating(v.dtype)    ? d::kFloat
                                             : d::kInt;
  t.dtype.code = static_cast<std::uint8_t>(code);
  const int device = v.device.type == DeviceType::kCUDA ? d::kCUDADevice : d::kCPUDevice;
  t.device.device_type = static_cast<decltype(t.device.device_type)>(device);
  t.device.device_id = v.device.index;
}

}  // namespace annulus
