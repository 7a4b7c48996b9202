// Forward: a block of threads has a tile of a sweep's queries and goes over the tiles of keys that any of them sees.
// Scores, weights and sums of a warp's rows stay in its registers: lane l has rows l / 4 and l / 4 + 8 of every 16.
#pragma once

#include <cstddef>
#include <cstdint>

#include "annulus/attention/cuda/launch.h"
#include "annulus/attention/cuda/mask.cuh"
#include "annulus/attention/cuda/query_block.cuh"
#include "annulus/cuda/check.h"
#include "annulus/cuda/math.cuh"
#include "annulus/cuda/reduce.cuh"

namespace annulus::attention::cuda {

// kM: tiles of 16 queries a warp has. With two a fragment of keys serves two products, without which the bandwidth of
// shared memory is what limits; kShort, for sweeps of 64 queries at most, has one, so that all warps have work.
template <class T, int kColumns, bool kShort>
struct ForwardTiling {
  static constexpr bool kSplit = Format<T>::kTerms > 1;
  static constexpr int kWarps = 4, kThreads = kWarps * 32;
  static constexpr int kM = kSplit || kColumns > 128 || kShort ? 1 : 2;
  static constexpr int kQueries = kWarps * kM * 16;
  static constexpr int kKeys = kSplit && kColumns > 128 ? 32 : 64;
  static constexpr int kBlocks = kColumns > 128 || (kSplit && kColumns > 64) ? 1 : 2;

  using QueryTile = Tile<Format<T>, kQueries, kColumns>;
  using KeyTile = Tile<Format<T>, kKeys, kColumns>;
  static constexpr int kWords = kQueries * kKeys / 32;

  // Behind the tiles of q, k and v. Bits of two tiles: a warp may still read those of one while another makes the next.
  struct Small : QueryBlock {
    std::uint64_t drawn[kQueries];
    std::uint32_t mask[2][kWords], kept[2][kWords];
    int flags[kKeys];
  };
  static constexpr int kTileBytes = QueryTile::kBytes + 2 * KeyTile::kBytes;
  static constexpr std::size_t kSharedBytes = kTileBytes + sizeof(Small);
};

// The largest of a row and the sum of its weights; of the latter a lane has a part.
template <int kRows>
struct RowStates {
  float m[kRows], l[kRows];

