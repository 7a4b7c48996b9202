// bf16 tiles by AVX512-BF16: vdpbf16ps sums pairs of products into 16 lanes of f32. The instruction
// rounds its sums to nearest even and takes subnormals as zero.

#include "annulus/cpu/features.h"
#include "annulus/cpu/tile.h"

#if defined(__x86_64__) && defined(__linux__)

#if defined(__GNUC__) && !defined(__clang__)
// GCC 12 takes the undefined operands within its own intrinsics for ours (its bug 105593).
#pragma GCC diagnostic ignored "-Wmaybe-uninitialized"
#pragma GCC diagnostic ignored "-Wuninitialized"
#endif
#if defined(__clang__)
#pragma clang attribute push( \
    __attribute__((target("avx512f,avx512bw,avx512vl,avx512dq,avx512bf16"))), apply_to = function)
#else
#pragma GCC push_options
#pragma GCC target("avx512f,avx512bw,avx512vl,avx512dq,avx512bf16")
#endif
#include <immintrin.h>

#include "annulus/cpu/tile_bf16_x86-inl.h"

namespace annulus::cpu {

namespace {

// 8 x 32: 16 sums, two vectors of weights and one broadcast pair of the state.
constexpr int kRows = 8;
constexpr int kUnit = 2;
static_assert(kRows <= kMaxTileRows && kCols <= kMaxTileCols);

// A pair along the depth is one 32-bit element here.
using Pair = std::uint32_t;

inline __m512bh as_bf16(__m512i v) { return reinterpret_cast<__m512bh>(v); }

template <int Terms, int M>
__attribute__((noinline)) void multiply_rows(const Pair* a, const Factor<float>* factors, int count,
                                             std::int64_t units, float* y, std::int64_t ldy,
                                             bool add, const Dots<float>* dots) {
  constexpr const TermProducts& products = kTermProducts[Terms];
  for (int f = 0; f < count; ++f, add = true) {
    __m512 sum[M][kVectors];
    ANNULUS_UNROLL
    for (int m = 0; m < M; ++m) {
      ANNULUS_UNROLL
      for (int n = 0; n < kVectors; ++n) sum[m][n] = _mm512_setzero_ps();
    }
    for (int p = 0; p < products.count; ++p) {
      const Pair* pa = a + products.left[p] * units * kRows;
      const Pair* pb = static_cast<const Pair*>(factors[f].b) + products.right[p] * units * kCols;
      for (std::int64_t i = 0; i < units; ++i) {
        __m512i right[kVectors];
        ANNULUS_UNROLL
        for (int n = 0; n < kVectors; ++n) right[n] = _mm512_loadu_si512(pb + n * kLanes);
        ANNULUS_UNROLL
        for (int m = 0; m < M; ++m) {
          const __m512i left = _mm512_set1_epi32(static_cast<int>(pa[m]));
          ANNULUS_UNROLL
          for (int n = 0; n < kVectors; ++n) {
            sum[m][n] = _mm512_dpbf16_ps(sum[m][n], as_bf16(left), as_bf16(right[n]));
          }
        }
        pa += kRows;
        pb += kCols;
      }
    }
    const float* scale = factors[f].scale;
    ANNULUS_UNROLL
    for (int m = 0; m < M; ++m) {
      finish_row(sum[m], scale != nullptr ? scale[m] : 1.0f, y + m * ldy, add,
                 dots != nullptr ? dots->s + m * dots->ld : nullptr,
                 dots != nullptr ? dots->to + f * kRows + m : nullptr);
    }
  }
}

template <int Terms>
void multiply(const void* a, const Factor<float>* factors, int count, std::int64_t depth, int rows,
              float* y, std::int64_t ldy, bool add, const Dots<float>* dots) {
  const auto* pa = static_cast<const Pair*>(a);
  const std::int64_t units = (depth + kUnit - 1) / kUnit;
  if (rows > 4) return multiply_rows<Terms, 8>(pa, factors, count, units, y, ldy, add, dots);
  if (rows > 2) return multiply_rows<Terms, 4>(pa, factors, count, units, y, ldy, add, dots);
  if (rows > 1) return multiply_rows<Terms, 2>(pa, factors, count, units, y, ldy, add, dots);
  return multiply_rows<Terms, 1>(pa, factors, count, units, y, ldy, add, dots);
}

// Pairs are broadcast from wherever they are.
void multiply_tiles(const void* a, std::int64_t step, const void* b, std::int64_t depth,
                    std::int64_t rows, float* y, std::int64_t ldy, bool add) {
  constexpr int kPairs = kCols / kUnit;  // of a row of a tile
  const auto* block = static_cast<const Pair*>(a);
  for (; rows > 0; rows -= kRows, block += kRows * kPairs, y += kRows * ldy) {
    __m512 sum[kRows][kVectors];
    ANNULUS_UNROLL
    for (int m = 0; m < kRows; ++m) {
      ANNULUS_UNROLL
      for (int n = 0; n < kVectors; ++n) sum[m][n] = _mm512_setzero_ps();
    }
    const Pair* tile = block;
    const auto* pb = static_cast<const Pair*>(b);
    for (std::int64_t t = 0; t < depth; t += kCols, tile += step / kUnit) {
      const std::int64_t pairs = std::min<std::int64_t>(kPairs, (depth - t + 1) / kUnit);
      for (const Pair* pa = tile; pa < tile + pairs; ++pa, pb += kCols) {
        __m512i right[kVectors];
        ANNULUS_UNROLL
        for (int n = 0; n < kVectors; ++n) right[n] = _mm512_loadu_si512(pb + n * kLanes);
        ANNULUS_UNROLL
        for (int m = 0; m < kRows; ++m) {
          const __m512i left = _mm512_set1_epi32(static_cast<int>(pa[m * kPairs]));
          ANNULUS_UNROLL
          for (int n = 0; n < kVectors; ++n) {
            sum[m][n] = _mm512_dpbf16_ps(sum[m][n], as_bf16(left), as_bf16(right[n]));
          }
        }
      }
    }
    ANNULUS_UNROLL
    for (int m = 0; m < kRows; ++m) {
      if (m < rows) finish_row(sum[m], 1.0f, y + m * ldy, add, nullptr, nullptr);
    }
  }
}

template <int Terms, class T>
void pack_rows_of(Side side, const T* x, std::int64_t ld, int valid, std::int64_t depth, void* to) {
  const int R = side == Side::kLeft ? kRows : kCols;
  auto* p = static_cast<Pair*>(to);
  const std::int64_t units = (depth + kUnit - 1) / kUnit;
  const std::int64_t step = units * R;
  if constexpr (Terms == 1 &&
                std::is_same_v<T, bfloat16>) {  // as it lies: 16 rows of 16 pairs, turned
    for (std::int64_t u = 0; u < units; u += kLanes) {
      for (int r = 0; r < R; r += kLanes) {
        __m512i v[kLanes];
        ANNULUS_UNROLL
        for (int i = 0; i < kLanes; ++i) {
          v[i] = load_pairs(x, (r + i) * ld + kUnit * u, r + i < valid ? depth - kUnit * u : 0);
        }
        turn(v);
        const __mmask16 lanes = first_lanes(R - r);
        for (int i = 0; i < kLanes && u + i < units; ++i) {
          _mm512_mask_storeu_epi32(p + (u + i) * R + r, lanes, v[i]);
        }
      }
    }
    return;
  }
  for (int r = 0; r < R; ++r) {
    // 16 along the depth are eight pairs, which go R apart.
    for (std::int64_t d = 0; d < kUnit * units; d += kLanes) {
      __m512 v = load_some(x, r * ld + d, r < valid ? depth - d : 0);
      const std::int64_t pairs =
          units - d / kUnit < kLanes / kUnit ? units - d / kUnit : kLanes / kUnit;
      for (int t = 0; t < Terms; ++t) {
        alignas(32) Pair pair[kLanes / kUnit];
        _mm256_store_si256(reinterpret_cast<__m256i*>(pair), _mm512_cvtepi32_epi16(take_term(v)));
        for (std::int64_t i = 0; i < pairs; ++i) p[t * step + (d / kUnit + i) * R + r] = pair[i];
      }
    }
  }
}
template <int Terms>
void pack_rows(Side side, const Matrix& x, int valid, std::int64_t depth, void* to) {
  detail::visit_rows<float>(
      x, [&](auto* rows) { pack_rows_of<Terms>(side, rows, x.ld, valid, depth, to); });
}

template <int Terms, class T>
void pack_columns_of(Side side, const Columns<T>& columns, std::int64_t depth, void* to) {
  const int R = side == Side::kLeft ? kRows : kCols;
  auto* p = static_cast<Pair*>(to);
  const std::int64_t units = (depth + kUnit - 1) / kUnit;
  const std::int64_t step = units * R;
  for (std::int64_t u = 0; u < units; ++u) {
    for (int r = 0; r < R; r += kLanes) {
      if constexpr (Terms == 1 && std::is_same_v<T, bfloat16>) {
        if (columns.scale == nullptr) {
          _mm512_mask_storeu_epi32(p + u * R + r, first_lanes(R - r), columns.pairs(kUnit * u, r));
          continue;
        }
      }
      __m512 first = columns.load(kUnit * u, r);
      __m512 second = columns.load(kUnit * u + 1, r);
      for (int t = 0; t < Terms; ++t) {
        _mm512_mask_storeu_epi32(p + t * step + u * R + r, first_lanes(R - r),
                                 take_pairs(first, second));
      }
    }
  }
}
template <int Terms>
void pack_columns(Side side, const Matrix& x, const std::int32_t* index, const float* scale,
                  int valid, std::int64_t depth, void* to) {
  detail::visit_rows<float>(x, [&]<class T>(const T* rows) {
    pack_columns_of<Terms>(side, Columns<T>{rows, x.ld, index, scale, valid, depth}, depth, to);
  });
}

template <int Terms>
const Tiles<float>* make_tiles(const char* name) {
  static const Tiles<float> tiles = {
      {kRows, kCols, kUnit, Terms, sizeof(Pair) / kUnit, name},
      pack_rows<Terms>,
      pack_columns<Terms>,
      detail::pack_each<float, kRows, kCols, sizeof(Pair) / kUnit, pack_rows<Terms>>,
      multiply<Terms>,
      detail::multiply_each<float, kRows, multiply<Terms>>,
      Terms == 1 ? multiply_tiles : nullptr};
  return &tiles;
}

}  // namespace

}  // namespace annulus::cpu

#if defined(__clang__)
#pragma clang attribute pop
#else
#pragma GCC pop_options
#endif

namespace annulus::cpu {

const Tiles<float>* detail::bf16_tiles_x86(Precision precision) {
  if (!has_avx512_bf16()) return nullptr;
  return of_terms(precision, make_tiles<1>("vdpbf16ps"), make_tiles<2>("vdpbf16ps x3"),
                  make_tiles<3>("vdpbf16ps x6"));
}

}  // namespace annulus::cpu

#else

namespace annulus::cpu {
const Tiles<float>* detail::bf16_tiles_x86(Precision) { return nullptr; }
}  // namespace annulus::cpu

#endif
