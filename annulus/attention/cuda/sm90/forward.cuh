// Forward on Hopper: one warpgroup brings tiles of keys and values, the others have 64 queries each. While the tensor cores
// make the next scores and add the last tile's values, a warpgroup makes weights of the scores it has.
//
// There are two of each kernel. In an even one (even.h) every query sees every key of its line, and one thread asks the copy engine for
// all of them: a third of the instructions, of which the device's memory has to bring each before its first time.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <type_traits>

#include "annulus/attention/cuda/forward_rows.cuh"
#include "annulus/attention/cuda/launch.h"
#include "annulus/attention/cuda/sm90/even.h"
#include "annulus/attention/cuda/sm90/maps.h"
#include "annulus/attention/cuda/sm90/tile.cuh"
#include "annulus/cuda/launch.cuh"
#include "annulus/cuda/tma.cuh"

namespace annulus::attention::cuda::sm90 {

template <class T_, int kColumns_, int kConsumers_, int kKeys_, int kStages_, bool kEven_>
struct ForwardTiling {
  using T = T_;
  static constexpr bool kEven = kEven_;
  static constexpr int kColumns = kColumns_, kConsumers = kConsumers_, kKeys = kKeys_,
                       kStages = kStages_;
  static constexpr int kQueries = 64 * kConsumers;
  static constexpr int kThreads = kGroup * (kConsumers + 1);
  // Together no more than what the launch gave, 168 (or 128) each, or nobody gets anything. Of 128 columns consumers need all
  // that there are: with 224 they are about 11 % slower.
  static constexpr int kProducerRegisters = kConsumers == 3  ? 32
                                            : kEven          ? 24
                                            : kColumns == 64 ? 56
                                                             : 40;
  static constexpr int kConsumerRegisters = kConsumers == 3  ? 160
                                            : kEven          ? 240
                                            : kColumns == 64 ? 224
                                                             : 232;
  // Threads that say of a block or a tile that it is there.
  static constexpr int kProducers = kEven ? 1 : kGroup;

  using QueryTile = Panels<kQueries, kColumns>;
  using KeyTile = Panels<kKeys, kColumns>;
  static constexpr int kTileBytes = QueryTile::kBytes + 2 * kStages * KeyTile::kBytes;

  // A tile of queries, and of each row the first key and the end, counted from seen.first.
  struct AnyBlock : QueryBlock {
    bool tiled;  // are there keys?
    MappedLine query_line, key_line;
    int first_key[kQueries], end_key[kQueries];
  };
  // Of a QueryBlock it has what stores ask for; the keys' sweep, who sees what, k and v are unset. (States so far are of dense calls
  // alone, whose rows follow each other.)
  struct EvenBlock : QueryBlock {
    MappedLine line;  // of queries and of keys
    int keys, key_head;
  };
  using Block = std::conditional_t<kEven, EvenBlock, AnyBlock>;
  struct Small {
    // Of two tiles of queries: the one whose results are stored, or at hand, and the next.
    Block block[2];
    QueryBlock none;  // without a row; nothing else of it is set, or followed
    SharedBarrier blocks[2 * 2], q_full, k_stages[2 * kStages], v_stages[2 * kStages];
    TileNote note[kStages];
    int not_finite[kStages];  // were there any in the tile of values? Said of tiles that are masked
  };
  static constexpr std::size_t kSharedBytes = kTileBytes + sizeof(Small);
};

// Whole tiles that every query sees, and those at the end of their tensors, come by the copy engine, which one thread asks; of
// all others each thread brings some rows.
struct ForwardMaps {
  RowMaps q, k, v;
};
struct NoGrid {};

// Scores become weights; `factor` is what sums so far are to be multiplied by. Both rows go side by side, in chains short
// enough that no instruction waits for the one before. (With a fourth or an eighth of the exponents by a polynomial instead of the
// special-function unit forwards of 64 columns take 5 to 25 % longer.)
template <int kN>
__device__ __forceinline__ void weights_of(float (&s)[kN], RowStates<2>& state, float (&factor)[2],
                                           float scale) {
  constexpr int kChains = 4;
  float part[2][kChains];
#pragma unroll
  for (int i = 0; i < kChains; ++i) {
#pragma unroll
    for (int half = 0; half < 2; ++half) part[half][i] = s[i / 2 * 4 + half * 2 + i % 2];
  }
#pragma unroll
  for (int i = kChains; i < kN / 2; ++i) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      float& high = part[half][i % kChains];
      high = fmaxf(high, s[i / 2 * 4 + half * 2 + i % 2]);
    }
  }
  float high[2], origin[2];
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    high[half] = fmaxf(fmaxf(part[half][0], part[half][1]), fmaxf(part[half][2], part[half][3]));
    high[half] = fmaxf(high[half], state.m[half]);
  }
