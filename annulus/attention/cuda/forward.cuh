// Forward: a block of threads has a tile of a sweep's queries and goes over the tiles of keys that any of them sees.
// Scores, weights and sums of a warp's rows stay in its registers: lane l has rows l / 4 and l / 4 + 8 of every 16.
#pragma once

#include <cstddef>
#include <cstdint>

#include "annulus/attention/cuda/launch.h"
#include "annulus/attention/cuda/mask.cuh"
#include "annulus/cuda/check.h"
#include "annulus/cuda/math.cuh"
#include "annulus/cuda/reduce.cuh"

namespace annulus::attention::cuda {

// kM: tiles of 16 queries a warp has. With two a fragment of keys serves two products, without which the bandwidth of
// shared memory is what limits.
template <class T, int kColumns>
struct ForwardTiling {
  static constexpr bool kSplit = Format<T>::kTerms > 1;
  static constexpr int kWarps = 4, kThreads = kWarps * 32;
  static constexpr int kM = kSplit || kColumns > 128 ? 1 : 2;
  static constexpr int kQueries = kWarps * kM * 16;
  static constexpr int kKeys = kSplit && kColumns > 128 ? 32 : 64;
  static constexpr int kBlocks = kColumns > 128 || (kSplit && kColumns > 64) ? 1 : 2;

  using QueryTile = Tile<Format<T>, kQueries, kColumns>;
  using KeyTile = Tile<Format<T>, kKeys, kColumns>;
  static constexpr int kWords = kQueries * kKeys / 32;

  // Behind the tiles of q, k and v. Bits of two tiles: a warp may still read those of one while another makes the next.
  struct Small {
    Sweep sweep;
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
#pragma unroll
  for (int m = 0; m < kM; ++m) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      float& old = state.m[m * 2 + half];
      float high = old;
      // fmaxf passes over a NaN, whose weight is one all the same.
#pragma unroll
      for (int n = 0; n < kN; ++n) {
        high = fmaxf(high, fmaxf(s[m][n][half * 2], s[m][n][half * 2 + 1]));
      }
      high = warp_reduce<4>(high, [](float a, float b) { return fmaxf(a, b); });
      const float origin = origin_of(high) * scale;
      const float factor = exp2_fast(fmaf(old, scale, -origin));
      old = high;
      float sum = 0;
#pragma unroll
      for (int n = 0; n < kN; ++n) {
#pragma unroll
        for (int e = 0; e < 2; ++e) {
          float& x = s[m][n][half * 2 + e];
          x = exp2_fast(fmaf(x, scale, -origin));
          sum += x;
        }
      }
      state.l[m * 2 + half] = fmaf(state.l[m * 2 + half], factor, sum);
#pragma unroll
      for (int n = 0; n < kD; ++n) {
        acc[m][n][half * 2] *= factor;
        acc[m][n][half * 2 + 1] *= factor;
      }
    }
  }
}

// Rows of the tile out of registers: o and lse, or merged into the states of earlier layers.
template <class T, int kM, int kD>
__device__ __forceinline__ void store_rows(const ForwardArgs& a, const BlockPlace& at,
                                           const Line& queries, std::int64_t first, int count,
                                           int first_row, RowStates<kM * 2>& state,
                                           float (&acc)[kM][kD][4]) {
  const Problem& p = a.p;
  const int lane = static_cast<int>(threadIdx.x) & 31;
#pragma unroll
  for (int m = 0; m < kM; ++m) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const float l = warp_sum<4>(state.l[m * 2 + half]);
      const float high = state.m[m * 2 + half] * p.exponent_scale;
      const int row = first_row + m * 16 + half * 8 + lane / 4;
      if (row >= count) continue;
      const std::int64_t token = p.token(queries.at(first + row));
      if (a.states.acc == nullptr) {
        const float factor = l == 0 ? 0.0f : p.dropout.scale / l;
        T* to = a.o.at<T>(at.b, at.h) + token * a.o.row;
#pragma unroll
        for (int n = 0; n < kD; ++n) {
          store_two(to, a.o.column, a.o.whole, n * 8 + lane % 4 * 2, p.Dv,
                    acc[m][n][half * 2] * factor, acc[m][n][half * 2 + 1] * factor);
        }
        if (lane % 4 == 0 && p.lse.data != nullptr) {
          constexpr float kLog2 = 0.693147181f;
          p.lse.at<float>(at.b, at.h)[token * p.lse.row] =
              l == 0 ? kNoScore : fmaf(high, kLog2, logf(l));
        }
        continue;
      }
      if (l == 0) continue;
      const std::int64_t i = (at.b * p.H + at.h) * p.Tq + token;
      const float old_l = a.states.l[i], old_m = old_l == 0 ? kNoScore : a.states.m[i];
      const float next = fmaxf(high, old_m), origin = origin_of(next);
      const float own = exp2_fast(high - origin), old = exp2_fast(old_m - origin);
      __syncwarp(__activemask());  // the four lanes of a row have read before one writes
      if (lane % 4 == 0) {
        a.states.m[i] = next;
        a.states.l[i] = fmaf(l, own, old_l * old);
      }
      float* to = a.states.acc + ((at.b * p.Tq + token) * p.H + at.h) * p.Dv;
#pragma unroll
      for (int n = 0; n < kD; ++n) {
#pragma unroll
        for (int e = 0; e < 2; ++e) {
          const int column = n * 8 + lane % 4 * 2 + e;
          if (column < p.Dv) {
            to[column] = fmaf(acc[m][n][half * 2 + e] * p.dropout.scale, own, to[column] * old);
          }
        }
      }
    }
  }
}

