// Where s, g and c of all steps lie for what comes after the backward loop on compute capability 9.0.
//
// Rows tb of [T][padded_b] come 32 at a time: a row tile. Of a row tile, 64 columns of s or g, or the 32
// c of a channel, lie in memory as the gradient of the weights wants them in shared memory, so that one
// bulk copy brings them there. Everybody else finds them by the functions below. On other GPUs s and g
// lie in rows.
#pragma once

#include <cstdint>

#include "annulus/cuda/mma.cuh"
#include "annulus/cuda/rows.cuh"
#include "annulus/ring_rnn/cuda/operands.cuh"

namespace annulus::ring_rnn::cuda::tensor {

inline constexpr int kRowTile = 32;                         // rows: two steps of wgmma
inline constexpr int kRowTileBytes = kRowTile * kTile * 2;  // of 64 columns in 16 bits
inline constexpr int kRowTileFactorBytes = kRowTile * 4;    // of a channel's c

// Which k of the two steps of 16 a row is: row 4q + 2h + e of a step is k = 2q + 8h + e. A lane's four
// k are then four neighbouring rows, whose c are one load.
__device__ __forceinline__ int row_tile_position(int row) {
  return (row & 16) + ((row >> 2) & 3) * 2 + ((row >> 1) & 1) * 8 + (row & 1);
}

// Within a step, which is whole row tiles: where column `col` of sample `row` lies, counted in numbers.
// In 16 bits MN-major as wgmma.cuh says, ...
__device__ __forceinline__ std::int64_t row_tile_block(const Layout& s, std::int64_t row, int col) {
  return ((row / kRowTile) * (s.padded_n / kTile) + col / kTile) * (kRowTile * kTile);
}
__device__ __forceinline__ std::int64_t row_tile_narrow(const Layout& s, std::int64_t row,
                                                        int col) {
  const int k = row_tile_position(static_cast<int>(row) & (kRowTile - 1));
  return row_tile_block(s, row, col) + k * kTile + (((col >> 3) & 7) ^ (k & 7)) * 8 + (col & 7);
}
// ... in f32 with 16-byte pieces swapped so that four rows that half a warp reads lie in different
// banks.
__device__ __forceinline__ std::int64_t row_tile_wide(const Layout& s, std::int64_t row, int col) {
  const int r = static_cast<int>(row) & (kRowTile - 1);
  return row_tile_block(s, row, col) + r * kTile + (((col >> 2) & 15) ^ (((r >> 2) & 3) * 2)) * 4 +
         (col & 3);
}

// A term of s: column `col` of sample `row` before step `time`; four columns are neighbours.
__device__ __forceinline__ std::int64_t state_at(const Layout& s, std::int64_t time,
                                                 std::int64_t row, int col) {
  return time * s.padded_b * s.padded_n +
         (s.row_tiles ? row_tile_narrow(s, row, col) : row * s.padded_n + col);
}

// g of `Columns` neighbouring columns: 1 or 4.
template <int Columns>
__device__ __forceinline__ void store_g(const BackwardPass& loop, std::int64_t time,
                                        std::int64_t row, int col, const float (&g)[Columns]) {
  const Layout& s = loop.layout;
  const std::int64_t step = time * s.padded_b * s.padded_n;
  if (!s.row_tiles) {
    store<Columns>(g, reinterpret_cast<float*>(loop.g) + step + row * s.padded_n + col);
  } else if (s.narrow_g) {
    store<Columns>(g, reinterpret_cast<bfloat16*>(loop.g) + step + row_tile_narrow(s, row, col));
  } else {
    store<Columns>(g, reinterpret_cast<float*>(loop.g) + step + row_tile_wide(s, row, col));
  }
}
inline std::int64_t g_bytes(const Layout& s) {
  return s.T * s.padded_b * s.padded_n * (s.narrow_g ? 2 : 4);
}

// c of channel `channel`, sample `row`; the lanes of a warp have neighbouring samples. One term: as
// pairs of bf16, {high of rows 0 and 1, high of 2 and 3, low of 0 and 1, low of 2 and 3} of each four
// rows, whose sum is c. More: as f32.
__device__ __forceinline__ void store_tile_c(const Layout& s, std::uint32_t* to, std::int64_t time,
                                             std::int64_t row, int channel, float c) {
  const std::int64_t tb = time * s.padded_b + row;
  std::uint32_t* at = to + (tb / kRowTile * s.channels + channel) * kRowTile;
  const int r = static_cast<int>(tb) & (kRowTile - 1);
  if (!s.narrow_g) {
    at[r] = __float_as_uint(c);
    return;
  }
  __nv_bfloat16 term[2];
  split_bf16<2>(c, term);
  // Even rows write the pair's high terms, odd rows the low ones.
  const bool odd = (r & 1) != 0;
  const float other = __shfl_xor_sync(~0u, __bfloat162float(odd ? term[0] : term[1]), 1);
  const __nv_bfloat16 partner = __float2bfloat16_rn(other);
  at[(r & ~3) + (odd ? 2 : 0) + ((r >> 1) & 1)] =
      odd ? pack_bf16(partner, term[1]) : pack_bf16(term[0], partner);
}
inline std::int64_t tile_c_words(const Layout& s) { return s.T * s.padded_b * s.channels; }

}  // namespace annulus::ring_rnn::cuda::tensor
