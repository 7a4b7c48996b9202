// Forward on Hopper: one warpgroup brings tiles of keys and values, the others have 64 queries each. While the tensor cores
// make the next scores and add the last tile's values, a warpgroup makes weights of the scores it has.
#pragma once

#include <cstddef>
#include <cstdint>

#include "annulus/attention/cuda/forward.cuh"
#include "annulus/attention/cuda/sm90/tile.cuh"

namespace annulus::attention::cuda::sm90 {

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
    int not_finite[kStages];             // were there any in the tile of values? Said of tiles that are masked
    int first_key[kQueries], end_key[kQueries];  // keys of a row, counted from seen.first
  };
  static constexpr std::size_t kSharedBytes = kTileBytes + sizeof(Small);
};

// ---- What a warpgroup does with scores: lane l of a warp has rows l / 4 and l / 4 + 8 of its 16, as s[4 n + 2 half + e] in
// column 8 n + 2 (l % 4) + e.

template <int kN>
__device__ __forceinline__ void keep_between(float (&s)[kN], const int (&first)[2],
                                             const int (&end)[2]) {
  const int column = static_cast<int>(threadIdx.x) % 4 * 2;
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const int low = first[half] - column, high = end[half] - column;
#pragma unroll
    for (int i = 0; i < kN / 2; ++i) {
      const int at = i / 2 * 8 + i % 2;
      float& x = s[i / 2 * 4 + half * 2 + i % 2];
      x = at >= low && at < high ? x : kNoScore;
    }
  }
}