#pragma unroll
  for (int step = 1; step < 4; step *= 2) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      high[half] = fmaxf(high[half], __shfl_xor_sync(~0u, high[half], step));
    }
  }
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    origin[half] = origin_of(high[half]) * scale;
    // Exactly 1 where nothing moved: of the rounded origin it would be off the same way in every tile.
    factor[half] = exp2_fast((state.m[half] - origin_of(high[half])) * scale);
    state.m[half] = high[half];
  }
#pragma unroll
  for (int i = 0; i < kN / 2; ++i) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      float& x = s[i / 2 * 4 + half * 2 + i % 2];
      x = exp2_fast(fmaf(x, scale, -origin[half]));
      part[half][i % kChains] = i < kChains ? x : part[half][i % kChains] + x;
    }
  }
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const float sum = (part[half][0] + part[half][1]) + (part[half][2] + part[half][3]);
    state.l[half] = fmaf(state.l[half], factor[half], sum);
  }
}

template <int kN>
__device__ __forceinline__ void multiply_by(float (&o)[kN], const float (&factor)[2]) {
#pragma unroll
  for (int i = 0; i < kN; ++i) o[i] *= factor[i / 2 % 2];
}

#if ANNULUS_DEVICE_HOPPER

// What clear_not_finite() took out of a tile of values is added to the rows that see it, as it is: weights are positive. It is
// read once more from where it came. Rare, and slow.
template <class T, int kN>
__device__ __forceinline__ void add_not_finite(float (&o)[kN], const Problem& p,
                                               const QueryBlock& block, int first_of_tile,
                                               int count, const int (&first)[2],
                                               const int (&end)[2]) {
  const int lane = static_cast<int>(threadIdx.x) & 31;
#pragma unroll 1
  for (int at = 0; at < count; ++at) {
    const std::int64_t key = block.seen.first + first_of_tile + at;
    const T* const row =
        static_cast<const T*>(block.v) + p.token(block.sweep.keys.at(key)) * p.v.row;
#pragma unroll
    for (int n = 0; n < kN / 4; ++n) {
#pragma unroll
      for (int e = 0; e < 2; ++e) {
        const int column = 8 * n + lane % 4 * 2 + e;
        const float v = column < p.Dv ? static_cast<float>(row[column]) : 0.0f;
        if (isfinite(v)) continue;
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          if (at >= first[half] && at < end[half]) o[4 * n + 2 * half + e] += v;
        }
      }
    }
  }
}

// What goes between those who bring tiles and the others: blocks, tiles of keys and of values, and where these lie.
template <class Tiling>
struct ForwardRings {
  using QueryTile = typename Tiling::QueryTile;
  using KeyTile = typename Tiling::KeyTile;
  Pipeline blocks, k, v;
  unsigned char *shared, *k_tiles, *v_tiles;

  __device__ __forceinline__ ForwardRings(typename Tiling::Small& small, unsigned char* tiles)
      : blocks(small.blocks, 2),
        k(small.k_stages, Tiling::kStages),
        v(small.v_stages, Tiling::kStages),
        shared(tiles),
        k_tiles(shared + QueryTile::kBytes),
        v_tiles(k_tiles + Tiling::kStages * KeyTile::kBytes) {}
  __device__ __forceinline__ QueryTile q_tile() const { return {shared}; }
  __device__ __forceinline__ KeyTile k_tile(int stage) const {
    return {k_tiles + stage * KeyTile::kBytes};
  }
  __device__ __forceinline__ KeyTile v_tile(int stage) const {
    return {v_tiles + stage * KeyTile::kBytes};
  }
};

// Blocks of threads stay, and take tiles of queries by turns: there and back, as the first ones have the most keys.
__device__ __forceinline__ std::int64_t block_of_turn(std::int64_t turn) {
  const auto width = static_cast<std::int64_t>(gridDim.x),
             own = static_cast<std::int64_t>(blockIdx.x);
  return turn * width + (turn % 2 == 0 ? own : width - 1 - own);
}

