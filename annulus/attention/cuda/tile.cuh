// Tiles of rows in shared memory, and products of them on tensor cores.
//
// A tile has kRows rows of kColumns 16-bit numbers, once a term (f32 is the sum of two bf16). Chunks of 16 bytes lie at
// chunk ^ (row % 8) of their row, so that the eight rows of an ldmatrix, and the eight chunks of a copy, are in different
// banks. What a tile has no rows or columns for is zero.
#pragma once

#include <cstdint>
#include <type_traits>

#include "annulus/attention/cuda/arguments.cuh"
#include "annulus/cuda/mma.cuh"
#include "annulus/cuda/rows.cuh"

namespace annulus::attention::cuda {

using namespace annulus::cuda;

// How numbers of type T are multiplied.
template <class T>
struct Format {
  using Source = T;
  using Element = std::conditional_t<std::is_same_v<T, float>, bfloat16, T>;
  static constexpr int kTerms = std::is_same_v<T, float> ? 2 : 1;
  // Copies go to shared memory by themselves, a tile ahead; numbers to be split pass through registers.
  static constexpr bool kAsync = kTerms == 1;
};

template <class Format, int kRows_, int kColumns_>
struct Tile {
  static constexpr int kRows = kRows_, kColumns = kColumns_;
  static constexpr int kPitch = kColumns * 2;  // bytes
  static constexpr int kPlane = kRows * kPitch;
  static constexpr int kBytes = kPlane * Format::kTerms;
  static constexpr int kChunks = kColumns / 8;
  static_assert(kChunks % 8 == 0);

  std::uint32_t address;

  __device__ static int offset(int row, int chunk) {
    return row * kPitch + ((chunk ^ (row & 7)) << 4);
  }
};

// Eight numbers as 16 bytes of every term.
template <class Format>
__device__ __forceinline__ void store_chunk(const float (&v)[8], std::uint32_t address, int plane) {
  std::uint32_t word[4][Format::kTerms];
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    if constexpr (Format::kTerms == 1) {
      const float two[2] = {v[2 * i], v[2 * i + 1]};
      word[i][0] = pack<typename Format::Element>(two).word[0];
    } else {
      split_pair<Format::kTerms>(v[2 * i], v[2 * i + 1], word[i]);
    }
  }
#pragma unroll
  for (int t = 0; t < Format::kTerms; ++t) {
    asm volatile("st.shared.v4.b32 [%0], {%1, %2, %3, %4};" ::"r"(address + t * plane),
                 "r"(word[0][t]), "r"(word[1][t]), "r"(word[2][t]), "r"(word[3][t])
                 : "memory");
  }
}

// Rows first..first+count-1 of a line into a tile, `columns` of each, of the tensor whose head begins at `from`. All
// threads of the block; where asynchronous the caller commits and waits.
template <class Format, int kThreads, class Tile>
__device__ __forceinline__ void load_tile(Tile tile, const typename Format::Source* from,
                                          const Operand& operand, const Problem& p,
                                          const Line& line, std::int64_t first, int count,
                                          int columns) {
  using T = typename Format::Source;
  constexpr int kChunks = Tile::kChunks;
  static_assert(kThreads % kChunks == 0 && Tile::kRows % (kThreads / kChunks) == 0);
  const int chunk = static_cast<int>(threadIdx.x) % kChunks;
  const int first_row = static_cast<int>(threadIdx.x) / kChunks;
  const int column = chunk * 8;
  constexpr int kStep = kThreads / kChunks;
  if (Format::kAsync && operand.whole) {
    const int rows = column < columns ? count : 0;
    if (p.order.defined()) {
#pragma unroll 1
      for (int i = 0; i < Tile::kRows; i += kStep) {
        const int row = first_row + i;
        const T* source = from;
        if (row < rows) source += p.token(line.at(first + row)) * operand.row + column;
        copy_async_16_or_zeros(tile.address + Tile::offset(row, chunk), source, row < rows);
      }
      return;
    }
    // What is not there is not read, so it does not matter where `source` points then.
    const T* source = from + line.at(first + first_row) * operand.row + column;
    const std::int64_t step = line.step * operand.row * kStep;
#pragma unroll
    for (int i = 0; i < Tile::kRows; i += kStep) {
      const int row = first_row + i;
      copy_async_16_or_zeros(tile.address + Tile::offset(row, chunk), source, row < rows);
      source += step;
    }
    return;
  }
  // The way of numbers to be split, which should have loads in flight, and of odd layouts, which should have registers.
#pragma unroll(Format::kAsync ? 1 : 2)
  for (int i = 0; i < Tile::kRows; i += kStep) {
    const int row = first_row + i;
    float v[8] = {};
    if (row < count && column < columns) {
      const T* source = from + p.token(line.at(first + row)) * operand.row;
      if (operand.whole) {
        constexpr int kEach = kVectorWidth<T>;
#pragma unroll
        for (int j = 0; j < 8; j += kEach) {
          float part[kEach];
          load<kEach>(source + column + j, part);
#pragma unroll
          for (int e = 0; e < kEach; ++e) v[j + e] = part[e];
        }
      } else {
#pragma unroll
        for (int j = 0; j < 8; ++j) {
          if (column + j < columns) {
            v[j] = static_cast<float>(source[(column + j) * operand.column]);
          }
        }
      }
    }
    store_chunk<Format>(v, tile.address + Tile::offset(row, chunk), Tile::kPlane);
  }
}

