// The gradient of theta on CUDA, together with dx.
//
//   dtheta[h,k] = sum over b, t, axes of s q,   q = x1 g2 - x2 g1,   (g1, g2) = dy turned back by
//   the phase
//
// s may be 2^31 and more, and the sum runs over B L terms of both signs. A block sums over a tile
// of tokens and the whole batch; relative to the tile's first position s0 it keeps sum(q) and
// sum((s - s0) q) in Real, adds its rows in a fixed order in double, and writes s0 sum(q) + sum((s
// - s0) q). A second kernel adds the tiles in a fixed order. No atomics, so the same bits on every
// run.

#include <cuda_runtime.h>

#include <algorithm>

#include "annulus/core/dispatch.h"
#include "annulus/cuda/launch.h"
#include "annulus/lrpe_cosine/cuda/arguments.cuh"

namespace annulus::lrpe_cosine::cuda {

namespace {

// Small tiles, so that the last blocks to finish do not leave the machine idle for long. Measured on
// an H200 in bf16 at n = 4096, with dx, as a multiple of a kernel that only moves the bytes: 16
// tokens and five blocks to a multiprocessor (96 registers) 1.22; 32 tokens 1.30, four or six blocks
// 1.33, 64 tokens 1.53.
constexpr int kTileTokens = 16;
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
  const std::int64_t t0 = static_cast<std::int64_t>(p.tile) * kTileTokens;
  const std::int64_t t1 = t0 + kTileTokens < a.L ? t0 + kTileTokens : a.L;

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
        next.d1 = annulus::cuda::fetch<V>(d1_from);
        next.d2 = annulus::cuda::fetch<V>(d2_from);
        next.x1 = annulus::cuda::fetch<V>(x1_from);
        if constexpr (kRotate) next.x2 = annulus::cuda::fetch<V>(x2_from);
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
          annulus::cuda::unpack(next.d1, d1);
          annulus::cuda::unpack(next.d2, d2);
          annulus::cuda::unpack(next.x1, x1);
          if constexpr (kRotate) annulus::cuda::unpack(next.x2, x2);
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
            if constexpr (kRotate) store_columns<V, T>(g2, side.dx.second, i_dx);
            store_columns<V, T>(g1, side.dx.first, i_dx);
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

struct ReduceArgs {
  const double* partial;
  std::int64_t tiles;
  std::int32_t C, E, axes;
  std::int32_t sides, heads_first;
  std::int32_t heads_per_row[2];
  void* dtheta;
  std::int64_t stride[2];
};

// Block (32 columns, 32 shares) of one row of theta. Share y adds entries y, y + 32, ... in order;
// then the shares are added in order.
template <class U>
__global__ void __launch_bounds__(1024)
    reduce_kernel(const ReduceArgs a, std::int32_t column_blocks) {
  __shared__ double shares[32][33];
  const int row = static_cast<int>(blockIdx.x) / column_blocks;
  const int k = (static_cast<int>(blockIdx.x) % column_blocks) * 32 + static_cast<int>(threadIdx.x);
  double total = 0;
  if (k < a.E) {
    for (int side = 0; side < a.sides; ++side) {
      const int heads = a.heads_per_row[side];
      const std::int64_t first =
          (side ? a.heads_first : 0) + static_cast<std::int64_t>(row) * heads;
      for (int j = 0; j < a.axes; ++j) {
        const std::int64_t c = static_cast<std::int64_t>(j) * a.E + k;
        if (c >= a.C) break;
        const double* const p = a.partial + first * a.tiles * a.C + c;
#pragma unroll 8
        for (std::int64_t i = threadIdx.y; i < heads * a.tiles; i += 32) total += p[i * a.C];
      }
    }
  }
  shares[threadIdx.y][threadIdx.x] = total;
  __syncthreads();
  if (threadIdx.y != 0 || k >= a.E) return;
  total = 0;
  for (int y = 0; y < 32; ++y) total += shares[y][threadIdx.x];
  static_cast<U*>(a.dtheta)[row * a.stride[0] + k * a.stride[1]] =
      U(static_cast<compute_t<U>>(total));
}

template <class U>
__global__ void zero_kernel(U* dtheta, std::int64_t rows, std::int64_t columns, std::int64_t s0,
                            std::int64_t s1) {
  const std::int64_t n = rows * columns;
  for (std::int64_t i = blockIdx.x * static_cast<std::int64_t>(blockDim.x) + threadIdx.x; i < n;
       i += static_cast<std::int64_t>(gridDim.x) * blockDim.x) {
    dtheta[i / columns * s0 + i % columns * s1] = U(compute_t<U>{0});
  }
}

std::int64_t tile_count(const Plan& plan) { return (plan.L + kTileTokens - 1) / kTileTokens; }

template <class T, int V, bool kRotate, Act kAct>
void launch(const Plan& plan, Args a, double* partial, cudaStream_t stream) {
  const auto lanes =
      static_cast<int>(std::clamp<std::int64_t>((plan.C + V - 1) / V, 1, kBlockLanes));
  const dim3 shape(static_cast<unsigned>(lanes), kBlockRows);
  const std::size_t shared =
      2 * V * sizeof(compute_t<T>) * static_cast<std::size_t>(lanes * kBlockRows) +
      StepTable<T>::bytes(lanes * V);
  const unsigned blocks = number_blocks(plan, tile_count(plan), 1, a);
  dtheta_kernel<T, V, kRotate, kAct><<<blocks, shape, shared, stream>>>(a, partial);
  annulus::cuda::check_launch(plan.op, "dtheta_kernel");
}

}  // namespace

std::int64_t dtheta_partials(const Plan& plan) { return tile_count(plan) * plan.heads() * plan.C; }

void launch_zero_dtheta(const Plan& plan, void* stream_handle) {
  const std::int64_t n = plan.theta_rows * plan.E;
  if (n == 0) return;
  auto* stream = static_cast<cudaStream_t>(stream_handle);
  visit_floating(plan.dtheta.dtype, [&]<class U>() {
    zero_kernel<U>
        <<<static_cast<unsigned>(std::min<std::int64_t>((n + 255) / 256, 1024)), 256, 0, stream>>>(
            static_cast<U*>(plan.dtheta.data), plan.theta_rows, plan.E, plan.dtheta.stride[0],
            plan.dtheta.stride[1]);
  });
  annulus::cuda::check_launch(plan.op, "zero_kernel");
}

void launch_dtheta(const Plan& plan, const Args& a, bool vectors, double* partial,
                   void* stream_handle) {
  auto* stream = static_cast<cudaStream_t>(stream_handle);
  visit_floating(plan.dtype, [&]<class T>() {
    const auto launch_form = [&]<bool kRotate, Act kAct>() {
      if constexpr (!std::is_same_v<T, double>) {
        if (vectors) {
          return launch<T, kVectorWidth<T>, kRotate, kAct>(plan, a, partial, stream);
        }
      }
      launch<T, 1, kRotate, kAct>(plan, a, partial, stream);
    };
    if (plan.rotate) return launch_form.template operator()<true, Act::kNone>();
    visit_activation(plan.activation,
                     [&]<Act kAct>() { launch_form.template operator()<false, kAct>(); });
  });

  ReduceArgs r{};
  r.partial = partial;
  r.tiles = tile_count(plan);
  r.C = a.C;
  r.E = a.E;
  r.axes = plan.axes;
  r.sides = plan.sides;
  r.heads_first = a.heads_first;
  r.heads_per_row[0] = static_cast<std::int32_t>(plan.side[0].heads_per_row);
  r.heads_per_row[1] = static_cast<std::int32_t>(plan.side[1].heads_per_row);
  r.dtheta = plan.dtheta.data;
  r.stride[0] = plan.dtheta.stride[0];
  r.stride[1] = plan.dtheta.stride[1];
  const std::int64_t column_blocks = (plan.E + 31) / 32;
  const unsigned blocks = checked_blocks(plan, plan.theta_rows * column_blocks);
  if (blocks == 0) return;
  visit_floating(plan.dtheta.dtype, [&]<class U>() {
    reduce_kernel<U>
        <<<blocks, dim3(32, 32), 0, stream>>>(r, static_cast<std::int32_t>(column_blocks));
  });
  annulus::cuda::check_launch(plan.op, "reduce_kernel");
}

}  // namespace annulus::lrpe_cosine::cuda
