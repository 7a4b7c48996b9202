// dq, dk, dv in one pass, where atomics are allowed: five products where the kernels without them need seven. As there, a
// block of threads has a tile of a line of keys and goes over the queries that see any of them, and rows of its products are
// keys. What a tile of queries gets is added in fp32 to what other tiles of keys add:
//
//   p = exp(s - lse),   ds = p (z <do, v> - delta),   dv_j = sum_i z p do_i,   dk_j = scale sum_i ds q_i,
//   dq_i += scale sum_j ds k_j
#pragma once

#include <cstddef>
#include <cstdint>

#include "annulus/attention/cuda/gradient_rows.cuh"
#include "annulus/attention/cuda/key_block.cuh"
#include "annulus/attention/cuda/launch.h"
#include "annulus/cuda/launch.cuh"
#include "annulus/cuda/reduce.cuh"

namespace annulus::attention::cuda {

// kKeyWarps x kQueryWarps warps share the scores of a tile: a warp has kM times 16 keys, and kPart queries at a time of
// kSteps times as many. The bandwidth of shared memory is what limits, so a fragment should serve many products. Where one
// row of warps has all queries, weights go from product to product in registers. Otherwise they pass through shared memory,
// and then a warp has a part of the columns of dk and dv, of all queries.
template <class T, int kColumns_, int kKeyWarps_, int kQueryWarps_, int kM_, int kPart_,
          int kSteps_, int kBlocks_, bool kLate_ = false, int kRowWarps_ = 2>
struct GradientTiling {
  using Type = T;
  static constexpr int kColumns = kColumns_, kKeyWarps = kKeyWarps_, kQueryWarps = kQueryWarps_;
  static constexpr int kM = kM_, kPart = kPart_, kSteps = kSteps_, kBlocks = kBlocks_;
  static constexpr int kWarps = kKeyWarps * kQueryWarps, kThreads = kWarps * 32;
  static constexpr int kKeys = kKeyWarps * kM * 16, kParts = kQueryWarps * kSteps,
                       kQueries = kParts * kPart;
  static constexpr bool kInRegisters = kQueryWarps == 1;
  static_assert(kInRegisters || kSteps == 1);
  static_assert(kThreads >= kQueries);
  // dk and dv of a warp.
  static constexpr int kOwnColumns = kColumns / kQueryWarps;
  // dq is made of a tile while the scores of the next are: one wait for others a tile less, and more that can overlap.
  static constexpr bool kLate = kLate_ && kInRegisters;
  static constexpr int kSlots = kLate ? 3 : 2;
  // dq: kRowWarps times as many warps as there are of columns.
  static constexpr int kRowWarps = kRowWarps_, kColumnWarps = kWarps / kRowWarps;
  static constexpr int kRowM = kQueries / kRowWarps / 16, kRowColumns = kColumns / kColumnWarps;

  using F = Format<T>;
  using KeyTile = Tile<F, kKeys, kColumns>;
  using QueryTile = Tile<F, kQueries, kColumns>;
  using PartTile = Tile<F, kPart, kColumns>;
  using ScoreTile = Tile<F, kKeys, kQueries>;
  static constexpr int kPartWords = kKeys * kPart / 32, kWords = kParts * kPartWords;

