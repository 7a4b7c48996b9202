// dq, dk, dv in one pass on Hopper, as gradient.cuh says, where atomics are allowed: one warpgroup brings tiles of queries, two
// have 64 keys each. Rows of products are keys, but for dq's, of which either has one half: the gradients of scores of both
// pass through shared memory for it.
//
// Numbers that are not finite would reach rows that do not see them, as 0 times NaN. Where there are any the other kernel
// runs, and this one returns: see not_finite.
#pragma once

#include <cstddef>
#include <cstdint>

#include "annulus/attention/cuda/gradient_rows.cuh"
#include "annulus/attention/cuda/key_block.cuh"
#include "annulus/attention/cuda/launch.h"
#include "annulus/attention/cuda/sm90/launch.h"
#include "annulus/attention/cuda/sm90/maps.h"
#include "annulus/attention/cuda/sm90/tile.cuh"
#include "annulus/cuda/launch.cuh"
#include "annulus/cuda/tma.cuh"

namespace annulus::attention::cuda::sm90 {

template <class T_, int kColumns_, int kQueries_>
struct GradientTiling {
  using T = T_;
  static constexpr int kColumns = kColumns_, kQueries = kQueries_;
  static constexpr int kConsumers = 2, kKeys = 64 * kConsumers, kStages = 2, kScores = 3;
  static constexpr int kThreads = kGroup * (kConsumers + 1);
  static constexpr int kProducerRegisters = 40, kConsumerRegisters = 232;

  using KeyTile = Panels<kKeys, kColumns>;
  using QueryTile = Panels<kQueries, kColumns>;
  using ScoreTile = Panels<kKeys, kQueries>;
  // A warpgroup's part of dq, 64 x 64 in fp32, on its way to the copy engine. (Of 64 columns there is no room for it.)
  using PartialTile = Panels<64, 128>;
  static constexpr bool kByEngine = kColumns == 128;
  static constexpr int kPartialBytes = kByEngine ? PartialTile::kBytes : 0;
  static constexpr int kTileBytes = 2 * KeyTile::kBytes + 2 * kStages * QueryTile::kBytes +
                                    kScores * ScoreTile::kBytes + kConsumers * kPartialBytes;
  // A warpgroup's half of dq: 64 of the queries, or 64 of the columns.
  static_assert(kQueries == 128 ? kColumns == 64 : kQueries == 64 && kColumns == 128);

  struct Small : KeyBlock {
    SharedBarrier kv_full, q_stages[2 * kStages], do_stages[2 * kStages];
    TileNote note[kStages];
    float lse[kStages][kQueries], delta[kStages][kQueries];
    std::uint32_t row[kStages][kQueries];  // where in dq, in vectors of 8, or kNowhere
    int head[kStages];
    MappedLine dq_line;
    // Of the tile whose dq is due, where it is added by the copy engine or from shared memory.
    struct Due {
      int first, head;
      std::uint32_t row[kByEngine ? 64 : 1];
    } due[kConsumers];
    int first_query[kKeys], end_query[kKeys];  // of those that see a key
    std::uint32_t found[kGroup / 32];
  };
  static constexpr std::size_t kSharedBytes = kTileBytes + sizeof(Small);