// ---- Products. A warp has kM tiles of 16 rows, from first_row on.

// The lane's address for fragments of A, and of B in both ways (see mma.cuh), of k or column 0.
template <class Tile>
__device__ __forceinline__ std::uint32_t a_address(Tile tile, int first_row) {
  const int lane = static_cast<int>(threadIdx.x) & 31;
  return tile.address + Tile::offset(first_row + lane % 16, lane / 16);
}
template <class Tile>
__device__ __forceinline__ std::uint32_t b_address(Tile tile) {
  const int lane = static_cast<int>(threadIdx.x) & 31;
  return tile.address + Tile::offset(lane % 8 + lane / 16 * 8, lane / 8 % 2);
}
template <class Tile>
__device__ __forceinline__ std::uint32_t b_rows_address(Tile tile) {
  const int lane = static_cast<int>(threadIdx.x) & 31;
  return tile.address + Tile::offset(lane % 16, lane / 16);
}

// That of chunk c, an even one. Four different numbers at most and what is added to them, which instructions have room for.
__device__ __forceinline__ std::uint32_t at_chunk(std::uint32_t address, int c) {
  return (address ^ ((c & 7) << 4)) + (c >> 3) * 128;
}

// d += a b over all pairs of terms but the smallest.
template <class Format, int kTerms = Format::kTerms>
__device__ __forceinline__ void mma_terms(float (&d)[4], const uint4 (&a)[kTerms],
                                          const std::uint32_t (&b0)[kTerms],
                                          const std::uint32_t (&b1)[kTerms]) {
  using E = typename Format::Element;
  if constexpr (kTerms == 2) {
    mma<E>(d, a[0], b0[1], b1[1]);
    mma<E>(d, a[1], b0[0], b1[0]);
  }
  mma<E>(d, a[0], b0[0], b1[0]);
}

// s = A B^T: rows of both tiles dotted with each other.
template <class Format, int kM, int kN, class TileA, class TileB>
__device__ __forceinline__ void multiply_rows(float (&s)[kM][kN][4], TileA tile_a, int first_row,
                                              TileB tile_b) {
  static_assert(TileA::kColumns == TileB::kColumns && TileB::kRows == kN * 8);
  constexpr int kTerms = Format::kTerms;
#pragma unroll
  for (int m = 0; m < kM; ++m) {
#pragma unroll
    for (int n = 0; n < kN; ++n) {
#pragma unroll
      for (int e = 0; e < 4; ++e) s[m][n][e] = 0;
    }
  }
  const std::uint32_t from_a = a_address(tile_a, first_row), from_b = b_address(tile_b);
#pragma unroll
  for (int k = 0; k < TileA::kColumns / 16; ++k) {
    uint4 a[kM][kTerms];
#pragma unroll
    for (int m = 0; m < kM; ++m) {
#pragma unroll
      for (int t = 0; t < kTerms; ++t) {
        a[m][t] = ldmatrix(at_chunk(from_a, 2 * k) + m * 16 * TileA::kPitch + t * TileA::kPlane);
      }
    }
#pragma unroll
    for (int n = 0; n < kN; n += 2) {
      std::uint32_t b[4][kTerms];
#pragma unroll
      for (int t = 0; t < kTerms; ++t) {
        const uint4 r =
            ldmatrix(at_chunk(from_b, 2 * k) + n * 8 * TileB::kPitch + t * TileB::kPlane);
        b[0][t] = r.x, b[1][t] = r.y, b[2][t] = r.z, b[3][t] = r.w;
      }
#pragma unroll
      for (int m = 0; m < kM; ++m) {
        mma_terms<Format>(s[m][n], a[m], b[0], b[1]);
        mma_terms<Format>(s[m][n + 1], a[m], b[2], b[3]);
      }
    }
  }
}

