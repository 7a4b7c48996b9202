// Softmax over features on CUDA, in one pass: a row of columns is 16 bytes a lane, so it stays in
// the registers of a warp (or of a part of one), and its maximum and sums are made by shuffles. As in
// the kernel that turns, the phases of a (head, token) are made once and serve several sequences.
//
// Rows longer than a warp holds, and f64, have their statistics made ahead of turn_kernel, a warp a
// row. Every order is fixed and the same for every layout.

#include "annulus/cuda/check.h"
#include "annulus/cuda/reduce.cuh"
#include "annulus/lrpe_cosine/cuda/arguments.cuh"

namespace annulus::lrpe_cosine::cuda {

namespace {

// Blocks of 128 threads, as for turn_kernel. Measured on an H200 in bf16, n = 4096, as a multiple of a
// kernel that only moves the bytes: 1.05 forward and backward; one row at a time forward 1.08, five
// blocks to a multiprocessor 1.07 / 1.08. With statistics in memory it was 3.8 / 7.7.
constexpr int kRowThreads = 128;
constexpr int kWarpLanes = 32;
template <RowTask kTask>
inline constexpr int kRowBlocks = kTask == RowTask::kForward ? 7 : 6;
// Sequences whose reductions run side by side.
template <RowTask kTask>
inline constexpr int kTogether = kTask == RowTask::kForward ? 2 : 1;

// What a thread has read of one sequence.
template <class T, int V>
struct RowPart {
  Vec<T, V> x, d1, d2;
};

// Over the lanes of a row, for several rows at a time: the shuffles of one hide behind the others'.
template <int N, class Real, class F>
__device__ __forceinline__ void reduce_rows(Real (&v)[N], int lanes, F&& combine) {
#pragma unroll
  for (int step = kWarpLanes / 2; step > 0; step /= 2) {
    if (step >= lanes) continue;
#pragma unroll
    for (int j = 0; j < N; ++j) v[j] = combine(v[j], __shfl_xor_sync(0xffffffffu, v[j], step));
  }
}

// Thread (x, y): V columns from V x on of token tile * blockDim.y + y, of batch_per_thread
// sequences. Every thread stays to the end: its warp's shuffles need it.
template <class T, bool kVectors, RowTask kTask>
__global__ void __launch_bounds__(kRowThreads, kRowBlocks<kTask>)
    row_kernel(const __grid_constant__ Args a) {
  using Real = compute_t<T>;
  constexpr int V = kVectorWidth<T>;
  constexpr int N = kTogether<kTask>;
  constexpr bool kForward = kTask == RowTask::kForward;
  extern __shared__ __align__(16) unsigned char shared[];
  const int lanes = static_cast<int>(blockDim.x);
  StepTable<T> table(shared, lanes * V);

  const Place p = find_place(a);
  const SideArgs& side = a.side[p.side];
  const Operand& out = kForward ? side.y : side.dx;
  if (kTask != RowTask::kStatistics && out.first == nullptr)
    return;  // of q and k, one was asked for
  const std::int64_t t = static_cast<std::int64_t>(p.tile) * blockDim.y + threadIdx.y;
  const std::int64_t b_begin = static_cast<std::int64_t>(p.group) * a.batch_per_thread;
  const std::int64_t b_left = a.B - b_begin;
  const int sequences = b_left < a.batch_per_thread ? static_cast<int>(b_left) : a.batch_per_thread;
  const int slot = static_cast<int>(threadIdx.x) * V;
  const int left = t < a.L ? a.C - slot : 0;

  // The next N sequences, of which `count` exist.
  RowPart<T, V> next[N];
  std::int64_t i_x = element(side.x, b_begin, p.head, t, slot);
  std::int64_t i_dy = element(side.dy, b_begin, p.head, t, slot);
  const auto fetch = [](const void* base, std::int64_t i, std::int64_t stride, int count,
                        Real filler) {
    return fetch_row<V, kVectors>(static_cast<const T*>(base) + i, stride, count, filler);
  };
  auto fetch_next = [&](int count) {
#pragma unroll
    for (int j = 0; j < N; ++j) {
      const int here = j < count ? left : 0;
      next[j].x = fetch(side.x.first, i_x, side.x.stride[3], here, -static_cast<Real>(INFINITY));
      i_x += side.x.stride[0];
      if constexpr (!kForward) {
        const std::int64_t stride = side.dy.stride[3];
        next[j].d1 = fetch(side.dy.first, i_dy, stride, here, Real(0));
        next[j].d2 = fetch(side.dy.second, i_dy, stride, here, Real(0));
        i_dy += side.dy.stride[0];
      }
    }
  };
  fetch_next(sequences);  // in flight while the table is made

  const bool suspect = table.fill(a, p.theta_row, 0, lanes * V);
  device::SinCos<Real, V> phase;
  phase.set_zero_phase();
  if (left > 0 && t >= a.positions.prefix) {
    std::int64_t s[device::kAxes] = {};
    find_position(a, b_begin, t, s);
    if constexpr (kVectors) {
      make_phases<T, V>(a, table, slot, s, slot, suspect, phase);
    } else {
#pragma unroll
      for (int i = 0; i < V; ++i) {
        if (i >= left) break;
        phase.set(i, a.positions.column_phase(table.step[slot + i], s, slot + i));
        if (suspect && isnan(table.poison[slot + i])) phase.c[i] = phase.s[i] = Real(NAN);
      }
    }
  }

  std::int64_t i_out = kTask == RowTask::kStatistics ? 0 : element(out, b_begin, p.head, t, slot);
  for (int done = 0; done < sequences; done += N) {
    Real e[N][V];
    Real g[N][V];
    Real high[N];
    Real sum[N];
    Real dot[N];
#pragma unroll
    for (int j = 0; j < N; ++j) {
      unpack(next[j].x, e[j]);
      high[j] = e[j][0];
#pragma unroll
      for (int i = 1; i < V; ++i) high[j] = fmax(high[j], e[j][i]);
      if constexpr (!kForward) {
        Real d1[V];
        Real d2[V];
        unpack(next[j].d1, d1);
        unpack(next[j].d2, d2);
        device::cosine_tile_backward(d1, d2, phase, g[j]);
      }
    }
    if (done + N < sequences) fetch_next(sequences - done - N);

    reduce_rows(high, lanes, [](Real u, Real v) { return fmax(u, v); });
#pragma unroll
    for (int j = 0; j < N; ++j) {
      sum[j] = 0;
      dot[j] = 0;
#pragma unroll
      for (int i = 0; i < V; ++i) {
        e[j][i] = power<T>(e[j][i] - high[j]);
        sum[j] = add_of(sum[j], e[j][i]);
        if constexpr (!kForward) {
          dot[j] = fma_of(dot_weight<T>(e[j][i]), g[j][i], dot[j]);
        }
      }
    }
    reduce_rows(sum, lanes, [](Real u, Real v) { return add_of(u, v); });
    if constexpr (!kForward) {
      reduce_rows(dot, lanes, [](Real u, Real v) { return add_of(u, v); });
    }

#pragma unroll
    for (int j = 0; j < N; ++j) {
      const int here = done + j < sequences ? left : 0;
      const Real scale = inverse<T>(sum[j]);
      const Real mean = dot_mean<T>(dot[j], scale);  // of g
      if constexpr (kTask == RowTask::kStatistics) {
        if (threadIdx.x == 0 && here > 0) {
          const std::int64_t row = ((b_begin + done + j) * a.heads + p.flat_head) * a.L + t;
          static_cast<Real*>(a.stats.high)[row] = high[j];
          static_cast<Real*>(a.stats.scale)[row] = scale;
          static_cast<Real*>(a.stats.dot)[row] = mean;
        }
      } else {
        Real probability[V];
        Real r1[V];
        Real r2[V];
#pragma unroll
        for (int i = 0; i < V; ++i) probability[i] = e[j][i] * scale;
        if constexpr (kForward) {
          device::cosine_tile(probability, phase, r1, r2);
          put_row<V, kVectors>(r2, static_cast<T*>(out.second) + i_out, out.stride[3], here);
        } else {
#pragma unroll
          for (int i = 0; i < V; ++i) r1[i] = probability[i] * (g[j][i] - mean);
        }
        put_row<V, kVectors>(r1, static_cast<T*>(out.first) + i_out, out.stride[3], here);
        i_out += out.stride[0];
      }
    }
  }
}

// g of one element: its gradient turned back by its phase, which is made on the spot.
template <class T>
__device__ __forceinline__ compute_t<T> gradient(const Args& a, const Head& h, std::int64_t b,
                                                 std::int64_t t, int c) {
  using Real = compute_t<T>;
  const Operand& dy = a.side[h.side].dy;
  const std::int64_t i = element(dy, b, h.head, t, c);
  const auto d1 = static_cast<Real>(static_cast<const T*>(dy.first)[i]);
  const auto d2 = static_cast<Real>(static_cast<const T*>(dy.second)[i]);
  if (t < a.positions.prefix) return fma_of(d2, Real(0), d1);
  std::int64_t s[device::kAxes] = {};
  find_position(a, b, t, s);
  const Real theta = load_theta<Real>(a, h.theta_row, c - a.positions.axis_of(c) * a.E);
  device::SinCos<Real, 1> phase;
  phase.set(0, a.positions.column_phase(make_step<T>(theta), s, c));
  if (!isfinite(theta)) phase.c[0] = phase.s[0] = Real(NAN);
  return fma_of(d2, phase.s[0], d1 * phase.c[0]);
}

template <class T>
__global__ void __launch_bounds__(kThreads)
    row_stats_kernel(const __grid_constant__ Args a, bool with_dot) {
  using Real = compute_t<T>;
  const std::int64_t rows = a.B * a.heads * a.L;
  const int lane = static_cast<int>(threadIdx.x) & 31;
  const std::int64_t warps = static_cast<std::int64_t>(gridDim.x) * (kThreads / 32);
  for (std::int64_t row = (static_cast<std::int64_t>(blockIdx.x) * kThreads + threadIdx.x) / 32;
       row < rows; row += warps) {
    const std::int64_t t = row % a.L;
    const std::int64_t flat = row / a.L % a.heads;
    const std::int64_t b = row / a.L / a.heads;
    const Head h = find_head(a, flat);
    const Operand& x = a.side[h.side].x;
    const T* p = static_cast<const T*>(x.first) + element(x, b, h.head, t, 0);
    Real high = -INFINITY;
    for (int c = lane; c < a.C; c += 32) {
      high = fmax(high, static_cast<Real>(p[c * x.stride[3]]));
    }
    high = warp_reduce(high, [](Real u, Real v) { return fmax(u, v); });
    Real sum = 0;
    for (int c = lane; c < a.C; c += 32)
      sum += power<T>(static_cast<Real>(p[c * x.stride[3]]) - high);
    sum = warp_sum(sum);
    const Real scale = inverse<T>(sum);
    Real dot = 0;
    if (with_dot) {
      for (int c = lane; c < a.C; c += 32) {
        const Real prob = power<T>(static_cast<Real>(p[c * x.stride[3]]) - high) * scale;
        dot += prob * gradient<T>(a, h, b, t, c);
      }
      dot = warp_sum(dot);
    }
    if (lane == 0) {
      static_cast<Real*>(a.stats.high)[row] = high;
      static_cast<Real*>(a.stats.scale)[row] = scale;
      if (with_dot) static_cast<Real*>(a.stats.dot)[row] = dot;
    }
  }
}

template <class T, bool kVectors>
void launch(const Plan& plan, Args a, RowTask task, cudaStream_t stream) {
  constexpr int V = kVectorWidth<T>;
  const int lanes = lanes_of_row(plan.C, V, kWarpLanes);
  const dim3 shape(static_cast<unsigned>(lanes), static_cast<unsigned>(kRowThreads / lanes));
  // Positions may be a sequence's own: then no two sequences have a phase in common.
  a.batch_per_thread =
      plan.own_positions() ? 1 : batch_per_thread(plan.B * plan.heads() * plan.L * lanes, plan.B);
  const unsigned grid = number_blocks(plan, ceil_div(plan.L, shape.y), a.batch_per_thread, a);
  const std::size_t shared = StepTable<T>::bytes(lanes * V);
  auto* const kernel = task == RowTask::kForward    ? row_kernel<T, kVectors, RowTask::kForward>
                       : task == RowTask::kBackward ? row_kernel<T, kVectors, RowTask::kBackward>
                                                    : row_kernel<T, kVectors, RowTask::kStatistics>;
  kernel<<<grid, shape, shared, stream>>>(a);
  check_launch(plan.op, "row_kernel");
}

}  // namespace

void launch_row_stats(const Plan& plan, const Args& a, bool with_dot, cudaStream_t stream) {
  const std::int64_t blocks = ceil_div(plan.B * plan.heads() * plan.L, kThreads / 32);
  const auto grid = static_cast<unsigned>(std::min<std::int64_t>(blocks, 1 << 20));
  visit_floating(plan.dtype, [&]<class T>() {
    row_stats_kernel<T><<<grid, kThreads, 0, stream>>>(a, with_dot);
  });
  check_launch(plan.op, "row_stats_kernel");
}

bool row_fits_warp(const Plan& plan) {
  return plan.activation == LrpeActivation::kSoftmaxFeatures && plan.dtype != DType::kF64 &&
         plan.C * size_of(plan.dtype) <= 16 * kWarpLanes;
}

void launch_rows(const Plan& plan, Args a, bool vectors, RowTask task, cudaStream_t stream) {
  visit_floating(plan.dtype, [&]<class T>() {
    if constexpr (!std::is_same_v<T, double>) {
      visit_bool(vectors, [&]<bool kVectors>() { launch<T, kVectors>(plan, a, task, stream); });
    }
  });
}

}  // namespace annulus::lrpe_cosine::cuda