// One warpgroup: queries, then keys and values tile by tile.
template <class Tiling>
__device__ __forceinline__ void bring_tiles(const Problem& p, std::int64_t blocks,
                                            const ForwardMaps& maps, typename Tiling::Small& small,
                                            unsigned char* shared) {
  using T = typename Tiling::T;
  using QueryTile = typename Tiling::QueryTile;
  using KeyTile = typename Tiling::KeyTile;
  constexpr int kStages = Tiling::kStages, kKeys = Tiling::kKeys, kOwn = 1;  // kOwn: named barrier
  const int thread = static_cast<int>(threadIdx.x) % kGroup;
  const bool leads = thread == 0;
  const ForwardRings<Tiling> rings(small, shared);
  PipelineStage at_block = Pipeline::producer(), stage = Pipeline::producer();
  PipelineStage last_keys = Pipeline::producer();
  // Takes one thread about 2.5 us, and runs while tiles of the block before are at work. (With warps of their own for it, which the
  // copies then do without, forwards take 4 to 19 % longer.)
  const auto find_block = [&](std::int64_t turn) {
    const std::int64_t number = block_of_turn(turn);
    auto& block = small.block[at_block.at];
    rings.blocks.acquire(at_block);
    if (leads) {
      if (number < blocks) {
        block.template start<T>(p, Tiling::kQueries, number);
        if (block.count > 0) {
          block.query_line.find(maps.q, block.sweep.queries);
          block.key_line.find(maps.k, block.sweep.keys);
        }
      } else {
        block.count = -1;
      }
    }
    sync_threads(kOwn, kGroup);
    const int rows = block.count;
    for (int row = thread; row < Tiling::kQueries; row += kGroup) {
      // (Of a row that sees no key both are where it would: the last one's end is that of all before it.)
      Range r = block.seen;
      if (row < rows) r = block.sweep.seen_from(block.query(row));
      block.first_key[row] = static_cast<int>(r.first - block.seen.first);
      block.end_key[row] = row < rows ? static_cast<int>(r.end - block.seen.first) : 0;
    }
    if (leads) {
      KeyWalk walk;
      if (rows > 0) walk.start(block.sweep, block.seen, kKeys);
      block.tiled = !walk.done();
    }
    rings.blocks.commit(at_block);
    at_block.next(2);
  };
  const auto bring_queries = [&](const auto& block) {
    // They are done with when the last keys are: before values are added, and o is stored. (Where consumers say it themselves, or
    // there are two stages of queries, their loops spill: 10 to 20 % longer. Asking for a block's first scores while the last
    // values of the one before are added makes the compiler serialize all products.)
    rings.k.acquire(last_keys);
    const QueryTile tile = rings.q_tile();
    const int rows = block.count;
    if (block.query_line.map < 0 || (rows < Tiling::kQueries && !block.query_line.ends)) {
      load_rows<T>(tile, p.q.at<const T>(block.b, block.h), p.q, p, block.sweep.queries,
                   block.first, rows, p.D);
      small.q_full.arrive_when_copied();
    } else if (leads) {
      small.q_full.arrive_expecting(QueryTile::kBytes);
      load_boxes(tile, maps.q, block.query_line, block.first, block.b, block.h, &small.q_full);
    } else {
      small.q_full.arrive();
    }
  };
  // The walk's next tile of keys and values, and after the block's first keys its queries.
  const auto bring_keys = [&](const auto& block, KeyWalk& walk, bool first) {
    const Range tile = walk.tile(kKeys);
    walk.next(block.sweep, block.seen, kKeys);
    const auto count = static_cast<int>(tile.end - tile.first);
    const bool seen = block.all_see(p, tile);
    const bool masked = !seen || count < kKeys;
    const bool by_engine =
        block.key_line.map >= 0 && seen &&
        (count == kKeys || (block.key_line.ends && tile.end == block.sweep.keys.count));
    const auto load = [&](const Pipeline& ring, const KeyTile& to, const void* from,
                          const Operand& operand, const RowMaps& map, int columns) {
      if (!by_engine) {
        load_rows<T>(to, static_cast<const T*>(from), operand, p, block.sweep.keys, tile.first,
                     count, columns);
      } else if (leads) {
        const std::int64_t head = p.group == 1 ? block.h : block.h / p.group;
        ring.expect(stage, KeyTile::kBytes);
        load_boxes(to, map, block.key_line, tile.first, block.b, head, ring.full + stage.at);
      } else {
        ring.commit(stage);
      }
    };
    rings.k.acquire(stage);
    if (leads) {
      small.note[stage.at] = {static_cast<int>(tile.first - block.seen.first), count, masked,
                              walk.done(), !by_engine};
      rings.k.commit(stage);
    }
    load(rings.k, rings.k_tile(stage.at), block.k, p.k, maps.k, p.D);
    if (!by_engine) rings.k.full[stage.at].arrive_when_copied();
    if (first) bring_queries(block);
    rings.v.acquire(stage);
    const KeyTile v_tile = rings.v_tile(stage.at);
    if (by_engine && leads) small.not_finite[stage.at] = 0;
    load(rings.v, v_tile, block.v, p.v, maps.v, p.Dv);
    if (!by_engine && masked) {
      copy_async_wait_all();
      const bool any = sync_threads_or(kOwn, kGroup, clear_not_finite<T>(v_tile));
      if (leads) small.not_finite[stage.at] = any;
      rings.v.commit(stage);
    } else if (!by_engine) {
      rings.v.full[stage.at].arrive_when_copied();
    }
    last_keys = {stage.at, stage.parity ^ 1};
    stage.next(kStages);
  };
  // A block is found when as many tiles of the one before have been brought as there is room for.
  for (std::int64_t turn = -1;; ++turn) {
    const auto& block = small.block[turn & 1];
    const int rows = turn < 0 ? 0 : block.count;
    if (rows < 0) break;
    KeyWalk walk;
    if (rows > 0) walk.start(block.sweep, block.seen, kKeys);
    for (int tiles = 1; !walk.done() || tiles <= kStages; ++tiles) {
      if (!walk.done()) bring_keys(block, walk, tiles == 1);
      if (tiles == kStages) find_block(turn + 1);
    }
  }
  copy_async_wait_all();
}

