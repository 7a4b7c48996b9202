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
#include "annulus/lrpe_cosine/lrpe_cosine_cuda.cuh"

namespace annulus::lrpe::cuda {

namespace {

constexpr int kTileTokens = 64;
// The rows of a block are fixed, whatever a thread's width: the order of the sums, and so their
// bits, must not depend on the layout.
constexpr int kBlockRows = 8;
constexpr int kBlockLanes = 32;

// Thread (x, y): V columns from V (x + i blockDim.x) on, of tokens y, y + blockDim.y, ... of the
// tile, all b.
template <class T, int V, bool kRotate>
__global__ void __launch_bounds__(kThreads)
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
  if (first < a.L) a.positions.unravel(first, s0);

  for (int first_column = 0; first_column < a.C; first_column += width) {
    const int slot = static_cast<int>(threadIdx.x) * V;
    const int column = first_column + slot;
    const bool suspect = table.fill(a, p.theta_row, first_column, width);
    const bool active = column < a.C;
    Real sum0[V] = {};
    Real sum1[V] = {};
    for (std::int64_t t = t0 + threadIdx.y; active && t < t1; t += blockDim.y) {
      const bool placed = t >= a.positions.prefix;
      std::int64_t s[device::kAxes] = {};
      if (placed) a.positions.unravel(t, s);
      const std::int64_t s_base = s[0];
      device::SinCos<Real, V> phase;
      phase.set_zero_phase();
      for (std::int64_t b = 0; b < a.B; ++b) {
        if (placed && (b == 0 || a.offsets != nullptr)) {
          s[0] = s_base + load_offset(a, b);
          make_phases<T, V>(a, table, slot, s, column, suspect, phase);
        }
        const std::int64_t i_dy = element(side.dy, b, p.head, t, column);
        const std::int64_t i_x = element(side.x, b, p.head, t, column);
        Real d1[V], d2[V], x1[V], x2[V], xb[V], g1[V], g2[V];
        load_columns<V, T>(side.dy.first, i_dy, d1);
        load_columns<V, T>(side.dy.second, i_dy, d2);
        load_columns<V, T>(side.x.first, i_x, x1);
        if constexpr (kRotate) load_columns<V, T>(side.x.second, i_x, x2);
        const std::int64_t sequence = b * a.heads + p.flat_head;
        const std::int64_t row = sequence * a.L + t;
        const std::int64_t stat_column = sequence * a.C + column;
        device::rotate_tile(d1, d2, phase, Real(-1), g1, g2);
        if constexpr (!kRotate) activate_tile<T>(a, x1, row, stat_column, xb);
        if (placed) {
#pragma unroll
          for (int i = 0; i < V; ++i) {
            const int axis = a.positions.axis_of(column + i);
            const auto within =
                static_cast<Real>(a.positions.along(s, axis) - a.positions.along(s0, axis));
            const Real q = kRotate ? device::mul_add(-x2[i], g1[i], x1[i] * g2[i]) : xb[i] * g2[i];
            sum0[i] = device::add(sum0[i], q);
            sum1[i] = device::mul_add(within, q, sum1[i]);
          }
        }
        if (side.dx.first != nullptr) {
          const std::int64_t i_dx = element(side.dx, b, p.head, t, column);
          if constexpr (kRotate) {
            store_columns<V, T>(g2, side.dx.second, i_dx);
          } else {
            activate_tile_backward<T>(a, x1, row, stat_column, g1);
          }
          store_columns<V, T>(g1, side.dx.first, i_dx);
        }
      }
    }
    // Rows in order, in double.
    const int thread = static_cast<int>(threadIdx.y * blockDim.x + threadIdx.x);
#pragma unroll
    for (int i = 0; i < V; ++i) {
      sums[i * threads + thread] = sum0[i];
      sums[(V + i) * threads + thread] = sum1[i];
    }
    __syncthreads();
    if (threadIdx.y == 0 && active) {
      const std::int64_t block = static_cast<std::int64_t>(p.flat_head) * a.tiles.divisor + p.tile;
#pragma unroll
      for (int i = 0; i < V; ++i) {
        double total0 = 0;
        double total1 = 0;
        for (unsigned y = 0; y < blockDim.y; ++y) {
          total0 += static_cast<double>(sums[i * threads + y * blockDim.x + threadIdx.x]);
          total1 += static_cast<double>(sums[(V + i) * threads + y * blockDim.x + threadIdx.x]);
        }
        const auto start =
            static_cast<double>(a.positions.along(s0, a.positions.axis_of(column + i)));
        partial[block * a.C + column + i] = start * total0 + total1;
      }
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
      for (std::int64_t i = threadIdx.y; i < heads * a.tiles; i += 32) {
        const double* p = a.partial + (first * a.tiles + i) * a.C;
        for (int j = 0; j < a.axes; ++j) {
          const std::int64_t c = static_cast<std::int64_t>(j) * a.E + k;
          if (c < a.C) total += p[c];
        }
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

template <class T, int V, bool kRotate>
void launch(const Plan& plan, const Args& a, double* partial, cudaStream_t stream) {
  const auto lanes =
      static_cast<int>(std::clamp<std::int64_t>((plan.C + V - 1) / V, 1, kBlockLanes));
  const dim3 shape(static_cast<unsigned>(lanes), kBlockRows);
  const std::size_t shared =
      2 * V * sizeof(compute_t<T>) * static_cast<std::size_t>(lanes * kBlockRows) +
      StepTable<T>::bytes(lanes * V);
  const std::int64_t blocks = tile_count(plan) * plan.heads();
  if (blocks >= (std::int64_t{1} << 31)) {
    throw NotSupported("[" + std::string(plan.op) + "] x must need fewer than 2^31 blocks on cuda");
  }
  dtheta_kernel<T, V, kRotate>
      <<<static_cast<unsigned>(blocks), shape, shared, stream>>>(a, partial);
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

void launch_dtheta(const Plan& plan, Args a, bool vectors, double* partial, void* stream_handle) {
  auto* stream = static_cast<cudaStream_t>(stream_handle);
  a.tiles = FastDiv(static_cast<std::uint32_t>(tile_count(plan)));
  a.heads_div = FastDiv(static_cast<std::uint32_t>(plan.heads()));
  visit_floating(plan.dtype, [&]<class T>() {
    visit_bool(plan.rotate, [&]<bool kRotate>() {
      if constexpr (!std::is_same_v<T, double>) {
        if (vectors) return launch<T, kVectorWidth<T>, kRotate>(plan, a, partial, stream);
      }
      launch<T, 1, kRotate>(plan, a, partial, stream);
    });
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
  const std::int64_t blocks = plan.theta_rows * column_blocks;
  if (blocks == 0) return;
  visit_floating(plan.dtheta.dtype, [&]<class U>() {
    reduce_kernel<U><<<static_cast<unsigned>(blocks), dim3(32, 32), 0, stream>>>(
        r, static_cast<std::int32_t>(column_blocks));
  });
  annulus::cuda::check_launch(plan.op, "reduce_kernel");
}

}  // namespace annulus::lrpe::cuda
