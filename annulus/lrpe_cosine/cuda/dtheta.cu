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

#include "annulus/cuda/check.h"
#include "annulus/lrpe_cosine/cuda/arguments.cuh"

namespace annulus::lrpe_cosine::cuda {

namespace {

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

}  // namespace

std::int64_t dtheta_partials(const Plan& plan) { return theta_tiles(plan) * plan.heads() * plan.C; }

void launch_zero_dtheta(const Plan& plan, cudaStream_t stream) {
  const std::int64_t n = plan.theta_rows * plan.E;
  if (n == 0) return;
  visit_floating(plan.dtheta.dtype, [&]<class U>() {
    zero_kernel<U>
        <<<static_cast<unsigned>(std::min<std::int64_t>((n + 255) / 256, 1024)), 256, 0, stream>>>(
            static_cast<U*>(plan.dtheta.data), plan.theta_rows, plan.E, plan.dtheta.stride[0],
            plan.dtheta.stride[1]);
  });
  check_launch(plan.op, "zero_kernel");
}

void launch_dtheta(const Plan& plan, const Args& a, bool vectors, double* partial,
                   cudaStream_t stream) {
  visit_width(plan.dtype, vectors,
              [&]<class T, int V>() { launch_partials<T, V>(plan, a, partial, stream); });

  ReduceArgs r{};
  r.partial = partial;
  r.tiles = theta_tiles(plan);
  r.C = a.C;
  r.E = a.E;
  r.axes = plan.axes;
  r.sides = plan.sides;
  r.heads_first = a.heads_first;
  for (int i = 0; i < 2; ++i) {
    r.heads_per_row[i] = static_cast<std::int32_t>(plan.side[i].heads_per_row);
    r.stride[i] = plan.dtheta.stride[static_cast<std::size_t>(i)];
  }
  r.dtheta = plan.dtheta.data;
  const std::int64_t column_blocks = ceil_div(plan.E, 32);
  const unsigned blocks = checked_blocks(plan, plan.theta_rows * column_blocks);
  if (blocks == 0) return;
  visit_floating(plan.dtheta.dtype, [&]<class U>() {
    reduce_kernel<U>
        <<<blocks, dim3(32, 32), 0, stream>>>(r, static_cast<std::int32_t>(column_blocks));
  });
  check_launch(plan.op, "reduce_kernel");
}

}  // namespace annulus::lrpe_cosine::cuda