  static __device__ KeyTile k_tile(unsigned char* shared) { return {shared}; }
  static __device__ KeyTile v_tile(unsigned char* shared) { return {shared + KeyTile::kBytes}; }
  static __device__ QueryTile q_tile(unsigned char* shared, int stage) {
    return {shared + 2 * KeyTile::kBytes + stage * QueryTile::kBytes};
  }
  static __device__ QueryTile do_tile(unsigned char* shared, int stage) {
    return q_tile(shared, kStages + stage);
  }
  static __device__ ScoreTile scores(unsigned char* shared, int i) {
    return {q_tile(shared, 2 * kStages).data + i * ScoreTile::kBytes};
  }
  static __device__ PartialTile partial(unsigned char* shared, int group) {
    return {scores(shared, kScores).data + group * kPartialBytes};
  }
};

inline constexpr std::uint32_t kNowhere = ~0u;

// q and do: of tiles that are whole, and all of whose queries see all keys. dq: sums in fp32, of layers or not.
struct GradientMaps {
  RowMaps q, do_, dq;
};

#if ANNULUS_DEVICE_HOPPER

// One warpgroup: the keys and values, then queries and what belongs to them tile by tile.
template <class Tiling>
__device__ __forceinline__ void bring_queries(const GradientArgs& a, const GradientMaps& maps,
                                              typename Tiling::Small& small,
                                              unsigned char* shared) {
  using T = typename Tiling::T;
  using QueryTile = typename Tiling::QueryTile;
  constexpr int kStages = Tiling::kStages, kQueries = Tiling::kQueries, kKeys = Tiling::kKeys;
  static_assert(kQueries <= kGroup);
  const Problem& p = a.p;
  const Sweep& sweep = small.sweep;
  const int thread = static_cast<int>(threadIdx.x);
  const bool leads = thread == 0;
  load_rows<T>(Tiling::k_tile(shared), p.k.at<const T>(small.b, small.h), p.k, p, sweep.keys,
               small.first, small.count, p.D);
  load_rows<T>(Tiling::v_tile(shared), p.v.at<const T>(small.b, small.h), p.v, p, sweep.keys,
               small.first, small.count, p.Dv);
  small.kv_full.arrive_when_copied();

  const Pipeline q_ring(small.q_stages, kStages), do_ring(small.do_stages, kStages);
  PipelineStage stage = Pipeline::producer();
  MappedLine line;
  line.find(maps.q, sweep.queries);
  QueryWalk<kGroup, kQueries, 1> walk{a, small, small.found};
  // What belongs to a thread's query of the next tile. It is asked for a tile ahead: behind what consumers add to dq it takes longer
  // than a copy of the engine, which would wait for it.
  float lse = 0, delta = 0;
  std::uint32_t row = kNowhere;
  const auto look_ahead = [&] {
    const Range tile = walk.tile();
    const std::int64_t h = walk.query_head();
    row = kNowhere;
    if (thread >= kQueries || tile.first + thread >= tile.end) return;
    const std::int64_t t = p.token(sweep.queries.at(tile.first + thread));
    // Where there are layers a block has one head.
    const std::int64_t in_layer = small.query_row + tile.first + thread;
    const std::int64_t i = a.delta.of_layers ? in_layer : (small.b * p.H + h) * a.delta.rows + t;
    const std::int64_t own = a.dq.layers != nullptr ? in_layer : (small.b * p.Tq + t) * p.H + h;
    lse = p.lse.at<const float>(small.b, h)[t * p.lse.row];
    delta = a.delta.data[i];
    row = static_cast<std::uint32_t>(own * p.D / 8);
  };
  walk.start();
  if (!walk.done()) look_ahead();
  while (!walk.done()) {
    const Range tile = walk.tile();
    const std::int64_t h = walk.query_head();
    const auto queries = static_cast<int>(tile.end - tile.first);
    const Range all = sweep.seen_by_all(tile);
    const bool masked = small.first < all.first || small.first + kKeys > all.end ||
                        small.count < kKeys || queries < kQueries;
    const bool by_engine = line.map >= 0 && !masked;
    const auto load = [&](const Pipeline& ring, QueryTile to, const Operand& operand,
                          const RowMaps& map, int columns) {
      ring.acquire(stage);
      if (!by_engine) {
        load_rows<T>(to, operand.at<const T>(small.b, h), operand, p, sweep.queries, tile.first,
                     queries, columns);
        ring.full[stage.at].arrive_when_copied();
      } else if (leads) {
        ring.expect(stage, QueryTile::kBytes);
        load_boxes(to, map, line, tile.first, small.b, h, ring.full + stage.at);
      } else {
        ring.commit(stage);
      }
    };
    // Consumers need do later than q, but are done with it sooner.
    load(do_ring, Tiling::do_tile(shared, stage.at), a.do_, maps.do_, p.Dv);
    load(q_ring, Tiling::q_tile(shared, stage.at), p.q, maps.q, p.D);
    if (leads) {
      small.note[stage.at] = {static_cast<int>(tile.first), queries, masked, 0, !by_engine};
      small.head[stage.at] = static_cast<int>(h);
    }
    if (thread < kQueries) {
      const bool there = row != kNowhere;
      small.lse[stage.at][thread] = there ? weight_origin(lse) : 0.0f;
      small.delta[stage.at][thread] = there ? delta : 0.0f;
      small.row[stage.at][thread] = row;
    }
    q_ring.commit(stage);
    stage.next(kStages);
    walk.next();
    if (!walk.done()) look_ahead();
  }
  q_ring.acquire(stage);
  if (leads) small.note[stage.at] = {};
  // (racecheck takes the note for unwritten where one thread arrives twice before another has at all.)
  sync_threads(1, kGroup);
  for (int i = 0; i < 2; ++i) q_ring.commit(stage);  // a tile's rows, and what belongs to them
  copy_async_wait_all();
}

// d = A^T B, of 64 columns of either: those of a panel.
template <class T, class PanelsA, class PanelsB>
__device__ __forceinline__ void multiply_columns(float (&d)[32], PanelsA a, int a_panel, PanelsB b,
                                                 int b_panel) {
  static_assert(PanelsA::kRows == PanelsB::kRows);
  const auto low_a = mn_major_low(a.data + a_panel * PanelsA::kPanel, PanelsA::kPanel);
  const auto low_b = mn_major_low(b.data + b_panel * PanelsB::kPanel, PanelsB::kPanel);
#pragma unroll
  for (int k = 0; k < PanelsA::kRows / 16; ++k) {
    wgmma<T, Major::kMN, Major::kMN>(d, mn_major(low_a, k), mn_major(low_b, k), k > 0);
  }
}

// A warp's 16 rows of a left operand to shared memory. (Words by st.shared take an address each: eight registers that the loop does
// not have.)
template <int kK, class Panels>
__device__ __forceinline__ void store_fragments(const Fragments<kK>& from, Panels to,
                                                int first_row) {
  const int lane = static_cast<int>(threadIdx.x) & 31;
  const std::uint32_t row =
      shared_address(to.data) + Panels::offset(first_row + lane % 16, lane / 16);
#pragma unroll
  for (int k = 0; k < kK / 16; ++k) {
    stmatrix((row ^ (2 * k % 8 << 4)) + k / 4 * Panels::kPanel, from.a[k]);
  }
}

// Sums of a warp, 16 rows of 64 columns in fp32, times `scale`, to rows of 256 bytes.
template <class Panels>
__device__ __forceinline__ void store_partial(const float (&acc)[8][4], float scale, Panels to,
                                              int first_row) {
  const int lane = static_cast<int>(threadIdx.x) & 31;
  const std::uint32_t at =
      shared_address(to.data) + Panels::offset(first_row + lane / 4, lane % 4 / 2) + lane % 2 * 8;
#pragma unroll
  for (int n = 0; n < 8; ++n) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      asm volatile("st.shared.v2.f32 [%0], {%1, %2};" ::"r"(
                       (at ^ (2 * n % 8 << 4)) + n / 4 * Panels::kPanel + half * 8 * 128),
                   "f"(acc[n][half * 2] * scale), "f"(acc[n][half * 2 + 1] * scale)
                   : "memory");
    }
  }
}

