// What the bf16 tiles of x86 share: rounding to bfloat16 on the way into a panel, and what becomes
// of a row of sums. Included after <immintrin.h>, between the pragmas that choose the instructions.
#pragma once

#include <cstdint>

#include "annulus/core/dtype.h"

namespace annulus::cpu {

namespace {

#define ANNULUS_UNROLL _Pragma("GCC unroll 16")

constexpr int kLanes = 16;
constexpr int kVectors = 2;
constexpr int kCols = kVectors * kLanes;

inline __mmask16 first_lanes(std::int64_t n) {
  return n >= kLanes ? static_cast<__mmask16>(0xffff)
         : n <= 0    ? static_cast<__mmask16>(0)
                     : static_cast<__mmask16>((1u << n) - 1);
}

// 16 numbers of bfloat16, each in a 32-bit element, as floats.
inline __m512 as_floats(__m512i v) { return _mm512_castsi512_ps(_mm512_slli_epi32(v, 16)); }

// n of 16 numbers from x[first] on; the others are zero and not touched.
inline __m512 load_some(const float* x, std::int64_t first, std::int64_t n) {
  return _mm512_maskz_loadu_ps(first_lanes(n), x + (n > 0 ? first : 0));
}
template <class T>
inline __m256i load_some16(const T* x, std::int64_t first, std::int64_t n) {
  return _mm256_maskz_loadu_epi16(first_lanes(n), x + (n > 0 ? first : 0));
}
inline __m512 load_some(const bfloat16* x, std::int64_t first, std::int64_t n) {
  return as_floats(_mm512_cvtepu16_epi32(load_some16(x, first, n)));
}
inline __m512 load_some(const float16* x, std::int64_t first, std::int64_t n) {
  return _mm512_cvtph_ps(load_some16(x, first, n));
}

// The operand of pack_columns: 16 rows from r on, at depth d.
template <class T>
struct Columns {
  const T* x;
  std::int64_t ld;
  const std::int32_t* index;
  const float* scale;
  int valid;
  std::int64_t depth;

  __m512 load(std::int64_t d, int r) const {
    if (d >= depth) return _mm512_setzero_ps();
    const __m512 v = load_some(x + (index != nullptr ? index[d] : d) * ld, r, valid - r);
    return scale != nullptr ? _mm512_mul_ps(v, _mm512_set1_ps(scale[d])) : v;
  }
  // Whether n rows from depth d on are there and whole, and taken as they lie.
  bool whole(std::int64_t d, std::int64_t n) const {
    return valid == kCols && d + n <= depth && index == nullptr && scale == nullptr;
  }
  // Rows of bfloat16 at depths d and d + 1 as pairs, without a factor: as they lie.
  __m512i pairs(std::int64_t d, int r) const {
    const auto row = [&](std::int64_t at) {
      if (at >= depth) return _mm512_setzero_si512();
      const std::int64_t from = (index != nullptr ? index[at] : at) * ld;
      return _mm512_cvtepu16_epi32(load_some16(x + from, r, valid - r));
    };
    return _mm512_or_si512(row(d), _mm512_slli_epi32(row(d + 1), 16));
  }
};

// What of 16 numbers bfloat16 holds, widened to 32-bit elements; the rest stays in v.
inline __m512i take_term(__m512& v) {
  const __m512i part = _mm512_cvtepu16_epi32(reinterpret_cast<__m256i>(_mm512_cvtneps_pbh(v)));
  v = _mm512_sub_ps(v, as_floats(part));
  return part;
}

// The same of two vectors, as pairs of one element of each.
inline __m512i take_pairs(__m512& first, __m512& second) {
  const __m512i low = take_term(first);
  return _mm512_or_si512(low, _mm512_slli_epi32(take_term(second), 16));
}

// 32 numbers of a row from x[first] on, zero from n on: bfloat16 as it lies, where nothing has to be rounded.
inline __m512i load_pairs(const bfloat16* x, std::int64_t first, std::int64_t n) {
  const __mmask32 some = n >= 2 * kLanes ? ~0u : n <= 0 ? 0u : (1u << n) - 1;
  return _mm512_maskz_loadu_epi16(some, x + (n > 0 ? first : 0));
}

// v[i][j] becomes v[j][i], in 16 x 16 pairs: first within blocks of 4 x 4, then the blocks.
inline void turn(__m512i (&v)[kLanes]) {
  __m512i w[kLanes];
  ANNULUS_UNROLL
  for (int i = 0; i < kLanes; i += 2) {
    w[i] = _mm512_unpacklo_epi32(v[i], v[i + 1]);
    w[i + 1] = _mm512_unpackhi_epi32(v[i], v[i + 1]);
  }
  ANNULUS_UNROLL
  for (int i = 0; i < kLanes; i += 4) {
    v[i] = _mm512_unpacklo_epi64(w[i], w[i + 2]);
    v[i + 1] = _mm512_unpackhi_epi64(w[i], w[i + 2]);
    v[i + 2] = _mm512_unpacklo_epi64(w[i + 1], w[i + 3]);
    v[i + 3] = _mm512_unpackhi_epi64(w[i + 1], w[i + 3]);
  }
  // v[4 g + c] holds of rows 4 g .. 4 g + 3 the columns c, 4 + c, 8 + c and 12 + c. A shuffle takes
  // from two registers their quarters 0 and 2 (0x88), or 1 and 3 (0xdd).
  ANNULUS_UNROLL
  for (int c = 0; c < 4; ++c) {
    const __m512i even0 = _mm512_shuffle_i32x4(v[c], v[4 + c], 0x88);
    const __m512i odd0 = _mm512_shuffle_i32x4(v[c], v[4 + c], 0xdd);
    const __m512i even1 = _mm512_shuffle_i32x4(v[8 + c], v[12 + c], 0x88);
    const __m512i odd1 = _mm512_shuffle_i32x4(v[8 + c], v[12 + c], 0xdd);
    v[c] = _mm512_shuffle_i32x4(even0, even1, 0x88);
    v[4 + c] = _mm512_shuffle_i32x4(odd0, odd1, 0x88);
    v[8 + c] = _mm512_shuffle_i32x4(even0, even1, 0xdd);
    v[12 + c] = _mm512_shuffle_i32x4(odd0, odd1, 0xdd);
  }
}

// y = (add ? y : 0) + scale * sum and, where s is not nullptr, dot = s . sum, for a row of a tile.
__attribute__((always_inline)) inline void finish_row(const __m512 (&sum)[kVectors], float scale,
                                                      float* y, bool add, const float* s,
                                                      float* dot) {
  const __m512 c = _mm512_set1_ps(scale);
  __m512 products = _mm512_setzero_ps();
  ANNULUS_UNROLL
  for (int n = 0; n < kVectors; ++n) {
    float* to = y + n * kLanes;
    const __m512 old = add ? _mm512_loadu_ps(to) : _mm512_setzero_ps();
    _mm512_storeu_ps(to, _mm512_fmadd_ps(sum[n], c, old));
    if (s != nullptr) products = _mm512_fmadd_ps(_mm512_loadu_ps(s + n * kLanes), sum[n], products);
  }
  if (s != nullptr) *dot = _mm512_reduce_add_ps(products);
}

}  // namespace

}  // namespace annulus::cpu
