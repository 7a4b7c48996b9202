// Tiles as wgmma reads them: panels of 64 columns, a row of a panel 128 bytes, whose chunks of 16 bytes are swapped as
// cuda/wgmma.cuh says. Whole tiles of rows that follow each other come by the copy engine (maps.h), all others by cp.async:
// a line of rows may have any step, begin anywhere and follow an order, and end before the tensor does, which a tensor map can
// say only in part.
#pragma once

#include <cstdint>

#include "annulus/attention/cuda/mask.cuh"
#include "annulus/cuda/pipeline.cuh"
#include "annulus/cuda/wgmma.cuh"

namespace annulus::attention::cuda::sm90 {

inline constexpr int kGroup = 128;  // threads of a warpgroup

template <int kRows_, int kColumns_>
struct Panels {
  static constexpr int kRows = kRows_, kColumns = kColumns_;
  static constexpr int kPanel = kRows * 128;  // bytes
  static constexpr int kBytes = kPanel * (kColumns / 64);
  static constexpr int kChunks = kColumns / 8;
  static_assert(kColumns % 64 == 0 && kRows % 8 == 0);

  unsigned char* data;

  __device__ static int offset(int row, int chunk) {
    return chunk / 8 * kPanel + row * 128 + ((chunk % 8 ^ row % 8) << 4);
  }
};

// What those who bring a tile say of it, so that nobody else has to walk. Keys are counted from the block's first.
struct TileNote {
  int first, count;
  int masked, last;
  int by_threads;  // copies were made by threads, not by the copy engine
};

// Scores of a warpgroup: lane l of a warp has rows l / 4 and l / 4 + 8 of its 16, as s[4 n + 2 half + e] in
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

#if ANNULUS_DEVICE_HOPPER

// Rows first..first+count-1 of a line, by a warpgroup; the caller says when they must have come. What there are no rows or
// columns for is zero.
template <class T, class Tile>
__device__ __forceinline__ void load_rows(Tile tile, const T* from, const Operand& operand,
                                          const Problem& p, const Line& line, std::int64_t first,
                                          int count, int columns) {
  constexpr int kChunks = Tile::kChunks, kStep = kGroup / kChunks;
  static_assert(kStep % 8 == 0 && Tile::kRows % kStep == 0);
  const int thread = static_cast<int>(threadIdx.x) % kGroup;
  const int chunk = thread % kChunks, first_row = thread / kChunks;
  const int rows = chunk * 8 < columns ? count : 0;
  std::uint32_t to = shared_address(tile.data) + Tile::offset(first_row, chunk);
  if (p.order.defined()) {
#pragma unroll 1
    for (int row = first_row; row < Tile::kRows; row += kStep, to += kStep * 128) {
      const T* source = from;
      if (row < rows) source += p.token(line.at(first + row)) * operand.row + chunk * 8;
      copy_async_16_or_zeros(to, source, row < rows);
    }
    return;
  }
  // What is not there is not read, so it does not matter where `source` points then.
  const T* source = from + line.at(first + first_row) * operand.row + chunk * 8;
  const std::int64_t step = line.step * operand.row * kStep;
#pragma unroll 4
  for (int row = first_row; row < Tile::kRows; row += kStep, to += kStep * 128) {
    copy_async_16_or_zeros(to, source, row < rows);
    source += step;
  }
}

// Numbers that are not finite, among those that this thread loaded and waited for, become zeros: in a product they would
// reach rows that have no weight for them. Were there any?
template <class T, class Tile>
__device__ __forceinline__ bool clear_not_finite(Tile tile) {
  constexpr int kChunks = Tile::kChunks, kStep = kGroup / kChunks;
  constexpr std::uint32_t kExponent = std::is_same_v<T, bfloat16> ? 0x7f80u : 0x7c00u;
  const int thread = static_cast<int>(threadIdx.x) % kGroup;
  const int chunk = thread % kChunks;
  bool any = false;
#pragma unroll 2
  for (int row = thread / kChunks; row < Tile::kRows; row += kStep) {
    const std::uint32_t at = shared_address(tile.data) + Tile::offset(row, chunk);
    if (!any_not_finite<T>(load_shared(at))) continue;
    any = true;
#pragma unroll 1
    for (std::uint32_t i = at; i < at + 16; i += 2) {
      std::uint16_t v;
      asm volatile("ld.shared.b16 %0, [%1];" : "=h"(v) : "r"(i));
      if ((v & kExponent) == kExponent) {
        asm volatile("st.shared.b16 [%0], %1;" ::"r"(i), "h"(std::uint16_t{0}) : "memory");
      }
    }
  }
  return any;
}

// ---- Products of a warpgroup, which has 64 rows of the left operand. The caller fences before the first, and commits.

// d = A B^T: rows of both dotted with each other; A's from first_row on.
template <class T, int kN, class PanelsA, class PanelsB>
__device__ __forceinline__ void multiply_rows(float (&d)[kN], PanelsA a, int first_row, PanelsB b) {
  static_assert(kN * 2 == PanelsB::kRows && PanelsA::kColumns == PanelsB::kColumns);
#pragma unroll
  for (int k = 0; k < PanelsA::kColumns / 16; ++k) {
    const auto low_a = k_major_low(a.data + k / 4 * PanelsA::kPanel + first_row * 128);
    const auto low_b = k_major_low(b.data + k / 4 * PanelsB::kPanel);
    wgmma<T, Major::kK, Major::kK>(d, k_major(low_a, k % 4), k_major(low_b, k % 4), k > 0);
  }
}

// What a product left as the left operand of the next one, rounded.
template <int kK>
struct Fragments {
  uint4 a[kK / 16];

  template <class T>
  __device__ __forceinline__ void take(const float (&s)[kK / 2]) {
#pragma unroll
    for (int k = 0; k < kK / 16; ++k) {
      std::uint32_t word[4];
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const float two[2] = {s[8 * k + 2 * i], s[8 * k + 2 * i + 1]};
        word[i] = pack<T>(two).word[0];
      }
      a[k] = make_uint4(word[0], word[1], word[2], word[3]);
    }
  }
};

// d += A B, or d = A B, where A's columns are B's rows.
template <class T, int kN, int kK, class PanelsB>
__device__ __forceinline__ void add_product(float (&d)[kN], const Fragments<kK>& a, PanelsB b,
                                            bool add = true) {
  static_assert(kN * 2 == PanelsB::kColumns && kK == PanelsB::kRows);
  const auto low = mn_major_low(b.data, PanelsB::kPanel);
#pragma unroll
  for (int k = 0; k < kK / 16; ++k) wgmma<T, Major::kMN>(d, a.a[k], mn_major(low, k), add || k > 0);
}

#endif  // ANNULUS_DEVICE_HOPPER

}  // namespace annulus::attention::cuda::sm90
