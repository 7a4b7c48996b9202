// dk, dv: a block of threads has a tile of a line of keys and goes over the queries that see any of them, of all heads
// that share the keys. Rows of its products are keys:
//
//   p = exp(s - lse),   ds = p (z <do, v> - delta),   dv_j = sum_i z p do_i,   dk_j = scale sum_i ds q_i
#pragma once

#include <cstddef>
#include <cstdint>

#include "annulus/attention/cuda/gradient_rows.cuh"
#include "annulus/attention/cuda/key_block.cuh"
#include "annulus/attention/cuda/launch.h"
#include "annulus/cuda/launch.cuh"
#include "annulus/cuda/reduce.cuh"

namespace annulus::attention::cuda {

// Both sums of 256 columns would be all registers of a thread: there are two kernels then, one a sum.
enum class Sums : std::uint8_t { kBoth, kKeys, kValues };

template <class T, int kColumns, bool kShort>
struct KeyGradientTiling {
  static constexpr bool kSplit = Format<T>::kTerms > 1;
  static constexpr int kWarps = kSplit && kColumns > 128 ? 2 : 4, kThreads = kWarps * 32;
  static constexpr int kM = !kSplit && kColumns <= 64 && !kShort ? 2 : 1;
  static constexpr int kKeys = kWarps * kM * 16;
  static constexpr int kQueries =
      !kSplit && (kColumns == 128 || (kColumns == 64 && kShort)) ? 64 : 32;
  static constexpr int kStages = Format<T>::kAsync ? 2 : 1;
  static constexpr int kBlocks = kColumns > 128 || (kSplit && kColumns > 64) ? 1 : 2;

  using KeyTile = Tile<Format<T>, kKeys, kColumns>;
  using QueryTile = Tile<Format<T>, kQueries, kColumns>;
  static constexpr int kWords = kKeys * kQueries / 32;

