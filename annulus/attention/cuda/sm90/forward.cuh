// Forward on Hopper: one warpgroup brings tiles of keys and values, the others have 64 queries each. While the tensor cores
// make the next scores and add the last tile's values, a warpgroup makes weights of the scores it has.
#pragma once

#include <cstddef>
#include <cstdint>

#include "annulus/attention/cuda/forward.cuh"
#include "annulus/attention/cuda/sm90/tile.cuh"
#include "annulus/cuda/tma.cuh"

namespace annulus::attention::cuda::sm90 {

// What those who bring a tile say of it, so that nobody else has to walk: keys are counted from the block's first, and behind
// the last tile there is one with no keys.
struct TileNote {
  int first, count, masked;
  int by_threads;  // copies were made by threads, not by the copy engine
};

template <class T_, int kColumns_, int kConsumers_, int kKeys_, int kStages_, int kBlocks_ = 1,
          bool kTurns_ = true>
struct ForwardTiling {
  using T = T_;
  static constexpr int kColumns = kColumns_, kConsumers = kConsumers_, kKeys = kKeys_,
                       kStages = kStages_, kBlocks = kBlocks_;
  static constexpr bool kTurns = kTurns_;
  static constexpr int kQueries = 64 * kConsumers;
  static constexpr int kThreads = kGroup * (kConsumers + 1);
  // Of 64 K, after what the launch gave every thread alike.
  static constexpr int kProducerRegisters = kBlocks == 2 ? 24 : kConsumers == 2 ? 40 : 32;
  static constexpr int kConsumerRegisters = kBlocks == 2 ? 104 : kConsumers == 2 ? 232 : 160;

  using QueryTile = Panels<kQueries, kColumns>;
  using KeyTile = Panels<kKeys, kColumns>;
  static constexpr int kTileBytes = QueryTile::kBytes + 2 * kStages * KeyTile::kBytes;

  struct Small : QueryBlock {
    SharedBarrier q_full, k_stages[2 * kStages], v_stages[2 * kStages];
    TileNote note[kStages];
    int not_finite[kStages];  // were there any in the tile of values? Said of tiles that are masked
    int first_key[kQueries], end_key[kQueries];  // keys of a row, counted from seen.first
  };
  static constexpr std::size_t kSharedBytes = kTileBytes + sizeof(Small);
};

struct KeyMaps {
  TensorMap k, v;
  bool any = false;
};

// ---- What a warpgroup does with scores: lane l of a warp has rows l / 4 and l / 4 + 8 of its 16, as s[4 n + 2 half + e] in
// column 8 n + 2 (l % 4) + e.

template <int kN>
__device__ __forceinline__ void keep_between(float (&s)[kN], const int (&first)[2],
                                             const int (&end)[2], float other) {
  const int column = static_cast<int>(threadIdx.x) % 4 * 2;
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const int low = first[half] - column, high = end[half] - column;
#pragma unroll
    for (int i = 0; i < kN / 2; ++i) {
      const int at = i / 2 * 8 + i % 2;
      float& x = s[i / 2 * 4 + half * 2 + i % 2];
      x = at >= low && at < high ? x : other;
    }
  }
}

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
    factor[half] = exp2_fast(fmaf(state.m[half], scale, -origin[half]));
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

