// What the CUDA kernels of LRPE-cosine share: the argument block, how a block finds its place, the
// table of phase steps, and the activations.
//
// A block is a rectangle of threads: x runs over the columns of a row, V at a time, y over tokens.
// The grid is one-dimensional, so no size but 2^31 blocks is a limit; offsets are 64-bit
// throughout.
#pragma once

#include <cstdint>

#include "annulus/core/dtype.h"
#include "annulus/cuda/fast_div.h"
#include "annulus/cuda/vec.cuh"
#include "annulus/lrpe_cosine/lrpe_cosine_plan.h"
#include "annulus/lrpe_cosine/lrpe_cosine_tile.cuh"

namespace annulus::lrpe::cuda {

using annulus::cuda::FastDiv;
using annulus::cuda::kVectorWidth;
using annulus::cuda::load;
using annulus::cuda::store;
using annulus::cuda::Vec;

struct SideArgs {
  Operand x, y, dy, dx;
  FastDiv heads_per_row;
};

// Statistics of a softmax, indexed by row (b, head, t) or by column (b, head, c).
struct SoftmaxStats {
  void* high = nullptr;   // maximum
  void* scale = nullptr;  // 1 / sum of exp(x - maximum)
  void* dot = nullptr;    // sum of p g, in the backward
};

struct Args {
  device::Positions positions;
  const void* theta = nullptr;
  const void* offsets = nullptr;  // nullptr: none
  std::int64_t theta_stride[2] = {};
  std::int64_t offsets_stride = 0;
  DType theta_dtype = DType::kF32;
  bool offsets_wide = false;  // i64 rather than i32
  std::int64_t B = 0, L = 0;
  std::int32_t C = 0, E = 0;
  std::int32_t heads = 0, heads_first = 0;  // of both sides, of the first
  std::int32_t batch_per_thread = 1;
  FastDiv tiles, heads_div;  // decode the block index
  LrpeActivation activation = LrpeActivation::kNone;
  bool backward = false;  // rotation: turn back
  SoftmaxStats stats;
  SideArgs side[2];
};

// Phase steps: 64 bits, 128 for fp64.
template <class T>
using step_t = std::conditional_t<std::is_same_v<T, double>, Turn, std::uint64_t>;

// theta is a float, or x's own type: only beside f64 can it be a double.
template <class T>
__device__ __forceinline__ step_t<T> make_step(compute_t<T> theta) {
  if constexpr (std::is_same_v<T, double>) {
    return turn_step(theta);
  } else {
    return turn_step64(theta);
  }
}

template <class Real>
__device__ __forceinline__ Real load_theta(const Args& a, int row, int k) {
  const std::int64_t i = row * a.theta_stride[0] + k * a.theta_stride[1];
  switch (a.theta_dtype) {
    case DType::kF64:
      return static_cast<Real>(static_cast<const double*>(a.theta)[i]);
    case DType::kF32:
      return static_cast<Real>(static_cast<const float*>(a.theta)[i]);
    case DType::kF16:
      return static_cast<Real>(static_cast<float>(static_cast<const float16*>(a.theta)[i]));
    default:
      return static_cast<Real>(static_cast<float>(static_cast<const bfloat16*>(a.theta)[i]));
  }
}

__device__ __forceinline__ std::int64_t load_offset(const Args& a, std::int64_t b) {
  if (a.offsets == nullptr) return 0;
  const std::int64_t i = b * a.offsets_stride;
  return a.offsets_wide ? static_cast<const std::int64_t*>(a.offsets)[i]
                        : static_cast<const std::int32_t*>(a.offsets)[i];
}

// Which tensor, head and rows of theta a block works on.
struct Place {
  int side, head, flat_head, theta_row;
  std::uint32_t tile, group;
};

__device__ __forceinline__ Place find_place(const Args& a) {
  Place p;
  const std::uint32_t rest = a.tiles.divide(blockIdx.x);
  p.tile = blockIdx.x - rest * a.tiles.divisor;
  p.group = a.heads_div.divide(rest);
  p.flat_head = static_cast<int>(rest - p.group * a.heads_div.divisor);
  p.side = p.flat_head >= a.heads_first ? 1 : 0;
  p.head = p.flat_head - (p.side ? a.heads_first : 0);
  p.theta_row =
      static_cast<int>(a.side[p.side].heads_per_row.divide(static_cast<std::uint32_t>(p.head)));
  return p;
}

// Phase steps of the columns a block works on at a time, in shared memory: blockDim.x * V of them.
template <class T>
struct StepTable {
  step_t<T>* step;
  compute_t<T>* poison;  // 0, or NaN where theta is not finite