// Scores become weights; `factor` is what sums so far are to be multiplied by.
template <int kN>
__device__ __forceinline__ void weights_of(float (&s)[kN], RowStates<2>& state, float (&factor)[2],
                                           float scale) {
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    float high[2] = {state.m[half], kNoScore};
#pragma unroll
    for (int i = 0; i < kN / 2; ++i) {
      high[i % 2] = fmaxf(high[i % 2], s[i / 2 * 4 + half * 2 + i % 2]);
    }
    const float m = warp_reduce<4>(fmaxf(high[0], high[1]),
                                   [](float a, float b) { return fmaxf(a, b); });
    const float origin = origin_of(m) * scale;
    factor[half] = exp2_fast(fmaf(state.m[half], scale, -origin));
    state.m[half] = m;
    float sum[2] = {0, 0};
#pragma unroll
    for (int i = 0; i < kN / 2; ++i) {
      float& x = s[i / 2 * 4 + half * 2 + i % 2];
      x = exp2_fast(fmaf(x, scale, -origin));
      sum[i % 2] += x;
    }
    state.l[half] = fmaf(state.l[half], factor[half], sum[0] + sum[1]);
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
                                               const QueryBlock& block, Range tile,
                                               const int (&first)[2], const int (&end)[2]) {
  const int lane = static_cast<int>(threadIdx.x) & 31;
#pragma unroll 1
  for (std::int64_t key = tile.first; key < tile.end; ++key) {
    const T* const row =
        static_cast<const T*>(block.v) + p.token(block.sweep.keys.at(key)) * p.v.row;
    const auto at = static_cast<int>(key - tile.first);
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
__device__ __forceinline__ void bring_tiles(const Problem& p, typename Tiling::Small& small,
                                            unsigned char* shared) {
  using T = typename Tiling::T;
  using QueryTile = typename Tiling::QueryTile;
  using KeyTile = typename Tiling::KeyTile;
  constexpr int kStages = Tiling::kStages, kKeys = Tiling::kKeys;
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
    const auto load = [&](const KeyTile& to, const void* from, const Operand& operand,
                          int columns) {
      load_rows<T>(to, static_cast<const T*>(from), operand, p, small.sweep.keys, tile.first,
                   static_cast<int>(tile.end - tile.first), columns);
    };
    k_ring.acquire(stage);
    load(KeyTile{k_tiles + stage.at * KeyTile::kBytes}, small.k, p.k, p.D);
    k_ring.full[stage.at].arrive_when_copied();
    v_ring.acquire(stage);
    const KeyTile v_tile{v_tiles + stage.at * KeyTile::kBytes};
    load(v_tile, small.v, p.v, p.Dv);
    if (small.masks(p, tile, kKeys)) {
      copy_async_wait_all();
      const bool any = sync_threads_or(1, kGroup, clear_not_finite<T>(v_tile));
      if (threadIdx.x % kGroup == 0) small.not_finite[stage.at] = any;
    }
    v_ring.full[stage.at].arrive_when_copied();
  }
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
  const Sweep& sweep = small.sweep;
  const int thread = static_cast<int>(threadIdx.x) % kGroup;
  const int lane = thread % 32, own_row = group * 64 + thread / 32 * 16 + lane / 4;

  if (thread < 64) {
    const int row = group * 64 + thread;
    Range r;
    if (row < small.count) r = sweep.seen_from(small.query(row));
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
  KeyWalk walk;
  walk.start(sweep, small.seen, kKeys);
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
  const auto tile_first = [&] { return static_cast<int>(walk.at - small.seen.first); };
  // Of a row's keys, those in the tile.
  const auto part_of_tile = [&](Range tile, int (&first)[2], int (&last)[2]) {
    const auto from = static_cast<int>(tile.first - small.seen.first);
    const auto count = static_cast<int>(tile.end - tile.first);
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      first[half] = small.first_key[own_row + 8 * half] - from;
      last[half] = min(small.end_key[own_row + 8 * half] - from, count);
    }
  };
  const auto make_weights = [&](Range tile, bool masked) {
    if (masked) {
      int first[2], last[2];
      part_of_tile(tile, first, last);
      keep_between(s, first, last);
    }
    weights_of(s, state, factor, p.exponent_scale);
  };
  const auto ask_for_scores = [&] {
    k_ring.wait(stage);
    fence_shared_writes();
    wgmma_fence();
    multiply_rows<T>(s, q_tile, group * 64, KeyTile{k_tiles + stage.at * KeyTile::kBytes});
    wgmma_commit();
  };
  // The values of the tile before.
  const auto add_values = [&](const PipelineStage& at, Range tile, bool masked) {
    v_ring.wait(at);
    fence_shared_writes();
    const KeyTile v_tile{v_tiles + at.at * KeyTile::kBytes};
    if (masked && small.not_finite[at.at] != 0) {
      int first[2], last[2];
      part_of_tile(tile, first, last);
      wgmma_wait<0>();
      add_not_finite<T>(o, p, small, tile, first, last);
    }
    wgmma_fence();
    add_product<T>(o, weights, v_tile);
    wgmma_commit();
  };

  if (!walk.done() && tile_first() < end) {
    small.q_full.wait(0);
    Range before = walk.tile(kKeys);
    bool masked = small.masks(p, before, kKeys);
    await_turn();
    ask_for_scores();
    pass_turn();
    wgmma_wait<0>();
    k_ring.release_by_warp(stage.at);
    make_weights(before, masked);
    weights.template take<T>(s);
    PipelineStage last = stage;
    while (true) {
      walk.next(sweep, small.seen, kKeys);
      stage.next(kStages);
      if (walk.done() || tile_first() >= end) break;
      const Range tile = walk.tile(kKeys);
      await_turn();
      ask_for_scores();
      add_values(last, before, masked);
      pass_turn();
      wgmma_wait<1>();
      k_ring.release_by_warp(stage.at);
      masked = small.masks(p, tile, kKeys);
      make_weights(tile, masked);
      wgmma_wait<0>();
      v_ring.release_by_warp(last.at);
      multiply_by(o, factor);
      weights.template take<T>(s);
      last = stage;
      before = tile;
    }
    add_values(last, before, masked);
    wgmma_wait<0>();
    v_ring.release_by_warp(last.at);
  }
  // Tiles that others still need.
  for (; !walk.done(); walk.next(sweep, small.seen, kKeys), stage.next(kStages)) {
    await_turn();
    pass_turn();
    k_ring.wait(stage);
    k_ring.release_by_warp(stage.at);
    v_ring.wait(stage);
    v_ring.release_by_warp(stage.at);
  }
  store_rows<T>(a, small, group * 64 + thread / 32 * 16, state, acc);
}

#endif  // ANNULUS_DEVICE_HOPPER

template <class Tiling>
__global__ void __launch_bounds__(Tiling::kThreads, Tiling::kBlocks)
    forward_kernel(const __grid_constant__ ForwardArgs a) {
#if ANNULUS_DEVICE_HOPPER
  extern __shared__ __align__(1024) unsigned char shared[];
  auto& small = *reinterpret_cast<typename Tiling::Small*>(shared + Tiling::kTileBytes);
  if (threadIdx.x == 0) {
    small.template start<typename Tiling::T>(a.p, Tiling::kQueries);
    small.q_full.init(kGroup);
    Pipeline(small.k_stages, Tiling::kStages).init(Tiling::kStages, kGroup, 4 * Tiling::kConsumers);
    Pipeline(small.v_stages, Tiling::kStages).init(Tiling::kStages, kGroup, 4 * Tiling::kConsumers);
    fence_barriers();
  }
  __syncthreads();
  if (small.count <= 0) return;
  const int group = __shfl_sync(~0u, static_cast<int>(threadIdx.x) / kGroup, 0);
  if (group == 0) {
    give_registers<Tiling::kProducerRegisters>();
    bring_tiles<Tiling>(a.p, small, shared);
  } else {
    take_registers<Tiling::kConsumerRegisters>();
    attend<Tiling>(a, small, shared, group - 1);
  }
#endif
}

template <class Tiling>
void launch_forward(const char* op, ForwardArgs a, cudaStream_t stream) {
  const std::int64_t blocks = a.p.number_blocks(a.p.H, true, Tiling::kQueries);
  if (blocks == 0) return;
  allow_shared(op, "forward_kernel", forward_kernel<Tiling>, Tiling::kSharedBytes);
  forward_kernel<Tiling>
      <<<checked_blocks(op, blocks), Tiling::kThreads, Tiling::kSharedBytes, stream>>>(a);
  check_launch(op, "forward_kernel");
}

}  // namespace annulus::attention::cuda::sm90