template <class T, int kColumns>
__global__ void __launch_bounds__(ForwardTiling<T, kColumns>::kThreads,
                                  ForwardTiling<T, kColumns>::kBlocks)
    forward_kernel(const __grid_constant__ ForwardArgs a) {
  using Tiling = ForwardTiling<T, kColumns>;
  using F = Format<T>;
  constexpr int kThreads = Tiling::kThreads, kKeys = Tiling::kKeys, kM = Tiling::kM;
  extern __shared__ __align__(1024) unsigned char shared[];
  const std::uint32_t base = shared_address(shared);
  const typename Tiling::QueryTile q_tile{base};
  const typename Tiling::KeyTile k_tile{base + Tiling::QueryTile::kBytes};
  const typename Tiling::KeyTile v_tile{k_tile.address + Tiling::KeyTile::kBytes};
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

  const std::int64_t key_head = at.h / p.group;
  const T* const k = p.k.at<T>(at.b, key_head);
  const T* const v = p.v.at<T>(at.b, key_head);
  const auto load_keys = [&](auto tile, const T* from, const Operand& operand, Range range, int columns) {
    load_tile<F, kThreads>(tile, from, operand, p, sweep.keys, range.first,
                           static_cast<int>(range.end - range.first), columns);
    copy_async_commit();
  };

  KeyWalk walk;
  walk.start(sweep, seen, kKeys);
  load_tile<F, kThreads>(q_tile, p.q.at<T>(at.b, at.h), p.q, p, sweep.queries, first, count, p.D);
  if (!walk.done()) load_keys(k_tile, k, p.k, walk.tile(kKeys), p.D);
  if (drops) {
    for (int row = static_cast<int>(threadIdx.x); row < count; row += kThreads) {
      const std::int64_t token = p.token(sweep.queries.at(first + row));
      small.drawn[row] = p.dropout.row(sweep.sample, at.h, token - sweep.first_query);
    }
    __syncthreads();
  }

  const int first_row = uniform_warp() * kM * 16;
  RowStates<kM * 2> state;
  float acc[kM][kColumns / 8][4] = {};
  for (int parity = 0; !walk.done(); parity ^= 1) {
    const Range tile = walk.tile(kKeys);
    const bool masked = holes || tile.first < all.first || tile.end > all.end ||
                        tile.end - tile.first < kKeys;
    if (masked) {
      make_mask<Tiling::kQueries, kKeys, kThreads>(
          small.mask[parity],
          [&](int row) {
            const Range r = row < count ? sweep.seen_from(sweep.queries.at(first + row)) : Range{};
            // A tile ends where its block does.
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
    copy_async_wait<0>();
    __syncthreads();  // q and k are here, and all have used v of the tile before
    load_keys(v_tile, v, p.v, tile, p.Dv);

    float s[kM][kKeys / 8][4];
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

    copy_async_wait<0>();
    __syncthreads();  // v is here, and all have used k
    walk.next(sweep, seen, kKeys);
    if (!walk.done()) load_keys(k_tile, k, p.k, walk.tile(kKeys), p.D);

    online_softmax(s, state, acc, p.exponent_scale);
    if (drops) keep_bits(s, small.kept[parity], first_row, 0.0f);
    if (masked && has_rows_not_finite<F, kThreads>(v_tile)) {
      take_out_rows_not_finite<F, kThreads>(acc, s, v_tile, first_row, small.mask[parity],
                                            small.flags);
    }
    add_product<F>(acc, s, v_tile);
  }
  copy_async_wait<0>();
  store_rows<T>(a, at, sweep.queries, first, count, first_row, state, acc);
}

template <class T, int kColumns>
void launch_forward(const char* op, ForwardArgs a, cudaStream_t stream) {
  using Tiling = ForwardTiling<T, kColumns>;
  a.p.slots = a.p.pattern.slots(true, Tiling::kQueries);
  const std::int64_t blocks = a.p.B * a.p.H * a.p.slots;
  if (blocks == 0) return;
  allow_shared(op, "forward_kernel", forward_kernel<T, kColumns>, Tiling::kSharedBytes);
  forward_kernel<T, kColumns>
      <<<checked_blocks(op, blocks), Tiling::kThreads, Tiling::kSharedBytes, stream>>>(a);
  check_launch(op, "forward_kernel");
}

}  // namespace annulus::attention::cuda
