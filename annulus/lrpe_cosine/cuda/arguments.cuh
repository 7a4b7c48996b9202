// What the CUDA kernels of LRPE-cosine share: the argument block, how a block finds its place, the
// table of phase steps, and the activations.
//
// A block is a rectangle of threads: x runs over the columns of a row, V at a time, y over tokens.
// The grid is one-dimensional, so no size but 2^31 blocks is a limit; offsets are 64-bit
// throughout.
#pragma once

#include <algorithm>
#include <cstdint>

#include "annulus/core/checked.h"
#include "annulus/core/dispatch.h"
#include "annulus/core/dtype.h"
#include "annulus/cuda/fast_div.h"
#include "annulus/cuda/math.cuh"
#include "annulus/cuda/rows.cuh"
#include "annulus/lrpe_cosine/cuda/tile.cuh"
#include "annulus/lrpe_cosine/plan.h"

namespace annulus::lrpe_cosine::cuda {

using namespace annulus::cuda;

struct SideArgs {
  Operand x, y, dy, dx;
  FastDiv heads_per_row;
};

// Statistics of a softmax, indexed by row (b, head, t) or by column (b, head, c).
struct SoftmaxStats {
  void* high = nullptr;   // maximum
  void* scale = nullptr;  // 1 / sum of power(x - maximum)
  void* dot = nullptr;    // sum of p g, in the backward
};

// An i32 or i64 tensor indexed (b, t, axis), or none.
struct Integers {
  const void* data = nullptr;
  std::int64_t stride[3] = {};
  bool wide = false;  // i64

