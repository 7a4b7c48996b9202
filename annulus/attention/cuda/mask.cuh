// Which numbers of a tile count, as bits in shared memory: 32 columns of a row a word. Of tiles in which all do nobody
// asks. And what a bit cannot do: in a product 0 times NaN is NaN, so numbers of B that are not finite are taken out of it
// and added one by one to the rows that have them.
#pragma once

#include <cstdint>

#include "annulus/attention/cuda/tile.cuh"

namespace annulus::attention::cuda {

// The tiles of keys of a sweep, ascending, as for_each_tile, one at a time.
struct KeyWalk {
  std::int64_t at = 0, end = 0, block = 0;

  // fixed: tiles lie at multiples of their size. What is before the first key seen is masked.
  __device__ void start(const Sweep& sweep, Range seen, int most, bool fixed = false) {
    at = fixed ? seen.first / most * most : seen.first;
    end = seen.end;
    block = -1;
    if (sweep.blocks.defined()) {
      end = at;
      next(sweep, seen, most);
    }
  }
  __device__ bool done() const { return at >= end; }
  __device__ Range tile(int most) const { return {at, at + most < end ? at + most : end}; }
  __device__ void next(const Sweep& sweep, Range seen, int most) {
    at += most;
    if (!sweep.blocks.defined()) return;
    while (at >= end && ++block < sweep.blocks.count) {
      const std::int64_t first =
          sweep.blocks.at(block) * sweep.blocks.size - sweep.blocks.first_row;
      const std::int64_t last = first + sweep.blocks.size;
      at = first > seen.first ? first : seen.first;
      end = last < seen.end ? last : seen.end;
    }
  }
};

// The numbers of first..end-1 among the 32 from `from` on, as bits.
__device__ __forceinline__ std::uint32_t bits_between(std::int64_t first, std::int64_t end,
                                                      std::int64_t from) {
  const auto within = [&](std::int64_t v) {
    return static_cast<int>(v < from ? 0 : v > from + 32 ? 32 : v - from);
  };
  const int low = within(first), high = within(end);
  if (high <= low) return 0;
  return (high == 32 ? ~0u : (1u << high) - 1u) & ~((1u << low) - 1u);
}

// kRows x kColumns bits: interval(row) are the columns that count, as a Range, but for those that counts(row, column)
// takes out where `holes`. All threads of the block.
template <int kRows, int kColumns, int kThreads, class Interval, class Counts>
__device__ __forceinline__ void make_mask(std::uint32_t* mask, Interval&& interval, bool holes,
                                          Counts&& counts) {
  constexpr int kWords = kColumns / 32;
  static_assert(kColumns % 32 == 0);
  for (int i = static_cast<int>(threadIdx.x); i < kRows * kWords; i += kThreads) {
    const int row = i / kWords, from = i % kWords * 32;
    const Range range = interval(row);
    std::uint32_t word = bits_between(range.first, range.end, from);
    if (holes) {
      for (std::uint32_t left = word; left != 0; left &= left - 1) {
        const int bit = __ffs(static_cast<int>(left)) - 1;
        if (!counts(row, from + bit)) word &= ~(1u << bit);
      }
    }
    mask[i] = word;
  }
}
// Those that dropout keeps: keeps(row, column).
template <int kRows, int kColumns, int kThreads, class Keeps>
__device__ __forceinline__ void make_kept(std::uint32_t* kept, Keeps&& keeps) {
  constexpr int kWords = kColumns / 32;
  for (int i = static_cast<int>(threadIdx.x); i < kRows * kWords; i += kThreads) {
    std::uint32_t word = 0;
#pragma unroll 4
    for (int bit = 0; bit < 32; ++bit) {
      if (keeps(i / kWords, i % kWords * 32 + bit)) word |= 1u << bit;
    }
    kept[i] = word;
  }
}

// Numbers whose bit is not set become `other`.
template <int kM, int kN>
__device__ __forceinline__ void keep_bits(float (&s)[kM][kN][4], const std::uint32_t* mask,
                                          int first_row, float other) {
  constexpr int kWords = kN / 4;
  const int lane = static_cast<int>(threadIdx.x) & 31;
#pragma unroll
  for (int m = 0; m < kM; ++m) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const std::uint32_t* words = mask + (first_row + m * 16 + half * 8 + lane / 4) * kWords;
#pragma unroll
      for (int w = 0; w < kWords; ++w) {
        const std::uint32_t word = words[w] >> (lane % 4 * 2);
#pragma unroll
        for (int n = 0; n < 4; ++n) {
#pragma unroll
          for (int e = 0; e < 2; ++e) {
            float& x = s[m][w * 4 + n][half * 2 + e];
            x = word >> (n * 8 + e) & 1 ? x : other;
          }
        }
      }
    }
  }
}

// ---- Numbers that are not finite

