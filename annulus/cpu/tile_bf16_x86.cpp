// bf16 tiles by AVX512-BF16: vdpbf16ps sums pairs of products into 16 lanes of f32. The instruction
// rounds its sums to nearest even and takes subnormals as zero.

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

namespace annulus::cpu {

namespace {

#define ANNULUS_UNROLL _Pragma("GCC unroll 16")

// 8 x 32: 16 sums, two vectors of weights and one broadcast pair of the state.
constexpr int kRows = 8;
constexpr int kLanes = 16;
constexpr int kVectors = 2;
constexpr int kCols = kVectors * kLanes;
constexpr int kUnit = 2;

// A pair along the depth is one 32-bit element here.
using Pair = std::uint32_t;

template <int Terms>
struct Pairs;
template <>
struct Pairs<1> {
  static constexpr int kCount = 1, kLeft[] = {0}, kRight[] = {0};
};
// Least products first.
template <>
struct Pairs<2> {
  static constexpr int kCount = 3, kLeft[] = {1, 0, 0}, kRight[] = {0, 1, 0};
};
template <>
struct Pairs<3> {
  static constexpr int kCount = 6, kLeft[] = {2, 1, 0, 1, 0, 0}, kRight[] = {0, 1, 2, 0, 1, 0};
};

inline __m512bh as_bf16(__m512i v) { return reinterpret_cast<__m512bh>(v); }

template <int Terms, int M>
__attribute__((noinline)) void multiply_rows(const Pair* a, const Factor<float>* factors, int count,
                                             std::int64_t units, float* y, std::int64_t ldy,
                                             bool add, const Dots<float>* dots) {
  for (int f = 0; f < count; ++f, add = true) {
    __m512 sum[M][kVectors];
    ANNULUS_UNROLL
    for (int m = 0; m < M; ++m) {
      ANNULUS_UNROLL
      for (int n = 0; n < kVectors; ++n) sum[m][n] = _mm512_setzero_ps();
    }
    for (int pair = 0; pair < Pairs<Terms>::kCount; ++pair) {
      const Pair* pa = a + Pairs<Terms>::kLeft[pair] * units * kRows;
      const Pair* pb =
          static_cast<const Pair*>(factors[f].b) + Pairs<Terms>::kRight[pair] * units * kCols;
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
      const __m512 c = _mm512_set1_ps(scale != nullptr ? scale[m] : 1.0f);
      __m512 dot = _mm512_setzero_ps();
      ANNULUS_UNROLL
      for (int n = 0; n < kVectors; ++n) {
        float* to = y + m * ldy + n * kLanes;
        const __m512 old = add ? _mm512_loadu_ps(to) : _mm512_setzero_ps();
        _mm512_storeu_ps(to, _mm512_fmadd_ps(sum[m][n], c, old));
        if (dots != nullptr) {
          const __m512 s = _mm512_loadu_ps(dots->s + m * dots->ld + n * kLanes);
          dot = _mm512_fmadd_ps(s, sum[m][n], dot);
        }
      }
      if (dots != nullptr) dots->to[f * kRows + m] = _mm512_reduce_add_ps(dot);
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

// What of 16 numbers bfloat16 holds, widened to 32-bit elements; the rest stays in v.
inline __m512i take_term(__m512& v) {
  const __m512i part = _mm512_cvtepu16_epi32(reinterpret_cast<__m256i>(_mm512_cvtneps_pbh(v)));
  v = _mm512_sub_ps(v, _mm512_castsi512_ps(_mm512_slli_epi32(part, 16)));
  return part;
}

inline __mmask16 first_lanes(std::int64_t n) {
  return n >= kLanes ? static_cast<__mmask16>(0xffff)
         : n <= 0    ? static_cast<__mmask16>(0)
                     : static_cast<__mmask16>((1u << n) - 1);
}

template <int Terms>
void pack_rows(const float* x, std::int64_t ld, int valid, std::int64_t depth, int R, void* to) {
  auto* p = static_cast<Pair*>(to);
  const std::int64_t units = (depth + kUnit - 1) / kUnit;
  const std::int64_t step = units * R;
  for (int r = 0; r < R; ++r) {
    // 16 along the depth are eight pairs, which go R apart.
    for (std::int64_t d = 0; d < kUnit * units; d += kLanes) {
      const __mmask16 mask = first_lanes(r < valid ? depth - d : 0);
      __m512 v = _mm512_maskz_loadu_ps(mask, x + (r < valid ? r * ld + d : 0));
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
void pack_columns(const float* x, std::int64_t ld, const std::int32_t* index, const float* scale,
                  int valid, std::int64_t depth, int R, void* to) {
  auto* p = static_cast<Pair*>(to);
  const std::int64_t units = (depth + kUnit - 1) / kUnit;
  const std::int64_t step = units * R;
  const auto load = [&](std::int64_t d, int r) {
    if (d >= depth) return _mm512_setzero_ps();
    const float* row = x + (index != nullptr ? index[d] : d) * ld;
    const __m512 v = _mm512_maskz_loadu_ps(first_lanes(valid - r), row + (r < valid ? r : 0));
    return scale != nullptr ? _mm512_mul_ps(v, _mm512_set1_ps(scale[d])) : v;
  };
  for (std::int64_t u = 0; u < units; ++u) {
    for (int r = 0; r < R; r += kLanes) {
      __m512 first = load(kUnit * u, r);
      __m512 second = load(kUnit * u + 1, r);
      for (int t = 0; t < Terms; ++t) {
        const __m512i low = take_term(first);
        const __m512i high = _mm512_slli_epi32(take_term(second), 16);
        _mm512_mask_storeu_epi32(p + t * step + u * R + r, first_lanes(R - r),
                                 _mm512_or_si512(low, high));
      }
    }
  }
}

template <int Terms>
const Tiles<float>* make_tiles(const char* name) {
  static const Tiles<float> tiles = {kRows,
                                     kCols,
                                     kUnit,
                                     Terms,
                                     sizeof(Pair) / kUnit,
                                     name,
                                     pack_rows<Terms>,
                                     pack_columns<Terms>,
                                     multiply<Terms>};
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

const Tiles<float>* detail::bf16_tiles_x86(Arithmetic arithmetic) {
  // The compiler's question takes the operating system's saving of the registers into account.
  static const bool present =
      __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
      __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq") &&
      __builtin_cpu_supports("avx512bf16");
  if (!present) return nullptr;
  switch (arithmetic) {
    case Arithmetic::kBf16:
      return make_tiles<1>("vdpbf16ps");
    case Arithmetic::kBf16x3:
      return make_tiles<2>("vdpbf16ps x3");
    case Arithmetic::kBf16x6:
      return make_tiles<3>("vdpbf16ps x6");
    default:
      return nullptr;
  }
}

}  // namespace annulus::cpu

#else

namespace annulus::cpu {
const Tiles<float>* detail::bf16_tiles_x86(Arithmetic) { return nullptr; }
}  // namespace annulus::cpu

#endif
