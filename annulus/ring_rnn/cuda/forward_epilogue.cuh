// The epilogue of a forward step on tensor cores: X is the state s.
#pragma once

#include "annulus/ring_rnn/cuda/step.cuh"

namespace annulus::ring_rnn::cuda::tensor {

// s of the loop's first step.
template <class T>
__device__ __forceinline__ float first_of_loop(const ForwardPass& loop, std::int64_t row, int col) {
  const Args& a = loop.args;
  if (!loop.restart) return first_state<T>(a, row, col);
  if (resets(a, row, loop.first)) return get_either<T>(a.reset_state, row, col);
  return get<float>(loop.restart, row, col);
}

// Neighbouring columns of a step. What it is made of besides the product, and where its results go,
// is known before the product is.
template <int Columns>
struct ForwardStep {
  StepInputs<float> in[Columns];
  float J0;
  std::int64_t out, saved;  // offsets of the first column at time 0
  std::int64_t saved_stride;
  int count;   // of columns that there are
  bool plain;  // no drive, mask, reset or kept state: asked once, not each for itself in every step

  // What is the same in all steps.
  __device__ __forceinline__ void begin(const ForwardPass& loop, std::int64_t row, int col) {
    const Args& a = loop.args;
    count = row < a.B ? columns_of<Columns>(a.N, col) : 0;
    plain = !a.drive && !a.mask && !a.reset && a.checkpoint == 0 && loop.y_again == nullptr;
#pragma unroll
    for (int e = 0; e < Columns; ++e) in[e].live = true;
    if (count == 0) return;
    visit_narrow(loop.dtype, [&]<class T>() {
      J0 = get<T>(a.J0);
#pragma unroll
      for (int e = 0; e < Columns; ++e) {
        if (e < count) in[e].alpha = get<T>(a.alpha, col + e);
      }
    });
    out = offset<float>(a.out, row, 0, col);
    if (loop.y_again != nullptr) {
      saved = (row - loop.again_first * a.B) * a.N + col;
      saved_stride = a.B * a.N;
    } else if (a.saved && a.checkpoint == 0) {
      saved = offset<float>(a.saved, 0, row, col);
      saved_stride = a.saved.stride[0];
    }
  }
  __device__ __forceinline__ void load(const ForwardPass& loop, std::int64_t t, std::int64_t row,
                                       int col) {
    const Args& a = loop.args;
    if (count == 0 || plain) return;
    const bool is_live = live(a, row, t);
    const bool resets_next = t + 1 < a.T && resets(a, row, t + 1);
    float drive[Columns] = {};
    if (a.drive) {
      visit_narrow(loop.dtype, [&]<class T>() {
        load_row(static_cast<const T*>(a.drive.data) + offset<T>(a.drive, row, t, col),
                 a.drive.stride[2], count, drive);
      });
    }
#pragma unroll
    for (int e = 0; e < Columns; ++e) {
      in[e].live = is_live;
      in[e].resets_next = resets_next;
      in[e].drive = drive[e];
    }
  }

  // r: the state after the step, v: the one that the next begins with; 0 where there is no column.
  __device__ __forceinline__ void finish(const ForwardPass& loop, std::int64_t t, std::int64_t row,
                                         int col, const float (&acc)[Columns], float row_sum,
                                         float (&r)[Columns], float (&v)[Columns]) const {
    const Args& a = loop.args;
#pragma unroll
    for (int e = 0; e < Columns; ++e) r[e] = v[e] = 0;
    if (count == 0) return;
    float y[Columns], f[Columns];
#pragma unroll
    for (int e = 0; e < Columns; ++e) {
      y[e] = plain ? fma_of(J0, row_sum, acc[e]) : mixed_input(a, in[e], acc[e], row_sum, J0);
    }
    activate(a.activation, y, f);
#pragma unroll
    for (int e = 0; e < Columns; ++e) {
      if (e >= count) break;
      r[e] = in[e].live ? leaked(in[e], f[e]) : in[e].s;
      if (!in[e].live) y[e] = 0;
      v[e] = r[e];
    }
    if (!plain && loop.y_again != nullptr) {
      store_row(loop.y_again + saved + t * saved_stride, 1, count, y);
    } else {
      visit_narrow(loop.dtype, [&]<class T>() {
        store_row(static_cast<T*>(a.out.data) + out + t * a.out.stride[1], a.out.stride[2], count,
                  r);
      });
      if (a.saved && (plain || a.checkpoint == 0)) {
        store_row(static_cast<float*>(a.saved.data) + saved + t * saved_stride, a.saved.stride[2],
                  count, y);
      }
      if (t == a.T - 1 && a.h_n) {
        store_row(static_cast<float*>(a.h_n.data) + offset<float>(a.h_n, row, col), a.h_n.stride[1],
                  count, r);
      }
    }
    if (!plain) begin_next(loop, t, row, col, v);
  }