  Integers() = default;
  explicit Integers(const TensorView& v) : data(v.data), wide(v.dtype == DType::kI64) {
    std::copy_n(v.stride.begin(), v.rank, stride);
  }
  __device__ __forceinline__ std::int64_t at(std::int64_t index) const {
    return wide ? static_cast<const std::int64_t*>(data)[index]
                : static_cast<const std::int32_t*>(data)[index];
  }
};

struct Args {
  device::Positions positions;
  const void* theta = nullptr;
  Integers offsets, position_ids;
  std::int64_t theta_stride[2] = {};
  DType theta_dtype = DType::kF32;
  bool own_positions = false;  // of each sequence
  std::int64_t B = 0, L = 0;
  std::int32_t C = 0, E = 0;
  std::int32_t heads = 0, heads_first = 0;  // of both sides, of the first
  std::int32_t batch_per_thread = 1;
  std::int32_t tokens_per_thread = 1;
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
  return load_number<Real>(a.theta_dtype, a.theta, row * a.theta_stride[0] + k * a.theta_stride[1]);
}

__device__ __forceinline__ std::int64_t load_offset(const Args& a, std::int64_t b) {
  return a.offsets.data == nullptr ? 0 : a.offsets.at(b * a.offsets.stride[0]);
}

// Where token t >= prefix of sequence b is, along each axis.
__device__ __forceinline__ void find_position(const Args& a, std::int64_t b, std::int64_t t,
                                              std::int64_t (&s)[device::kAxes]) {
  if (a.position_ids.data != nullptr) {
    const Integers& ids = a.position_ids;
    const std::int64_t row = b * ids.stride[0] + t * ids.stride[1];
#pragma unroll
    for (int j = 0; j < device::kAxes; ++j) {
      if (j < a.positions.axes) s[j] = ids.at(row + j * ids.stride[2]);
    }
  } else {
    a.positions.unravel(t, s);
    s[0] += load_offset(a, b);
  }
}

// Which tensor, head and row of theta a head is, counted over both sides.
struct Head {
  int side, head, theta_row;
};
__device__ __forceinline__ Head find_head(const Args& a, std::int64_t flat) {
  Head h;
  h.side = flat >= a.heads_first ? 1 : 0;
  h.head = static_cast<int>(flat) - (h.side ? a.heads_first : 0);
  h.theta_row =
      static_cast<int>(a.side[h.side].heads_per_row.divide(static_cast<std::uint32_t>(h.head)));
  return h;
}

// ... and what of it a block works on.
struct Place : Head {
  int flat_head;
  std::uint32_t tile, group;
};

__device__ __forceinline__ Place find_place(const Args& a) {
  Place p;
  const std::uint32_t rest = a.tiles.divide(blockIdx.x);
  p.tile = blockIdx.x - rest * a.tiles.divisor;
  p.group = a.heads_div.divide(rest);
  p.flat_head = static_cast<int>(rest - p.group * a.heads_div.divisor);
  static_cast<Head&>(p) = find_head(a, p.flat_head);
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

// 1 / x and 1 / (1 + e^-x); where a 16-bit T takes the result, by the special-function unit.
template <class T, class Real>
__device__ __forceinline__ Real inverse(Real x) {
  if constexpr (sizeof(T) == 2) {
    return inverse_fast(x);
  } else {
    return Real(1) / x;
  }
}
template <class T, class Real>
__device__ __forceinline__ Real sigmoid(Real x) {
  if constexpr (sizeof(T) == 2) {
    return sigmoid_fast(x);
  } else {
    return sigmoid_with_tails(x);
  }
}

// What softmax sums: exp(x - maximum), given the difference. Where a 16-bit T takes the result it is
// 2^30 times as large, in the sum too, so that a quotient of subnormal size is not lost on the way.
template <class T, class Real>
__device__ __forceinline__ Real power(Real below) {
  if constexpr (sizeof(T) == 2) {
    return exp2_fast(fma_of(below, kLog2E, 30.0f));
  } else {
    return exp(below);
  }
}
// What is added up of p g: a power of at most 1, so that no finite g is made infinite, and what the sum is
// multiplied by, given 1 / the sum of powers.
template <class T>
inline constexpr float kPowerOfMaximum = sizeof(T) == 2 ? 0x1p30f : 1.0f;
template <class T, class Real>
__device__ __forceinline__ Real dot_weight(Real power) {
  return mul_of(power, Real(1) / kPowerOfMaximum<T>);
}
template <class T, class Real>
__device__ __forceinline__ Real dot_mean(Real dot, Real scale) {
  return mul_of(dot, mul_of(scale, Real(kPowerOfMaximum<T>)));
}
// What such a sum is multiplied by when the maximum rises.
template <class T, class Real>
__device__ __forceinline__ Real decay(Real below) {
  if constexpr (sizeof(T) == 2) {
    return exp2_fast(below * kLog2E);
  } else {
    return exp(below);
  }
}

// Which code a kernel holds for f. Softmax over rows (features) and over columns (tokens) needs
// registers for its statistics, which would slow down the others.
enum class Act { kNone, kPointwise, kRows, kColumns };
inline constexpr bool is_softmax(Act act) { return act == Act::kRows || act == Act::kColumns; }
template <class F>
decltype(auto) visit_activation(LrpeActivation activation, F&& f) {
  switch (activation) {
    case LrpeActivation::kNone:
      return f.template operator()<Act::kNone>();
    case LrpeActivation::kSoftmaxFeatures:
      return f.template operator()<Act::kRows>();
    case LrpeActivation::kSoftmaxTokens:
      return f.template operator()<Act::kColumns>();
    default:
      return f.template operator()<Act::kPointwise>();
  }
}

// f.operator()<T, V>() for a type and the columns a thread takes at a time.
template <class F>
void visit_width(DType dtype, bool vectors, F&& f) {
  visit_floating(dtype, [&]<class T>() {
    if constexpr (!std::is_same_v<T, double>) {
      if (vectors) return f.template operator()<T, kVectorWidth<T>>();
    }
    f.template operator()<T, 1>();
  });
}

// Statistics of the softmax that elements (row, column .. column + V) belong to.
template <Act kAct, class Real, int V>
__device__ __forceinline__ void load_stat(const void* stat, std::int64_t row, std::int64_t column,
                                          Real (&out)[V]) {
  const auto* p = static_cast<const Real*>(stat);
  if constexpr (kAct == Act::kRows) {
    const Real one = p[row];
#pragma unroll
    for (int i = 0; i < V; ++i) out[i] = one;
  } else {
    // Vectors of columns begin at multiples of V, so 16 bytes of statistics are aligned.
    constexpr int kPiece = V * sizeof(Real) < 16 ? V : static_cast<int>(16 / sizeof(Real));
#pragma unroll
    for (int k = 0; k < V; k += kPiece) {
      const Vec<Real, kPiece> piece = fetch<kPiece>(p + column + k);
#pragma unroll
      for (int i = 0; i < kPiece; ++i) out[k + i] = piece.word[i];
    }
  }
}

template <class T, Act kAct, int V, class Real>
__device__ __forceinline__ void probabilities(const SoftmaxStats& stats, const Real (&x)[V],
                                              std::int64_t row, std::int64_t column, Real (&p)[V]) {
  Real high[V];
  Real scale[V];
  load_stat<kAct>(stats.high, row, column, high);
  load_stat<kAct>(stats.scale, row, column, scale);
#pragma unroll
  for (int i = 0; i < V; ++i) p[i] = power<T>(x[i] - high[i]) * scale[i];
}

// xb = f(x), which may be x itself. `row` and `column` index `stats`.
template <class T, Act kAct, int V, class Real>
__device__ __forceinline__ void activate_tile(LrpeActivation activation, const SoftmaxStats& stats,
                                              const Real (&x)[V], std::int64_t row,
                                              std::int64_t column, Real (&xb)[V]) {
  if constexpr (is_softmax(kAct)) {
    probabilities<T, kAct>(stats, x, row, column, xb);
  } else {
    const auto each = [&](auto&& f) {
#pragma unroll
      for (int i = 0; i < V; ++i) xb[i] = f(x[i]);
    };
    switch (kAct == Act::kNone ? LrpeActivation::kNone : activation) {
      case LrpeActivation::kRelu:
        return each([](Real v) { return v <= 0 ? Real(0) : v; });
      case LrpeActivation::kSigmoid:
        return each([](Real v) { return sigmoid<T>(v); });
      case LrpeActivation::kSilu:
        return each([](Real v) { return v * sigmoid<T>(v); });
      default:
        return each([](Real v) { return v; });
    }
  }
}

// Replaces g, the gradient of f(x), by dx.
template <class T, Act kAct, int V, class Real>
__device__ __forceinline__ void activate_tile_backward(LrpeActivation activation,
                                                       const SoftmaxStats& stats,
                                                       const Real (&x)[V], std::int64_t row,
                                                       std::int64_t column, Real (&g)[V]) {
  if constexpr (is_softmax(kAct)) {
    Real p[V];
    Real dot[V];
    probabilities<T, kAct>(stats, x, row, column, p);
    load_stat<kAct>(stats.dot, row, column, dot);
#pragma unroll
    for (int i = 0; i < V; ++i) g[i] = p[i] * (g[i] - dot[i]);
  } else {
    const auto each = [&](auto&& f) {
#pragma unroll
      for (int i = 0; i < V; ++i) g[i] = f(x[i], g[i]);
    };
    switch (kAct == Act::kNone ? LrpeActivation::kNone : activation) {
      case LrpeActivation::kRelu:
        return each([](Real v, Real d) { return v <= 0 ? Real(0) : d; });
      case LrpeActivation::kSigmoid:
        return each([](Real v, Real d) {
          const Real s = sigmoid<T>(v);
          return d * s * (Real(1) - s);
        });
      case LrpeActivation::kSilu:
        return each([](Real v, Real d) {
          const Real s = sigmoid<T>(v);
          return d * (s + v * s * (Real(1) - s));
        });
      default:
        return;
    }
  }
}

__device__ __forceinline__ std::int64_t element(const Operand& o, std::int64_t b, std::int64_t h,
                                                std::int64_t t, std::int64_t c) {
  return b * o.stride[0] + h * o.stride[1] + t * o.stride[2] + c * o.stride[3];
}

// Lanes that share a row of C columns, V each: a power of two, so that shuffles can add them up.
inline int lanes_of_row(std::int64_t C, int V, int most) {
  int lanes = 1;
  while (lanes < most && lanes * V < C) lanes *= 2;
  return lanes;
}

// Host side, one per file.
inline constexpr int kThreads = 256;
int batch_per_thread(std::int64_t vectors, std::int64_t B);
// Fills in how blocks are numbered, by tile, head and group of `sequences`, and says how many there are.
unsigned number_blocks(const Plan& plan, std::int64_t tiles, std::int64_t sequences, Args& args);
// A number of blocks that fits a launch, or NotSupported.
unsigned checked_blocks(const Plan& plan, std::int64_t blocks);

// Softmax over features where a row fits the registers of a warp: y, dx, or the statistics for
// dtheta, in one pass.
enum class RowTask { kForward, kBackward, kStatistics };
bool row_fits_warp(const Plan& plan);
void launch_rows(const Plan& plan, Args args, bool vectors, RowTask task, cudaStream_t stream);

// Statistics of other rows.
void launch_row_stats(const Plan& plan, const Args& args, bool with_dot, cudaStream_t stream);

// Statistics of columns, over tokens.
void launch_column_stats(const Plan& plan, const Args& args, bool vectors, bool with_dot,
                         void* scratch, cudaStream_t stream);
std::size_t column_scratch_bytes(const Plan& plan, bool with_dot);

// Columns that only pass through, where there are some.
void launch_pass(const Plan& plan, const Args& args, cudaStream_t stream);

void launch_dtheta(const Plan& plan, const Args& args, bool vectors, double* partial,
                   cudaStream_t stream);
std::int64_t dtheta_partials(const Plan& plan);
void launch_zero_dtheta(const Plan& plan, cudaStream_t stream);

// The partial sums of dtheta, of tiles of this many tokens: cuda/dtheta.cuh. Small tiles, so that the last blocks to
// finish do not leave the machine idle for long. Measured on an H200 in bf16 at n = 4096, with dx, as a multiple of a
// kernel that only moves the bytes: 16 tokens and five blocks to a multiprocessor (96 registers) 1.22; 32 tokens 1.30,
// four or six blocks 1.33, 64 tokens 1.53.
inline constexpr int kThetaTokens = 16;
inline std::int64_t theta_tiles(const Plan& plan) { return ceil_div(plan.L, kThetaTokens); }
template <class T, int V>
void launch_partials(const Plan& plan, Args a, double* partial, cudaStream_t stream);

}  // namespace annulus::lrpe_cosine::cuda
