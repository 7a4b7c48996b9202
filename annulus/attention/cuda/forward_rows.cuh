// What the forward does with the rows a warp has in registers: the softmax as it goes along, and results out.
#pragma once

#include <cstdint>

#include "annulus/attention/cuda/query_block.cuh"
#include "annulus/cuda/math.cuh"
#include "annulus/cuda/reduce.cuh"

namespace annulus::attention::cuda {

// The largest of a row and the sum of its weights; of the latter a lane has a part.
template <int kRows>
struct RowStates {
  float m[kRows], l[kRows];

  __device__ RowStates() {
#pragma unroll
    for (int r = 0; r < kRows; ++r) m[r] = kNoScore, l[r] = 0;
  }
};

// Sums are brought to the origin that the largest score so far is.
template <int kM, int kN, int kD>
__device__ __forceinline__ void move_origin(const float (&s)[kM][kN][4], RowStates<kM * 2>& state,
                                            float (&acc)[kM][kD][4], float scale) {
  // After the first tiles the largest score is mostly among those seen.
  float factor[kM * 2];
  bool moved = false;
#pragma unroll
  for (int r = 0; r < kM * 2; ++r) {
    float high = state.m[r];
    // fmaxf passes over a NaN, whose weight is one all the same.
#pragma unroll
    for (int n = 0; n < kN; ++n) {
      high = fmaxf(high, fmaxf(s[r / 2][n][r % 2 * 2], s[r / 2][n][r % 2 * 2 + 1]));
    }
    high = warp_reduce<4>(high, [](float a, float b) { return fmaxf(a, b); });
    const bool moves = high != state.m[r];
    factor[r] = moves ? exp2_fast((state.m[r] - origin_of(high)) * scale) : 1.0f;
    moved |= moves;
    state.m[r] = high;
  }
  if (__any_sync(~0u, moved)) {
#pragma unroll
    for (int r = 0; r < kM * 2; ++r) {
      state.l[r] *= factor[r];
#pragma unroll
      for (int n = 0; n < kD; ++n) {
        acc[r / 2][n][r % 2 * 2] *= factor[r];
        acc[r / 2][n][r % 2 * 2 + 1] *= factor[r];
      }
    }
  }
}
// Scores become weights.
template <int kM, int kN>
__device__ __forceinline__ void weigh(float (&s)[kM][kN][4], RowStates<kM * 2>& state,
                                      float scale) {
#pragma unroll
  for (int r = 0; r < kM * 2; ++r) {
    const float origin = origin_of(state.m[r]) * scale;
    float sum = 0;
#pragma unroll
    for (int n = 0; n < kN; ++n) {
#pragma unroll
      for (int e = 0; e < 2; ++e) {
        float& x = s[r / 2][n][r % 2 * 2 + e];
        x = exp2_fast(fmaf(x, scale, -origin));
        sum += x;
      }
    }
    state.l[r] += sum;
  }
}

// A row's sums, of which four lanes have a part each, to those of the keys before.
template <int kD>
__device__ __forceinline__ void add_to_state(const ForwardArgs& a, const QueryBlock& at, int row,
                                             RowState own, const float (&acc)[kD][4], int half) {
  const Problem& p = a.p;
  const int lane = static_cast<int>(threadIdx.x) & 31;
  const std::int64_t i = p.part_row(0, at.b, at.h, at.query(row));
  float* const to = a.states.acc + i * LayerRows::pitch(p.Dv) + lane % 4 * 2;
  // All is asked for at once: one number after the other it takes as long as eight tiles of keys.
  const RowState before{a.states.m[i], a.states.l[i]};
  float2 old[kD];
#pragma unroll
  for (int n = 0; n < kD; ++n) {
    old[n] = n * 8 + lane % 4 * 2 < p.Dv ? *reinterpret_cast<const float2*>(to + n * 8) : float2{};
  }
  __syncwarp(0xfu << (lane & ~3));  // all four have read the state
  float kept = 0, here = 1;
  RowState all = own;
  if (before.l != 0) {
    all.m = fmaxf(before.m, own.m);
    const float origin = origin_of(all.m);
    kept = exp2_fast(before.m - origin);
    here = exp2_fast(own.m - origin);
    all.l = fmaf(own.l, here, before.l * kept);
  }
  if (lane % 4 == 0) {
    a.states.m[i] = all.m;
    a.states.l[i] = all.l;
  }
  here *= p.dropout.scale;
#pragma unroll
  for (int n = 0; n < kD; ++n) {
    if (n * 8 + lane % 4 * 2 >= p.Dv) continue;
    *reinterpret_cast<float2*>(to + n * 8) = {fmaf(acc[n][half * 2], here, old[n].x * kept),
                                              fmaf(acc[n][half * 2 + 1], here, old[n].y * kept)};
  }
}

// Rows of the tile out of registers: o and lse, or states of the layer.
template <class T, int kRows, int kM, int kD>
__device__ __forceinline__ void store_rows(const ForwardArgs& a, const QueryBlock& at,
                                           int first_row, RowStates<kRows>& state,
                                           float (&acc)[kM][kD][4]) {
  static_assert(kRows == kM * 2);
  const Problem& p = a.p;
  const int lane = static_cast<int>(threadIdx.x) & 31;
#pragma unroll
  for (int r = 0; r < kRows; ++r) state.l[r] = warp_sum<4>(state.l[r]);
#pragma unroll
  for (int r = 0; r < kRows; ++r) {
    const int row = first_row + r * 8 + lane / 4;
    if (row >= at.count) continue;
    const float l = state.l[r], high = state.m[r] * p.exponent_scale;
    if (a.carries) {
      if (l != 0) add_to_state(a, at, row, {high, l}, acc[r / 2], r % 2);
      continue;
    }
    if (a.states.acc != nullptr) {
      const std::int64_t i = a.parts > 1 ? p.part_row(at.part, at.b, at.h, p.token(at.query(row)))
                                         : at.layer_row + row;
      if (lane % 4 == 0) {
        a.states.m[i] = high;
        a.states.l[i] = l;
      }
      float* const to = a.states.acc + i * LayerRows::pitch(p.Dv);
#pragma unroll
      for (int n = 0; n < kD; ++n) {
        store_two(to, 1, true, n * 8 + lane % 4 * 2, p.Dv,
                  acc[r / 2][n][r % 2 * 2] * p.dropout.scale,
                  acc[r / 2][n][r % 2 * 2 + 1] * p.dropout.scale);
      }
      continue;
    }
    const std::int64_t token = p.token(at.query(row));
    if (lane % 4 == 0 && p.lse.data != nullptr) {
      constexpr float kLog2 = 0.693147181f;
      p.lse.at<float>(at.b, at.h)[token * p.lse.row] =
          l == 0 ? kNoScore : fmaf(high, kLog2, logf(l));
    }
    const float factor = l == 0 ? 0.0f : p.dropout.scale / l;
    T* const to = a.o.at<T>(at.b, at.h) + token * a.o.row;
#pragma unroll
    for (int n = 0; n < kD; ++n) {
      store_two(to, a.o.column, a.o.whole, n * 8 + lane % 4 * 2, p.Dv,
                acc[r / 2][n][r % 2 * 2] * factor, acc[r / 2][n][r % 2 * 2 + 1] * factor);
    }
  }
}

}  // namespace annulus::attention::cuda
