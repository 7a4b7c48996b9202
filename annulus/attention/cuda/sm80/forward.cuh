// Forward: a block of threads has a tile of a sweep's queries and goes over the tiles of keys that any of them sees.
// Scores, weights and sums of a warp's rows stay in its registers: lane l has rows l / 4 and l / 4 + 8 of every 16.
#pragma once

#include <cstddef>
#include <cstdint>

#include "annulus/attention/cuda/forward_rows.cuh"
#include "annulus/attention/cuda/launch.h"
#include "annulus/attention/cuda/mask.cuh"
#include "annulus/attention/cuda/query_block.cuh"
#include "annulus/cuda/launch.cuh"
#include "annulus/cuda/reduce.cuh"

namespace annulus::attention::cuda {

// How tiles of keys and values follow each other.
//   kTwice  k and v are brought in turn, each while the other is used: all warps wait twice a tile
//   kOnce   both are brought a tile ahead
enum class Flow : std::uint8_t { kTwice, kOnce };

// kM: tiles of 16 queries a warp has. With two a fragment of keys serves two products, without which the bandwidth of
// shared memory is what limits; with one there are twice as many tiles, for short sweeps and few of them.
// kHolds: fragments of queries stay in registers. kPlain: tiles of which everything counts have code of their own, without a
// branch between products, where the registers for it are there.
template <class T, int kColumns_, int kM_, int kKeys_, int kBlocks_, Flow kFlow_, bool kHolds_,
          bool kPlain_>
struct ForwardTiling {
  using Type = T;
  static constexpr int kColumns = kColumns_, kM = kM_, kKeys = kKeys_, kBlocks = kBlocks_;
  static constexpr Flow kFlow = kFlow_;
  static constexpr bool kHolds = kHolds_, kPlain = kPlain_;
  static constexpr int kWarps = 4, kThreads = kWarps * 32, kQueries = kWarps * kM * 16;
  static constexpr int kStages = kFlow == Flow::kTwice ? 1 : 2;
  static_assert(Format<T>::kAsync || (kFlow == Flow::kTwice && !kHolds));

  using QueryTile = Tile<Format<T>, kQueries, kColumns>;
  using KeyTile = Tile<Format<T>, kKeys, kColumns>;
  static constexpr int kWords = kQueries * kKeys / 32;