// Rows of a tile in a warp's registers, as the A of products.
template <class Format, int kM, int kK>
struct HeldRows {
  uint4 a[kM][kK > 0 ? kK : 1];

  template <class Tile>
  __device__ __forceinline__ void take(Tile tile, int first_row) {
    static_assert(Format::kTerms == 1 && Tile::kColumns == kK * 16);
    const std::uint32_t from = a_address(tile, first_row);
#pragma unroll
    for (int m = 0; m < kM; ++m) {
#pragma unroll
      for (int k = 0; k < kK; ++k) {
        a[m][k] = ldmatrix(at_chunk(from, 2 * k) + m * 16 * Tile::kPitch);
      }
    }
  }
};
template <class Format, int kM, int kN, int kK, class TileB>
__device__ __forceinline__ void multiply_rows(float (&s)[kM][kN][4],
                                              const HeldRows<Format, kM, kK>& rows, TileB tile_b) {
  using E = typename Format::Element;
  const std::uint32_t from_b = b_address(tile_b);
#pragma unroll
  for (int k = 0; k < kK; ++k) {
#pragma unroll
    for (int n = 0; n < kN; n += 2) {
      const uint4 b = ldmatrix(at_chunk(from_b, 2 * k) + n * 8 * TileB::kPitch);
#pragma unroll
      for (int m = 0; m < kM; ++m) {
        if (k == 0) {
          mma_first<E>(s[m][n], rows.a[m][k], b.x, b.y);
          mma_first<E>(s[m][n + 1], rows.a[m][k], b.z, b.w);
        } else {
          mma<E>(s[m][n], rows.a[m][k], b.x, b.y);
          mma<E>(s[m][n + 1], rows.a[m][k], b.z, b.w);
        }
      }
    }
  }
}

// What multiply_rows leaves as the A of the next product, rounded or split to what is multiplied: half the registers.
template <class Format, int kM, int kK>
struct Weights {
  uint4 a[kM][kK / 2][Format::kTerms];

  __device__ __forceinline__ void take(const float (&p)[kM][kK][4]) {
#pragma unroll
    for (int m = 0; m < kM; ++m) {
#pragma unroll
      for (int k = 0; k < kK; k += 2) {
        std::uint32_t w[4][Format::kTerms];
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          const float two[2] = {p[m][k + i / 2][i % 2 * 2], p[m][k + i / 2][i % 2 * 2 + 1]};
          if constexpr (Format::kTerms == 1) {
            w[i][0] = pack<typename Format::Element>(two).word[0];
          } else {
            split_pair<Format::kTerms>(two[0], two[1], w[i]);
          }
        }
#pragma unroll
        for (int t = 0; t < Format::kTerms; ++t) {
          a[m][k / 2][t] = make_uint4(w[0][t], w[1][t], w[2][t], w[3][t]);
        }
      }
    }
  }
};

// acc += P B
template <class Format, int kM, int kK, int kN, class TileB>
__device__ __forceinline__ void add_product(float (&acc)[kM][kN][4],
                                            const Weights<Format, kM, kK>& p, TileB tile_b) {
  static_assert(TileB::kColumns == kN * 8 && TileB::kRows == kK * 8);
  constexpr int kTerms = Format::kTerms;
  const std::uint32_t from_b = b_rows_address(tile_b);
#pragma unroll
  for (int k = 0; k < kK; k += 2) {
#pragma unroll
    for (int n = 0; n < kN; n += 2) {
      std::uint32_t b[4][kTerms];
#pragma unroll
      for (int t = 0; t < kTerms; ++t) {
        const uint4 r =
            ldmatrix_transposed(at_chunk(from_b, n) + k * 8 * TileB::kPitch + t * TileB::kPlane);
        b[0][t] = r.x, b[1][t] = r.y, b[2][t] = r.z, b[3][t] = r.w;
      }
#pragma unroll
      for (int m = 0; m < kM; ++m) {
        mma_terms<Format>(acc[m][n], p.a[m][k / 2], b[0], b[1]);
        mma_terms<Format>(acc[m][n + 1], p.a[m][k / 2], b[2], b[3]);
      }
    }
  }
}