// The same from there to sums in global memory by a warpgroup: row(i) is where row i begins, or null. Of `columns`, a multiple of
// four.
template <class Panels, class Row>
__device__ __forceinline__ void add_partial(Panels from, int columns, Row&& row) {
  const int thread = static_cast<int>(threadIdx.x) % kGroup;
  const int chunk = thread % 16;
  if (chunk * 4 >= columns) return;
#pragma unroll 1
  for (int i = thread / 16; i < 64; i += kGroup / 16) {
    float* const to = row(i);
    const uint4 v = load_shared(shared_address(from.data) + Panels::offset(i, chunk));
    add_four(to + chunk * 4, __uint_as_float(v.x), __uint_as_float(v.y), __uint_as_float(v.z),
             __uint_as_float(v.w), to != nullptr);
  }
}

// A warpgroup's 64 keys over all queries that see them.
template <class Tiling>
__device__ __forceinline__ void gather(const GradientArgs& a, const GradientMaps& maps,
                                       typename Tiling::Small& small, unsigned char* shared,
                                       int group) {
  using T = typename Tiling::T;
  constexpr int kStages = Tiling::kStages, kQueries = Tiling::kQueries;
  constexpr int kRanges = 2, kDone = 4;  // named barriers; 1 is that of those who bring tiles
  const Problem& p = a.p;
  const int thread = static_cast<int>(threadIdx.x) % kGroup;
  const int lane = thread % 32, warp = thread / 32, first_row = group * 64 + warp * 16;
  const int own_row = first_row + lane / 4;
  if (thread < 64) {
    const int row = group * 64 + thread;
    Range r;
    if (row < small.count) r = small.sweep.seeing_any({small.first + row, small.first + row + 1});
    small.first_query[row] = r.empty() ? 0 : static_cast<int>(r.first);
    small.end_query[row] = r.empty() ? 0 : static_cast<int>(r.end);
  }
  sync_threads(kRanges + group, kGroup);

  const Pipeline q_ring(small.q_stages, kStages), do_ring(small.do_stages, kStages);
  const auto k_tile = Tiling::k_tile(shared), v_tile = Tiling::v_tile(shared);
  PipelineStage stage;
  float s[kQueries / 2], dp[kQueries / 2], dq_sums[1][8][4];
  auto& dq = *reinterpret_cast<float(*)[32]>(&dq_sums);
  float dk_sums[1][Tiling::kColumns / 8][4], dv_sums[1][Tiling::kColumns / 8][4];
  auto& dk = *reinterpret_cast<float(*)[Tiling::kColumns / 2]>(&dk_sums);
  auto& dv = *reinterpret_cast<float(*)[Tiling::kColumns / 2]>(&dv_sums);
  const auto next_tile = [&] {
    q_ring.wait(stage);
    const TileNote note = small.note[stage.at];
    if (note.by_threads != 0) fence_shared_writes();
    return note;
  };
  const auto ask_for_scores = [&] {
    wgmma_fence();
    multiply_rows<T>(s, k_tile, group * 64, Tiling::q_tile(shared, stage.at));
    wgmma_commit();
  };
  const auto part_of_tile = [&](const TileNote& tile, int(&first)[2], int(&last)[2]) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      first[half] = small.first_query[own_row + 8 * half] - tile.first;
      last[half] = min(small.end_query[own_row + 8 * half] - tile.first, tile.count);
    }
  };

  small.kv_full.wait(0);
  fence_shared_writes();
  // dq of a tile is made a tile later, when the other half of its scores' gradients has long come: a warpgroup may be up to a
  // tile ahead of the other, so that one has products to make while the other has weights to make. (Of scores that are asked
  // for a tile ahead d128 is 12 % slower.) Before the first tile dq is that of whatever lies there, and goes nowhere.
  const auto await_other = [&](int turn) {
    sync_threads(kDone + 2 * (group ^ 1) + turn % 2, 2 * kGroup);
  };
  const auto say_done = [&](int turn) { arrive_threads(kDone + 2 * group + turn % 2, 2 * kGroup); };
  const auto ask_for_dq = [&](int place) {
    wgmma_fence();
    multiply_columns<T>(dq, Tiling::scores(shared, place), kQueries == 128 ? group : 0, k_tile,
                        kQueries == 128 ? 0 : group);
    wgmma_commit();
  };
  // Adding it from registers is what a seventh of forward and backward goes to (d128, n 8192): what is added waits in the same
  // queue as all else that reads and writes memory. The copy engine takes boxes from shared memory. (A row at a time, by
  // cp.reduce.async.bulk, it takes 7 % longer.)
  float* const dq_to = a.dq.layers != nullptr ? a.dq.layers : a.dq.sum;
  const bool engine_adds = Tiling::kByEngine && small.dq_line.map >= 0;
  std::uint32_t due[2] = {kNowhere, kNowhere};  // the lane's rows of dq
  const auto add_dq = [&](bool any) {
    if constexpr (Tiling::kByEngine) {
      if (!any) return;
      const auto partial = Tiling::partial(shared, group);
      store_partial(dq_sums[0], p.scale, partial, warp * 16);
      const auto& at = small.due[group];
      if (engine_adds) {
        fence_shared_writes();
        sync_threads(kRanges + group, kGroup);
        if (thread != 0) return;
        const bool of_layers = a.dq.layers != nullptr;
        add_boxes(partial, maps.dq, small.dq_line, group * 64, p.D, at.first,
                  of_layers ? 0 : small.b, of_layers ? 0 : at.head);
        commit_stores();
        return;
      }
      sync_threads(kRanges + group, kGroup);
      add_partial(partial, p.D - group * 64, [&](int i) {
        const std::uint32_t row = at.row[i];
        return row == kNowhere ? nullptr : dq_to + std::int64_t{row} * 8 + group * 64;
      });
      sync_threads(kRanges + group, kGroup);  // before the rows that are due next are written
      return;
    }
    add_rows(dq_sums, p.scale, dq_to, 0, p.D,
             [&](int i) { return due[i / 8] == kNowhere ? -1 : std::int64_t{due[i / 8]} * 8; });
  };
  say_done(1);
  int place = 0, place_before = Tiling::kScores - 1;  // of scores
  TileNote tile = next_tile();
  bool any = false;
  int turn = 0;
  for (; tile.count > 0; ++turn) {
    const PipelineStage now = stage;
    ask_for_scores();
    const auto do_tile = Tiling::do_tile(shared, now.at);
    do_ring.wait(now);
    if (tile.by_threads != 0) fence_shared_writes();
    wgmma_fence();
    multiply_rows<T>(dp, v_tile, group * 64, do_tile);
    wgmma_commit();
    const auto of_columns = [&](const float* row, int n) {
      return *reinterpret_cast<const float2*>(row + lane % 4 * 2 + n * 8);
    };
    // As many are read before a product is waited for as there are registers for.
    constexpr int kAhead = kQueries == 64 ? 4 : 0;
    float2 ahead[kAhead + 1];
    const auto read_ahead = [&](const float* row) {
#pragma unroll
      for (int n = 0; n < kAhead; ++n) ahead[n] = of_columns(row, n);
    };
    read_ahead(small.lse[now.at]);
    wgmma_wait<1>();  // scores
#pragma unroll
    for (int n = 0; n < kQueries / 8; ++n) {
      const float2 origin = n < kAhead ? ahead[n] : of_columns(small.lse[now.at], n);
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        s[4 * n + i] =
            exp2_fast(fmaf(s[4 * n + i], p.exponent_scale, i % 2 == 0 ? -origin.x : -origin.y));
      }
    }
    int first[2], last[2];
    if (tile.masked != 0) {
      part_of_tile(tile, first, last);
      keep_between(s, first, last, 0.0f);
    }
    Fragments<kQueries> weights, ds;
    read_ahead(small.delta[now.at]);
    wgmma_wait<0>();  // dp