  static __host__ __device__ constexpr std::size_t bytes(int columns) {
    return static_cast<std::size_t>(columns) * (sizeof(step_t<T>) + sizeof(compute_t<T>));
  }
  __device__ __forceinline__ StepTable(unsigned char* shared, int columns)
      : step(reinterpret_cast<step_t<T>*>(shared)),
        poison(reinterpret_cast<compute_t<T>*>(shared + columns * sizeof(step_t<T>))) {}

  // Fills the table for columns [first, first + count) and waits for it. Says whether some theta
  // among them is not finite, so that the poison must be added.
  __device__ __forceinline__ bool fill(const Args& a, int theta_row, int first, int count) {
    using Real = compute_t<T>;
    const int thread = static_cast<int>(threadIdx.y * blockDim.x + threadIdx.x);
    const int threads = static_cast<int>(blockDim.x * blockDim.y);
    bool bad = false;
    for (int i = thread; i < count && first + i < a.C; i += threads) {
      const int c = first + i;
      const Real theta = load_theta<Real>(a, theta_row, c - a.positions.axis_of(c) * a.E);
      const bool finite = isfinite(theta);
      bad |= !finite;
      step[i] = make_step<T>(theta);
      poison[i] = finite ? Real(0) : Real(NAN);
    }
    return __syncthreads_or(bad) != 0;
  }
};

// The phases of V columns, of a token that has a position, from table entry `slot` on.
template <class T, int V>
__device__ __forceinline__ void make_phases(const Args& a, const StepTable<T>& table, int slot,
                                            const std::int64_t (&s)[device::kAxes], int column,
                                            bool suspect, device::SinCos<compute_t<T>, V>& phase) {
  std::int64_t position[V];
  a.positions.along_columns(s, column, position);
#pragma unroll
  for (int i = 0; i < V; ++i) phase.set(i, turn_at(table.step[slot + i], position[i]));
  if (suspect) {
#pragma unroll
    for (int i = 0; i < V; ++i) {
      phase.s[i] += table.poison[slot + i];
      phase.c[i] += table.poison[slot + i];
    }
  }
}

template <class Real>
__device__ __forceinline__ Real exp_of(Real x) {
  if constexpr (std::is_same_v<Real, double>) {
    return exp(x);
  } else {
    return expf(x);
  }
}

// 1 / (1 + e^-x). Where a 16-bit T takes the result, by the special-function unit: right to 2^-17
// where f16 keeps 2^-11; 1 minus it, in the backward, to 2^-23 of 1.
template <class T, class Real>
__device__ __forceinline__ Real sigmoid(Real x) {
  if constexpr (sizeof(T) == 2) {
    Real inverse;
    asm("rcp.approx.f32 %0, %1;" : "=f"(inverse) : "f"(1.0f + __expf(-x)));
    return inverse;
  } else {
    return Real(1) / (Real(1) + exp_of(-x));
  }
}

template <class Real>
__device__ __forceinline__ Real max_with_nan(Real a, Real b) {
  return b > a || isnan(b) ? b : a;
}

// Statistics of the softmax that element (row, column + i) belongs to.
struct StatIndex {
  bool features;
  std::int64_t row, column;

