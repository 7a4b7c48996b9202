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