#pragma unroll
    for (int n = 0; n < kQueries / 8; ++n) {
      const float2 less = n < kAhead ? ahead[n] : of_columns(small.delta[now.at], n);
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        dp[4 * n + i] = s[4 * n + i] * (dp[4 * n + i] - (i % 2 == 0 ? less.x : less.y));
      }
    }
    if (tile.masked != 0) keep_between(dp, first, last, 0.0f);
    // (Before dp is waited for it would be sooner, but 16 registers too many; with weights in 16 bits only, up to 6 % slower.)
    weights.template take<T>(s);
    wgmma_fence();
    add_product<T>(dv, weights, do_tile, any);
    wgmma_commit();
    ds.template take<T>(dp);
    store_fragments(ds, Tiling::scores(shared, place), first_row);
    fence_shared_writes();

    if (Tiling::kByEngine && thread == 0) wait_stores_read<0>();
    await_other(turn + 1);
    ask_for_dq(place_before);
    add_product<T>(dk, ds, Tiling::q_tile(shared, now.at), any);
    wgmma_commit();
    any = true;
    wgmma_wait<1>();  // dv and dq
    say_done(turn);
    do_ring.release_by_warp(now.at);
    add_dq(turn > 0);
    if constexpr (Tiling::kByEngine) {
      if (thread == 0)
        small.due[group].first = tile.first, small.due[group].head = small.head[now.at];
      if (!engine_adds && thread < 64) small.due[group].row[thread] = small.row[now.at][thread];
    } else {
      const std::uint32_t* const rows = small.row[now.at] + group * 64 + warp * 16 + lane / 4;
      due[0] = rows[0];
      due[1] = rows[8];
    }
    place_before = place;
    place = place + 1 == Tiling::kScores ? 0 : place + 1;
    stage.next(kStages);
    tile = next_tile();
    wgmma_wait<0>();  // dk
    q_ring.release_by_warp(now.at);
  }
  if (Tiling::kByEngine && thread == 0) wait_stores_read<0>();
  await_other(turn + 1);
  ask_for_dq(place_before);
  wgmma_wait<0>();
  add_dq(any);
  if (Tiling::kByEngine && thread == 0) wait_stores<0>();
  if (!any) {
#pragma unroll
    for (int i = 0; i < Tiling::kColumns / 2; ++i) dk[i] = dv[i] = 0;
  }
  const auto token = [&](int row) { return p.token(small.sweep.keys.at(small.first + row)); };
  store_gradient<T>(dk_sums, p.scale, first_row, 0, small.count, a.dk, small.layer_row, small.b,
                    small.h, p.Tk, p.Hkv, p.D, token);
  store_gradient<T>(dv_sums, 1.0f, first_row, 0, small.count, a.dv, small.layer_row, small.b,
                    small.h, p.Tk, p.Hkv, p.Dv, token);
}

