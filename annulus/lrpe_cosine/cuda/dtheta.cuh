// The kernel that makes dx and the partial sums of dtheta (cuda/dtheta.cu says what they are). Compiled a few
// widths a file (types_*.cu, dtheta_narrow.cu), since each has five forms.
#pragma once

#include "annulus/cuda/check.h"
#include "annulus/lrpe_cosine/cuda/arguments.cuh"

namespace annulus::lrpe_cosine::cuda {

// The rows of a block are fixed, whatever a thread's width: the order of the sums, and so their
// bits, must not depend on the layout.
constexpr int kBlockRows = 8;
constexpr int kBlockLanes = 16;
template <Act kAct>
inline constexpr int kMinBlocks = kAct == Act::kNone ? 5 : 4;

// What a thread has read of one sequence.
template <class T, int V>
struct Sequence {
  Vec<T, V> d1, d2, x1, x2;
};

// Thread (x, y): V columns from V (x + i blockDim.x) on, of tokens y, y + blockDim.y, ... of the
// tile, all b.
template <class T, int V, bool kRotate, Act kAct>
__global__ void __launch_bounds__(kBlockRows* kBlockLanes, kMinBlocks<kAct>)
    dtheta_kernel(const __grid_constant__ Args a, double* __restrict__ partial) {
  using Real = compute_t<T>;
  extern __shared__ __align__(16) unsigned char shared[];
  auto* sums = reinterpret_cast<Real*>(shared);  // [2][V][blockDim.y][blockDim.x]
  const int threads = static_cast<int>(blockDim.x * blockDim.y);
  const int width = static_cast<int>(blockDim.x) * V;  // columns a block takes at a time
  StepTable<T> table(shared + 2 * V * sizeof(Real) * threads, width);

  const Place p = find_place(a);
  const SideArgs& side = a.side[p.side];
  const std::int64_t t0 = static_cast<std::int64_t>(p.tile) * kThetaTokens;
  const std::int64_t t1 = t0 + kThetaTokens < a.L ? t0 + kThetaTokens : a.L;

  // Where positions are counted from within the tile.
  std::int64_t s0[device::kAxes] = {};
  const std::int64_t first = t0 > a.positions.prefix ? t0 : a.positions.prefix;
  if (first < a.L) find_position(a, 0, first, s0);

  for (int first_column = 0; first_column < a.C; first_column += width) {
    const int slot = static_cast<int>(threadIdx.x) * V;
    const int column = first_column + slot;
    const bool suspect = table.fill(a, p.theta_row, first_column, width);
    const bool active = column < a.C;
    // The thread's own sums wait in shared memory: they are used once a token, and its registers
    // are all taken in between.
    Real* const mine = sums + threadIdx.y * blockDim.x + threadIdx.x;
#pragma unroll
    for (int i = 0; i < 2 * V; ++i) mine[i * threads] = 0;
    for (std::int64_t t = t0 + threadIdx.y; active && t < t1; t += blockDim.y) {
      const std::int64_t i_dy = element(side.dy, 0, p.head, t, column);
      const std::int64_t i_x = element(side.x, 0, p.head, t, column);
      const auto* d1_from = static_cast<const T*>(side.dy.first) + i_dy;
      const auto* d2_from = static_cast<const T*>(side.dy.second) + i_dy;
      const auto* x1_from = static_cast<const T*>(side.x.first) + i_x;
      const auto* x2_from = static_cast<const T*>(side.x.second) + i_x;
      std::int64_t i_dx = element(side.dx, 0, p.head, t, column);
      Sequence<T, V> next;
      auto fetch_next = [&] {
        next.d1 = fetch<V>(d1_from);
        next.d2 = fetch<V>(d2_from);
        next.x1 = fetch<V>(x1_from);
        if constexpr (kRotate) next.x2 = fetch<V>(x2_from);
        d1_from += side.dy.stride[0];
        d2_from += side.dy.stride[0];
        x1_from += side.x.stride[0];
        x2_from += side.x.stride[0];
      };
      fetch_next();  // in flight while the phases are made
      const bool placed = t >= a.positions.prefix;
      // Sequences that have their positions, and so their phases, in common: all, or one.
      const std::int64_t alike = a.own_positions ? 1 : a.B;
      for (std::int64_t b = 0; b < a.B;) {
        device::SinCos<Real, V> phase;
        phase.set_zero_phase();
        const std::int64_t b_first = b;
        if (placed) {
          std::int64_t s[device::kAxes] = {};
          find_position(a, b, t, s);
          make_phases<T, V>(a, table, slot, s, column, suspect, phase);
        }
        Real q[V] = {};
        for (const std::int64_t end = b + alike; b < end; ++b) {
          Real d1[V], d2[V], x1[V], x2[V], g1[V], g2[V];
          unpack(next.d1, d1);
          unpack(next.d2, d2);
          unpack(next.x1, x1);
          if constexpr (kRotate) unpack(next.x2, x2);
          if (b + 1 < a.B) fetch_next();
          [[maybe_unused]] const std::int64_t sequence = b * a.heads + p.flat_head;
          [[maybe_unused]] const std::int64_t row = sequence * a.L + t;
          [[maybe_unused]] const std::int64_t stat_column = sequence * a.C + column;
          device::rotate_tile(d1, d2, phase, Real(-1), g1, g2);
          Real xb[V];
          activate_tile<T, kAct>(a.activation, a.stats, x1, row, stat_column, xb);
#pragma unroll
          for (int i = 0; i < V; ++i) {
            q[i] = fma_of(xb[i], g2[i], q[i]);
            if constexpr (kRotate) q[i] = fma_of(-x2[i], g1[i], q[i]);
          }
          if (side.dx.first != nullptr) {
            activate_tile_backward<T, kAct>(a.activation, a.stats, x1, row, stat_column, g1);
            if constexpr (kRotate) store<V>(g2, static_cast<T*>(side.dx.second) + i_dx);
            store<V>(g1, static_cast<T*>(side.dx.first) + i_dx);
            i_dx += side.dx.stride[0];
          }
        }
        if (!placed) continue;
        std::int64_t s[device::kAxes] = {};
        std::int64_t here[V];
        std::int64_t start[V];
        find_position(a, b_first, t, s);
        a.positions.along_columns(s, column, here);
        a.positions.along_columns(s0, column, start);
#pragma unroll
        for (int i = 0; i < V; ++i) {
          const auto within = static_cast<Real>(here[i] - start[i]);
          mine[i * threads] = add_of(mine[i * threads], q[i]);
          mine[(V + i) * threads] = fma_of(within, q[i], mine[(V + i) * threads]);
        }
      }
    }
    // Rows in order, in double.
    __syncthreads();
    const std::int64_t block = static_cast<std::int64_t>(p.flat_head) * a.tiles.divisor + p.tile;
    const int lanes = static_cast<int>(blockDim.x);
    for (int i = static_cast<int>(threadIdx.y) * lanes + static_cast<int>(threadIdx.x);
         i < width && first_column + i < a.C; i += threads) {
      const Real* const of_column = sums + i % V * threads + i / V;
      double total0 = 0;
      double total1 = 0;
      for (int y = 0; y < static_cast<int>(blockDim.y); ++y) {
        total0 += static_cast<double>(of_column[y * lanes]);
        total1 += static_cast<double>(of_column[V * threads + y * lanes]);
      }
      const int c = first_column + i;
      const auto start = static_cast<double>(a.positions.along(s0, a.positions.axis_of(c)));
      partial[block * a.C + c] = start * total0 + total1;
    }
    __syncthreads();
  }
}

template <class T, int V, bool kRotate, Act kAct>
void launch(const Plan& plan, Args a, double* partial, cudaStream_t stream) {
  const auto lanes =
      static_cast<int>(std::clamp<std::int64_t>((plan.C + V - 1) / V, 1, kBlockLanes));
  const dim3 shape(static_cast<unsigned>(lanes), kBlockRows);
  const std::size_t shared =
      2 * V * sizeof(compute_t<T>) * static_cast<std::size_t>(lanes * kBlockRows) +
      StepTable<T>::bytes(lanes * V);
  const unsigned blocks = number_blocks(plan, theta_tiles(plan), plan.B, a);
  dtheta_kernel<T, V, kRotate, kAct><<<blocks, shape, shared, stream>>>(a, partial);
  check_launch(plan.op, "dtheta_kernel");
}

template <class T, int V>
void launch_partials(const Plan& plan, Args a, double* partial, cudaStream_t stream) {
  if (plan.rotate) return launch<T, V, true, Act::kNone>(plan, a, partial, stream);
  visit_activation(plan.activation,
                   [&]<Act kAct>() { launch<T, V, false, kAct>(plan, a, partial, stream); });
}

}  // namespace annulus::lrpe_cosine::cuda
