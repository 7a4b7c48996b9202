// The device side of LRPE-cosine for use inside other kernels: a linear-attention kernel that makes
// its queries and keys in registers never writes the 2 D wide tensors at all (8 of the 10 bytes per
// bf16 element that encoding and attention move together).
//
//   __global__ void my_kernel(lrpe_cosine::device::Positions positions, const float* theta, ...) {
//     lrpe_cosine::device::SinCos<float, 8> phase;
//     std::int64_t s[4];
//     positions.unravel(token, s);                              // once per row
//     for (int i = 0; i < 8; ++i)                               // once per (head, token, column)
//       phase.set(i, positions.column_phase(lrpe_cosine::turn_step64(theta[...]), s, column + i));
//     float yc[8], ys[8];
//     lrpe_cosine::device::cosine_tile(x, phase, yc, ys);              // for every batch
//   }
//
// The library's own kernels are built from these functions.
#pragma once

#include <cstdint>

#include "annulus/cuda/fast_div.h"
#include "annulus/cuda/math.cuh"
#include "annulus/lrpe_cosine/phase.h"

namespace annulus::lrpe_cosine::device {

inline constexpr int kAxes = 4;

// Where tokens are: passed to a kernel by value, filled on the host by make_positions().
struct Positions {
  std::int64_t prefix = 0;
  std::int64_t offset = 0;
  std::int64_t extent[kAxes] = {1, 1, 1, 1};
  annulus::cuda::FastDiv divide[kAxes];  // by extent, where all tokens fit in 31 bits
  int axes = 1;
  int columns_per_axis = 1;  // E
  bool wide = false;         // more than 2^31 tokens: plain 64-bit division

  // Position of token t >= prefix along each axis; only the first `axes` entries are set.
  __device__ __forceinline__ void unravel(std::int64_t t, std::int64_t (&s)[kAxes]) const {
    if (axes == 1) {
      s[0] = t - prefix + offset;
    } else if (wide) {
      const Wide w = unravel_wide(t - prefix);
#pragma unroll
      for (int j = 0; j < kAxes; ++j) s[j] = w.s[j];
    } else {
      auto r = static_cast<std::uint32_t>(t - prefix);
#pragma unroll
      for (int j = kAxes - 1; j > 0; --j) {
        if (j >= axes) continue;
        const std::uint32_t q = divide[j].divide(r);
        s[j] = r - q * divide[j].divisor;
        r = q;
      }
      s[0] = r;
    }
  }

  // Out of line, and by value: three 64-bit divisions would be a third of a kernel's code, and an
  // array whose address is taken would live in local memory.
  struct Wide {
    std::int64_t s[kAxes];
  };
  __device__ __noinline__ Wide unravel_wide(std::int64_t rest) const {
    Wide w;
    w.s[3] = rest % extent[3];
    rest /= extent[3];
    w.s[2] = rest % extent[2];
    rest /= extent[2];
    w.s[1] = rest % extent[1];
    w.s[0] = rest / extent[1];
    return w;
  }

  // Position of each of V <= E neighbouring columns (or one): they lie on one axis or on two.
  template <int V>
  __device__ __forceinline__ void along_columns(const std::int64_t (&s)[kAxes], int column,
                                                std::int64_t (&position)[V]) const {
    if (axes == 1) {
#pragma unroll
      for (int i = 0; i < V; ++i) position[i] = s[0];
    } else {
      const int last = axis_of(column + V - 1);
      const int edge = last * columns_per_axis - column;  // where the second axis begins
      const std::int64_t first_position = along(s, axis_of(column));
      const std::int64_t last_position = along(s, last);
#pragma unroll
      for (int i = 0; i < V; ++i) position[i] = i < edge ? first_position : last_position;
    }
  }

  // Axis that owns a column.
  __device__ __forceinline__ int axis_of(int column) const {
    if (axes == 1) return 0;
    return (column >= columns_per_axis) + (column >= 2 * columns_per_axis) +
           (column >= 3 * columns_per_axis);
  }