// One warpgroup: the queries, then keys and values tile by tile.
template <class Tiling>
__device__ __forceinline__ void bring_tiles(const Problem& p, const KeyMaps& maps,
                                            typename Tiling::Small& small, unsigned char* shared) {
  using T = typename Tiling::T;
  using QueryTile = typename Tiling::QueryTile;
  using KeyTile = typename Tiling::KeyTile;
  constexpr int kStages = Tiling::kStages, kKeys = Tiling::kKeys;
  const bool leads = threadIdx.x % kGroup == 0;
  load_rows<T>(QueryTile{shared}, p.q.at<const T>(small.b, small.h), p.q, p, small.sweep.queries,
               small.first, small.count, p.D);
  small.q_full.arrive_when_copied();
  const Pipeline k_ring(small.k_stages, kStages), v_ring(small.v_stages, kStages);
  unsigned char* const k_tiles = shared + QueryTile::kBytes;
  unsigned char* const v_tiles = k_tiles + kStages * KeyTile::kBytes;
  PipelineStage stage = Pipeline::producer();
  KeyWalk walk;
  walk.start(small.sweep, small.seen, kKeys);
  for (; !walk.done(); walk.next(small.sweep, small.seen, kKeys), stage.next(kStages)) {
    const Range tile = walk.tile(kKeys);
    const auto count = static_cast<int>(tile.end - tile.first);
    const bool masked = small.masks(p, tile, kKeys);
    const bool by_engine = maps.any && !masked && small.sweep.keys.step == 1;
    const auto load = [&](const Pipeline& ring, const KeyTile& to, const void* from,
                          const Operand& operand, const TensorMap& map, int columns) {
      if (by_engine) {
        if (leads) ring.expect(stage, KeyTile::kBytes);
        else ring.commit(stage);
        if (leads) {
#pragma unroll
          for (int i = 0; i < Tiling::kColumns / 64; ++i) {
            load_box(to.data + i * KeyTile::kPanel, map,
                     {64 * i, static_cast<int>(small.sweep.keys.at(tile.first)),
                      static_cast<int>(small.h / p.group), static_cast<int>(small.b)},
                     ring.full + stage.at);
          }
        }
        return;
      }
      load_rows<T>(to, static_cast<const T*>(from), operand, p, small.sweep.keys, tile.first, count,
                   columns);
      if (&ring == &k_ring || !masked) ring.full[stage.at].arrive_when_copied();
    };
    k_ring.acquire(stage);
    if (leads) {
      small.note[stage.at] = {static_cast<int>(tile.first - small.seen.first), count, masked,
                               !by_engine};
      k_ring.commit(stage);
    }
    load(k_ring, KeyTile{k_tiles + stage.at * KeyTile::kBytes}, small.k, p.k, maps.k, p.D);
    v_ring.acquire(stage);
    const KeyTile v_tile{v_tiles + stage.at * KeyTile::kBytes};
    load(v_ring, v_tile, small.v, p.v, maps.v, p.Dv);
    if (masked) {
      copy_async_wait_all();
      const bool any = sync_threads_or(1, kGroup, clear_not_finite<T>(v_tile));
      if (leads) small.not_finite[stage.at] = any;
      v_ring.commit(stage);
    }
  }
  k_ring.acquire(stage);
  if (leads) {
    small.note[stage.at] = {};
    k_ring.commit(stage);
  }
  k_ring.commit(stage);
  copy_async_wait_all();
}