 private:
  // Resets, and states that are kept, where there are such.
  __device__ __forceinline__ void begin_next(const ForwardPass& loop, std::int64_t t,
                                             std::int64_t row, int col, float (&v)[Columns]) const {
    const Args& a = loop.args;
    const bool reset = in[0].resets_next;
    if (!reset && (a.checkpoint == 0 || loop.y_again != nullptr)) return;
    visit_narrow(loop.dtype, [&]<class T>() {
#pragma unroll
      for (int e = 0; e < Columns; ++e) {
        if (e >= count) break;
        v[e] = loop.y_again == nullptr ? begin_step<T>(a, row, col + e, t + 1, v[e], reset)
                                       : begin_step<T, true>(a, row, col + e, t + 1, v[e], reset);
      }
    });
  }
};

struct Forward {
  static constexpr bool kDots = false;
  using Pass = ForwardPass;

  static __device__ __forceinline__ float4& held(const ForwardPass& loop, std::int64_t row,
                                                 int col) {
    return *reinterpret_cast<float4*>(loop.s + row * loop.layout.padded_n + col);
  }

  static __device__ __forceinline__ void begin(const ForwardPass& loop, std::int64_t row, int col,
                                               float (&v)[4]) {
    const Args& a = loop.args;
#pragma unroll
    for (int e = 0; e < 4; ++e) {
      v[e] = 0;
      if (row >= a.B || col + e >= a.N) continue;
      visit_narrow(loop.dtype, [&]<class T>() { v[e] = first_of_loop<T>(loop, row, col + e); });
    }
    held(loop, row, col) = make_float4(v[0], v[1], v[2], v[3]);
  }

  // What the epilogue of step t reads of a row from column `col` on, for prefetch_epilogue().
  static __device__ __forceinline__ void prefetch(const ForwardPass& loop, std::int64_t t,
                                                  std::int64_t row, int col) {
    const Args& a = loop.args;
    if (!a.drive || row >= a.B || col >= a.N) return;
    visit_narrow(loop.dtype, [&]<class T>() {
      prefetch_row(static_cast<const T*>(a.drive.data) + offset<T>(a.drive, row, t, col),
                   a.drive.stride[2]);
    });
  }

  using Ahead = ForwardStep<4>;
  static __device__ __forceinline__ Ahead ahead(const ForwardPass& loop, std::int64_t t,
                                                std::int64_t row, int col) {
    Ahead ahead = {};
    const float4 before = held(loop, row, col);
    ahead.begin(loop, row, col);
    ahead.load(loop, t, row, col);
    ahead.in[0].s = before.x;
    ahead.in[1].s = before.y;
    ahead.in[2].s = before.z;
    ahead.in[3].s = before.w;
    return ahead;
  }

  static __device__ __forceinline__ void finish(const ForwardPass& loop, std::int64_t t,
                                                std::int64_t row, int tile, int col,
                                                const Ahead& ahead, const float (&acc)[4],
                                                float row_sum, float (&v)[4]) {
    const Args& a = loop.args;
    float r[4];
    ahead.finish(loop, t, row, col, acc, row_sum, r, v);
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
        float* to =
            loop.vectors + ((t * loop.layout.row_parts + tile) * loop.layout.padded_b + row) * 2;
        *reinterpret_cast<float2*>(to) = make_float2(x, y);
      }
    }
  }
};

}  // namespace annulus::ring_rnn::cuda::tensor
