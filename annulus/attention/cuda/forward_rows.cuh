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

// ---- Rows of a tile out of registers. All lanes of a warp come along, also those whose rows do not exist: a warp that is
// divided here has fewer registers in the loops before it.

// To states: of the layer or part, or (carries) added to those of the keys before.
template <int kD>
__device__ __forceinline__ void store_state(const ForwardArgs& a, const QueryBlock& at, int row,
                                            RowState own, const float (&acc)[kD][4], int half) {
  const Problem& p = a.p;
  const int lane = static_cast<int>(threadIdx.x) & 31;
  const bool leads = lane % 4 == 0;
  // Of a row that saw no key nothing is added.
  const bool there = row < at.count && (!a.carries || own.l != 0);
  std::int64_t i = 0;
  if (there) {
    i = a.carries     ? p.part_row(0, at.b, at.h, at.query(row))
        : a.parts > 1 ? p.part_row(at.part, at.b, at.h, p.token(at.query(row)))
                      : at.layer_row + row;
  }
  float kept = 0, here = 1;
  if (a.carries) {
    RowState before{0, 0};
    if (there && leads) before = {a.states.m[i], a.states.l[i]};
    before.m = __shfl_sync(~0u, before.m, lane & ~3);
    before.l = __shfl_sync(~0u, before.l, lane & ~3);
    if (before.l != 0) {
      const float high = fmaxf(before.m, own.m), origin = origin_of(high);
      kept = exp2_fast(before.m - origin);
      here = exp2_fast(own.m - origin);
      own = {high, fmaf(own.l, here, before.l * kept)};
    }
  }
  if (there && leads) {
    a.states.m[i] = own.m;
    a.states.l[i] = own.l;
  }
  here *= p.dropout.scale;
  float* const to = a.states.acc + i * LayerRows::pitch(p.Dv) + lane % 4 * 2;
  const int columns = there ? p.Dv - lane % 4 * 2 : 0;
  // Some are asked for at once: one after the other they take as long as eight tiles of keys.
  constexpr int kAtOnce = kD < 16 ? kD : 16;
#pragma unroll
  for (int first = 0; first < kD; first += kAtOnce) {
    float2 old[kAtOnce] = {};
    if (a.carries) {
#pragma unroll
      for (int n = 0; n < kAtOnce; ++n) {
        const int column = (first + n) * 8;
        if (column < columns) old[n] = *reinterpret_cast<const float2*>(to + column);
      }
    }
#pragma unroll
    for (int n = 0; n < kAtOnce; ++n) {
      const int column = (first + n) * 8;
      const float(&sums)[4] = acc[first + n];
      const float2 sum{fmaf(sums[half * 2], here, old[n].x * kept),
                       fmaf(sums[half * 2 + 1], here, old[n].y * kept)};
      if (column < columns) *reinterpret_cast<float2*>(to + column) = sum;
    }
  }
}

// To o and lse.
template <class T, int kD>
__device__ __forceinline__ void store_output(const ForwardArgs& a, const QueryBlock& at, int row,
                                             RowState own, const float (&acc)[kD][4], int half) {
  const Problem& p = a.p;
  const bool there = row < at.count;
  const std::int64_t token = there ? p.token(at.query(row)) : 0;
  if (there && threadIdx.x % 4 == 0 && p.lse.data != nullptr) {
    constexpr float kLog2 = 0.693147181f;
    p.lse.at<float>(at.b, at.h)[token * p.lse.row] =
        own.l == 0 ? kNoScore : fmaf(own.m, kLog2, logf(own.l));
  }
  store_sums(acc, half, own.l == 0 ? 0.0f : p.dropout.scale / own.l,
             a.o.at<T>(at.b, at.h) + token * a.o.row, a.o, 0, there ? p.Dv : 0);
}

template <class T, int kRows, int kM, int kD>
__device__ __forceinline__ void store_rows(const ForwardArgs& a, const QueryBlock& at,
                                           int first_row, RowStates<kRows>& state,
                                           float (&acc)[kM][kD][4]) {
  static_assert(kRows == kM * 2);
  const int lane = static_cast<int>(threadIdx.x) & 31;
#pragma unroll
  for (int r = 0; r < kRows; ++r) state.l[r] = warp_sum<4>(state.l[r]);
#pragma unroll
  for (int r = 0; r < kRows; ++r) {
    const int row = first_row + r * 8 + lane / 4;
    const RowState own{state.m[r] * a.p.exponent_scale, state.l[r]};
    if (a.states.acc != nullptr) {
      store_state(a, at, row, own, acc[r / 2], r % 2);
    } else {
      store_output<T>(a, at, row, own, acc[r / 2], r % 2);
    }
  }
}

}  // namespace annulus::attention::cuda