  struct Small : KeyBlock {
    std::uint64_t drawn[2][kQueries];
    float lse[2][kQueries], delta[2][kQueries];
    std::uint32_t mask[2][kWords], kept[2][kWords];
    int flags[kQueries];
    std::uint32_t found[kWarps];
  };
  static constexpr int kTileBytes = 2 * KeyTile::kBytes + 2 * kStages * QueryTile::kBytes;
  static constexpr std::size_t kSharedBytes = kTileBytes + sizeof(Small);
};

template <class T, int kColumns, bool kShort, Sums kSums>
__global__ void __launch_bounds__(KeyGradientTiling<T, kColumns, kShort>::kThreads,
                                  KeyGradientTiling<T, kColumns, kShort>::kBlocks)
    key_gradient_kernel(const __grid_constant__ KeyGradientArgs a) {
  using Tiling = KeyGradientTiling<T, kColumns, kShort>;
  using F = Format<T>;
  using KeyTile = typename Tiling::KeyTile;
  using QueryTile = typename Tiling::QueryTile;
  constexpr int kThreads = Tiling::kThreads, kQueries = Tiling::kQueries, kM = Tiling::kM,
                kStages = Tiling::kStages;
  constexpr bool kOfKeys = kSums != Sums::kValues, kOfValues = kSums != Sums::kKeys;
  await_previous_kernel();
  extern __shared__ __align__(1024) unsigned char shared[];
  const std::uint32_t base = shared_address(shared);
  const KeyTile k_tile{base}, v_tile{base + KeyTile::kBytes};
  const std::uint32_t queries_base = base + 2 * KeyTile::kBytes;
  const auto q_tile = [&](int stage) {
    return QueryTile{queries_base + 2 * stage * QueryTile::kBytes};
  };
  const auto do_tile = [&](int stage) {
    return QueryTile{queries_base + (2 * stage + 1) * QueryTile::kBytes};
  };
  auto& small = *reinterpret_cast<typename Tiling::Small*>(shared + Tiling::kTileBytes);

  const Problem& p = a.p;
  const Sweep& sweep = small.sweep;
  if (threadIdx.x == 0) small.start(a, Tiling::kKeys);
  __syncthreads();
  if (small.count == 0) return;
  const bool drops = p.dropout.any();
  const auto token = [&](int row) { return p.token(sweep.keys.at(small.first + row)); };
  const auto load_keys = [&](KeyTile tile, const Operand& operand, int columns) {
    load_tile<F, kThreads>(tile, operand.at<T>(small.b, small.h), operand, p, sweep.keys,
                           small.first, small.count, columns);
  };
  load_keys(k_tile, p.k, p.D);
  if (kOfKeys) load_keys(v_tile, p.v, p.Dv);

  QueryWalk<kThreads, kQueries> walk{a, small, small.found};
  // Has a tile of queries brought, and says whether it is masked.
  const auto issue = [&](int stage, int parity) {
    const Range tile = walk.tile();
    const std::int64_t h = walk.query_head();
    const int queries = static_cast<int>(tile.end - tile.first);
    load_tile<F, kThreads>(q_tile(stage), p.q.at<T>(small.b, h), p.q, p, sweep.queries, tile.first,
                           queries, p.D);
    load_tile<F, kThreads>(do_tile(stage), a.do_.at<T>(small.b, h), a.do_, p, sweep.queries,
                           tile.first, queries, p.Dv);
    copy_async_commit();
    for (int i = static_cast<int>(threadIdx.x); i < kQueries; i += kThreads) {
      const bool there = i < queries;
      const std::int64_t t = there ? p.token(sweep.queries.at(tile.first + i)) : 0;
      small.lse[parity][i] =
          there ? weight_origin(p.lse.at<const float>(small.b, h)[t * p.lse.row]) : 0.0f;
      // Where there are layers a block has one head.
      const std::int64_t at = a.delta.of_layers ? small.query_row + tile.first + i
                                                : (small.b * p.H + h) * a.delta.rows + t;
      small.delta[parity][i] = there ? a.delta.data[at] : 0.0f;
      if (drops) small.drawn[parity][i] = p.dropout.row(sweep.sample, h, t - sweep.first_query);
    }
    const bool holes = p.pattern.has_holes();
    const Range all = sweep.seen_by_all(tile);
    const bool masked = holes || small.first < all.first || small.first + small.count > all.end ||
                        queries < kQueries;
    if (masked) {
      make_mask<Tiling::kKeys, kQueries, kThreads>(
          small.mask[parity],
          [&](int row) {
            const Range r = row < small.count
                                ? sweep.seeing_any({small.first + row, small.first + row + 1})
                                : Range{};
            return Range{r.first - tile.first, (r.end < tile.end ? r.end : tile.end) - tile.first};
          },
          holes,
          [&](int row, int column) {
            return p.pattern.counts(small.layer, h, sweep.queries.at(tile.first + column),
                                    sweep.keys.at(small.first + row));
          });
    }
    if (drops) {
      __syncthreads();  // drawn
      make_kept<Tiling::kKeys, kQueries, kThreads>(small.kept[parity], [&](int row, int column) {
        return row < small.count && column < queries &&
               p.dropout.keeps(small.drawn[parity][column], token(row) - sweep.first_key);
      });
    }
    return masked;
  };

  const int lane = static_cast<int>(threadIdx.x) & 31;
  const int first_row = uniform_warp() * kM * 16;
  const bool active = kM > 1 || first_row < small.count;
  constexpr int kD = kColumns / 8;
  float dk[kM][kOfKeys ? kD : 1][4] = {}, dv[kM][kOfValues ? kD : 1][4] = {};
  walk.start();
  bool masked = !walk.done() && issue(0, 0);
  for (int parity = 0; !walk.done(); parity ^= 1) {
    copy_async_wait<0>();
    __syncthreads();  // this tile is here, and all are done with the one before
    const int stage = kStages == 2 ? parity : 0;
    const bool now_masked = masked;
    walk.next();
    if (kStages == 2 && !walk.done()) masked = issue(stage ^ 1, parity ^ 1);

    float s[kM][kQueries / 8][4];
    const auto of_query = [&](const float* from) {
      return [=](int, int n, int e) { return from[n * 8 + lane % 4 * 2 + e % 2]; };
    };
    if (active) {
      multiply_rows<F>(s, k_tile, first_row, q_tile(stage));
      weights_of(s, p, of_query(small.lse[parity]));
    }
    if constexpr (kOfKeys) {
      float dp[kM][kQueries / 8][4];
      Weights<F, kM, kQueries / 8> ds;
      if (active) {
        multiply_rows<F>(dp, v_tile, first_row, do_tile(stage));
        if (drops) keep_bits(dp, small.kept[parity], first_row, 0.0f);
        score_gradients(dp, s, p.dropout.scale, of_query(small.delta[parity]));
        if (now_masked) keep_bits(dp, small.mask[parity], first_row, 0.0f);
        ds.take(dp);
      }
      if (now_masked && has_not_finite<F, kThreads>(q_tile(stage))) {
        take_out_not_finite<F, kThreads, false>(dk, q_tile(stage), first_row, small.mask[parity],
                                                small.flags);
      }
      if (active) add_product(dk, ds, q_tile(stage));
    }
    if constexpr (kOfValues) {
      Weights<F, kM, kQueries / 8> weights;
      if (active) {
        if (drops) keep_bits(s, small.kept[parity], first_row, 0.0f);
        if (now_masked) keep_bits(s, small.mask[parity], first_row, 0.0f);
        weights.take(s);
      }
      if (now_masked && has_not_finite<F, kThreads>(do_tile(stage))) {
        take_out_not_finite<F, kThreads, true>(dv, do_tile(stage), first_row, small.mask[parity],
                                               small.flags);
      }
      if (active) add_product(dv, weights, do_tile(stage));
    }
    if (kStages == 1 && !walk.done()) {
      __syncthreads();
      masked = issue(0, parity ^ 1);
    }
  }
  copy_async_wait<0>();
  if constexpr (kOfKeys) {
    store_gradient<T>(dk, p.scale, first_row, 0, small.count, a.dk, small.layer_row, small.b,
                      small.h, p.Tk, p.Hkv, p.D, token);
  }
  if constexpr (kOfValues) {
    store_gradient<T>(dv, p.dropout.scale, first_row, 0, small.count, a.dv, small.layer_row,
                      small.b, small.h, p.Tk, p.Hkv, p.Dv, token);
  }
}

template <class T, int kColumns, bool kShort, Sums kSums>
void launch_key_sums(const char* op, const KeyGradientArgs& a, std::int64_t blocks,
                     cudaStream_t stream) {
  using Tiling = KeyGradientTiling<T, kColumns, kShort>;
  launch_kernel(op, "key_gradient_kernel", key_gradient_kernel<T, kColumns, kShort, kSums>,
                checked_blocks(op, blocks), Tiling::kThreads, Tiling::kSharedBytes, stream, a);
}

template <class T, int kColumns, bool kShort>
void launch_key_gradient(const char* op, KeyGradientArgs a, cudaStream_t stream) {
  const std::int64_t blocks =
      a.p.number_blocks(a.p.Hkv, false, KeyGradientTiling<T, kColumns, kShort>::kKeys);
  if (blocks == 0) return;
  if constexpr (kColumns > 128) {
    launch_key_sums<T, kColumns, kShort, Sums::kKeys>(op, a, blocks, stream);
    launch_key_sums<T, kColumns, kShort, Sums::kValues>(op, a, blocks, stream);
  } else {
    launch_key_sums<T, kColumns, kShort, Sums::kBoth>(op, a, blocks, stream);
  }
}

template <class T>
void key_gradient_of(const char* op, const KeyGradientArgs& a, cudaStream_t stream) {
  const bool is_short = !a.p.fixed && a.p.longest_sweep(false) <= kShortSweep;
  visit_tiles<T>(a.p, is_short, [&]<int kColumns, bool kShort>() {
    // Wider tiles have 64 keys anyway.
    launch_key_gradient<T, kColumns, kShort && kColumns <= 64>(op, a, stream);
  });
}

}  // namespace annulus::attention::cuda
