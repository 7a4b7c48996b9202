// LRPE-cosine for short calls, where the instructions before the first store are the time, not the
// bytes: at 64 tokens (B = H = 12, D = 128, bf16) turn_kernel issues about 1000 instructions a warp,
// 150 of them before its first load.
//
// Here a block takes a few tokens of one head in all sequences, and makes each of its sines and
// cosines once, a column a thread, in shared memory; turn_kernel has every thread make those of its
// own columns, again for every group of sequences. By count that is half the instructions and less
// than half the code. The argument block holds what one tensor with 31-bit offsets needs, in the
// order of its use.
//
// Same functions, same bits as turn_kernel.
#pragma once

#include <cstdint>

#include "annulus/cuda/fast_div.h"
#include "annulus/cuda/rows.cuh"
#include "annulus/lrpe_cosine/cuda/turn.cuh"

namespace annulus::lrpe_cosine::cuda {

// How a short call is cut: sequences a thread has in flight, tokens of a block.
inline constexpr int kShortAhead = 3;
inline constexpr int kShortTokens = 2;
inline constexpr std::int64_t kShortVectors = std::int64_t{1} << 20;  // 16-byte vectors of x
inline constexpr int kShortThreads = 512;

struct ShortArgs {
  const void* in = nullptr;     // first component
  const void* theta = nullptr;  // float, or x's type
  std::int32_t in_stride[3] = {};
  std::int32_t B = 0, L = 0, C = 0;
  std::int32_t shares = 1;  // threads that make the phases of one column, each of other tokens
  std::int32_t theta_stride[2] = {};
  std::int32_t in_second = 0;  // second component - first, in elements
  bool theta_f32 = true;
  bool backward = false;
  std::int32_t prefix = 0;
  std::int32_t axes = 1, E = 0;
  std::int64_t offset = 0;
  void* out = nullptr;
  std::int32_t out_stride[3] = {};
  std::int32_t out_second = 0;
  // Position along axis j: (r / inner) mod extent.
  struct Axis {
    FastDiv inner, extent;
  } axis[device::kAxes];
};

// Where column c lies in a row of the table: the V columns of a thread as V / 4 vectors of 4, apart, so
// that threads side by side read memory side by side.
template <int V>
__device__ __forceinline__ int table_slot(int c, int C) {
  if constexpr (V == 8) return (c & 4 ? C / 2 : 0) + (c >> 3) * 4 + (c & 3);
  return c;
}

template <int V>
__device__ __forceinline__ void read_table(const float* row, int lane, int C, float (&out)[V]) {
#pragma unroll
  for (int i = 0; i < V / 4; ++i) {
    const float4 four = *reinterpret_cast<const float4*>(row + i * (C / 2) + lane * 4);
    out[4 * i] = four.x;
    out[4 * i + 1] = four.y;
    out[4 * i + 2] = four.z;
    out[4 * i + 3] = four.w;
  }
}

// Thread (x, y, z): V columns from V x on of token blockIdx.x blockDim.z + z, of sequences y, y +
// blockDim.y, ...; kShortAhead of them in flight at once.
template <class T, int V, Mode kMode>
__global__ void __launch_bounds__(kShortThreads) short_kernel(const __grid_constant__ ShortArgs a) {
  static_assert(V == 4 || V == 8);
  constexpr bool kTwoIn = kReadsSecond<kMode>;
  extern __shared__ __align__(16) float shared_table[];  // per token: C cosines, C sines
  const int lane = static_cast<int>(threadIdx.x);
  const int first_token = static_cast<int>(blockIdx.x * blockDim.z);
  const int t = first_token + static_cast<int>(threadIdx.z);
  const int head = static_cast<int>(blockIdx.y);
  const int sequences = static_cast<int>(blockDim.y);
  int b = static_cast<int>(threadIdx.y);

  // Threads beyond one for each column begin at the next token.
  const int threads = static_cast<int>(blockDim.x * blockDim.y * blockDim.z);
  const int tokens = static_cast<int>(blockDim.z);
  int column = static_cast<int>((threadIdx.z * blockDim.y + threadIdx.y) * blockDim.x) + lane;
  int start = 0;
#pragma unroll 1
  while (column >= a.C) {
    column -= a.C;
    ++start;
  }
  int axis = 0;
  float theta = 0;
  const bool maker = start < a.shares;
  auto load_frequency = [&] {
    int k = column;
    if (a.axes > 1) {
      axis = (column >= a.E) + (column >= 2 * a.E) + (column >= 3 * a.E);
      k -= axis * a.E;
    }
    const int i = head * a.theta_stride[0] + k * a.theta_stride[1];
    theta = a.theta_f32 ? static_cast<const float*>(a.theta)[i]
                        : static_cast<float>(static_cast<const T*>(a.theta)[i]);
  };
  if (maker) load_frequency();  // first of all: the sines wait for it

  Vec<T, V> first[kShortAhead];
  Vec<T, V> second[kShortAhead];
  const T* from = static_cast<const T*>(a.in) +
                  (b * a.in_stride[0] + head * a.in_stride[1] + t * a.in_stride[2] + lane * V);
  const std::int64_t in_step = static_cast<std::int64_t>(sequences) * a.in_stride[0];
  auto fetch_next = [&] {
#pragma unroll
    for (int j = 0; j < kShortAhead; ++j) {
      if (b + j * sequences < a.B) {
        first[j] = fetch<V>(from);
        if constexpr (kTwoIn) second[j] = fetch<V>(from + a.in_second);
      }
      from += in_step;
    }
  };
  if (t < a.L) fetch_next();  // in flight while the sines are made

  if (maker) {
#pragma unroll 1
    while (true) {
      const bool finite = isfinite(theta);
      const std::uint64_t step = turn_step64(theta);
      float* const table = shared_table + table_slot<V>(column, a.C);
#pragma unroll 1
      for (int z = start; z < tokens; z += a.shares) {
        const int r = first_token + z - a.prefix;
        float s = 0;
        float c = 1;
        if (r >= 0) {
          std::int64_t position = 0;
          if (a.axes == 1) {
            position = r + a.offset;
          } else {
            const std::uint32_t q = a.axis[axis].inner.divide(static_cast<std::uint32_t>(r));
            position = q - a.axis[axis].extent.divide(q) * a.axis[axis].extent.divisor;
          }
          sincos_turn(turn_at(step, position), s, c);
          if (!finite) s = c = NAN;
        }
        table[z * 2 * a.C] = c;
        table[z * 2 * a.C + a.C] = s;
      }
      column += threads;
      if (column >= a.C) break;
      load_frequency();
    }
  }
  __syncthreads();
  if (t >= a.L) return;

  device::SinCos<float, V> phase;
  const float* const row = shared_table + static_cast<int>(threadIdx.z) * 2 * a.C;
  read_table<V>(row, lane, a.C, phase.c);
  read_table<V>(row + a.C, lane, a.C, phase.s);
  const float sign = a.backward ? -1.0f : 1.0f;
  T* to = static_cast<T*>(a.out) +
          (b * a.out_stride[0] + head * a.out_stride[1] + t * a.out_stride[2] + lane * V);
  const std::int64_t out_step = static_cast<std::int64_t>(sequences) * a.out_stride[0];
  while (true) {
#pragma unroll
    for (int j = 0; j < kShortAhead; ++j) {
      if (b + j * sequences < a.B) {
        float u[V];
        float w[V];
        float r1[V];
        float r2[V];
        unpack(first[j], u);
        if constexpr (kTwoIn) unpack(second[j], w);
        if constexpr (kMode == Mode::kRotate) {
          device::rotate_tile(u, w, phase, sign, r1, r2);
        } else if constexpr (kMode == Mode::kSpread) {
          device::cosine_tile(u, phase, r1, r2);
        } else {
          device::cosine_tile_backward(u, w, phase, r1);
        }
        store<V>(r1, to);
        if constexpr (kMode != Mode::kGather) store<V>(r2, to + a.out_second);
      }
      to += out_step;
    }
    b += kShortAhead * sequences;
    if (b >= a.B) return;
    fetch_next();
  }
}

// Fills the arguments; false where the call is not of the kind this kernel serves.
inline bool make_short_args(const Plan& plan, bool backward, ShortArgs& a) {
  if (plan.sides != 1 || plan.offsets.defined() || plan.position_ids.defined() ||
      plan.activation != LrpeActivation::kNone || plan.dtype == DType::kF64) {
    return false;
  }
  const Side& side = plan.side[0];
  const Operand& in = backward ? side.dy : side.x;
  const Operand& out = backward ? side.dx : side.y;
  const std::int64_t heads = side.heads;
  if (heads > 65535) return false;  // blockIdx.y
  if (plan.C * size_of(plan.dtype) > 16 * kShortThreads) return false;
  // Every offset below 2^31.
  const std::int64_t extent[4] = {plan.B, heads, plan.L, plan.C};
  const auto fits = [&](const Operand& o) {
    double reach = 0;
    for (int i = 0; i < 4; ++i) {
      const auto stride = static_cast<double>(o.stride[i]);
      reach += static_cast<double>(extent[i]) * (stride < 0 ? -stride : stride);
    }
    return reach < 0x1p31;
  };
  const auto distance = [&](const Operand& o) -> std::int64_t {
    if (o.second == nullptr) return 0;
    return (static_cast<const char*>(o.second) - static_cast<const char*>(o.first)) /
           size_of(plan.dtype);
  };
  const auto narrow = [](std::int64_t v) { return v > -(1ll << 31) && v < (1ll << 31); };
  if (!fits(in) || !fits(out) || !narrow(distance(in)) || !narrow(distance(out)) ||
      !narrow(plan.prefix) || !narrow(plan.E)) {
    return false;
  }
  const auto& theta = plan.theta;
  const std::int64_t last_row = plan.theta_rows * theta.stride[0],
                     last_column = plan.E * theta.stride[1];
  if (!narrow(last_row) || !narrow(last_column) || !narrow(last_row + last_column)) return false;

  a.in = in.first;
  a.out = out.first;
  a.in_second = static_cast<std::int32_t>(distance(in));
  a.out_second = static_cast<std::int32_t>(distance(out));
  for (int i = 0; i < 3; ++i) {
    a.in_stride[i] = static_cast<std::int32_t>(in.stride[i]);
    a.out_stride[i] = static_cast<std::int32_t>(out.stride[i]);
  }
  a.theta = theta.data;
  a.theta_f32 = theta.dtype == DType::kF32;
  a.theta_stride[0] = plan.theta_rows == 1 ? 0 : static_cast<std::int32_t>(theta.stride[0]);
  a.theta_stride[1] = static_cast<std::int32_t>(theta.stride[1]);
  a.B = static_cast<std::int32_t>(plan.B);
  a.L = static_cast<std::int32_t>(plan.L);
  a.C = static_cast<std::int32_t>(plan.C);
  a.E = static_cast<std::int32_t>(plan.E < (1 << 29) ? plan.E : 1 << 29);
  a.axes = plan.axes;
  a.prefix = static_cast<std::int32_t>(plan.prefix);
  a.offset = plan.offset;
  a.backward = backward;
  std::int64_t inner = 1;
  for (int j = plan.axes - 1; j >= 0; --j) {
    const std::int64_t n = plan.extent[j] > 0 ? plan.extent[j] : 1;
    a.axis[j] = {FastDiv(static_cast<std::uint32_t>(inner)),
                 FastDiv(static_cast<std::uint32_t>(n))};
    inner *= n;
  }
  return true;
}

template <class T, int V, Mode kMode>
void launch_short(ShortArgs a, std::int64_t heads, cudaStream_t stream) {
  const int lanes = a.C / V;
  const int most = kShortThreads / lanes;
  const int sequences = std::min((a.B + kShortAhead - 1) / kShortAhead, most);
  // A batch of few sequences takes more tokens, so that a block is two warps at least.
  const int wanted = std::max(kShortTokens, 64 / (lanes * sequences));
  const int tokens = std::max(1, std::min({wanted, most / sequences, a.L}));
  a.shares = std::clamp(lanes * sequences * tokens / a.C, 1, tokens);
  const dim3 block(static_cast<unsigned>(lanes), static_cast<unsigned>(sequences),
                   static_cast<unsigned>(tokens));
  const dim3 grid(static_cast<unsigned>((a.L + tokens - 1) / tokens), static_cast<unsigned>(heads));
  const std::size_t shared = sizeof(float) * 2 * static_cast<std::size_t>(a.C * tokens);
  short_kernel<T, V, kMode><<<grid, block, shared, stream>>>(a);
}

}  // namespace annulus::lrpe_cosine::cuda