// A warpgroup's 64 queries over all tiles.
template <class Tiling>
__device__ __forceinline__ void attend(const ForwardArgs& a, typename Tiling::Small& small,
                                       unsigned char* shared, int group) {
  using T = typename Tiling::T;
  using QueryTile = typename Tiling::QueryTile;
  using KeyTile = typename Tiling::KeyTile;
  constexpr int kStages = Tiling::kStages, kKeys = Tiling::kKeys, kConsumers = Tiling::kConsumers;
  // Named barriers: 2 + group for the ranges of a group's rows, 5 + group for its turn.
  constexpr int kRanges = 2, kTurn = 5;
  const Problem& p = a.p;
  const int thread = static_cast<int>(threadIdx.x) % kGroup;
  const int lane = thread % 32, own_row = group * 64 + thread / 32 * 16 + lane / 4;

  if (thread < 64) {
    const int row = group * 64 + thread;
    Range r;
    if (row < small.count) r = small.sweep.seen_from(small.query(row));
    const bool none = r.empty();
    small.first_key[row] = none ? 0 : static_cast<int>(r.first - small.seen.first);
    small.end_key[row] = none ? 0 : static_cast<int>(r.end - small.seen.first);
  }
  sync_threads(kRanges + group, kGroup);
  // Rows see no key that is further on than those of the last.
  const int rows = small.count - group * 64 < 64 ? small.count - group * 64 : 64;
  const int end = rows > 0 ? small.end_key[group * 64 + rows - 1] : 0;

  const Pipeline k_ring(small.k_stages, kStages), v_ring(small.v_stages, kStages);
  const QueryTile q_tile{shared};
  unsigned char* const k_tiles = shared + QueryTile::kBytes;
  unsigned char* const v_tiles = k_tiles + kStages * KeyTile::kBytes;
  PipelineStage stage;
  // Warpgroups take turns in asking for products, so that one's are made while another has weights to make.
  const auto await_turn = [&] {
    if constexpr (Tiling::kTurns) sync_threads(kTurn + group, 2 * kGroup);
  };
  const auto pass_turn = [&] {
    if constexpr (Tiling::kTurns) {
      arrive_threads(kTurn + (group + 1 == kConsumers ? 0 : group + 1), 2 * kGroup);
    }
  };
  if (Tiling::kTurns && group == kConsumers - 1) pass_turn();

  float s[kKeys / 2], factor[2];
  float acc[1][Tiling::kColumns / 8][4] = {};
  auto& o = *reinterpret_cast<float(*)[Tiling::kColumns / 2]>(&acc);
  RowStates<2> state;
  Fragments<kKeys> weights;
  // Of a row's keys, those in the tile.
  const auto part_of_tile = [&](const TileNote& tile, int (&first)[2], int (&last)[2]) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      first[half] = small.first_key[own_row + 8 * half] - tile.first;
      last[half] = min(small.end_key[own_row + 8 * half] - tile.first, tile.count);
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
    multiply_rows<T>(s, q_tile, group * 64, KeyTile{k_tiles + stage.at * KeyTile::kBytes});
    wgmma_commit();
  };
  const auto add_values = [&](int at, const TileNote& tile) {
    const KeyTile v_tile{v_tiles + at * KeyTile::kBytes};
    if (tile.by_threads != 0) fence_shared_writes();
    if (tile.masked != 0 && small.not_finite[at] != 0) {
      int first[2], last[2];
      part_of_tile(tile, first, last);
      wgmma_wait<0>();
      add_not_finite<T>(o, p, small, tile.first, tile.count, first, last);
    }
    wgmma_fence();
    add_product<T>(o, weights, v_tile);
    wgmma_commit();
  };

  TileNote tile = next_tile();
  if (tile.count > 0 && tile.first < end) {
    small.q_full.wait(0);
    fence_shared_writes();
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
      const TileNote next = next_tile();
      if (next.count == 0 || next.first >= end) break;
      await_turn();
      ask_for_scores();
      v_ring.wait(before);
      add_values(before.at, tile);
      pass_turn();
      tile = next;
      wgmma_wait<1>();
      k_ring.release_by_warp(stage.at);
      make_weights(tile);
      wgmma_wait<0>();
      v_ring.release_by_warp(before.at);
      multiply_by(o, factor);  // asking first whether there is anything to do costs a tenth of the speed
      weights.template take<T>(s);
      before = stage;
    }
    v_ring.wait(before);
    add_values(before.at, tile);
    wgmma_wait<0>();
    v_ring.release_by_warp(before.at);
  }
  // Tiles that only others need.
  for (; next_tile().count > 0; stage.next(kStages)) {
    await_turn();
    pass_turn();
    k_ring.release_by_warp(stage.at);
    v_ring.wait(stage);
    v_ring.release_by_warp(stage.at);
  }
  store_rows<T>(a, small, group * 64 + thread / 32 * 16, state, acc);
}

#endif  // ANNULUS_DEVICE_HOPPER

template <class Tiling>
__global__ void __launch_bounds__(Tiling::kThreads, Tiling::kBlocks)
    forward_kernel(const __grid_constant__ ForwardArgs a, const __grid_constant__ KeyMaps maps) {
#if ANNULUS_DEVICE_HOPPER
  extern __shared__ __align__(1024) unsigned char shared[];
  auto& small = *reinterpret_cast<typename Tiling::Small*>(shared + Tiling::kTileBytes);
  if (threadIdx.x == 0) {
    small.template start<typename Tiling::T>(a.p, Tiling::kQueries);
    small.q_full.init(kGroup);
    Pipeline(small.k_stages, Tiling::kStages).init(Tiling::kStages, kGroup + 1, 4 * Tiling::kConsumers);
    Pipeline(small.v_stages, Tiling::kStages).init(Tiling::kStages, kGroup, 4 * Tiling::kConsumers);
    fence_barriers();
  }
  __syncthreads();
  if (small.count <= 0) return;
  const int group = __shfl_sync(~0u, static_cast<int>(threadIdx.x) / kGroup, 0);
  if (group == 0) {
    give_registers<Tiling::kProducerRegisters>();
    bring_tiles<Tiling>(a.p, maps, small, shared);
  } else {
    take_registers<Tiling::kConsumerRegisters>();
    attend<Tiling>(a, small, shared, group - 1);
  }
#endif
}

template <class Tiling>
void launch_forward(const char* op, ForwardArgs a, const KeyMaps& maps, cudaStream_t stream) {
  const std::int64_t blocks = a.p.number_blocks(a.p.H, true, Tiling::kQueries);
  if (blocks == 0) return;
  allow_shared(op, "forward_kernel", forward_kernel<Tiling>, Tiling::kSharedBytes);
  forward_kernel<Tiling>
      <<<checked_blocks(op, blocks), Tiling::kThreads, Tiling::kSharedBytes, stream>>>(a, maps);
  check_launch(op, "forward_kernel");
}

}  // namespace annulus::attention::cuda::sm90