  __device__ __forceinline__ std::int64_t operator()(int i) const {
    return features ? row : column + i;
  }
};
template <class Real>
__device__ __forceinline__ Real probability(const Args& a, Real x, std::int64_t k) {
  return exp_of(x - static_cast<const Real*>(a.stats.high)[k]) *
         static_cast<const Real*>(a.stats.scale)[k];
}

// xb = f(x), which may be x itself. `row` and `column` index the statistics.
template <class T, int V, class Real>
__device__ __forceinline__ void activate_tile(const Args& a, const Real (&x)[V], std::int64_t row,
                                              std::int64_t column, Real (&xb)[V]) {
  const auto each = [&](auto&& f) {
#pragma unroll
    for (int i = 0; i < V; ++i) xb[i] = f(x[i], i);
  };
  switch (a.activation) {
    case LrpeActivation::kNone:
      return each([](Real v, int) { return v; });
    case LrpeActivation::kRelu:
      return each([](Real v, int) { return v <= 0 ? Real(0) : v; });
    case LrpeActivation::kSigmoid:
      return each([](Real v, int) { return sigmoid<T>(v); });
    case LrpeActivation::kSilu:
      return each([](Real v, int) { return v * sigmoid<T>(v); });
    default: {
      const StatIndex k{a.activation == LrpeActivation::kSoftmaxFeatures, row, column};
      return each([&](Real v, int i) { return probability(a, v, k(i)); });
    }
  }
}

// Replaces g, the gradient of f(x), by dx.
template <class T, int V, class Real>
__device__ __forceinline__ void activate_tile_backward(const Args& a, const Real (&x)[V],
                                                       std::int64_t row, std::int64_t column,
                                                       Real (&g)[V]) {
  const auto each = [&](auto&& f) {
#pragma unroll
    for (int i = 0; i < V; ++i) g[i] = f(x[i], g[i], i);
  };
  switch (a.activation) {
    case LrpeActivation::kNone:
      return;
    case LrpeActivation::kRelu:
      return each([](Real v, Real d, int) { return v <= 0 ? Real(0) : d; });
    case LrpeActivation::kSigmoid:
      return each([](Real v, Real d, int) {
        const Real s = sigmoid<T>(v);
        return d * s * (Real(1) - s);
      });
    case LrpeActivation::kSilu:
      return each([](Real v, Real d, int) {
        const Real s = sigmoid<T>(v);
        return d * (s + v * s * (Real(1) - s));
      });
    default: {
      const StatIndex k{a.activation == LrpeActivation::kSoftmaxFeatures, row, column};
      const auto* dots = static_cast<const Real*>(a.stats.dot);
      return each(
          [&](Real v, Real d, int i) { return probability(a, v, k(i)) * (d - dots[k(i)]); });
    }
  }
}

__device__ __forceinline__ std::int64_t element(const Operand& o, std::int64_t b, std::int64_t h,
                                                std::int64_t t, std::int64_t c) {
  return b * o.stride[0] + h * o.stride[1] + t * o.stride[2] + c * o.stride[3];
}

// V columns; with V = 1 any column stride, with V > 1 dense and aligned.
template <int V, class T, class Real>
__device__ __forceinline__ void load_columns(const void* base, std::int64_t i, Real (&out)[V]) {
  load<V>(static_cast<const T*>(base) + i, out);
}
template <int V, class T, class Real>
__device__ __forceinline__ void store_columns(const Real (&in)[V], void* base, std::int64_t i) {
  store<V>(in, static_cast<T*>(base) + i);
}

// Host side, one per file.
void launch_softmax_stats(const Plan& plan, const Args& args, bool with_dot, void* scratch,
                          void* stream);
std::size_t softmax_scratch_bytes(const Plan& plan);
void launch_dtheta(const Plan& plan, Args args, bool vectors, double* partial, void* stream);
std::int64_t dtheta_partials(const Plan& plan);
void launch_zero_dtheta(const Plan& plan, void* stream);
inline constexpr int kThreads = 256;

}  // namespace annulus::lrpe::cuda
