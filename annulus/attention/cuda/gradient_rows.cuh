// What the kernels of the backward do with the rows a warp has in registers: weights and gradients of scores, and sums out.
#pragma once

#include <cstdint>

#include "annulus/attention/cuda/tile.cuh"
#include "annulus/cuda/math.cuh"

namespace annulus::attention::cuda {

// What exponents of weights are counted from, in units of log 2; of a row without keys (or scores) any number will do.
__device__ __forceinline__ float weight_origin(float lse) { return origin_of(lse) * kLog2E; }

// Scores become weights.
template <int kM, int kN, class Origin>
__device__ __forceinline__ void weights_of(float (&s)[kM][kN][4], const Problem& p,
                                           Origin&& origin) {
  const float factor = p.score_scale * p.exponent_scale;  // one of them is 1
#pragma unroll
  for (int m = 0; m < kM; ++m) {
#pragma unroll
    for (int n = 0; n < kN; ++n) {
#pragma unroll
      for (int e = 0; e < 4; ++e) {
        s[m][n][e] = exp2_fast(fmaf(s[m][n][e], factor, -origin(m, n, e)));
      }
    }
  }
}
// ds = p (z dp - delta), in place of dp.
template <int kM, int kN, class Delta>
__device__ __forceinline__ void score_gradients(float (&dp)[kM][kN][4],
                                                const float (&weight)[kM][kN][4], float kept_scale,
                                                Delta&& delta) {
#pragma unroll
  for (int m = 0; m < kM; ++m) {
#pragma unroll
    for (int n = 0; n < kN; ++n) {
#pragma unroll
      for (int e = 0; e < 4; ++e) {
        dp[m][n][e] = weight[m][n][e] * fmaf(dp[m][n][e], kept_scale, -delta(m, n, e));
      }
    }
  }
}

// Rows of registers times `scale`, of the columns from first_column on; token(row) is where a row lies, of those that exist,
// and layer_row the first among those of layers. All lanes of a warp come along: see forward_rows.cuh.
template <class T, int kM, int kD, class Token>
__device__ __forceinline__ void store_gradient(const float (&acc)[kM][kD][4], float scale,
                                               int first_row, int first_column, int count,
                                               const Gradient& to, std::int64_t layer_row,
                                               std::int64_t b, std::int64_t h, std::int64_t rows,
                                               std::int64_t heads, int columns, Token&& token) {
  const int lane = static_cast<int>(threadIdx.x) & 31;
#pragma unroll
  for (int m = 0; m < kM; ++m) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int row = first_row + m * 16 + half * 8 + lane / 4;
      const bool there = row < count;
      const int end = there ? columns : 0;
      if (to.layers == nullptr && to.sum == nullptr) {
        const std::int64_t t = there ? token(row) : 0;
        store_sums(acc[m], half, scale, to.tensor.at<T>(b, h) + t * to.tensor.row, to.tensor,
                   first_column, end);
        continue;
      }
      std::int64_t i = 0;
      if (there) i = to.layers != nullptr ? layer_row + row : (b * rows + token(row)) * heads + h;
      float* const line = (to.layers != nullptr ? to.layers : to.sum) +
                          i * LayerRows::pitch(columns) + first_column + lane % 4 * 2;
      const bool adds = to.layers == nullptr;
#pragma unroll
      for (int n = 0; n < kD; ++n) {
        // (Rows have room for a multiple of four.)
        if (first_column + n * 8 + lane % 4 * 2 >= end) continue;
        auto* const two = reinterpret_cast<float2*>(line + n * 8);
        const float2 old = adds ? *two : float2{};
        *two = {fmaf(acc[m][n][half * 2], scale, old.x),
                fmaf(acc[m][n][half * 2 + 1], scale, old.y)};
      }
    }
  }
}

// ---- Sums that several blocks of threads add to

// Neighbours more in fp32, if `there`. Predicated, so that nothing around it has to wait for a branch.
__device__ __forceinline__ void add_two(float* to, float a, float b, bool there) {
  asm volatile(
      "{.reg .pred p; setp.ne.b32 p, %3, 0; @p red.relaxed.gpu.global.add.f32 [%0], %1; @p "
      "red.relaxed.gpu.global.add.f32 [%0+4], %2;}" ::"l"(to),
      "f"(a), "f"(b), "r"(static_cast<int>(there))
      : "memory");
}
__device__ __forceinline__ void add_four(float* to, float a, float b, float c, float d,
                                         bool there) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  asm volatile(
      "{.reg .pred p; setp.ne.b32 p, %5, 0; @p red.relaxed.gpu.global.add.v4.f32 [%0], {%1, %2, "
      "%3, %4};}" ::"l"(to),
      "f"(a), "f"(b), "f"(c), "f"(d), "r"(static_cast<int>(there))
      : "memory");
#else
  add_two(to, a, b, there);
  add_two(to + 2, c, d, there);
#endif
}

// Sums of a warp times `scale`, added to rows of fp32: `row(i)` is where row i begins, in numbers from `to` on, or negative.
// Two lanes exchange what they have of 16 columns, so that each has four neighbours. (Sums whose columns lie as lanes have them need no
// exchange, but gradients of 128 columns took 2 to 5 % longer: what is added comes in bursts.)
template <int kM, int kN, class Row>
__device__ __forceinline__ void add_rows(const float (&acc)[kM][kN][4], float scale, float* to,
                                         int first_column, int columns, Row&& row) {
  const int lane = static_cast<int>(threadIdx.x) & 31;
  const bool odd = (lane & 1) != 0;
  const int column = first_column + (lane & 1) * 8 + (lane & 2) * 2;
#pragma unroll
  for (int r = 0; r < kM * 2; ++r) {
    const std::int64_t first = row(r * 8 + lane / 4);
    float* const line = to + first + column;
#pragma unroll
    for (int n = 0; n < kN; n += 2) {
      float own[2], sent[2];
#pragma unroll
      for (int e = 0; e < 2; ++e) {
        const float low = acc[r / 2][n][r % 2 * 2 + e] * scale,
                    high = acc[r / 2][n + 1][r % 2 * 2 + e] * scale;
        own[e] = odd ? high : low;
        sent[e] = __shfl_xor_sync(~0u, odd ? low : high, 1);
      }
      add_four(line + n * 8, odd ? sent[0] : own[0], odd ? sent[1] : own[1], odd ? own[0] : sent[0],
               odd ? own[1] : sent[1], first >= 0 && column + n * 8 < columns);
    }
  }
}

}  // namespace annulus::attention::cuda