// The same of an even call, by one thread.
// (Tried for a sooner beginning, without gain: its maps prefetched, its arguments touched by all warps at once, the wait for the kernel before
// put off until the first copy. A head's keys and values asked for to L2 ahead: 128 columns 3 % longer. Results stored while the next block's
// first scores are made: they spill, 10 to 20 % longer.)
template <class Tiling>
__device__ __forceinline__ void bring_even_tiles(const ForwardArgs& a, const EvenGrid& grid,
                                                 std::int64_t blocks, const ForwardMaps& maps,
                                                 typename Tiling::Small& small,
                                                 unsigned char* shared) {
  using QueryTile = typename Tiling::QueryTile;
  using KeyTile = typename Tiling::KeyTile;
  constexpr int kStages = Tiling::kStages, kKeys = Tiling::kKeys;
  const ForwardRings<Tiling> rings(small, shared);
  PipelineStage at_block = Pipeline::producer(), stage = Pipeline::producer();
  PipelineStage last_keys = Pipeline::producer();
  for (int turn = 0;; ++turn) {
    const std::int64_t number = block_of_turn(turn);
    auto& block = small.block[at_block.at];
    rings.blocks.acquire(at_block);
    const bool there = number < blocks;
    if (there) {
      grid.find(block, a.p, static_cast<std::int32_t>(number));
    } else {
      block.count = -1;
    }
    rings.blocks.commit(at_block);
    at_block.next(2);
    if (!there) break;
    if (a.carries) {
      // States so far, which are read at the block's end: to L2.
      const std::int64_t row = a.p.part_row(0, block.b, block.h, block.first);
      const std::int64_t pitch = LayerRows::pitch(a.p.Dv);
      prefetch_bulk(a.states.acc + row * pitch, static_cast<unsigned>(block.count * pitch * 4));
    }
    const int keys = block.keys;
#pragma unroll 1
    for (int first = 0; first < keys; first += kKeys) {
      const auto load = [&](const Pipeline& ring, const KeyTile& to, const RowMaps& map) {
        ring.expect(stage, KeyTile::kBytes);
        load_boxes(to, map, block.line, first, block.b, block.key_head, ring.full + stage.at);
      };
      rings.k.acquire(stage);
      const bool last = first + kKeys >= keys;
      const int count = last ? keys - first : kKeys;
      small.note[stage.at] = {first, count, count < kKeys, last, false};
      load(rings.k, rings.k_tile(stage.at), maps.k);
      if (first == 0) {
        rings.k.acquire(last_keys);  // with which the queries before are done with
        small.q_full.arrive_expecting(QueryTile::kBytes);
        load_boxes(rings.q_tile(), maps.q, block.line, block.first, block.b, block.h,
                   &small.q_full);
      }
      rings.v.acquire(stage);
      load(rings.v, rings.v_tile(stage.at), maps.v);
      last_keys = {stage.at, stage.parity ^ 1};
      stage.next(kStages);
    }
  }
}