  __device__ RowStates() {
#pragma unroll
    for (int r = 0; r < kRows; ++r) m[r] = kNoScore, l[r] = 0;
  }
};

// Scores become weights, and sums are brought to their new origin.
template <int kM, int kN, int kD>
__device__ __forceinline__ void online_softmax(float (&s)[kM][kN][4], RowStates<kM * 2>& state,
                                               float (&acc)[kM][kD][4], float scale) {
  // First what was summed, so that its factors are gone when registers are scarce. After the first tiles the largest score is
  // mostly among those seen.
  float factor[kM * 2];
  bool moved = false;
#pragma unroll
  for (int r = 0; r < kM * 2; ++r) {
    float high = state.m[r];
    // fmaxf passes over a NaN, whose weight is one all the same.
#pragma unroll
    for (int n = 0; n < kN; ++n) {
      high = fmaxf(high, fmaxf(s[r / 2][n][r % 2 * 2], s[r / 2][n][r % 2 * 2 + 1]));
    }
    high = warp_reduce<4>(high, [](float a, float b) { return fmaxf(a, b); });
    const bool moves = high != state.m[r];
    factor[r] = moves ? exp2_fast((state.m[r] - origin_of(high)) * scale) : 1.0f;
    moved |= moves;
    state.m[r] = high;
  }
  if (__any_sync(~0u, moved)) {
#pragma unroll
    for (int r = 0; r < kM * 2; ++r) {
      state.l[r] *= factor[r];
#pragma unroll
      for (int n = 0; n < kD; ++n) {
        acc[r / 2][n][r % 2 * 2] *= factor[r];
        acc[r / 2][n][r % 2 * 2 + 1] *= factor[r];
      }
    }
  }
#pragma unroll
  for (int r = 0; r < kM * 2; ++r) {
    const float origin = origin_of(state.m[r]) * scale;
    float sum = 0;
#pragma unroll
    for (int n = 0; n < kN; ++n) {
#pragma unroll
      for (int e = 0; e < 2; ++e) {
        float& x = s[r / 2][n][r % 2 * 2 + e];
        x = exp2_fast(fmaf(x, scale, -origin));
        sum += x;
      }
    }
    state.l[r] += sum;
  }
}

// Rows of the tile out of registers: o and lse, or states of the layer.
template <class T, int kRows, int kM, int kD>
__device__ __forceinline__ void store_rows(const ForwardArgs& a, const QueryBlock& at,
                                           int first_row, RowStates<kRows>& state,
                                           float (&acc)[kM][kD][4]) {
  static_assert(kRows == kM * 2);
  const Problem& p = a.p;
  const int lane = static_cast<int>(threadIdx.x) & 31;
#pragma unroll
  for (int r = 0; r < kRows; ++r) state.l[r] = warp_sum<4>(state.l[r]);
#pragma unroll
  for (int r = 0; r < kRows; ++r) {
    const int row = first_row + r * 8 + lane / 4;
    if (row >= at.count) continue;
    const float l = state.l[r], high = state.m[r] * p.exponent_scale;
    if (a.states.acc != nullptr) {
      const std::int64_t i = at.layer_row + row;
      if (lane % 4 == 0) {
        a.states.m[i] = high;
        a.states.l[i] = l;
      }
      float* const to = a.states.acc + i * LayerRows::pitch(p.Dv);
#pragma unroll
      for (int n = 0; n < kD; ++n) {
        store_two(to, 1, true, n * 8 + lane % 4 * 2, p.Dv,
                  acc[r / 2][n][r % 2 * 2] * p.dropout.scale,
                  acc[r / 2][n][r % 2 * 2 + 1] * p.dropout.scale);
      }
      continue;
    }
    const std::int64_t token = p.token(at.query(row));
    if (lane % 4 == 0 && p.lse.data != nullptr) {
      constexpr float kLog2 = 0.693147181f;
      p.lse.at<float>(at.b, at.h)[token * p.lse.row] =
          l == 0 ? kNoScore : fmaf(high, kLog2, logf(l));
    }
    const float factor = l == 0 ? 0.0f : p.dropout.scale / l;
    T* const to = a.o.at<T>(at.b, at.h) + token * a.o.row;
#pragma unroll
    for (int n = 0; n < kD; ++n) {
      store_two(to, a.o.column, a.o.whole, n * 8 + lane % 4 * 2, p.Dv,
                acc[r / 2][n][r % 2 * 2] * factor, acc[r / 2][n][r % 2 * 2 + 1] * factor);
    }
  }
}

template <class T, int kColumns, bool kShort>
__global__ void __launch_bounds__(ForwardTiling<T, kColumns, kShort>::kThreads,
                                  ForwardTiling<T, kColumns, kShort>::kBlocks)
    forward_kernel(const __grid_constant__ ForwardArgs a) {
  using Tiling = ForwardTiling<T, kColumns, kShort>;
  using F = Format<T>;
  constexpr int kThreads = Tiling::kThreads, kKeys = Tiling::kKeys, kM = Tiling::kM;
  extern __shared__ __align__(1024) unsigned char shared[];
  const std::uint32_t base = shared_address(shared);
  const typename Tiling::QueryTile q_tile{base};
  const typename Tiling::KeyTile k_tile{base + Tiling::QueryTile::kBytes};
  const typename Tiling::KeyTile v_tile{k_tile.address + Tiling::KeyTile::kBytes};
  auto& small = *reinterpret_cast<typename Tiling::Small*>(shared + Tiling::kTileBytes);

  const Problem& p = a.p;
  const Sweep& sweep = small.sweep;
  if (threadIdx.x == 0) small.template start<T>(p, Tiling::kQueries);
  __syncthreads();
  if (small.count <= 0) return;
  const bool drops = p.dropout.any();

  const auto load_keys = [&](auto tile, const void* from, const Operand& operand, Range range,
                             int columns) {
    load_tile<F, kThreads>(tile, static_cast<const T*>(from), operand, p, sweep.keys, range.first,
                           static_cast<int>(range.end - range.first), columns);
    copy_async_commit();
  };

  KeyWalk walk;
  walk.start(sweep, small.seen, kKeys);
  load_tile<F, kThreads>(q_tile, p.q.at<T>(small.b, small.h), p.q, p, sweep.queries, small.first,
                         small.count, p.D);
  if (!walk.done()) load_keys(k_tile, small.k, p.k, walk.tile(kKeys), p.D);
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
  float acc[kM][kColumns / 8][4] = {};
  for (int parity = 0; !walk.done(); parity ^= 1) {
    const Range tile = walk.tile(kKeys);
    const bool masked = small.masks(p, tile, kKeys);
    if (masked)
      make_query_mask<Tiling::kQueries, kKeys, kThreads>(small.mask[parity], p, small, tile);
    if (drops) {
      make_query_kept<Tiling::kQueries, kKeys, kThreads>(small.kept[parity], p, small, tile,
                                                         small.drawn);
    }
    copy_async_wait<0>();
    __syncthreads();  // q and k are here, and all have used v of the tile before
    load_keys(v_tile, small.v, p.v, tile, p.Dv);

    float s[kM][kKeys / 8][4];
    if (active) {
      multiply_rows<F>(s, q_tile, first_row, k_tile);
      if (p.scale_first) {
#pragma unroll
        for (int m = 0; m < kM; ++m) {
#pragma unroll
          for (int n = 0; n < kKeys / 8; ++n) {
#pragma unroll
            for (int e = 0; e < 4; ++e) s[m][n][e] *= p.score_scale;
          }
        }
      }
      if (masked) keep_bits(s, small.mask[parity], first_row, kNoScore);
    }

    copy_async_wait<0>();
    __syncthreads();  // v is here, and all have used k
    walk.next(sweep, small.seen, kKeys);
    if (!walk.done()) load_keys(k_tile, small.k, p.k, walk.tile(kKeys), p.D);

    Weights<F, kM, kKeys / 8> weights;
    if (active) {
      online_softmax(s, state, acc, p.exponent_scale);
      if (drops) keep_bits(s, small.kept[parity], first_row, 0.0f);
      weights.take(s);
    }
    if (masked && has_not_finite<F, kThreads>(v_tile)) {
      take_out_not_finite<F, kThreads, true>(acc, v_tile, first_row, small.mask[parity],
                                             small.flags);
    }
    if (active) add_product(acc, weights, v_tile);
  }
  copy_async_wait<0>();
  store_rows<T>(a, small, first_row, state, acc);
}

template <class T, int kColumns, bool kShort>
void launch_forward(const char* op, ForwardArgs a, cudaStream_t stream) {
  using Tiling = ForwardTiling<T, kColumns, kShort>;
  const std::int64_t blocks = a.p.number_blocks(a.p.H, true, Tiling::kQueries);
  if (blocks == 0) return;
  allow_shared(op, "forward_kernel", forward_kernel<T, kColumns, kShort>, Tiling::kSharedBytes);
  forward_kernel<T, kColumns, kShort>
      <<<checked_blocks(op, blocks), Tiling::kThreads, Tiling::kSharedBytes, stream>>>(a);
  check_launch(op, "forward_kernel");
}

template <class T>
void forward_of(const char* op, const ForwardArgs& a, cudaStream_t stream) {
  const bool is_short = a.p.longest_sweep(true) <= kShortSweep;
  visit_tiles<T>(a.p, is_short, [&]<int kColumns, bool kShort>() {
    launch_forward<T, kColumns, kShort>(op, a, stream);
  });
}

}  // namespace annulus::attention::cuda
