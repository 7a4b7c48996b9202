// The ends of a forward step on tensor cores: X is the state s.
#pragma once

#include "annulus/ring_rnn/ring_rnn_cuda_parts.cuh"

namespace annulus::ring::cuda::tensor {

struct Forward {
  static constexpr bool kBackward = false;
  static constexpr bool kDots = false;

  static __device__ __forceinline__ int parity(const Loop&, std::int64_t t) {
    return static_cast<int>(t & 1);
  }

  static __device__ __forceinline__ float4& held(const Loop& loop, std::int64_t row, int col) {
    return *reinterpret_cast<float4*>(loop.state + row * loop.shape.padded_n + col);
  }

  static __device__ __forceinline__ void begin(const Loop& loop, std::int64_t row, int col,
                                               float (&v)[4]) {
    const Args& a = loop.args;
#pragma unroll
    for (int e = 0; e < 4; ++e) {
      v[e] = 0;
      if (row >= a.B || col + e >= a.N) continue;
      visit_narrow(loop.dtype, [&]<class T>() {
        if (!loop.restart) {
          v[e] = first_state<T>(a, row, col + e);
        } else if (resets(a, row, loop.first)) {
          v[e] = get_either<T>(a.reset_state, row, col + e);
        } else {
          v[e] = get<float>(loop.restart, row, col + e);
        }
      });
    }
    held(loop, row, col) = make_float4(v[0], v[1], v[2], v[3]);
  }

  static __device__ __forceinline__ void finish(const Loop& loop, std::int64_t t, std::int64_t row,
                                                int tile, int col, const float (&acc)[4],
                                                float row_sum, float (&v)[4]) {
    const Args& a = loop.args;
    const float4 before = held(loop, row, col);
    const float s[4] = {before.x, before.y, before.z, before.w};
    float r[4] = {};
#pragma unroll
    for (int e = 0; e < 4; ++e) v[e] = 0;
    if (row < a.B) {
      visit_narrow(loop.dtype, [&]<class T>() {
        const float J0 = get<T>(a.J0);
#pragma unroll
        for (int e = 0; e < 4; ++e) {
          if (col + e >= a.N) continue;
          Stepped<float> done;
          if (loop.y_again == nullptr) {
            done = finish_step<T>(a, row, col + e, t, s[e], acc[e], row_sum, J0);
          } else {
            done = finish_step<T, true>(a, row, col + e, t, s[e], acc[e], row_sum, J0);
            loop.y_again[((t - loop.y_first) * a.B + row) * a.N + col + e] = done.y;
          }
          r[e] = done.r;
          v[e] = done.next;
        }
      });
    }
    held(loop, row, col) = make_float4(v[0], v[1], v[2], v[3]);
    if (loop.vectors != nullptr) {
      float x = 0, y = 0;
#pragma unroll
      for (int e = 0; e < 4; ++e) {
        float sine, cosine;
        sincospif(2.0f * (static_cast<float>(col + e) / static_cast<float>(a.N)), &sine, &cosine);
        x = fmaf(r[e], cosine, x);
        y = fmaf(r[e], sine, y);
      }
      x = sum_row(x);
      y = sum_row(y);
      if ((threadIdx.x & 15) == 0) {
        float* to = loop.vectors + ((t * loop.shape.tiles + tile) * loop.shape.padded_b + row) * 2;
        *reinterpret_cast<float2*>(to) = make_float2(x, y);
      }
    }
  }
};

}  // namespace annulus::ring::cuda::tensor
