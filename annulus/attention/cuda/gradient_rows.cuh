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
// and layer_row the first among those of layers.
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
      if (row >= count) continue;
      if (to.layers != nullptr) {
        float* const line = to.layers + (layer_row + row) * LayerRows::pitch(columns);
#pragma unroll
        for (int n = 0; n < kD; ++n) {
          store_two(line, 1, true, first_column + n * 8 + lane % 4 * 2, columns,
                    acc[m][n][half * 2] * scale, acc[m][n][half * 2 + 1] * scale);
        }
      } else if (to.sum == nullptr) {
        T* const line = to.tensor.at<T>(b, h) + token(row) * to.tensor.row;
#pragma unroll
        for (int n = 0; n < kD; ++n) {
          store_two(line, to.tensor.column, to.tensor.whole, first_column + n * 8 + lane % 4 * 2,
                    columns, acc[m][n][half * 2] * scale, acc[m][n][half * 2 + 1] * scale);
        }
      } else {
        float* const line = to.sum + ((b * rows + token(row)) * heads + h) * columns;
#pragma unroll
        for (int n = 0; n < kD; ++n) {
#pragma unroll
          for (int e = 0; e < 2; ++e) {
            const int column = first_column + n * 8 + lane % 4 * 2 + e;
            if (column < columns) {
              line[column] = fmaf(acc[m][n][half * 2 + e], scale, line[column]);
            }
          }
        }
      }
    }
  }
}

}  // namespace annulus::attention::cuda