  // Behind the tiles of q, k and v. Bits of two tiles: a warp may still read those of one while another makes the next.
  struct Small : QueryBlock {
    std::uint64_t drawn[kQueries];
    std::uint32_t mask[2][kWords], kept[2][kWords];
    int flags[kKeys];
  };
  static constexpr int kTileBytes = QueryTile::kBytes + 2 * kStages * KeyTile::kBytes;
  static constexpr std::size_t kSharedBytes = kTileBytes + sizeof(Small);
};

// kShort: sweeps are short, or tiles few.
template <class T, int kColumns, bool kShort>
struct ForwardChoice {
  static constexpr bool kSplit = Format<T>::kTerms > 1;
  static constexpr int kM = kSplit || kColumns > 128 || kShort ? 1 : 2;
  static constexpr int kKeys = kSplit && kColumns > 128 ? 32 : 64;
  static constexpr int kBlocks = kColumns > 128 || (kSplit && kColumns > 64) ? 1 : 2;
  // With little shared memory or few keys, and with much: two blocks of threads should find room.
  using Small = ForwardTiling<T, kColumns, kM, kKeys, kBlocks, Flow::kTwice, false, false>;
  using Large = Small;
};
template <class T, bool kShort>
requires(Format<T>::kAsync) struct ForwardChoice<T, 64, kShort> {
  using Small = ForwardTiling<T, 64, kShort ? 1 : 2, 64, 2, Flow::kTwice, false, false>;
  using Large = ForwardTiling<T, 64, kShort ? 1 : 2, 128, 2, Flow::kOnce, kShort, true>;
};
template <class T>
requires(Format<T>::kAsync) struct ForwardChoice<T, 128, true> {
  using Small = ForwardTiling<T, 128, 1, 64, 2, Flow::kTwice, false, false>;
  using Large = ForwardTiling<T, 128, 1, 64, 2, Flow::kOnce, true, true>;
};

template <class Tiling>
__global__ void __launch_bounds__(Tiling::kThreads, Tiling::kBlocks)
    forward_kernel(const __grid_constant__ ForwardArgs a) {
  using T = typename Tiling::Type;
  using F = Format<T>;
  using KeyTile = typename Tiling::KeyTile;
  constexpr int kThreads = Tiling::kThreads, kKeys = Tiling::kKeys, kM = Tiling::kM;
  constexpr Flow kFlow = Tiling::kFlow;
  await_previous_kernel();
  extern __shared__ __align__(1024) unsigned char shared[];
  const std::uint32_t base = shared_address(shared);
  const typename Tiling::QueryTile q_tile{base};
  const std::uint32_t keys_base = base + Tiling::QueryTile::kBytes;
  const auto k_tile = [&](int stage) { return KeyTile{keys_base + 2 * stage * KeyTile::kBytes}; };
  const auto v_tile = [&](int stage) {
    return KeyTile{keys_base + (2 * stage + 1) * KeyTile::kBytes};
  };
  auto& small = *reinterpret_cast<typename Tiling::Small*>(shared + Tiling::kTileBytes);

  const Problem& p = a.p;
  const Sweep& sweep = small.sweep;
  if (threadIdx.x == 0) small.template start<T>(p, Tiling::kQueries, a.parts, kKeys);
  __syncthreads();
  if (small.count <= 0) return;
  const bool drops = p.dropout.any();

  const auto load_keys = [&](KeyTile tile, const void* from, const Operand& operand, Range range,
                             int columns) {
    load_tile<F, kThreads>(tile, static_cast<const T*>(from), operand, p, sweep.keys, range.first,
                           static_cast<int>(range.end - range.first), columns);
    copy_async_commit();
  };
  const auto bring_k = [&](Range tile, int stage) {
    load_keys(k_tile(stage), small.k, p.k, tile, p.D);
  };
  const auto bring_v = [&](Range tile, int stage) {
    load_keys(v_tile(stage), small.v, p.v, tile, p.Dv);
  };
  // Bits of a tile; says whether it is masked.
  const auto make_bits = [&](Range tile, int parity) {
    const bool masked = small.masks(p, tile, kKeys);
    if (masked)
      make_query_mask<Tiling::kQueries, kKeys, kThreads>(small.mask[parity], p, small, tile);
    if (drops) {
      make_query_kept<Tiling::kQueries, kKeys, kThreads>(small.kept[parity], p, small, tile,
                                                         small.drawn);
    }
    return masked;
  };

  KeyWalk walk;
  walk.start(sweep, small.seen, kKeys, p.fixed);
  load_tile<F, kThreads>(q_tile, p.q.at<T>(small.b, small.h), p.q, p, sweep.queries, small.first,
                         small.count, p.D);
  if (!walk.done()) {
    bring_k(walk.tile(kKeys), 0);
    if constexpr (kFlow != Flow::kTwice) bring_v(walk.tile(kKeys), 0);
  }
  if (drops) {
    for (int row = static_cast<int>(threadIdx.x); row < small.count; row += kThreads) {
      const std::int64_t token = p.token(small.query(row));
      small.drawn[row] = p.dropout.row(sweep.sample, small.h, token - sweep.first_query);
    }
    __syncthreads();
  }

  const int first_row = uniform_warp() * kM * 16;
  // A warp without rows only waits with the others; asked where sweeps may be short.
  const bool active = kM > 1 || first_row < small.count;
  RowStates<kM * 2> state;
  float acc[kM][Tiling::kColumns / 8][4] = {};
  using Scores = float[kM][kKeys / 8][4];
  HeldRows<F, kM, Tiling::kHolds ? Tiling::kColumns / 16 : 0> held;
  // kPlain: all keys count for all queries, nothing is dropped, and scores are what is multiplied. Without those branches
  // products and what is between them overlap better.
  const bool is_plain = !drops && !p.scale_first;
  const auto scores_of = [&]<bool kPlain>(Scores& s, KeyTile keys) {
    if constexpr (Tiling::kHolds) {
      multiply_rows(s, held, keys);
    } else {
      multiply_rows<F>(s, q_tile, first_row, keys);
    }
    if (!kPlain && p.scale_first) {
#pragma unroll
      for (int m = 0; m < kM; ++m) {
#pragma unroll
        for (int n = 0; n < kKeys / 8; ++n) {
#pragma unroll
          for (int e = 0; e < 4; ++e) s[m][n][e] *= p.score_scale;
        }
      }
    }
  };
  // Sums of a tile.
  const auto add_tile = [&]<bool kPlain>(Scores& s, KeyTile values, int parity, bool masked) {
    Weights<F, kM, kKeys / 8> weights;
    if (active) {
      if (!kPlain && masked) keep_bits(s, small.mask[parity], first_row, kNoScore);
      move_origin(s, state, acc, p.exponent_scale);
      weigh(s, state, p.exponent_scale);
      if (!kPlain && drops) keep_bits(s, small.kept[parity], first_row, 0.0f);
      weights.take(s);
    }
    if (!kPlain && masked && has_not_finite<F, kThreads>(values)) {
      take_out_not_finite<F, kThreads, true>(acc, values, first_row, small.mask[parity],
                                             small.flags);
    }
    if (active) add_product(acc, weights, values);
  };
  const auto visit = [&](bool masked, auto&& f) {
    if (Tiling::kPlain && is_plain && !masked) {
      f.template operator()<true>();
    } else {
      f.template operator()<false>();
    }
  };

  if constexpr (kFlow == Flow::kTwice) {
    for (int parity = 0; !walk.done(); parity ^= 1) {
      const Range tile = walk.tile(kKeys);
      const bool masked = make_bits(tile, parity);
      copy_async_wait<0>();
      __syncthreads();  // q and k are here, and all have used v of the tile before
      bring_v(tile, 0);
      static_assert(!Tiling::kHolds);
      Scores s;
      if (active) scores_of.template operator()<false>(s, k_tile(0));
      copy_async_wait<0>();
      __syncthreads();  // v is here, and all have used k
      walk.next(sweep, small.seen, kKeys);
      if (!walk.done()) bring_k(walk.tile(kKeys), 0);
      visit(masked, [&]<bool kPlain>() {
        add_tile.template operator()<kPlain>(s, v_tile(0), parity, masked);
      });
    }
  } else if (!walk.done()) {
    bool masked = make_bits(walk.tile(kKeys), 0);
    copy_async_wait<0>();
    __syncthreads();  // q and the first tile are here
    if constexpr (Tiling::kHolds) held.take(q_tile, first_row);
    for (int stage = 0; !walk.done(); stage ^= 1) {
      const bool now_masked = masked;
      walk.next(sweep, small.seen, kKeys);
      if (!walk.done()) {
        bring_k(walk.tile(kKeys), stage ^ 1);
        bring_v(walk.tile(kKeys), stage ^ 1);
        masked = make_bits(walk.tile(kKeys), stage ^ 1);
      }
      visit(now_masked, [&]<bool kPlain>() {
        Scores s;
        if (active) scores_of.template operator()<kPlain>(s, k_tile(stage));
        add_tile.template operator()<kPlain>(s, v_tile(stage), stage, now_masked);
      });
      copy_async_wait<0>();
      __syncthreads();  // the next tile is here, and all are done with this one
    }
  }
  copy_async_wait<0>();
  store_rows<T>(a, small, first_row, state, acc);
}

template <class Tiling>
void launch_forward(const char* op, ForwardArgs a, cudaStream_t stream) {
  const std::int64_t blocks = a.p.number_blocks(a.p.H, true, Tiling::kQueries) * a.parts;
  if (blocks == 0) return;
  launch_kernel(op, "forward_kernel", forward_kernel<Tiling>, checked_blocks(op, blocks),
                Tiling::kThreads, Tiling::kSharedBytes, stream, a);
}

template <class T>
void forward_of(const char* op, const ForwardArgs& a, cudaStream_t stream) {
  const bool is_short = !a.p.fixed && (a.p.longest_sweep(true) <= kShortSweep ||
                                       fill_of(op, a.p, a.p.H, true, 128) != Fill::kOften);
  // Of keys in blocks of a list, or of short sweeps, large tiles would be empty for the most part.
  const bool is_large =
      !a.p.fixed && a.p.longest_sweep(false) > 64 && has_much_shared(current_device(op));
  visit_tiles<T>(a.p, is_short, [&]<int kColumns, bool kShort>() {
    using Choice = ForwardChoice<T, kColumns, kShort>;
    if (is_large) {
      launch_forward<typename Choice::Large>(op, a, stream);
    } else {
      launch_forward<typename Choice::Small>(op, a, stream);
    }
  });
}

}  // namespace annulus::attention::cuda
