// The kernels that are compiled: a function a type (in files of its own, so that they compile side by side), which picks
// the kernel for the columns and sweeps of a call.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>
#include <string>

#include "annulus/attention/cuda/arguments.cuh"
#include "annulus/core/errors.h"
#include "annulus/core/info.h"
#include "annulus/cuda/check.h"
#include "annulus/cuda/fast_div.h"

namespace annulus::attention::cuda {

inline unsigned checked_blocks(const char* op, std::int64_t blocks) {
  if (blocks < (std::int64_t{1} << 31)) return static_cast<unsigned>(blocks);
  throw NotSupported("[" + std::string(op) + "] q and k must need fewer than 2^31 blocks on cuda");
}

inline int current_device(const char* op) {
  int device = 0;
  annulus::cuda::throw_on_error(cudaGetDevice(&device), op, "cudaGetDevice");
  return device;
}
// Of a device; 0 where there is none, and scratch is only counted.
inline std::int64_t attribute_of(cudaDeviceAttr attribute, int device) {
  int value = 0;
  if (cudaDeviceGetAttribute(&value, attribute, device) == cudaSuccess) return value;
  (void)cudaGetLastError();
  return 0;
}
inline std::int64_t multiprocessors_of(int device) {
  return attribute_of(cudaDevAttrMultiProcessorCount, device);
}
inline bool is_hopper(int device) {
  return attribute_of(cudaDevAttrComputeCapabilityMajor, device) == 9 &&
         attribute_of(cudaDevAttrComputeCapabilityMinor, device) == 0;
}
// What compute capabilities 9.0 and 10.0 have, 227 KB a block of threads, and 8.x and 12.0 have not.
inline bool has_much_shared(int device) {
  return attribute_of(cudaDevAttrMaxSharedMemoryPerBlockOptin, device) >= 200 * 1024;
}

// How far the tiles of a call fill the device, at one a multiprocessor: half of it at most, all of it about once, or more
// often. Of tiles that differ in their work twice as many are as good: those with little are done early.
enum class Fill : std::uint8_t { kHalf, kOnce, kOften };
inline Fill fill_of(const char* op, Problem p, std::int64_t heads, bool of_queries, int size) {
  const std::int64_t tiles = p.number_blocks(heads, of_queries, size),
                     places = multiprocessors_of(current_device(op));
  if (2 * tiles <= places) return Fill::kHalf;
  return tiles <= places * (p.pattern.is_causal() ? 2 : 1) ? Fill::kOnce : Fill::kOften;
}

// Rows of a sweep that are short: see ForwardTiling.
inline constexpr std::int64_t kShortSweep = 64;

// f.operator()<columns of the tiles, are sweeps short>(). Where warps have 16 rows anyway there is no kernel for short ones.
template <class T, class F>
void visit_tiles(const Problem& p, bool is_short, F&& f) {
  const int columns = p.D > p.Dv ? p.D : p.Dv;
  if (columns > 128) return f.template operator()<256, false>();
  if constexpr (sizeof(T) == 2) {
    if (is_short) {
      return columns <= 64 ? f.template operator()<64, true>() : f.template operator()<128, true>();
    }
  }
  return columns <= 64 ? f.template operator()<64, false>() : f.template operator()<128, false>();
}

template <class T>
void forward_of(const char* op, const ForwardArgs& a, cudaStream_t stream);
template <class T>
void query_gradient_of(const char* op, const QueryGradientArgs& a, cudaStream_t stream);
// Of 16-bit numbers and kColumns columns at most: 64 or 128.
template <class T, int kColumns>
void gradient_of(const char* op, const GradientArgs& a, cudaStream_t stream);
template <class T>
void key_gradient_of(const char* op, const KeyGradientArgs& a, cudaStream_t stream);

// delta (B, H, Tq) = <do, o> - dlse. And rows of fp32 for sums that are cleared on the way: of clear_width numbers, a
// multiple of 4.
struct DeltaArgs {
  std::int64_t B = 0, H = 0, Tq = 0;
  int Dv = 0;
  DType dtype = DType::kF32;
  Operand o, do_, dlse;
  float* delta = nullptr;
  float* clear = nullptr;  // (B, Tq, H, clear_width)
  std::int64_t clear_width = 0;
};
void launch_delta(const char* op, const DeltaArgs& a, cudaStream_t stream);

// What finding a token among the rows of layers divides by.
struct LayerDivisors {
  annulus::cuda::FastDiv length[Dilated::kMost], rate[Dilated::kMost], heads[Dilated::kMost];
  std::uint32_t rows[Dilated::kMost] = {};  // of a segment

  LayerDivisors() = default;
  // None of more tokens than a FastDiv divides: they are found otherwise.
  explicit LayerDivisors(const Dilated& p) {
    if (p.tokens >= INT32_MAX) return;
    using annulus::cuda::FastDiv;
    const auto by = [](std::int64_t n) { return FastDiv(static_cast<std::uint32_t>(n)); };
    for (int i = 0; i < p.branches; ++i) {
      length[i] = by(p.length[i]);
      rate[i] = by(p.rate[i]);
      heads[i] = by(tiles_of(p.heads, p.rate[i]));
      rows[i] = static_cast<std::uint32_t>(tiles_of(p.length[i], p.rate[i]));
    }
  }
};

// The same of the rows of layers, each with its own o: that of its states.
struct LayerDeltaArgs {
  Dilated pattern;
  LayerRows rows;
  LayerDivisors divisors;
  std::int64_t B = 0, H = 0, Tq = 0;
  int Dv = 0;
  DType dtype = DType::kF32;
  Operand do_, dlse;
  States states;
  float* delta = nullptr;
};
void launch_layer_delta(const char* op, const LayerDeltaArgs& a, cudaStream_t stream);

// `to` (B, tokens, heads, columns) of the rows of layers: merged as softmax states, together with their lse, or where
// there are no m and l summed, on top of `before` where that is defined. Head h of `to` is that of queries
// h group + first_head. Or, where there are `parts`, of as many states of every (b, h, token).
struct MergeArgs {
  int parts = 0;
  Dilated pattern;
  LayerRows rows;
  LayerDivisors divisors;
  std::int64_t B = 0, tokens = 0, heads = 0, group = 1, first_head = 0;
  int columns = 0;
  DType dtype = DType::kF32;  // of `to`
  States from;
  const float* before = nullptr;  // (B, tokens, heads, columns); may be `to`
  Operand to, lse;
};
void launch_merge(const char* op, const MergeArgs& a, cudaStream_t stream);

// *found = 1 where one of the tensors, (B, rows, heads, columns) of 16-bit numbers in whole rows, has a number that is not
// finite.
struct FiniteArgs {
  struct One {
    Operand tensor;
    std::int64_t rows = 0, heads = 0;
    int columns = 0;
    bool flat = false;  // one number behind the other
  };
  std::int64_t B = 0;
  DType dtype = DType::kBF16;
  One of[3];
  int* found = nullptr;
};
void launch_find_not_finite(const char* op, const FiniteArgs& a, cudaStream_t stream);

// `to` (B, rows, heads, columns), rounded from fp32 whose rows are `pitch` apart, or zeros.
struct RoundArgs {
  std::int64_t B = 0, rows = 0, heads = 0;
  int columns = 0;
  DType dtype = DType::kF32;
  const float* from = nullptr;
  std::int64_t pitch = 0;
  Operand to;
};
void launch_round(const char* op, const RoundArgs& a, cudaStream_t stream);

// Whether the device runs these kernels.
Support kernels_support();

}  // namespace annulus::attention::cuda