  // Bits lie part by part.
  struct Small : KeyBlock {
    std::uint64_t drawn[2][kQueries];
    std::int64_t row[kSlots][kQueries];  // where in dq, or negative
    float lse[2][kQueries], delta[2][kQueries];
    std::uint32_t mask[kSlots][kWords], kept[2][kWords];
    int flags[kKeys > kQueries ? kKeys : kQueries];
    std::uint32_t found[kWarps];
  };
  static constexpr int kScoreTiles = kLate || !kInRegisters ? 2 : 1;
  static constexpr int kTileBytes =
      2 * KeyTile::kBytes + 4 * QueryTile::kBytes + kScoreTiles * ScoreTile::kBytes;
  static constexpr std::size_t kSharedBytes = kTileBytes + sizeof(Small);
};

template <class Tiling>
__global__ void __launch_bounds__(Tiling::kThreads, Tiling::kBlocks)
    gradient_kernel(const __grid_constant__ GradientArgs a) {
  using T = typename Tiling::Type;
  using F = Format<T>;
  using KeyTile = typename Tiling::KeyTile;
  using QueryTile = typename Tiling::QueryTile;
  using PartTile = typename Tiling::PartTile;
  using ScoreTile = typename Tiling::ScoreTile;
  constexpr int kThreads = Tiling::kThreads, kKeys = Tiling::kKeys, kQueries = Tiling::kQueries,
                kPart = Tiling::kPart, kM = Tiling::kM, kSlots = Tiling::kSlots;
  constexpr bool kInRegisters = Tiling::kInRegisters, kLate = Tiling::kLate;
  await_previous_kernel();
  if (a.not_finite != nullptr && *a.not_finite == 0) return;
  extern __shared__ __align__(1024) unsigned char shared[];
  const std::uint32_t base = shared_address(shared);
  const KeyTile k_tile{base}, v_tile{base + KeyTile::kBytes};
  const std::uint32_t queries_base = base + 2 * KeyTile::kBytes;
  const std::uint32_t scores_base = queries_base + 4 * QueryTile::kBytes;
  const auto q_tile = [&](int stage) {
    return QueryTile{queries_base + 2 * stage * QueryTile::kBytes};
  };
  const auto do_tile = [&](int stage) {
    return QueryTile{queries_base + (2 * stage + 1) * QueryTile::kBytes};
  };
  auto& small = *reinterpret_cast<typename Tiling::Small*>(shared + Tiling::kTileBytes);

  const Problem& p = a.p;
  const Sweep& sweep = small.sweep;
  if (threadIdx.x == 0) small.start(a, kKeys);
  __syncthreads();
  if (small.count == 0) return;
  const bool drops = p.dropout.any();
  const auto token = [&](int row) { return p.token(sweep.keys.at(small.first + row)); };
  const auto load_keys = [&](KeyTile tile, const Operand& operand, int columns) {
    load_tile<F, kThreads>(tile, operand.at<T>(small.b, small.h), operand, p, sweep.keys,
                           small.first, small.count, columns);
  };
  load_keys(k_tile, p.k, p.D);
  load_keys(v_tile, p.v, p.Dv);

  QueryWalk<kThreads, kQueries> walk{a, small, small.found};
  // Of the thread's query in the next tile: read before the products of this one, and put into shared memory behind them.
  float next_lse = 0, next_delta = 0;
  const int own = static_cast<int>(threadIdx.x);
  // Has a tile of queries brought, and says whether it is masked.
  const auto issue = [&](int stage, int slot) {
    const Range tile = walk.tile();
    const std::int64_t h = walk.query_head();
    const int queries = static_cast<int>(tile.end - tile.first);
    load_tile<F, kThreads>(q_tile(stage), p.q.at<T>(small.b, h), p.q, p, sweep.queries, tile.first,
                           queries, p.D);
    load_tile<F, kThreads>(do_tile(stage), a.do_.at<T>(small.b, h), a.do_, p, sweep.queries,
                           tile.first, queries, p.Dv);
    copy_async_commit();
    if (own < kQueries) {
      const bool there = own < queries;
      const std::int64_t t = there ? p.token(sweep.queries.at(tile.first + own)) : 0;
      // Where there are layers a block has one head.
      const std::int64_t in_layer = small.query_row + tile.first + own;
      const std::int64_t i = a.delta.of_layers ? in_layer : (small.b * p.H + h) * a.delta.rows + t;
      next_lse = there ? p.lse.at<const float>(small.b, h)[t * p.lse.row] : 0.0f;
      next_delta = there ? a.delta.data[i] : 0.0f;
      const std::int64_t row = a.dq.layers != nullptr ? in_layer : (small.b * p.Tq + t) * p.H + h;
      small.row[slot][own] = there ? row * LayerRows::pitch(p.D) : -1;
      if (drops) small.drawn[stage][own] = p.dropout.row(sweep.sample, h, t - sweep.first_query);
    }
    const bool holes = p.pattern.has_holes();
    const Range all = sweep.seen_by_all(tile);
    const bool masked = holes || small.first < all.first || small.first + kKeys > all.end ||
                        small.count < kKeys || queries < kQueries;
    if (masked) {
#pragma unroll 1
      for (int part = 0; part < Tiling::kParts; ++part) {
        const std::int64_t first = tile.first + part * kPart;
        make_mask<kKeys, kPart, kThreads>(
            small.mask[slot] + part * Tiling::kPartWords,
            [&](int row) {
              const Range r = row < small.count
                                  ? sweep.seeing_any({small.first + row, small.first + row + 1})
                                  : Range{};
              return Range{r.first - first, (r.end < tile.end ? r.end : tile.end) - first};
            },
            holes,
            [&](int row, int column) {
              return p.pattern.counts(small.layer, h, sweep.queries.at(first + column),
                                      sweep.keys.at(small.first + row));
            });
      }
    }
    if (drops) {
      __syncthreads();  // drawn
#pragma unroll 1
      for (int part = 0; part < Tiling::kParts; ++part) {
        make_kept<kKeys, kPart, kThreads>(
            small.kept[stage] + part * Tiling::kPartWords, [&](int row, int column) {
              const int query = part * kPart + column;
              return row < small.count && query < queries &&
                     p.dropout.keeps(small.drawn[stage][query], token(row) - sweep.first_key);
            });
      }
    }
    return masked;
  };
  const auto arrive = [&](int stage) {
    if (own >= kQueries) return;
    small.lse[stage][own] = weight_origin(next_lse);
    small.delta[stage][own] = next_delta;
  };

  const int lane = static_cast<int>(threadIdx.x) & 31, warp = uniform_warp();
  const int query_warp = kInRegisters ? 0 : warp / Tiling::kKeyWarps;
  const int first_row = (kInRegisters ? warp : warp % Tiling::kKeyWarps) * kM * 16;
  constexpr int kD = Tiling::kOwnColumns / 8;
  const int first_chunk = query_warp * kD;
  const auto counts = [&](int slot, int key, int query) {
    constexpr int kWords = kPart / 32;
    const std::uint32_t word =
        small.mask[slot][query / kPart * Tiling::kPartWords + key * kWords + query % kPart / 32];
    return (word >> (query % 32) & 1) != 0;
  };

  // dq of a tile whose gradients of scores are in shared memory.
  bool k_not_finite = false;
  const auto add_queries = [&]<bool kPlain>(ScoreTile scores, int slot, bool masked) {
    constexpr int kRowM = Tiling::kRowM, kN = Tiling::kRowColumns / 8;
    const int first_query = warp % Tiling::kRowWarps * kRowM * 16;
    const int chunk = warp / Tiling::kRowWarps * kN;
    float dq[kRowM][kN][4] = {};
    const bool takes_out = !kPlain && masked && k_not_finite;
    if (takes_out) {
      __syncthreads();  // scores of the tile at hand may be in the making
      take_out_not_finite<F, kThreads, false>(
          dq, k_tile, first_query, chunk, small.flags,
          [&](int query, int key) { return counts(slot, key, query); });
    }
    const std::uint32_t from = at_chunk(b_address(scores), first_query / 8);
    add_product_of<F>(
        dq,
        [&](int m, int k) {
          return ldmatrix_transposed(at_chunk(from, 2 * m) + k * 16 * ScoreTile::kPitch);
        },
        k_tile, chunk);
    if (takes_out) {  // scores need the keys as they are
      __syncthreads();
      load_keys(k_tile, p.k, p.D);
      copy_async_commit();
      copy_async_wait<0>();
      __syncthreads();
    }
    float* const to = a.dq.layers != nullptr ? a.dq.layers : a.dq.sum;
    add_rows(dq, p.scale, to, chunk * 8, p.D,
             [&](int i) { return small.row[slot][first_query + i]; });
  };

  float dk[kM][kD][4] = {}, dv[kM][kD][4] = {};
  // All of a tile. kPlain: everything counts, and nothing is dropped: without a branch, so that products and what is between
  // them can overlap.
  bool was_masked = false, was = false;
  int before = 0;
  const auto add_tile = [&]<bool kPlain>(int stage, int now, bool now_masked) {
    const ScoreTile scores{scores_base + (kLate ? stage : 0) * ScoreTile::kBytes};
    if (kLate && (kPlain || was)) {
      add_queries.template operator()<kPlain>(
          ScoreTile{scores_base + (stage ^ 1) * ScoreTile::kBytes}, before, was_masked);
    }
#pragma unroll
    for (int step = 0; step < Tiling::kSteps; ++step) {
      const int part = kInRegisters ? step : query_warp;
      const PartTile q_part{q_tile(stage).address + part * PartTile::kBytes};
      const PartTile do_part{do_tile(stage).address + part * PartTile::kBytes};
      const std::uint32_t* const mask = small.mask[now] + part * Tiling::kPartWords;
      const std::uint32_t* const kept = small.kept[stage] + part * Tiling::kPartWords;
      const auto of_query = [&](const float* from) {
        const float* const own_part = from + part * kPart + lane % 4 * 2;
        return [=](int, int n, int e) { return own_part[n * 8 + e % 2]; };
      };
      float s[kM][kPart / 8][4], dp[kM][kPart / 8][4];
      multiply_rows<F>(s, k_tile, first_row, q_part);
      multiply_rows<F>(dp, v_tile, first_row, do_part);
      weights_of(s, p, of_query(small.lse[stage]));
      if (!kPlain && drops) keep_bits(dp, kept, first_row, 0.0f);
      score_gradients(dp, s, p.dropout.scale, of_query(small.delta[stage]));
      if (!kPlain && drops) keep_bits(s, kept, first_row, 0.0f);
      if (!kPlain && now_masked) {
        keep_bits(s, mask, first_row, 0.0f);
        keep_bits(dp, mask, first_row, 0.0f);
      }
      Weights<F, kM, kPart / 8> weights, ds;
      weights.take(s);
      ds.take(dp);
      store_weights(ds, scores, first_row, part * (kPart / 8));
      if constexpr (kInRegisters) {
        if (!kPlain && now_masked && has_not_finite<F, kThreads>(do_part)) {
          take_out_not_finite<F, kThreads, true>(dv, do_part, first_row, mask, small.flags);
        }
        add_product(dv, weights, do_part);
        if (!kPlain && now_masked && has_not_finite<F, kThreads>(q_part)) {
          take_out_not_finite<F, kThreads, false>(dk, q_part, first_row, mask, small.flags);
        }
        add_product(dk, ds, q_part);
      } else {
        store_weights(weights, ScoreTile{scores.address + ScoreTile::kBytes}, first_row,
                      part * (kPart / 8));
      }
    }
    if constexpr (!kLate) __syncthreads();  // scores are there
    if constexpr (!kInRegisters) {
      const auto keys_counts = [&](int key, int query) { return counts(now, key, query); };
      const auto from = [&](ScoreTile tile) {
        const std::uint32_t address = a_address(tile, first_row);
        return [=](int m, int k) {
          return ldmatrix(at_chunk(address, 2 * k) + m * 16 * ScoreTile::kPitch);
        };
      };
      if (!kPlain && now_masked && has_not_finite<F, kThreads>(do_tile(stage))) {
        take_out_not_finite<F, kThreads, true>(dv, do_tile(stage), first_row, first_chunk,
                                               small.flags, keys_counts);
      }
      add_product_of<F>(dv, from(ScoreTile{scores.address + ScoreTile::kBytes}), do_tile(stage),
                        first_chunk);
      if (!kPlain && now_masked && has_not_finite<F, kThreads>(q_tile(stage))) {
        take_out_not_finite<F, kThreads, false>(dk, q_tile(stage), first_row, first_chunk,
                                                small.flags, keys_counts);
      }
      add_product_of<F>(dk, from(scores), q_tile(stage), first_chunk);
    }
    if constexpr (kLate) {
      was = true;
      before = now;
      was_masked = now_masked;
    } else {
      add_queries.template operator()<kPlain>(scores, now, now_masked);
    }
  };
  walk.start();
  bool masked = !walk.done() && issue(0, 0);
  if (!walk.done()) arrive(0);
  copy_async_wait<0>();
  __syncthreads();
  k_not_finite = has_not_finite<F, kThreads>(k_tile);
  int slot = 0, stage = 0;
  for (; !walk.done(); stage ^= 1) {
    copy_async_wait<0>();
    __syncthreads();  // this tile is here, and all are done with the one before
    const bool now_masked = masked;
    const int now = slot;
    walk.next();
    if (!walk.done()) {
      slot = slot + 1 == kSlots ? 0 : slot + 1;
      masked = issue(stage ^ 1, slot);
    }
    if (!now_masked && !drops && !(k_not_finite && was_masked) && (was || !kLate)) {
      add_tile.template operator()<true>(stage, now, false);
    } else {
      add_tile.template operator()<false>(stage, now, now_masked);
    }
    if (!walk.done()) arrive(stage ^ 1);
  }
  if (kLate && was) {
    __syncthreads();
    add_queries.template operator()<false>(ScoreTile{scores_base + (stage ^ 1) * ScoreTile::kBytes},
                                           before, was_masked);
  }
  store_gradient<T>(dk, p.scale, first_row, first_chunk * 8, small.count, a.dk, small.layer_row,
                    small.b, small.h, p.Tk, p.Hkv, p.D, token);
  store_gradient<T>(dv, p.dropout.scale, first_row, first_chunk * 8, small.count, a.dv,
                    small.layer_row, small.b, small.h, p.Tk, p.Hkv, p.Dv, token);
}

template <class Tiling>
void launch_gradient(const char* op, GradientArgs a, cudaStream_t stream) {
  const std::int64_t blocks = a.p.number_blocks(a.p.Hkv, false, Tiling::kKeys);
  if (blocks == 0) return;
  launch_kernel(op, "gradient_kernel", gradient_kernel<Tiling>, checked_blocks(op, blocks),
                Tiling::kThreads, Tiling::kSharedBytes, stream, a);
}

// Tiles of 128 keys have the least traffic of shared memory a product; those of 64 are for short sweeps, and where 128 would
// leave half of the device idle. Of few tiles each should have all warps of a multiprocessor.
template <class T, int kColumns>
void gradient_of(const char* op, const GradientArgs& a, cudaStream_t stream) {
  const Fill fill = fill_of(op, a.p, a.p.Hkv, false, 128);
  const bool is_short = a.p.longest_sweep(false) <= kShortSweep;
  if constexpr (kColumns == 64) {
    using Short = GradientTiling<T, 64, 4, 1, 1, 64, 1, 2, true>;
    using Few = GradientTiling<T, 64, 4, 2, 1, 64, 1, 1>;
    using Wide = GradientTiling<T, 64, 4, 2, 2, 64, 1, 1, false, 4>;
    using Most = GradientTiling<T, 64, 4, 1, 2, 32, 2, 2, true>;
    if (is_short) return launch_gradient<Short>(op, a, stream);
    if (fill == Fill::kHalf) return launch_gradient<Few>(op, a, stream);
    if (fill == Fill::kOnce) return launch_gradient<Wide>(op, a, stream);
    launch_gradient<Most>(op, a, stream);
  } else {
    static_assert(kColumns == 128);
    using Short = GradientTiling<T, 128, 4, 1, 1, 64, 1, 2>;
    using Few = GradientTiling<T, 128, 4, 2, 1, 32, 1, 1>;
    using Most = GradientTiling<T, 128, 4, 2, 2, 32, 1, 1>;
    if (is_short) return launch_gradient<Short>(op, a, stream);
    if (fill == Fill::kHalf) return launch_gradient<Few>(op, a, stream);
    launch_gradient<Most>(op, a, stream);
  }
}

}  // namespace annulus::attention::cuda