#endif  // ANNULUS_DEVICE_HOPPER

template <class Tiling>
__global__ void __launch_bounds__(Tiling::kThreads, 1)
    gradient_kernel(const __grid_constant__ GradientArgs a,
                    const __grid_constant__ GradientMaps maps) {
#if ANNULUS_DEVICE_HOPPER
  extern __shared__ __align__(1024) unsigned char shared[];
  auto& small = *reinterpret_cast<typename Tiling::Small*>(shared + Tiling::kTileBytes);
  await_previous_kernel();
  if (a.not_finite != nullptr && *a.not_finite != 0) return;
  if (threadIdx.x == 0) {
    small.start(a, Tiling::kKeys);
    if (a.dq.layers == nullptr) {
      small.dq_line.find(maps.dq, small.sweep.queries);
    } else {
      small.dq_line = {maps.dq.count - 1, 0, static_cast<int>(small.query_row), false};
    }
    small.kv_full.init(kGroup);
    Pipeline(small.q_stages, Tiling::kStages).init(Tiling::kStages, 2 * kGroup, 8);
    Pipeline(small.do_stages, Tiling::kStages).init(Tiling::kStages, kGroup, 8);
    fence_barriers();
  }
  __syncthreads();
  if (small.count == 0) return;
  const int group = __shfl_sync(~0u, static_cast<int>(threadIdx.x) / kGroup, 0);
  if (group == 0) {
    give_registers<Tiling::kProducerRegisters>();
    bring_queries<Tiling>(a, maps, small, shared);
  } else {
    take_registers<Tiling::kConsumerRegisters>();
    gather<Tiling>(a, maps, small, shared, group - 1);
  }
#endif
}

