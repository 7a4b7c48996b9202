// dq: as the forward, a block of threads has a tile of queries and goes over the keys they see:
//
//   p = exp(s - lse),   ds = p (z <do, v> - delta),   dq = scale sum_j ds k_j
#pragma once

#include <cstddef>
#include <cstdint>

#include "annulus/attention/cuda/launch.h"
#include "annulus/attention/cuda/mask.cuh"
#include "annulus/cuda/check.h"
#include "annulus/cuda/math.cuh"
#include "annulus/cuda/reduce.cuh"

namespace annulus::attention::cuda {

template <class T, int kColumns>
struct QueryGradientTiling {
  static constexpr bool kSplit = Format<T>::kTerms > 1;
  static constexpr int kWarps = kSplit && kColumns > 128 ? 2 : 4, kThreads = kWarps * 32;
  static constexpr int kM = kSplit || kColumns > 128 ? 1 : 2;
  static constexpr int kQueries = kWarps * kM * 16;
  static constexpr int kKeys = kColumns > 64 ? 32 : 64;
  static constexpr int kStages = Format<T>::kAsync ? 2 : 1;
  static constexpr int kBlocks = kColumns > 128 || (kSplit && kColumns > 64) ? 1 : 2;

  using QueryTile = Tile<Format<T>, kQueries, kColumns>;
  using KeyTile = Tile<Format<T>, kKeys, kColumns>;
  static constexpr int kWords = kQueries * kKeys / 32;

  struct Small {
    Sweep sweep;
    std::uint64_t drawn[kQueries];
    float lse[kQueries], delta[kQueries];
    std::uint32_t mask[2][kWords], kept[2][kWords];
    int flags[kKeys];
  };
  static constexpr int kTileBytes = 2 * QueryTile::kBytes + 2 * kStages * KeyTile::kBytes;
  static constexpr std::size_t kSharedBytes = kTileBytes + sizeof(Small);
};

// What exponents of weights are counted from, in units of log 2; of a row without keys (or scores) any number will do.
__device__ __forceinline__ float weight_origin(float lse) { return origin_of(lse) * kLog2E; }

// Scores become weights.
template <int kM, int kN, class Origin>
__device__ __forceinline__ void weights_of(float (&s)[kM][kN][4], const Problem& p, Origin&& origin) {
#pragma unroll
  for (int m = 0; m < kM; ++m) {
#pragma unroll
    for (int n = 0; n < kN; ++n) {
#pragma unroll
      for (int e = 0; e < 4; ++e) {
        const float score = p.scale_first ? s[m][n][e] * p.score_scale : s[m][n][e];
        s[m][n][e] = exp2_fast(fmaf(score, p.exponent_scale, -origin(m, n, e)));
      }
    }
  }
}
// ds = p (z dp - delta), in place of dp.
template <int kM, int kN, class Delta>
__device__ __forceinline__ void score_gradients(float (&dp)[kM][kN][4],
                                                const float (&weight)[kM][kN][4], float kept_scale,
                                                Delta&& delta) {
#pragma unroll
  for (int m = 0; m < kM; ++m) {
#pragma unroll
    for (int n = 0; n < kN; ++n) {
#pragma unroll
      for (int e = 0; e < 4; ++e) {
        dp[m][n][e] = weight[m][n][e] * fmaf(dp[m][n][e], kept_scale, -delta(m, n, e));
      }
    }
  }
}

// Rows of registers times `scale`, to a tensor, or added to sums of (B, rows, heads, columns); token(row) is where a row
// lies, of those that exist.
template <class T, int kM, int kD, class Token>
__device__ __forceinline__ void store_gradient(const float (&acc)[kM][kD][4], float scale,
                                               int first_row, int count, const Operand& to,
                                               float* sum, std::int64_t b, std::int64_t h,
                                               std::int64_t rows, std::int64_t heads, int columns,
                                               Token&& token) {
  const int lane = static_cast<int>(threadIdx.x) & 31;
#pragma unroll
  for (int m = 0; m < kM; ++m) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int row = first_row + m * 16 + half * 8 + lane / 4;
      if (row >= count) continue;
      const std::int64_t at = token(row);
      if (sum == nullptr) {
        T* const line = to.at<T>(b, h) + at * to.row;
#pragma unroll
        for (int n = 0; n < kD; ++n) {
          store_two(line, to.column, to.whole, n * 8 + lane % 4 * 2, columns,
                    acc[m][n][half * 2] * scale, acc[m][n][half * 2 + 1] * scale);
        }
      } else {
        float* const line = sum + ((b * rows + at) * heads + h) * columns;
#pragma unroll
        for (int n = 0; n < kD; ++n) {
#pragma unroll
          for (int e = 0; e < 2; ++e) {
            const int column = n * 8 + lane % 4 * 2 + e;
            if (column < columns) {
              line[column] = fmaf(acc[m][n][half * 2 + e], scale, line[column]);
            }
          }
        }
      }
    }
  }
}

