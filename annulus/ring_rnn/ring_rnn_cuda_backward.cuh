// The ends of a backward step on tensor cores: X is g = alpha F'(y) l, and the memory of the state
// holds l = dL/dr, the incoming gradient of the step included.
#pragma once

#include "annulus/ring_rnn/ring_rnn_cuda_parts.cuh"

namespace annulus::ring::cuda::tensor {

template <bool Dots>
struct Backward {
  static constexpr bool kBackward = true;
  static constexpr bool kDots = Dots;

  static __device__ __forceinline__ int parity(const Loop& loop, std::int64_t t) {
    return static_cast<int>((loop.args.T - 1 - t) & 1);
  }

  static __device__ __forceinline__ std::int64_t at(const Loop& loop, std::int64_t row, int col) {
    return row * loop.shape.padded_n + col;
  }

  // l of step t -> g of step t, and everything else that is made of them.
  template <class T>
  static __device__ __forceinline__ void pass(const Loop& loop, std::int64_t t, std::int64_t row,
                                              int col, const float (&l)[4], float (&g)[4],
                                              float (&s)[4]) {
    const Args& a = loop.args;
    const bool counts = row < a.B && live(a, row, t);
    const bool needs_s = loop.alpha_sums != nullptr || loop.s_sums != nullptr;
#pragma unroll
    for (int e = 0; e < 4; ++e) {
      g[e] = 0;
      s[e] = 0;
      const int i = col + e;
      if (row >= a.B || i >= a.N) continue;
      float moved = 0;
      if (counts) {
        const float y = loop.y[(t - loop.y_first) * loop.y_stride[0] + row * loop.y_stride[1] +
                               i * loop.y_stride[2]];
        const Activated<float> f = activate_and_slope(a.activation, y);
        g[e] = mul_of(mul_of(get<T>(a.alpha, i), f.slope), l[e]);
        if (needs_s) s[e] = state_before<T>(a, row, t, i);
        moved = l[e] * (f.value - s[e]);
      }
      if (loop.alpha_sums != nullptr) {
        float& sum = loop.alpha_sums[at(loop, row, i)];
        sum = t == a.T - 1 ? moved : sum + moved;
      }
      if (a.ddrive) put<T>(a.ddrive, g[e], row, t, i);
    }
  }

  static __device__ __forceinline__ void make_g(const Loop& loop, std::int64_t t, std::int64_t row,
                                                int tile, int col, const float (&l)[4],
                                                float (&g)[4]) {
    const Shape& shape = loop.shape;
    float s[4];
    visit_narrow(loop.dtype, [&]<class T>() { pass<T>(loop, t, row, col, l, g, s); });
    *reinterpret_cast<float4*>(loop.state + at(loop, row, col)) =
        make_float4(l[0], l[1], l[2], l[3]);
    if (loop.g != nullptr) {
      *reinterpret_cast<float4*>(loop.g + t * shape.padded_b * shape.padded_n +
                                 at(loop, row, col)) = make_float4(g[0], g[1], g[2], g[3]);
    }
    if (loop.s_sums != nullptr) {
      const float sum_g = sum_row((g[0] + g[1]) + (g[2] + g[3]));
      const float sum_s = sum_row((s[0] + s[1]) + (s[2] + s[3]));
      if ((threadIdx.x & 15) == 0) {
        const std::int64_t to = (t * shape.tiles + tile) * shape.padded_b + row;
        loop.g_sums[to] = sum_g;
        loop.s_sums[to] = sum_s;
      }
    }
  }

  static __device__ __forceinline__ void begin(const Loop& loop, std::int64_t row, int col,
                                               float (&v)[4]) {
    const Args& a = loop.args;
    const std::int64_t t = loop.last - 1;
    float l[4];
    if (loop.last < a.T) {  // the launch before left it
      const float4 held = *reinterpret_cast<const float4*>(loop.state + at(loop, row, col));
      l[0] = held.x;
      l[1] = held.y;
      l[2] = held.z;
      l[3] = held.w;
      return make_g(loop, t, row, col / kTile, col, l, v);
    }
#pragma unroll
    for (int e = 0; e < 4; ++e) {
      l[e] = 0;
      if (row >= a.B || col + e >= a.N) continue;
      if (a.dh_n) l[e] = get<float>(a.dh_n, row, col + e);
      if (a.dout) {
        visit_narrow(loop.dtype, [&]<class T>() { l[e] += get<T>(a.dout, row, t, col + e); });
      }
    }
    make_g(loop, t, row, col / kTile, col, l, v);
  }

  static __device__ __forceinline__ void finish(const Loop& loop, std::int64_t t, std::int64_t row,
                                                int tile, int col, const float (&sum)[4],
                                                float row_sum, float (&v)[4]) {
    const Args& a = loop.args;
    const float4 held = *reinterpret_cast<const float4*>(loop.state + at(loop, row, col));
    float l[4] = {held.x, held.y, held.z, held.w};
    if (row < a.B) {
      const bool counts = live(a, row, t);
      const bool reset = resets(a, row, t);
      visit_narrow(loop.dtype, [&]<class T>() {
        const float J0 = get<T>(a.J0);
#pragma unroll
        for (int e = 0; e < 4; ++e) {
          const int i = col + e;
          if (i >= a.N) continue;
          if (counts) {
            const float alpha = get<T>(a.alpha, i);
            l[e] = fmaf(1.0f - alpha, l[e], fmaf(J0, row_sum, sum[e]));  // dL/ds
          }
          float past = 0;  // what resets have taken out of the recurrence so far
          if (loop.reset_sums != nullptr) {
            float& taken = loop.reset_sums[at(loop, row, i)];
            past = t == a.T - 1 ? 0.0f : taken;
            if (reset) past += l[e];
            taken = past;
          }
          if (reset) l[e] = 0;
          if (t > 0) {
            if (a.dout) l[e] += get<T>(a.dout, row, t - 1, i);
          } else {
            if (a.dreset_state) put_either<T>(a.dreset_state, past, row, i);
            if (a.dr0) put_either<T>(a.dr0, loop.own_reset_state ? l[e] : l[e] + past, row, i);
          }
        }
      });
    }
    if (t > loop.leave_at) return make_g(loop, t - 1, row, tile, col, l, v);
    *reinterpret_cast<float4*>(loop.state + at(loop, row, col)) =
        make_float4(l[0], l[1], l[2], l[3]);
#pragma unroll
    for (int e = 0; e < 4; ++e) v[e] = 0;
  }
};

}  // namespace annulus::ring::cuda::tensor
