// The epilogue of a backward step on tensor cores: X is g = alpha F'(y) l; what is kept between steps
// is l = dL/dr, the incoming gradient of the step included.
#pragma once

#include "annulus/ring_rnn/cuda/step.cuh"

namespace annulus::ring_rnn::cuda::tensor {

// dL/ds of a step that counts.
__device__ __forceinline__ float state_gradient(float l, float alpha, float J0, float row_sum,
                                                float sum) {
  return fmaf(1.0f - alpha, l, fmaf(J0, row_sum, sum));
}

// g of a step that counts, and its part of dL/dalpha.
struct Opened {
  float g, moved;
};
__device__ __forceinline__ Opened open_step(const Activated<float>& f, float alpha, float s,
                                            float l) {
  return {mul_of(mul_of(alpha, f.slope), l), l * (f.value - s)};
}

template <bool Dots>
struct Backward {
  static constexpr bool kDots = Dots;
  using Pass = BackwardPass;

  static __device__ __forceinline__ std::int64_t at(const BackwardPass& loop, std::int64_t row,
                                                    int col) {
    return row * loop.layout.padded_n + col;
  }

  // What g of step t is made of besides l, of four columns.
  struct Opening {
    float y[4], s[4], alpha_sum[4];
    bool counts;
  };
  static __device__ __forceinline__ Opening opening(const BackwardPass& loop, std::int64_t t,
                                                    std::int64_t row, int col) {
    const Args& a = loop.args;
    Opening open = {};
    open.counts = row < a.B && live(a, row, t);
    if (loop.alpha_sums != nullptr && t < a.T - 1) {
      load<4>(loop.alpha_sums + at(loop, row, col), open.alpha_sum);
    }
    if (!open.counts) return open;
    const int count = columns_of<4>(loop.args.N, col);
    load_row(loop.y + (t - loop.y_first) * loop.y_stride[0] + row * loop.y_stride[1] +
                 col * loop.y_stride[2],
             loop.y_stride[2], count, open.y);
    if (loop.alpha_sums == nullptr && loop.s_sums == nullptr) return open;
    visit_narrow(loop.dtype, [&]<class T>() {
      const StateRow from = state_row<T>(a, row, t);
      if (from.wide) {
        load_row(static_cast<const float*>(from.data) + col * from.step, from.step, count, open.s);
      } else {
        load_row(static_cast<const T*>(from.data) + col * from.step, from.step, count, open.s);
      }
    });
    return open;
  }

  static __device__ __forceinline__ void load_alpha(const BackwardPass& loop, int col,
                                                    float (&alpha)[4]) {
    visit_narrow(loop.dtype, [&]<class T>() {
#pragma unroll
      for (int e = 0; e < 4; ++e) {
        alpha[e] = col + e < loop.args.N ? get<T>(loop.args.alpha, col + e) : 0.0f;
      }
    });
  }

  // l of step t -> g of step t, and everything else that is made of them.
  static __device__ __forceinline__ void make_g(const BackwardPass& loop, std::int64_t t,
                                                std::int64_t row, int tile, int col,
                                                const Opening& open, const float (&alpha)[4],
                                                const float (&l)[4], float (&g)[4]) {
    const Args& a = loop.args;
    const Layout& layout = loop.layout;
    const int count = columns_of<4>(loop.args.N, col);
    float sums[4];
    Activated<float> f[4];
    activate_and_slope(a.activation, open.y, f);
#pragma unroll
    for (int e = 0; e < 4; ++e) {
      const Opened step = open_step(f[e], alpha[e], open.s[e], l[e]);
      const bool counts = open.counts && e < count;
      g[e] = counts ? step.g : 0.0f;
      sums[e] = counts ? open.alpha_sum[e] + step.moved : open.alpha_sum[e];
    }
    if (loop.alpha_sums != nullptr) store<4>(sums, loop.alpha_sums + at(loop, row, col));
    store<4>(l, loop.l + at(loop, row, col));
    if (loop.g != nullptr) store_g(loop, t, row, col, g);
    if (a.ddrive && row < a.B) {
      visit_narrow(loop.dtype, [&]<class T>() {
        store_row(static_cast<T*>(a.ddrive.data) + offset<T>(a.ddrive, row, t, col),
                  a.ddrive.stride[2], count, g);
      });
    }
    if (loop.s_sums != nullptr) {
      const float sum_g = sum_row((g[0] + g[1]) + (g[2] + g[3]));
      const float sum_s = sum_row((open.s[0] + open.s[1]) + (open.s[2] + open.s[3]));
      if ((threadIdx.x & 15) == 0) {
        const std::int64_t to = (t * layout.row_parts + tile) * layout.padded_b + row;
        loop.g_sums[to] = sum_g;
        loop.s_sums[to] = sum_s;
      }
    }
  }