template <class T, int kColumns>
__global__ void __launch_bounds__(QueryGradientTiling<T, kColumns>::kThreads,
                                  QueryGradientTiling<T, kColumns>::kBlocks)
    query_gradient_kernel(const __grid_constant__ QueryGradientArgs a) {
  using Tiling = QueryGradientTiling<T, kColumns>;
  using F = Format<T>;
  using KeyTile = typename Tiling::KeyTile;
  constexpr int kThreads = Tiling::kThreads, kKeys = Tiling::kKeys, kM = Tiling::kM,
                kStages = Tiling::kStages;
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
  const BlockPlace at(blockIdx.x, p.H, p.slots);
  const Place place = p.pattern.place(at.h, at.slot, true, Tiling::kQueries);
  if (threadIdx.x == 0) small.sweep = p.pattern.sweep(at.b, at.h, place.sweep);
  __syncthreads();
  const Sweep& sweep = small.sweep;
  const std::int64_t first = place.tile * Tiling::kQueries;
  if (place.tile < 0 || first >= sweep.queries.count) return;
  const Range part{first, first + Tiling::kQueries < sweep.queries.count ? first + Tiling::kQueries
                                                                         : sweep.queries.count};
  const int count = static_cast<int>(part.end - part.first);
  const Range seen = sweep.seen_by_any(part), all = sweep.seen_by_all(part);
  const bool holes = p.pattern.has_holes(), drops = p.dropout.any();
  const auto token = [&](int row) { return p.token(sweep.queries.at(first + row)); };
  for (int row = static_cast<int>(threadIdx.x); row < Tiling::kQueries; row += kThreads) {
    const std::int64_t t = row < count ? token(row) : 0;
    const bool there = row < count;
    small.lse[row] =
        there ? weight_origin(p.lse.at<const float>(at.b, at.h)[t * p.lse.row]) : 0.0f;
    small.delta[row] = there ? a.delta[(at.b * p.H + at.h) * p.Tq + t] : 0.0f;
    small.drawn[row] = drops ? p.dropout.row(sweep.sample, at.h, t - sweep.first_query) : 0;
  }
  load_tile<F, kThreads>(q_tile, p.q.at<T>(at.b, at.h), p.q, p, sweep.queries, first, count, p.D);
  load_tile<F, kThreads>(do_tile, a.do_.at<T>(at.b, at.h), a.do_, p, sweep.queries, first, count,
                         p.Dv);

  const std::int64_t key_head = at.h / p.group;
  const T* const k = p.k.at<T>(at.b, key_head);
  const T* const v = p.v.at<T>(at.b, key_head);
  // Has a tile of keys brought, and says whether it is masked.
  const auto issue = [&](Range tile, int stage, int parity) {
    const int keys = static_cast<int>(tile.end - tile.first);
    load_tile<F, kThreads>(k_tile(stage), k, p.k, p, sweep.keys, tile.first, keys, p.D);
    load_tile<F, kThreads>(v_tile(stage), v, p.v, p, sweep.keys, tile.first, keys, p.Dv);
    copy_async_commit();
    const bool masked =
        holes || tile.first < all.first || tile.end > all.end || keys < kKeys;
    if (masked) {
      make_mask<Tiling::kQueries, kKeys, kThreads>(
          small.mask[parity],
          [&](int row) {
            const Range r = row < count ? sweep.seen_from(sweep.queries.at(first + row)) : Range{};
            return Range{r.first - tile.first, (r.end < tile.end ? r.end : tile.end) - tile.first};
          },
          holes,
          [&](int row, int column) {
            return p.pattern.counts(at.h, sweep.queries.at(first + row),
                                    sweep.keys.at(tile.first + column));
          });
    }
    if (drops) {
      make_kept<Tiling::kQueries, kKeys, kThreads>(small.kept[parity], [&](int row, int column) {
        const std::int64_t key = tile.first + column;
        return row < count && key < tile.end &&
               p.dropout.keeps(small.drawn[row], p.token(sweep.keys.at(key)) - sweep.first_key);
      });
    }
    return masked;
  };

  __syncthreads();  // drawn
  const int lane = static_cast<int>(threadIdx.x) & 31;
  const int first_row = uniform_warp() * kM * 16;
  float acc[kM][kColumns / 8][4] = {};
  KeyWalk walk;
  walk.start(sweep, seen, kKeys);
  bool masked = !walk.done() && issue(walk.tile(kKeys), 0, 0);
  for (int parity = 0; !walk.done(); parity ^= 1) {
    copy_async_wait<0>();
    __syncthreads();  // this tile is here, and all are done with the one before
    const int stage = kStages == 2 ? parity : 0;
    const bool now_masked = masked;
    walk.next(sweep, seen, kKeys);
    if (kStages == 2 && !walk.done()) masked = issue(walk.tile(kKeys), stage ^ 1, parity ^ 1);

    float s[kM][kKeys / 8][4], dp[kM][kKeys / 8][4];
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
    score_gradients(dp, s, p.dropout.scale, [&](int m, int, int e) { return delta[m * 2 + e / 2]; });
    if (now_masked) {
      keep_bits(dp, small.mask[parity], first_row, 0.0f);
      if (has_rows_not_finite<F, kThreads>(k_tile(stage))) {
        take_out_rows_not_finite<F, kThreads>(acc, dp, k_tile(stage), first_row,
                                              small.mask[parity], small.flags);
      }
    }
    add_product<F>(acc, dp, k_tile(stage));
    if (kStages == 1 && !walk.done()) {
      __syncthreads();
      masked = issue(walk.tile(kKeys), 0, parity ^ 1);
    }
  }
  copy_async_wait<0>();
  store_gradient<T>(acc, p.scale, first_row, count, a.dq, a.sum, at.b, at.h, p.Tq, p.H, p.D, token);
}

template <class T, int kColumns>
void launch_query_gradient(const char* op, QueryGradientArgs a, cudaStream_t stream) {
  using Tiling = QueryGradientTiling<T, kColumns>;
  a.p.slots = a.p.pattern.slots(true, Tiling::kQueries);
  const std::int64_t blocks = a.p.B * a.p.H * a.p.slots;
  if (blocks == 0) return;
  allow_shared(op, "query_gradient_kernel", query_gradient_kernel<T, kColumns>,
               Tiling::kSharedBytes);
  query_gradient_kernel<T, kColumns>
      <<<checked_blocks(op, blocks), Tiling::kThreads, Tiling::kSharedBytes, stream>>>(a);
  check_launch(op, "query_gradient_kernel");
}

}  // namespace annulus::attention::cuda