template <class Tiling>
void launch_gradient(const char* op, GradientArgs a, const GradientMaps& maps,
                     cudaStream_t stream) {
  const std::int64_t blocks = a.p.number_blocks(a.p.Hkv, false, Tiling::kKeys);
  if (blocks == 0) return;
  launch_kernel(op, "gradient_kernel", gradient_kernel<Tiling>, checked_blocks(op, blocks),
                Tiling::kThreads, Tiling::kSharedBytes, stream, a, maps);
}

// Of the rows of layers there is one map; of those of tensors a map a step, where no row of a map is beyond the sums.
inline RowMaps dq_maps_of(const char* op, const GradientArgs& a) {
  const Problem& p = a.p;
  if (a.dq.layers != nullptr) {
    Problem flat;
    flat.B = 1;
    const std::int64_t rows = p.B * p.H * p.rows.count;
    if (rows > INT32_MAX - 64) return {};
    return maps_of<float>(op, flat, {a.dq.layers, 0, p.D}, rows, 1, p.D, 64);
  }
  const Operand sums{a.dq.sum, p.Tq * p.H * p.D, p.H * p.D, p.D};
  RowMaps maps = maps_of<float>(op, p, sums, p.Tq, p.H, p.D, 64);
  for (int i = 0; i < maps.count; ++i) {
    if (p.Tq % maps.step[i] != 0) return {};
  }
  return maps;
}

template <class T>
void gradient_of(const char* op, const GradientArgs& a, cudaStream_t stream) {
  const Problem& p = a.p;
  const auto launch = [&]<class Tiling>() {
    GradientMaps maps{maps_of<T>(op, p, p.q, p.Tq, p.H, p.D, Tiling::kQueries),
                      maps_of<T>(op, p, a.do_, p.Tq, p.H, p.Dv, Tiling::kQueries),
                      {}};
    both_or_none(maps.q, maps.do_);
    if constexpr (Tiling::kByEngine) maps.dq = dq_maps_of(op, a);
    launch_gradient<Tiling>(op, a, maps, stream);
  };
  if (p.D <= 64 && p.Dv <= 64) return launch.template operator()<GradientTiling<T, 64, 128>>();
  launch.template operator()<GradientTiling<T, 128, 64>>();
}

}  // namespace annulus::attention::cuda::sm90
