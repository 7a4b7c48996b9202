// Forward on Hopper: one warpgroup brings tiles of keys and values, the others have 64 queries each. While the tensor cores
// make the next scores and add the last tile's values, a warpgroup makes weights of the scores it has.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>

#include "annulus/attention/cuda/forward_rows.cuh"
#include "annulus/attention/cuda/launch.h"
#include "annulus/attention/cuda/sm90/maps.h"
#include "annulus/attention/cuda/sm90/tile.cuh"
#include "annulus/cuda/launch.cuh"
#include "annulus/cuda/tma.cuh"

namespace annulus::attention::cuda::sm90 {

template <class T_, int kColumns_, int kConsumers_, int kKeys_, int kStages_>
struct ForwardTiling {
  using T = T_;
  static constexpr int kColumns = kColumns_, kConsumers = kConsumers_, kKeys = kKeys_,
                       kStages = kStages_;
  static constexpr int kQueries = 64 * kConsumers;
  static constexpr int kThreads = kGroup * (kConsumers + 1);
  // Together no more than what the launch gave, 168 (or 128) each, or nobody gets anything. Of 128 columns consumers need all
  // that there are: with 224 they are about 11 % slower.
  static constexpr int kProducerRegisters = kConsumers == 3 ? 32 : kColumns == 64 ? 56 : 40;
  static constexpr int kConsumerRegisters = kConsumers == 3 ? 160 : kColumns == 64 ? 224 : 232;

  using QueryTile = Panels<kQueries, kColumns>;
  using KeyTile = Panels<kKeys, kColumns>;
  // The next tile of queries comes while this one is at work, where there is room for both.
  static constexpr int kKeyBytes = 2 * kStages * KeyTile::kBytes, kMostTileBytes = 220 * 1024;
  static constexpr int kQueryStages = kKeyBytes + 2 * QueryTile::kBytes <= kMostTileBytes ? 2 : 1;
  static constexpr int kTileBytes = kKeyBytes + kQueryStages * QueryTile::kBytes;

  static constexpr int kBlocks = 3;
  // A tile of queries, and of each row the first key and the end, counted from seen.first.
  struct Block : QueryBlock {
    static constexpr int kKeys = kKeys_;
    // The tiles of keys, and the keys that every query sees: a tile within needs no mask.
    int tiles, all_first, all_end;
    int key_head;
    int first_key[kQueries], end_key[kQueries];
  };
  struct Small {
    // Of the tile of queries whose keys are used, of that whose keys come, and of the next.
    Block block[kBlocks];
    SharedBarrier blocks[2 * kBlocks], q_stages[2 * kQueryStages];
    SharedBarrier k_stages[2 * kStages], v_stages[2 * kStages];
    TileNote note[kStages];
    int not_finite[kStages];  // were there any in the tile of values? Said of tiles that are masked
  };
  static constexpr std::size_t kSharedBytes = kTileBytes + sizeof(Small);