  static __device__ __forceinline__ void begin(const BackwardPass& loop, std::int64_t row, int col,
                                               float (&v)[4]) {
    const Args& a = loop.args;
    const std::int64_t t = loop.last - 1;
    const Opening open = opening(loop, t, row, col);
    float l[4] = {}, alpha[4];
    load_alpha(loop, col, alpha);
    if (loop.last < a.T) {  // the launch before left it
      load<4>(loop.l + at(loop, row, col), l);
      return make_g(loop, t, row, col / kTile, col, open, alpha, l, v);
    }
#pragma unroll
    for (int e = 0; e < 4; ++e) {
      if (row >= a.B || col + e >= a.N) continue;
      if (a.dh_n) l[e] = get<float>(a.dh_n, row, col + e);
      if (a.dout) {
        visit_narrow(loop.dtype, [&]<class T>() { l[e] += get<T>(a.dout, row, t, col + e); });
      }
    }
    make_g(loop, t, row, col / kTile, col, open, alpha, l, v);
  }

  // What the epilogue of step t reads of a row from column `col` on, for prefetch_epilogue().
  static __device__ __forceinline__ void prefetch(const BackwardPass& loop, std::int64_t t,
                                                  std::int64_t row, int col) {
    const Args& a = loop.args;
    if (row >= a.B || col >= a.N || t == 0) return;
    visit_narrow(loop.dtype, [&]<class T>() {
      if (a.dout) {
        prefetch_row(static_cast<const T*>(a.dout.data) + offset<T>(a.dout, row, t - 1, col),
                     a.dout.stride[2]);
      }
      if (t <= loop.leave_at) return;
      prefetch_row(loop.y + (t - 1 - loop.y_first) * loop.y_stride[0] + row * loop.y_stride[1] +
                       col * loop.y_stride[2],
                   loop.y_stride[2]);
      if (t > 1 && (loop.alpha_sums != nullptr || loop.s_sums != nullptr)) {
        prefetch_row(static_cast<const T*>(a.out.data) + offset<T>(a.out, row, t - 2, col),
                     a.out.stride[2]);
      }
    });
  }

  // What the epilogue is made of besides the product, of four columns.
  struct Ahead {
    float l[4], alpha[4], dout[4];
    float taken[4];  // by resets, out of the recurrence, so far
    float J0;
    bool counts, reset;
    Opening before;  // of the step before
  };
  static __device__ __forceinline__ Ahead ahead(const BackwardPass& loop, std::int64_t t,
                                                std::int64_t row, int col) {
    const Args& a = loop.args;
    Ahead ahead = {};
    if (t > loop.leave_at) ahead.before = opening(loop, t - 1, row, col);
    load<4>(loop.l + at(loop, row, col), ahead.l);
    if (loop.reset_sums != nullptr && t < a.T - 1) {
      load<4>(loop.reset_sums + at(loop, row, col), ahead.taken);
    }
    load_alpha(loop, col, ahead.alpha);
    if (row >= a.B) return ahead;
    ahead.counts = live(a, row, t);
    ahead.reset = resets(a, row, t);
    visit_narrow(loop.dtype, [&]<class T>() {
      ahead.J0 = get<T>(a.J0);
      if (a.dout && t > 0) {
        load_row(static_cast<const T*>(a.dout.data) + offset<T>(a.dout, row, t - 1, col),
                 a.dout.stride[2], columns_of<4>(loop.args.N, col), ahead.dout);
      }
    });
    return ahead;
  }

  static __device__ __forceinline__ void finish(const BackwardPass& loop, std::int64_t t,
                                                std::int64_t row, int tile, int col,
                                                const Ahead& ahead, const float (&sum)[4],
                                                float row_sum, float (&v)[4]) {
    const Args& a = loop.args;
    float l[4], taken[4];
#pragma unroll
    for (int e = 0; e < 4; ++e) {
      l[e] = ahead.l[e];
      taken[e] = ahead.taken[e];
      if (row >= a.B || col + e >= a.N) continue;
      if (ahead.counts) l[e] = state_gradient(l[e], ahead.alpha[e], ahead.J0, row_sum, sum[e]);
      if (ahead.reset) {
        taken[e] += l[e];
        l[e] = 0;
      }
      l[e] += ahead.dout[e];
    }
    if (loop.reset_sums != nullptr) store<4>(taken, loop.reset_sums + at(loop, row, col));
    if (t == 0 && row < a.B) {
      visit_narrow(loop.dtype, [&]<class T>() {
#pragma unroll
        for (int e = 0; e < 4; ++e) {
          const int i = col + e;
          if (i >= a.N) continue;
          if (a.dreset_state) put_either<T>(a.dreset_state, taken[e], row, i);
          if (a.dr0) put_either<T>(a.dr0, loop.own_reset_state ? l[e] : l[e] + taken[e], row, i);
        }
      });
    }
    if (t > loop.leave_at)
      return make_g(loop, t - 1, row, tile, col, ahead.before, ahead.alpha, l, v);
    store<4>(l, loop.l + at(loop, row, col));
#pragma unroll
    for (int e = 0; e < 4; ++e) v[e] = 0;
  }
};

}  // namespace annulus::ring_rnn::cuda::tensor