// A warpgroup's 64 queries of every tile of queries, over all tiles of keys.
template <class Tiling>
__device__ __forceinline__ void attend(const ForwardArgs& a, typename Tiling::Small& small,
                                       unsigned char* shared, int group) {
  using T = typename Tiling::T;
  using QueryTile = typename Tiling::QueryTile;
  using KeyTile = typename Tiling::KeyTile;
  constexpr int kStages = Tiling::kStages, kKeys = Tiling::kKeys, kConsumers = Tiling::kConsumers;
  constexpr bool kEven = Tiling::kEven;
  constexpr int kTurn = 2;  // named barriers, one a group
  const Problem& p = a.p;
  const int thread = static_cast<int>(threadIdx.x) % kGroup;
  const int lane = thread % 32, own_row = group * 64 + thread / 32 * 16 + lane / 4;
  const ForwardRings<Tiling> rings(small, shared);
  // Warpgroups take turns in asking for products, so that one's are made while another has weights to make.
  const auto await_turn = [&] { sync_threads(kTurn + group, 2 * kGroup); };
  const auto pass_turn = [&] {
    arrive_threads(kTurn + (group + 1 == kConsumers ? 0 : group + 1), 2 * kGroup);
  };
  if (group == kConsumers - 1) pass_turn();

  PipelineStage at_block, stage;
  unsigned queries_parity = 0;
  float acc[1][Tiling::kColumns / 8][4] = {};
  auto& o = *reinterpret_cast<float(*)[Tiling::kColumns / 2]>(&acc);
  RowStates<2> state;
  // What a block left is stored at the head of the next turn. In the first nothing is: its instructions, a fifth of all, come from the
  // device's memory while the first tiles do (128 columns, 4096 tokens: 1 to 2 us of 117).
  for (bool any = false;; any = true, at_block.next(2)) {
    const int before = at_block.at ^ 1;
    const QueryBlock& left = any ? small.block[before] : small.none;
    store_rows<T>(a, left, group * 64 + thread / 32 * 16, state, acc);
    if (any) rings.blocks.release_by_warp(before);
    rings.blocks.wait(at_block);
    auto& block = small.block[at_block.at];
    if (block.count < 0) break;
    // Rows see no key that is further on than those of the last.
    int end = 0;
    if constexpr (!kEven) {
      const int rows = block.count - group * 64 < 64 ? block.count - group * 64 : 64;
      if (rows > 0) end = block.end_key[group * 64 + rows - 1];
    }
    const auto seen = [&](const TileNote& tile) { return kEven || tile.first < end; };

    float s[kKeys / 2], factor[2];
#pragma unroll
    for (float& x : o) x = 0;
    state = RowStates<2>();
    Fragments<kKeys> weights;
    // Of a row's keys, those in the tile.
    const auto part_of_tile = [&](const TileNote& tile, int(&first)[2], int(&last)[2]) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        if constexpr (kEven) {
          first[half] = 0;
          last[half] = tile.count;
        } else {
          first[half] = block.first_key[own_row + 8 * half] - tile.first;
          last[half] = min(block.end_key[own_row + 8 * half] - tile.first, tile.count);
        }
      }
    };
    const auto make_weights = [&](const TileNote& tile) {
      if (tile.masked != 0) {
        int first[2], last[2];
        part_of_tile(tile, first, last);
        keep_between(s, first, last, kNoScore);
      }
      weights_of(s, state, factor, p.exponent_scale);
    };
    const auto next_tile = [&] {
      rings.k.wait(stage);
      const TileNote note = small.note[stage.at];
      if (!kEven && note.by_threads != 0) fence_shared_writes();
      return note;
    };
    const auto ask_for_scores = [&] {
      wgmma_fence();
      multiply_rows<T>(s, rings.q_tile(), group * 64, rings.k_tile(stage.at));
      wgmma_commit();
    };
    const auto add_values = [&](const PipelineStage& at, const TileNote& tile) {
      rings.v.wait(at);
      if constexpr (!kEven) {
        if (tile.by_threads != 0) fence_shared_writes();
        if (tile.masked != 0 && small.not_finite[at.at] != 0) {
          int first[2], last[2];
          part_of_tile(tile, first, last);
          wgmma_wait<0>();
          add_not_finite<T>(o, p, block, tile.first, tile.count, first, last);
        }
      }
      wgmma_fence();
      add_product<T>(o, weights, rings.v_tile(at.at));
      wgmma_commit();
    };

    bool tiled = true;
    if constexpr (!kEven) tiled = block.tiled;
    if (tiled) {
      small.q_full.wait(queries_parity);
      queries_parity ^= 1;
      fence_shared_writes();
      TileNote tile = next_tile();
      bool more = true;  // tiles, of the block
      if (seen(tile)) {
        await_turn();
        ask_for_scores();
        pass_turn();
        wgmma_wait<0>();
        rings.k.release_by_warp(stage.at);
        make_weights(tile);
        weights.template take<T>(s);
        PipelineStage before = stage;
        while (true) {
          stage.next(kStages);
          more = tile.last == 0;
          if (!more) break;
          const TileNote next = next_tile();
          if (!seen(next)) break;
          await_turn();
          ask_for_scores();
          add_values(before, tile);
          pass_turn();
          tile = next;
          wgmma_wait<1>();
          rings.k.release_by_warp(stage.at);
          make_weights(tile);
          wgmma_wait<0>();
          rings.v.release_by_warp(before.at);
          // (Asking first whether there is anything to do costs up to a seventh of the speed.)
          multiply_by(o, factor);
          weights.template take<T>(s);
          before = stage;
        }
        add_values(before, tile);
        wgmma_wait<0>();
        rings.v.release_by_warp(before.at);
      }
      // Tiles that only others need.
      while (!kEven && more) {
        more = next_tile().last == 0;
        await_turn();
        pass_turn();
        rings.k.release_by_warp(stage.at);
        rings.v.wait(stage);
        rings.v.release_by_warp(stage.at);
        stage.next(kStages);
      }
    }
  }
}

