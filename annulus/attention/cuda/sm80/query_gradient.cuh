// dq: as the forward, a block of threads has a tile of queries and goes over the keys they see:
//
//   p = exp(s - lse),   ds = p (z <do, v> - delta),   dq = scale sum_j ds k_j
#pragma once

#include <cstddef>
#include <cstdint>

#include "annulus/attention/cuda/gradient_rows.cuh"
#include "annulus/attention/cuda/launch.h"
#include "annulus/attention/cuda/mask.cuh"
#include "annulus/attention/cuda/query_block.cuh"
#include "annulus/cuda/launch.cuh"
#include "annulus/cuda/reduce.cuh"

namespace annulus::attention::cuda {

template <class T, int kColumns, bool kShort>
struct QueryGradientTiling {
  static constexpr bool kSplit = Format<T>::kTerms > 1;
  static constexpr int kWarps = kSplit && kColumns > 128 ? 2 : 4, kThreads = kWarps * 32;
  static constexpr int kM = kSplit || kColumns > 128 || kShort ? 1 : 2;
  static constexpr int kQueries = kWarps * kM * 16;
  static constexpr int kKeys = kColumns > 64 ? 32 : 64;
  static constexpr int kStages = Format<T>::kAsync ? 2 : 1;
  static constexpr int kBlocks = kColumns > 128 || (kSplit && kColumns > 64) ? 1 : 2;

  using QueryTile = Tile<Format<T>, kQueries, kColumns>;
  using KeyTile = Tile<Format<T>, kKeys, kColumns>;
  static constexpr int kWords = kQueries * kKeys / 32;