  static __device__ KeyTile k_tile(unsigned char* shared, int stage) {
    return {shared + 2 * stage * KeyTile::kBytes};
  }
  static __device__ KeyTile v_tile(unsigned char* shared, int stage) {
    return {shared + (2 * stage + 1) * KeyTile::kBytes};
  }
  static __device__ QueryTile q_tile(unsigned char* shared, int stage) {
    return {shared + kKeyBytes + stage * QueryTile::kBytes};
  }
};

// Scores become weights; `factor` is what sums so far are to be multiplied by. Both rows go side by side, in chains short
// enough that no instruction waits for the one before.
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

// Blocks of threads stay, and take tiles of queries by turns: there and back, as the first ones have the most keys.
__device__ __forceinline__ std::int64_t block_of_turn(std::int64_t turn) {
  const auto width = static_cast<std::int64_t>(gridDim.x),
             own = static_cast<std::int64_t>(blockIdx.x);
  return turn * width + (turn % 2 == 0 ? own : width - 1 - own);
}

// Tiles of keys of a tile of queries, and where the i-th begins. (Those of a list are its
// blocks, of which none begins before the first that is seen.)
template <class Block>
__device__ __forceinline__ int first_of_tile(const Block& block, int i) {
  const BlockList& list = block.sweep.blocks;
  if (list.defined()) return static_cast<int>(list.at(i) * list.size);
  return static_cast<int>(block.seen.first) + i * Block::kKeys;
}
template <class Block>
__device__ __forceinline__ int tiles_in(const Block& block) {
  const BlockList& list = block.sweep.blocks;
  if (!list.defined()) {
    return block.seen.empty()
               ? 0
               : static_cast<int>(tiles_of(block.seen.end - block.seen.first, Block::kKeys));
  }
  int low = 0, high = static_cast<int>(list.count);  // the blocks that begin before the end
  while (low < high) {
    const int middle = (low + high) / 2;
    if (list.at(middle) * list.size < block.seen.end) {
      low = middle + 1;
    } else {
      high = middle;
    }
  }
  return low;
}

// One warpgroup: queries, then keys and values tile by tile. (Whatever they do for a tile takes time from everybody: with the
// arithmetic of a KeyWalk in 64 bits, by all threads, short sweeps took 15 % more.)
template <class Tiling>
__device__ __forceinline__ void bring_tiles(const Problem& p, std::int64_t blocks, const Maps& maps,
                                            typename Tiling::Small& small, unsigned char* shared) {
  using T = typename Tiling::T;
  using KeyTile = typename Tiling::KeyTile;
  constexpr int kStages = Tiling::kStages, kKeys = Tiling::kKeys, kBlocks = Tiling::kBlocks;
  constexpr int kOwn = 1, kDescriber = 3;  // a named barrier, a warp
  const int thread = static_cast<int>(threadIdx.x) % kGroup;
  const bool leads = thread == 0;
  const int lane = thread % 32, warp = thread / 32;
  const Pipeline block_ring(small.blocks, kBlocks), q_ring(small.q_stages, Tiling::kQueryStages);
  const Pipeline k_ring(small.k_stages, kStages), v_ring(small.v_stages, kStages);
  PipelineStage at_block, at_description = Pipeline::producer(), at_queries = Pipeline::producer();
  PipelineStage stage = Pipeline::producer();
  // Says what the tile of queries of a turn is: the last warp, a tile of queries ahead, as it takes as long as several tiles
  // of keys.
  const auto describe = [&](int turn) {
    const std::int64_t number = block_of_turn(turn);
    auto& block = small.block[at_description.at];
    block_ring.acquire(at_description);
    if (lane == 0) {
      if (number < blocks) {
        block.template start<T>(p, Tiling::kQueries, number);
        block.tiles = block.count > 0 ? tiles_in(block) : 0;
        block.all_first = static_cast<int>(block.all.first);
        block.all_end = static_cast<int>(min(block.all.end, block.seen.end));
        block.key_head = static_cast<int>(p.group == 1 ? block.h : block.h / p.group);
      } else {
        block.count = -1;
      }
    }
    __syncwarp();
    for (int row = lane; row < Tiling::kQueries; row += 32) {
      Range r;
      if (row < block.count) r = block.sweep.seen_from(block.query(row));
      block.first_key[row] = r.empty() ? 0 : static_cast<int>(r.first - block.seen.first);
      block.end_key[row] = r.empty() ? 0 : static_cast<int>(r.end - block.seen.first);
    }
    block_ring.commit(at_description);
    at_description.next(kBlocks);
  };
  // Behind the first keys: their room may be free sooner than that of the queries.
  const auto load_queries = [&](const typename Tiling::Block& block) {
    q_ring.acquire(at_queries);
    load_rows<T>(Tiling::q_tile(shared, at_queries.at), p.q.at<const T>(block.b, block.h), p.q, p,
                 block.sweep.queries, block.first, block.count, p.D);
    q_ring.full[at_queries.at].arrive_when_copied();
    at_queries.next(Tiling::kQueryStages);
  };
  bool alone = false;  // one thread has gone through stages that the others have not waited for
  for (int turn = 0;; ++turn) {
    // (Of turn 0 there is none yet: one call of describe() is a thousand instructions.)
    if (turn > 0) block_ring.wait(at_block);
    const auto& block = small.block[at_block.at];
    const bool last = turn > 0 && block.count < 0;
    if (warp == kDescriber && !last) describe(turn);
    if (last) break;
    if (turn == 0) continue;
    const int tiles = block.tiles;
    const Line& line = block.sweep.keys;
    int next = tiles > 0 ? first_of_tile(block, 0) : 0;
    for (int i = 0; i < tiles; ++i) {
      const int first = next;
      if (i + 1 < tiles) next = first_of_tile(block, i + 1);
      const TileNote note{first - static_cast<int>(block.seen.first),
                          min(kKeys, static_cast<int>(block.seen.end) - first),
                          first < block.all_first || first + kKeys > block.all_end, i + 1 == tiles,
                          !maps.any || line.step != 1};
      // Mostly the copy engine brings a tile, and one thread is enough to ask for it.
      if (note.masked == 0 && note.by_threads == 0) {
        alone = true;
        if (leads) {
          const auto load = [&](const Pipeline& ring, const KeyTile& to, const TensorMap& map) {
#pragma unroll
            for (int panel = 0; panel < Tiling::kColumns / 64; ++panel) {
              load_box(to.data + panel * KeyTile::kPanel, map,
                       {64 * panel, static_cast<int>(line.first) + first, block.key_head,
                        static_cast<int>(block.b)},
                       ring.full + stage.at);
            }
          };
          k_ring.acquire(stage);
          small.note[stage.at] = note;
          k_ring.expect(stage, KeyTile::kBytes, kGroup + 1);
          load(k_ring, Tiling::k_tile(shared, stage.at), maps.one);
          v_ring.acquire(stage);
          v_ring.expect(stage, KeyTile::kBytes, kGroup);
          load(v_ring, Tiling::v_tile(shared, stage.at), maps.two);
        }
        if (i == 0) load_queries(block);
        stage.next(kStages);
        continue;
      }
      if (alone) sync_threads(kOwn, kGroup);
      alone = false;
      k_ring.acquire(stage);
      if (leads) {
        small.note[stage.at] = note;
        small.note[stage.at].by_threads = 1;
        k_ring.commit(stage);
      }
      load_rows<T>(Tiling::k_tile(shared, stage.at), static_cast<const T*>(block.k), p.k, p, line,
                   first, note.count, p.D);
      k_ring.full[stage.at].arrive_when_copied();
      if (i == 0) load_queries(block);
      v_ring.acquire(stage);
      const KeyTile v_tile = Tiling::v_tile(shared, stage.at);
      load_rows<T>(v_tile, static_cast<const T*>(block.v), p.v, p, line, first, note.count, p.Dv);
      if (note.masked != 0) {
        copy_async_wait_all();
        const bool any = sync_threads_or(kOwn, kGroup, clear_not_finite<T>(v_tile));
        if (leads) small.not_finite[stage.at] = any;
        v_ring.commit(stage);
      } else {
        v_ring.full[stage.at].arrive_when_copied();
      }
      stage.next(kStages);
    }
    // Whoever has nothing to do sleeps here: waiting for a stage takes turns from those who work.
    if (alone) sync_threads(kOwn, kGroup);
    alone = false;
    block_ring.release_by_warp(at_block.at);
    at_block.next(kBlocks);
  }
  copy_async_wait_all();
}

// A warpgroup's 64 queries of every tile of queries, over all tiles of keys.
template <class Tiling>
__device__ __forceinline__ void attend(const ForwardArgs& a, typename Tiling::Small& small,
                                       unsigned char* shared, int group) {
  using T = typename Tiling::T;
  using KeyTile = typename Tiling::KeyTile;
  constexpr int kStages = Tiling::kStages, kKeys = Tiling::kKeys, kConsumers = Tiling::kConsumers;
  constexpr int kTurn = 2;  // named barriers, one a group
  const Problem& p = a.p;
  const int thread = static_cast<int>(threadIdx.x) % kGroup;
  const int lane = thread % 32, own_row = group * 64 + thread / 32 * 16 + lane / 4;
  const Pipeline block_ring(small.blocks, Tiling::kBlocks),
      q_ring(small.q_stages, Tiling::kQueryStages);
  const Pipeline k_ring(small.k_stages, kStages), v_ring(small.v_stages, kStages);
  // Warpgroups take turns in asking for products, so that one's are made while another has weights to make.
  const auto await_turn = [&] { sync_threads(kTurn + group, 2 * kGroup); };
  const auto pass_turn = [&] {
    arrive_threads(kTurn + (group + 1 == kConsumers ? 0 : group + 1), 2 * kGroup);
  };
  if (group == kConsumers - 1) pass_turn();

  PipelineStage at_block, at_queries, stage;
  for (;; at_block.next(Tiling::kBlocks)) {
    block_ring.wait(at_block);
    auto& block = small.block[at_block.at];
    if (block.count < 0) break;
    // Rows see no key that is further on than those of the last.
    const int rows = block.count - group * 64 < 64 ? block.count - group * 64 : 64;
    const int end = rows > 0 ? block.end_key[group * 64 + rows - 1] : 0;

    float s[kKeys / 2], factor[2];
    float acc[1][Tiling::kColumns / 8][4] = {};
    auto& o = *reinterpret_cast<float(*)[Tiling::kColumns / 2]>(&acc);
    RowStates<2> state;
    Fragments<kKeys> weights;
    // Of a row's keys, those in the tile.
    const auto part_of_tile = [&](const TileNote& tile, int(&first)[2], int(&last)[2]) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        first[half] = block.first_key[own_row + 8 * half] - tile.first;
        last[half] = min(block.end_key[own_row + 8 * half] - tile.first, tile.count);
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
      k_ring.wait(stage);
      const TileNote note = small.note[stage.at];
      if (note.by_threads != 0) fence_shared_writes();
      return note;
    };
    const auto ask_for_scores = [&] {
      wgmma_fence();
      multiply_rows<T>(s, Tiling::q_tile(shared, at_queries.at), group * 64,
                       Tiling::k_tile(shared, stage.at));
      wgmma_commit();
    };
    const auto add_values = [&](const PipelineStage& at, const TileNote& tile) {
      v_ring.wait(at);
      if (tile.by_threads != 0) fence_shared_writes();
      if (tile.masked != 0 && small.not_finite[at.at] != 0) {
        int first[2], last[2];
        part_of_tile(tile, first, last);
        wgmma_wait<0>();
        add_not_finite<T>(o, p, block, tile.first, tile.count, first, last);
      }
      wgmma_fence();
      add_product<T>(o, weights, Tiling::v_tile(shared, at.at));
      wgmma_commit();
    };

    if (block.tiles > 0) {
      q_ring.wait(at_queries);
      fence_shared_writes();
      TileNote tile = next_tile();
      bool more = true;  // tiles, of the block
      if (tile.first < end) {
        await_turn();
        ask_for_scores();
        pass_turn();
        wgmma_wait<0>();
        k_ring.release_by_warp(stage.at);
        make_weights(tile);
        weights.template take<T>(s);
        PipelineStage before = stage;
        while (true) {
          stage.next(kStages);
          more = tile.last == 0;
          if (!more) break;
          const TileNote next = next_tile();
          if (next.first >= end) break;
          await_turn();
          ask_for_scores();
          add_values(before, tile);
          pass_turn();
          tile = next;
          wgmma_wait<1>();
          k_ring.release_by_warp(stage.at);
          make_weights(tile);
          wgmma_wait<0>();
          v_ring.release_by_warp(before.at);
          // (Asking first whether there is anything to do costs up to a seventh of the speed; so does releasing queries before
          // the last product: addresses of tiles are no longer the same in all lanes for the compiler.)
          multiply_by(o, factor);
          weights.template take<T>(s);
          before = stage;
        }
        add_values(before, tile);
        wgmma_wait<0>();
        v_ring.release_by_warp(before.at);
      }
      // Tiles that only others need.
      while (more) {
        more = next_tile().last == 0;
        await_turn();
        pass_turn();
        k_ring.release_by_warp(stage.at);
        v_ring.wait(stage);
        v_ring.release_by_warp(stage.at);
        stage.next(kStages);
      }
      q_ring.release_by_warp(at_queries.at);
      at_queries.next(Tiling::kQueryStages);
    }
    store_rows<T>(a, block, group * 64 + thread / 32 * 16, state, acc);
    block_ring.release_by_warp(at_block.at);
  }
}