#endif  // ANNULUS_DEVICE_HOPPER

template <class Tiling>
__global__ void __launch_bounds__(Tiling::kThreads, 1) forward_kernel(
    const __grid_constant__ ForwardArgs a, std::int64_t blocks,
    const __grid_constant__ ForwardMaps maps,
    const __grid_constant__ std::conditional_t<Tiling::kEven, EvenGrid, NoGrid> grid) {
#if ANNULUS_DEVICE_HOPPER
  extern __shared__ __align__(1024) unsigned char shared[];
  auto& small = *reinterpret_cast<typename Tiling::Small*>(shared + Tiling::kTileBytes);
  if (threadIdx.x == 0) {
    constexpr int kStages = Tiling::kStages, kWarps = 4 * Tiling::kConsumers;
    constexpr int kProducers = Tiling::kProducers;
    Pipeline(small.blocks, 2).init(2, kProducers, kWarps);
    small.q_full.init(kProducers);
    // (The note of a tile of keys has an arrival of its own where all threads bring it.)
    Pipeline(small.k_stages, kStages).init(kStages, kProducers + !Tiling::kEven, kWarps);
    Pipeline(small.v_stages, kStages).init(kStages, kProducers, kWarps);
    small.none.count = 0;
    fence_barriers();
  }
  await_previous_kernel();
  __syncthreads();
  const int group = __shfl_sync(~0u, static_cast<int>(threadIdx.x) / kGroup, 0);
  if (group == 0) {
    give_registers<Tiling::kProducerRegisters>();
    if constexpr (Tiling::kEven) {
      if (threadIdx.x == 0) bring_even_tiles<Tiling>(a, grid, blocks, maps, small, shared);
    } else {
      bring_tiles<Tiling>(a.p, blocks, maps, small, shared);
    }
  } else {
    take_registers<Tiling::kConsumerRegisters>();
    attend<Tiling>(a, small, shared, group - 1);
  }
#endif
}

template <class Tiling, class Grid>
void launch_forward(const char* op, const ForwardArgs& a, const ForwardMaps& maps, const Grid& grid,
                    std::int64_t blocks, cudaStream_t stream) {
  if (blocks == 0) return;
  const std::int64_t places = std::min(blocks, multiprocessors_of(current_device(op)));
  launch_kernel(op, "forward_kernel", forward_kernel<Tiling>, checked_blocks(op, places),
                Tiling::kThreads, Tiling::kSharedBytes, stream, a, blocks, maps, grid);
}

}  // namespace annulus::attention::cuda::sm90