  struct Small : QueryBlock {
    std::uint64_t drawn[kQueries];
    float lse[kQueries], delta[kQueries];
    std::uint32_t mask[2][kWords], kept[2][kWords];
    int flags[kKeys];
  };
  static constexpr int kTileBytes = 2 * QueryTile::kBytes + 2 * kStages * KeyTile::kBytes;
  static constexpr std::size_t kSharedBytes = kTileBytes + sizeof(Small);
};

template <class T, int kColumns, bool kShort>
__global__ void __launch_bounds__(QueryGradientTiling<T, kColumns, kShort>::kThreads,
                                  QueryGradientTiling<T, kColumns, kShort>::kBlocks)
    query_gradient_kernel(const __grid_constant__ QueryGradientArgs a) {
  using Tiling = QueryGradientTiling<T, kColumns, kShort>;
  using F = Format<T>;
  using KeyTile = typename Tiling::KeyTile;
  constexpr int kThreads = Tiling::kThreads, kKeys = Tiling::kKeys, kM = Tiling::kM,
                kStages = Tiling::kStages;
  await_previous_kernel();
  extern __shared__ __align__(1024) unsigned char shared[];
  const std::uint32_t base = shared_address(shared);
  const typename Tiling::QueryTile q_tile{base}, do_tile{base + Tiling::QueryTile::kBytes};
  const std::uint32_t keys_base = base + 2 * Tiling::QueryTile::kBytes;
  const auto k_tile = [&](int stage) { return KeyTile{keys_base + 2 * stage * KeyTile::kBytes}; };
  const auto v_tile = [&](int stage) {
    return KeyTile{keys_base + (2 * stage + 1) * KeyTile::kBytes};
  };
  auto& small = *reinterpret_cast<typename Tiling::Small*>(shared + Tiling::kTileBytes);

  const Problem& p = a.p;
  const Sweep& sweep = small.sweep;
  if (threadIdx.x == 0) small.template start<T>(p, Tiling::kQueries);
  __syncthreads();
  if (small.count == 0) return;
  const bool drops = p.dropout.any();
  const auto token = [&](int row) { return p.token(small.query(row)); };
  for (int row = static_cast<int>(threadIdx.x); row < Tiling::kQueries; row += kThreads) {
    const bool there = row < small.count;
    const std::int64_t t = there ? token(row) : 0;
    small.lse[row] =
        there ? weight_origin(p.lse.at<const float>(small.b, small.h)[t * p.lse.row]) : 0.0f;
    const std::int64_t i =
        a.delta.of_layers ? small.layer_row + row : (small.b * p.H + small.h) * a.delta.rows + t;
    small.delta[row] = there ? a.delta.data[i] : 0.0f;
    small.drawn[row] = drops ? p.dropout.row(sweep.sample, small.h, t - sweep.first_query) : 0;
  }
  const auto load_queries = [&](auto tile, const Operand& operand, int columns) {
    load_tile<F, kThreads>(tile, operand.at<T>(small.b, small.h), operand, p, sweep.queries,
                           small.first, small.count, columns);
  };
  load_queries(q_tile, p.q, p.D);
  load_queries(do_tile, a.do_, p.Dv);

  // Has a tile of keys brought, and says whether it is masked.
  const auto issue = [&](Range tile, int stage, int parity) {
    const int keys = static_cast<int>(tile.end - tile.first);
    load_tile<F, kThreads>(k_tile(stage), static_cast<const T*>(small.k), p.k, p, sweep.keys,
                           tile.first, keys, p.D);
    load_tile<F, kThreads>(v_tile(stage), static_cast<const T*>(small.v), p.v, p, sweep.keys,
                           tile.first, keys, p.Dv);
    copy_async_commit();
    const bool masked = small.masks(p, tile, kKeys);
    if (masked)
      make_query_mask<Tiling::kQueries, kKeys, kThreads>(small.mask[parity], p, small, tile);
    if (drops) {
      make_query_kept<Tiling::kQueries, kKeys, kThreads>(small.kept[parity], p, small, tile,
                                                         small.drawn);
    }
    return masked;
  };

  __syncthreads();  // drawn
  const int lane = static_cast<int>(threadIdx.x) & 31;
  const int first_row = uniform_warp() * kM * 16;
  const bool active = kM > 1 || first_row < small.count;
  float acc[kM][kColumns / 8][4] = {};
  KeyWalk walk;
  walk.start(sweep, small.seen, kKeys, p.fixed);
  bool masked = !walk.done() && issue(walk.tile(kKeys), 0, 0);
  for (int parity = 0; !walk.done(); parity ^= 1) {
    copy_async_wait<0>();
    __syncthreads();  // this tile is here, and all are done with the one before
    const int stage = kStages == 2 ? parity : 0;
    const bool now_masked = masked;
    walk.next(sweep, small.seen, kKeys);
    if (kStages == 2 && !walk.done()) masked = issue(walk.tile(kKeys), stage ^ 1, parity ^ 1);

    float s[kM][kKeys / 8][4], dp[kM][kKeys / 8][4];
    Weights<F, kM, kKeys / 8> ds;
    if (active) {
      multiply_rows<F>(s, q_tile, first_row, k_tile(stage));
      multiply_rows<F>(dp, do_tile, first_row, v_tile(stage));
      float lse[kM * 2], delta[kM * 2];
#pragma unroll
      for (int r = 0; r < kM * 2; ++r) {
        lse[r] = small.lse[first_row + r * 8 + lane / 4];
        delta[r] = small.delta[first_row + r * 8 + lane / 4];
      }
      weights_of(s, p, [&](int m, int, int e) { return lse[m * 2 + e / 2]; });
      if (drops) keep_bits(dp, small.kept[parity], first_row, 0.0f);
      score_gradients(dp, s, p.dropout.scale,
                      [&](int m, int, int e) { return delta[m * 2 + e / 2]; });
      if (now_masked) keep_bits(dp, small.mask[parity], first_row, 0.0f);
      ds.take(dp);
    }
    if (now_masked && has_not_finite<F, kThreads>(k_tile(stage))) {
      take_out_not_finite<F, kThreads, false>(acc, k_tile(stage), first_row, small.mask[parity],
                                              small.flags);
    }
    if (active) add_product(acc, ds, k_tile(stage));
    if (kStages == 1 && !walk.done()) {
      __syncthreads();
      masked = issue(walk.tile(kKeys), 0, parity ^ 1);
    }
  }
  copy_async_wait<0>();
  store_gradient<T>(acc, p.scale, first_row, 0, small.count, a.dq, small.layer_row, small.b,
                    small.h, p.Tq, p.H, p.D, token);
}

template <class T, int kColumns, bool kShort>
void launch_query_gradient(const char* op, QueryGradientArgs a, cudaStream_t stream) {
  using Tiling = QueryGradientTiling<T, kColumns, kShort>;
  const std::int64_t blocks = a.p.number_blocks(a.p.H, true, Tiling::kQueries);
  if (blocks == 0) return;
  launch_kernel(op, "query_gradient_kernel", query_gradient_kernel<T, kColumns, kShort>,
                checked_blocks(op, blocks), Tiling::kThreads, Tiling::kSharedBytes, stream, a);
}

template <class T>
void query_gradient_of(const char* op, const QueryGradientArgs& a, cudaStream_t stream) {
  const bool is_short = !a.p.fixed && a.p.longest_sweep(true) <= kShortSweep;
  visit_tiles<T>(a.p, is_short, [&]<int kColumns, bool kShort>() {
    launch_query_gradient<T, kColumns, kShort>(op, a, stream);
  });
}

}  // namespace annulus::attention::cuda