// acc += A B of one term, where a(m, k) is the fragment of A, and of B the columns from chunk first_chunk on: a multiple of kN.
template <class Format, int kM, int kN, class TileB, class A>
__device__ __forceinline__ void add_product_of(float (&acc)[kM][kN][4], A&& a, TileB tile_b,
                                               int first_chunk) {
  static_assert(Format::kTerms == 1 && kN % 2 == 0);
  using E = typename Format::Element;
  const std::uint32_t from_b = at_chunk(b_rows_address(tile_b), first_chunk);
#pragma unroll
  for (int k = 0; k < TileB::kRows / 16; ++k) {
    uint4 of_a[kM];
#pragma unroll
    for (int m = 0; m < kM; ++m) of_a[m] = a(m, k);
#pragma unroll
    for (int n = 0; n < kN; n += 2) {
      const uint4 b = ldmatrix_transposed(at_chunk(from_b, n) + k * 16 * TileB::kPitch);
#pragma unroll
      for (int m = 0; m < kM; ++m) {
        mma<E>(acc[m][n], of_a[m], b.x, b.y);
        mma<E>(acc[m][n + 1], of_a[m], b.z, b.w);
      }
    }
  }
}

// Weights into columns of a tile, from an even chunk on.
template <class Format, int kM, int kK, class Tile>
__device__ __forceinline__ void store_weights(const Weights<Format, kM, kK>& w, Tile tile,
                                              int first_row, int first_chunk) {
  const int lane = static_cast<int>(threadIdx.x) & 31;
  const std::uint32_t to = tile.address + Tile::offset(first_row + lane / 4, 0) + lane % 4 * 4;
#pragma unroll
  for (int m = 0; m < kM; ++m) {
#pragma unroll
    for (int k = 0; k < kK / 2; ++k) {
      const std::uint32_t words[4] = {w.a[m][k][0].x, w.a[m][k][0].y, w.a[m][k][0].z,
                                      w.a[m][k][0].w};
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const std::uint32_t at = at_chunk(at_chunk(to, first_chunk), 2 * k + i / 2) +
                                 (m * 16 + i % 2 * 8) * Tile::kPitch;
        asm volatile("st.shared.b32 [%0], %1;" ::"r"(at), "r"(words[i]) : "memory");
      }
    }
  }
}

// Two neighbours of a row; `columns` of it exist.
template <class T>
__device__ __forceinline__ void store_two(T* row, std::int64_t stride, bool whole, int column,
                                          int columns, float low, float high) {
  if (whole) {
    const float two[2] = {low, high};
    if (column < columns) store<2>(two, row + column);
  } else {
    if (column < columns) row[column * stride] = T(low);
    if (column + 1 < columns) row[(column + 1) * stride] = T(high);
  }
}

// A row of what a product left, times `factor`, from column `first` of `row` on; `columns` of it exist, none where the row does
// not. All lanes of the warp: in tensors of 16 bits four of them exchange what they have, so that each stores 16 bytes.
template <class T, int kD>
__device__ __forceinline__ void store_sums(const float (&acc)[kD][4], int half, float factor,
                                           T* row, const Operand& to, int first, int columns) {
  const int lane = static_cast<int>(threadIdx.x) & 31;
  if constexpr (sizeof(T) == 2 && kD % 4 == 0) {
    if (to.whole) {
      const bool odd = (lane & 1) != 0, high = (lane & 2) != 0;
#pragma unroll
      for (int n = 0; n < kD; n += 4) {
        std::uint32_t word[4], out[4];
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          const float two[2] = {acc[n + i][half * 2] * factor, acc[n + i][half * 2 + 1] * factor};
          word[i] = pack<T>(two).word[0];
        }
        // Eight columns of four lanes to one: those of an even and an odd one first.
        std::uint32_t pair[2][2];
#pragma unroll
        for (int i = 0; i < 2; ++i) {
          const std::uint32_t low = word[2 * i], up = word[2 * i + 1];
          const std::uint32_t got = __shfl_xor_sync(~0u, odd ? low : up, 1);
          pair[i][0] = odd ? got : low;
          pair[i][1] = odd ? up : got;
        }
#pragma unroll
        for (int i = 0; i < 2; ++i) {
          const std::uint32_t got = __shfl_xor_sync(~0u, high ? pair[0][i] : pair[1][i], 2);
          out[i] = high ? got : pair[0][i];
          out[2 + i] = high ? pair[1][i] : got;
        }
        const int column = first + (n + lane % 4) * 8;
        if (column < columns) {
          *reinterpret_cast<uint4*>(row + column) = make_uint4(out[0], out[1], out[2], out[3]);
        }
      }
      return;
    }
  }
#pragma unroll
  for (int n = 0; n < kD; ++n) {
    store_two(row, to.column, to.whole, first + n * 8 + lane % 4 * 2, columns,
              acc[n][half * 2] * factor, acc[n][half * 2 + 1] * factor);
  }
}

}  // namespace annulus::attention::cuda