#endif  // ANNULUS_DEVICE_HOPPER

template <class Tiling>
__global__ void __launch_bounds__(Tiling::kThreads, 1)
    forward_kernel(const __grid_constant__ ForwardArgs a, std::int64_t blocks,
                   const __grid_constant__ Maps maps) {
#if ANNULUS_DEVICE_HOPPER
  extern __shared__ __align__(1024) unsigned char shared[];
  auto& small = *reinterpret_cast<typename Tiling::Small*>(shared + Tiling::kTileBytes);
  if (threadIdx.x == 0) {
    constexpr int kStages = Tiling::kStages, kWarps = 4 * Tiling::kConsumers;
    Pipeline(small.blocks, Tiling::kBlocks).init(Tiling::kBlocks, 32, kWarps + 4);
    Pipeline(small.q_stages, Tiling::kQueryStages).init(Tiling::kQueryStages, kGroup, kWarps);
    Pipeline(small.k_stages, kStages).init(kStages, kGroup + 1, kWarps);
    Pipeline(small.v_stages, kStages).init(kStages, kGroup, kWarps);
    fence_barriers();
  }
  await_previous_kernel();
  __syncthreads();
  const int group = __shfl_sync(~0u, static_cast<int>(threadIdx.x) / kGroup, 0);
  if (group == 0) {
    give_registers<Tiling::kProducerRegisters>();
    bring_tiles<Tiling>(a.p, blocks, maps, small, shared);
  } else {
    take_registers<Tiling::kConsumerRegisters>();
    attend<Tiling>(a, small, shared, group - 1);
  }
#endif
}

template <class Tiling>
void launch_forward(const char* op, ForwardArgs a, const Maps& maps, cudaStream_t stream) {
  const std::int64_t blocks = a.p.number_blocks(a.p.H, true, Tiling::kQueries);
  if (blocks == 0) return;
  const std::int64_t places = std::min(blocks, multiprocessors_of(current_device(op)));
  launch_kernel(op, "forward_kernel", forward_kernel<Tiling>, checked_blocks(op, places),
                Tiling::kThreads, Tiling::kSharedBytes, stream, a, blocks, maps);
}

}  // namespace annulus::attention::cuda::sm90