  __device__ __forceinline__ std::int64_t along(const std::int64_t (&s)[kAxes], int axis) const {
    if (axes == 1) return s[0];
    return axis == 0 ? s[0] : axis == 1 ? s[1] : axis == 2 ? s[2] : s[3];
  }

  template <class Step>
  __device__ __forceinline__ Step column_phase(Step step, const std::int64_t (&s)[kAxes],
                                               int column) const {
    return turn_at(step, along(s, axis_of(column)));
  }
};

inline Positions make_positions(int axes, const std::int64_t* extent, std::int64_t prefix,
                                std::int64_t offset, std::int64_t columns_per_axis) {
  Positions p;
  p.prefix = prefix;
  p.offset = offset;
  p.axes = axes;
  // Columns are ints on the device; an E beyond that means one axis owns every column.
  p.columns_per_axis = static_cast<int>(columns_per_axis < (1 << 29) ? columns_per_axis : 1 << 29);
  std::int64_t tokens = 1;
  for (int j = 0; j < axes; ++j) {
    p.extent[j] = extent[j] > 0 ? extent[j] : 1;
    tokens *= p.extent[j];
  }
  p.wide = tokens >= (std::int64_t{1} << 31);
  for (int j = 0; j < axes && !p.wide; ++j) {
    p.divide[j] = annulus::cuda::FastDiv(static_cast<std::uint32_t>(p.extent[j]));
  }
  return p;
}

// The sines and cosines of V neighbouring columns of one token, to fp32 (fp64) accuracy relative to
// the value, at the zeros too. (MUFU's sin and cos are right to 2^-21 of 1, not of the value:
// several bf16 ulps wherever |cos| < 1e-4.)
template <class Real, int V>
struct SinCos {
  Real s[V];
  Real c[V];

  __device__ __forceinline__ void set_zero_phase() {
#pragma unroll
    for (int i = 0; i < V; ++i) {
      s[i] = Real(0);
      c[i] = Real(1);
    }
  }
  __device__ __forceinline__ void set(int i, std::uint64_t turn) { sincos_turn(turn, s[i], c[i]); }
  __device__ __forceinline__ void set(int i, Turn turn) { sincos_turn(turn, s[i], c[i]); }
};

// yc = x cos, ys = x sin.
template <class Real, int V>
__device__ __forceinline__ void cosine_tile(const Real (&x)[V], const SinCos<Real, V>& phase,
                                            Real (&yc)[V], Real (&ys)[V]) {
#pragma unroll
  for (int i = 0; i < V; ++i) {
    yc[i] = x[i] * phase.c[i];
    ys[i] = x[i] * phase.s[i];
  }
}

// Sums of products are written as fma, so that every kernel rounds alike: a layout never changes a bit.

// The gradient of x: g = dyc cos + dys sin.
template <class Real, int V>
__device__ __forceinline__ void cosine_tile_backward(const Real (&dyc)[V], const Real (&dys)[V],
                                                     const SinCos<Real, V>& phase, Real (&g)[V]) {
#pragma unroll
  for (int i = 0; i < V; ++i) g[i] = annulus::cuda::fma_of(dys[i], phase.s[i], dyc[i] * phase.c[i]);
}

// (y1, y2) = (x1, x2) turned by the phase; `sign` = -1 turns back.
template <class Real, int V>
__device__ __forceinline__ void rotate_tile(const Real (&x1)[V], const Real (&x2)[V],
                                            const SinCos<Real, V>& phase, Real sign, Real (&y1)[V],
                                            Real (&y2)[V]) {
#pragma unroll
  for (int i = 0; i < V; ++i) {
    const Real a = x1[i];
    const Real b = x2[i];
    const Real s = sign * phase.s[i];
    y1[i] = annulus::cuda::fma_of(-b, s, a * phase.c[i]);
    y2[i] = annulus::cuda::fma_of(b, phase.c[i], a * s);
  }
}

}  // namespace annulus::lrpe_cosine::device