// Is one of the numbers in 16 bytes NaN or an infinity? Their exponents are all ones, and carry into the sign.
template <class Element>
__device__ __forceinline__ bool any_not_finite(uint4 v) {
  constexpr std::uint32_t kExponents =
      std::is_same_v<Element, bfloat16> ? 0x7f807f80u : 0x7c007c00u;
  constexpr std::uint32_t kOne = std::is_same_v<Element, bfloat16> ? 0x00800080u : 0x04000400u;
  const std::uint32_t carry = ((v.x & kExponents) + kOne) | ((v.y & kExponents) + kOne) |
                              ((v.z & kExponents) + kOne) | ((v.w & kExponents) + kOne);
  return (carry & 0x80008000u) != 0;
}
__device__ __forceinline__ uint4 load_shared(std::uint32_t address) {
  uint4 v;
  asm volatile("ld.shared.v4.b32 {%0, %1, %2, %3}, [%4];"
               : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
               : "r"(address));
  return v;
}

// Has the tile any? All threads of the block get the answer, and wait for each other. Of split numbers the first term
// says it.
template <class Format, int kThreads, class Tile>
__device__ __forceinline__ bool has_not_finite(Tile tile) {
  bool any = false;
#pragma unroll 4
  for (int i = static_cast<int>(threadIdx.x) * 16; i < Tile::kPlane; i += kThreads * 16) {
    any |= any_not_finite<typename Format::Element>(load_shared(tile.address + i));
  }
  return __syncthreads_or(any);
}

// Numbers of B that are not finite are taken out of the tile and added to the rows of acc for which counts(own row, row of B)
// says that their row of B does: as they are where weights are positive, as NaN where there is no telling what they are
// multiplied by. (Weights themselves are not needed: 0 times an infinity is what exp() makes of a small one, not a wish.)
// acc has the columns from chunk first_chunk on. All threads of the block; `flags` has room for the tile's rows. Rare, and
// slow.
template <class Format, int kThreads, bool kPositive, int kM, int kN, class Tile, class Counts>
__device__ __forceinline__ void take_out_not_finite(float (&acc)[kM][kN][4], Tile tile,
                                                    int first_row, int first_chunk, int* flags,
                                                    Counts&& counts) {
  using E = typename Format::Element;
  constexpr std::uint32_t kExponent = std::is_same_v<E, bfloat16> ? 0x7f80u : 0x7c00u;
  for (int row = static_cast<int>(threadIdx.x); row < Tile::kRows; row += kThreads) {
    bool any = false;
    for (int i = 0; i < Tile::kPitch; i += 16) {
      any |= any_not_finite<E>(load_shared(tile.address + row * Tile::kPitch + i));
    }
    flags[row] = any;
  }
  __syncthreads();
  const int lane = static_cast<int>(threadIdx.x) & 31;
#pragma unroll 1
  for (int row = 0; row < Tile::kRows; ++row) {
    if (flags[row] == 0) continue;
#pragma unroll
    for (int n = 0; n < kN; ++n) {
      std::uint32_t two;
      asm volatile("ld.shared.b32 %0, [%1];"
                   : "=r"(two)
                   : "r"(tile.address + Tile::offset(row, first_chunk + n) + lane % 4 * 4));
      float v[2];
      unpack(Vec<E, 2>{{two}}, v);
#pragma unroll
      for (int e = 0; e < 2; ++e) {
        if ((two >> (16 * e) & kExponent) != kExponent) continue;
        const float add = kPositive ? v[e] : __int_as_float(0x7fffffff);
#pragma unroll
        for (int r = 0; r < kM * 2; ++r) {
          const int own = first_row + r * 8 + lane / 4;
          if (counts(own, row)) acc[r / 2][n][r % 2 * 2 + e] += add;
        }
      }
    }
  }
  __syncthreads();
  for (int i = static_cast<int>(threadIdx.x); i < Tile::kRows * Tile::kColumns; i += kThreads) {
    const std::uint32_t at = tile.address + i * 2;
    std::uint16_t v;
    asm volatile("ld.shared.b16 %0, [%1];" : "=h"(v) : "r"(at));
    if ((v & kExponent) == kExponent) {
      asm volatile("st.shared.b16 [%0], %1;" ::"r"(at), "h"(std::uint16_t{0}) : "memory");
    }
  }
  __syncthreads();
}

// The same of all columns, where a row of the mask says which rows of B count.
template <class Format, int kThreads, bool kPositive, int kM, int kN, class Tile>
__device__ __forceinline__ void take_out_not_finite(float (&acc)[kM][kN][4], Tile tile,
                                                    int first_row, const std::uint32_t* mask,
                                                    int* flags) {
  constexpr int kWords = Tile::kRows / 32;
  take_out_not_finite<Format, kThreads, kPositive>(
      acc, tile, first_row, 0, flags,
      [&](int own, int row) { return (mask[own * kWords + row / 32] >> (row % 32) & 1) != 0; });
}

}  // namespace annulus::attention::cuda
