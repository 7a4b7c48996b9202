// How the copy engine finds boxes of a tensor (tma.cuh): a descriptor that the driver makes on the
// host. Dimensions count from the innermost one on, whose elements are neighbours in memory. Only
// for files compiled with CUDA.
#pragma once

#include <cstdint>
#include <span>

#include "annulus/core/dtype.h"

namespace annulus::cuda {

// The driver's CUtensorMap, without its header.
struct alignas(64) TensorMap {
  std::uint64_t opaque[16];
};

// What a map is made of. `strides` are bytes from one element of dimension 1, 2, ... to the next.
struct TensorBox {
  DType dtype = DType::kF32;
  const void* data = nullptr;
  std::span<const std::int64_t> shape;
  std::span<const std::int64_t> strides;  // one less than there are dimensions
  std::span<const int> box;               // of one copy
  int swizzle = 0;  // bytes: 0 (dense), 32, 64 or 128: as wide as the box's rows at most
};

// Throws InvalidArgument, which names the rule of the hardware that the tensor or the box breaks,
// NotSupported where the driver has no tensor maps, DeviceError where it refuses.
TensorMap make_tensor_map(const char* op, const TensorBox& tensor);

}  // namespace annulus::cuda
