// What the operands X and V of a step's products are made of.
//
// Bf16<Terms>: sums of 1, 2 or 3 bf16.
// F16: one f16, for f16 tensors, whose weights it holds exactly. X, which may be of any size (g above
// all), is multiplied by a power of two for every row and tile of 64 columns, which are a chunk of the
// depth of the next step: the largest number of them comes to 2^14 or above, so that those down to 2^-28
// of it keep all bits. Whoever multiplies c onto the product multiplies by the inverse first.
//
// s of all steps, which the gradients of weights and actions are made of, are sums of kStateTerms bf16:
// two hold an f16 exactly, and an f32 r0 or reset_state to 16 bits.
#pragma once

#include <cuda_fp16.h>
#include <cstdint>

#include "annulus/core/dtype.h"
#include "annulus/cuda/mma.cuh"

namespace annulus::ring_rnn::cuda::tensor {

template <int Terms>
struct Bf16 {
  using Element = bfloat16;
  static constexpr int kTerms = Terms, kStateTerms = Terms;
  static constexpr bool kScaled = false;
  static constexpr bool kFactorsOnX = Terms == 1;  // sm90 may multiply c onto X: see Scale

  // Word i holds term i of both.
  static __device__ __forceinline__ void split(float low, float high,
                                               std::uint32_t (&word)[Terms]) {
    annulus::cuda::split_pair<Terms>(low, high, word);
  }
};

struct F16 {
  using Element = float16;
  static constexpr int kTerms = 1, kStateTerms = 2;
  static constexpr bool kScaled = true;
  static constexpr bool kFactorsOnX = false;

  static __device__ __forceinline__ void split(float low, float high, std::uint32_t (&word)[1]) {
    const __half2 pair = __floats2half2_rn(low, high);
    word[0] = reinterpret_cast<const std::uint32_t&>(pair);
  }
};

// A power of two and its inverse, both normal: times it, `largest` (finite, not negative) lies in
// [2^14, 2^15), or is 0, or too small to bring there.
struct RowScale {
  float factor, inverse;

  __device__ __forceinline__ explicit RowScale(float largest) {
    const int exponent =
        static_cast<int>(__float_as_uint(largest) >> 23);  // biased; 0 below normal
    const int power = largest == 0 ? 0 : min(127 + 14 - exponent, 126);
    factor = __uint_as_float(static_cast<unsigned>(127 + power) << 23);
    inverse = __uint_as_float(static_cast<unsigned>(127 - power) << 23);
  }
};

template <class F>
auto with_terms(int terms, F&& f) {
  switch (terms) {
    case 1:
      return f.template operator()<1>();
    case 2:
      return f.template operator()<2>();
    default:
      return f.template operator()<3>();
  }
}

template <class F>
auto with_format(int terms, bool f16, F&& f) {
  if (f16) return f.template operator()<F16>();
  return with_terms(terms, [&]<int Terms>() { return f.template operator()<Bf16<Terms>>(); });
}

}  // namespace annulus::ring_rnn::cuda::tensor
