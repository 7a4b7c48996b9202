#include "annulus/cuda/tensor_map.h"

#include <cuda.h>

#include <algorithm>
#include <bit>
#include <iterator>
#include <string>

#include "annulus/core/errors.h"
#include "annulus/cuda/check.h"

namespace annulus::cuda {

namespace {

constexpr CUtensorMapDataType kTypes[] = {  // by DType
    CU_TENSOR_MAP_DATA_TYPE_FLOAT64, CU_TENSOR_MAP_DATA_TYPE_FLOAT32,
    CU_TENSOR_MAP_DATA_TYPE_FLOAT16, CU_TENSOR_MAP_DATA_TYPE_BFLOAT16,
    CU_TENSOR_MAP_DATA_TYPE_INT32,   CU_TENSOR_MAP_DATA_TYPE_INT64,
    CU_TENSOR_MAP_DATA_TYPE_UINT8};
static_assert(static_cast<int>(DType::kBool) == 6);
// Bytes of a swizzle, by CUtensorMapSwizzle.
constexpr int kSwizzles[] = {0, 32, 64, 128};
static_assert(CU_TENSOR_MAP_SWIZZLE_NONE == 0 && CU_TENSOR_MAP_SWIZZLE_128B == 3);

using EncodeTiled = decltype(&cuTensorMapEncodeTiled);
// Of the driver that is loaded: nothing is linked with libcuda, which machines without a GPU lack.
EncodeTiled encode_tiled(const char* op) {
  void* found = nullptr;
  cudaDriverEntryPointQueryResult result = cudaDriverEntryPointSymbolNotFound;
  throw_on_error(cudaGetDriverEntryPointByVersion("cuTensorMapEncodeTiled", &found, 12000,
                                                  cudaEnableDefault, &result),
                 op, "cudaGetDriverEntryPointByVersion");
  if (result != cudaDriverEntryPointSuccess || found == nullptr) {
    throw NotSupported("[" + std::string(op) + "] the CUDA driver has no tensor maps");
  }
  return reinterpret_cast<EncodeTiled>(found);
}
}  // namespace

TensorMap make_tensor_map(const char* op, const TensorBox& t) {
  const auto rule = [&](bool holds, const std::string& what) {
    if (!holds) throw InvalidArgument("[" + std::string(op) + "] tensor map: " + what);
  };
  const std::size_t rank = t.shape.size();
  rule(rank >= 1 && rank <= 5, "1 to 5 dimensions but " + std::to_string(rank));
  rule(t.strides.size() + 1 == rank && t.box.size() == rank,
       "one stride less than dimensions, as many of the box");
  rule(reinterpret_cast<std::uintptr_t>(t.data) % 16 == 0,
       "the first element must be aligned to 16 bytes");
  cuuint64_t shape[5], strides[5];
  cuuint32_t box[5], steps[5];
  for (std::size_t i = 0; i < rank; ++i) {
    const std::string at = " of dimension " + std::to_string(i) + " but is ";
    rule(t.shape[i] > 0 && t.shape[i] <= std::int64_t{1} << 32,
         "size must be 1 to 2^32" + at + std::to_string(t.shape[i]));
    rule(t.box[i] > 0 && t.box[i] <= 256, "box must be 1 to 256" + at + std::to_string(t.box[i]));
    shape[i] = static_cast<cuuint64_t>(t.shape[i]);
    box[i] = static_cast<cuuint32_t>(t.box[i]);
    steps[i] = 1;
    if (i == 0) continue;
    const std::int64_t stride = t.strides[i - 1];
    rule(stride >= 0 && stride % 16 == 0 && stride < std::int64_t{1} << 40,
         "stride must be a multiple of 16 bytes below 2^40" + at + std::to_string(stride));
    strides[i - 1] = static_cast<cuuint64_t>(stride);
  }
  const std::int64_t row = t.box[0] * size_of(t.dtype);
  rule(row % 16 == 0,
       "rows of the box must be multiples of 16 bytes but have " + std::to_string(row));
  rule(t.swizzle == 0 || row <= t.swizzle,
       "rows of the box must not be wider than the swizzle of " + std::to_string(t.swizzle) +
           " bytes but have " + std::to_string(row));
  const auto swizzle = std::ranges::find(kSwizzles, t.swizzle) - kSwizzles;
  rule(swizzle < std::ssize(kSwizzles),
       "swizzle must be 0, 32, 64 or 128 bytes but is " + std::to_string(t.swizzle));
  CUtensorMap map;
  const CUresult error =
      encode_tiled(op)(&map, kTypes[static_cast<int>(t.dtype)], static_cast<cuuint32_t>(rank),
                       const_cast<void*>(t.data), shape, strides, box, steps,
                       CU_TENSOR_MAP_INTERLEAVE_NONE, static_cast<CUtensorMapSwizzle>(swizzle),
                       CU_TENSOR_MAP_L2_PROMOTION_L2_128B, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
  if (error != CUDA_SUCCESS) {
    throw DeviceError("[" + std::string(op) + "] cuTensorMapEncodeTiled failed: CUresult " +
                      std::to_string(static_cast<int>(error)));
  }
  static_assert(sizeof(TensorMap) == sizeof(CUtensorMap));
  return std::bit_cast<TensorMap>(map);
}

}  // namespace annulus::cuda
