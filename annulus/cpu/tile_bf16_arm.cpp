// bf16 tiles by Arm's bfmmla: a 2 x 4 by 4 x 2 product an instruction, summed in f32. The
// instruction rounds its sums to odd and takes subnormals as zero, as the architecture says.

#include "annulus/cpu/features.h"
#include "annulus/cpu/tile.h"

// Clang before 18 has these instructions for a whole file or not at all.
#if defined(__aarch64__) && defined(__linux__) && \
    (!defined(__clang__) || defined(__ARM_FEATURE_BF16_VECTOR_ARITHMETIC))

#include <arm_neon.h>

#include <type_traits>

#if !defined(__clang__)
#pragma GCC push_options
#pragma GCC target("arch=armv8.2-a+bf16")
#endif
#include <arm_bf16.h>

namespace annulus::cpu {

namespace {

#define ANNULUS_UNROLL _Pragma("GCC unroll 8")

// 8 x 8: 16 sums, one behind the 18 that fit before GCC spills, and a divisor of usual sizes.
constexpr int kRows = 8;
constexpr int kCols = 8;
constexpr int kUnit = 4;

static_assert(kRows <= kMaxTileRows && kCols <= kMaxTileCols);

// What a product is added to may be far: it comes while the product is made.
template <int M>
inline void ask_for(const float* y, std::int64_t ldy) {
  ANNULUS_UNROLL
  for (int m = 0; m < 2 * M; ++m) __builtin_prefetch(y + m * ldy);
}

// M pairs of rows by four pairs of columns: what one term of each adds to their sums.
template <int M>
inline __attribute__((always_inline)) void accumulate(const bfloat16_t* pa, const bfloat16_t* pb,
                                                      std::int64_t units,
                                                      float32x4_t (&sum)[M][4]) {
  for (std::int64_t i = 0; i < units; ++i) {
    bfloat16x8_t right[4];
    ANNULUS_UNROLL
    for (int n = 0; n < 4; ++n) right[n] = vld1q_bf16(pb + 8 * n);
    ANNULUS_UNROLL
    for (int m = 0; m < M; ++m) {
      const bfloat16x8_t left = vld1q_bf16(pa + 8 * m);
      ANNULUS_UNROLL
      for (int n = 0; n < 4; ++n) sum[m][n] = vbfmmlaq_f32(sum[m][n], left, right[n]);
    }
    pa += kRows * kUnit;
    pb += kCols * kUnit;
  }
}
// A sum is a 2 x 2 block: two of them side by side are four columns of two rows.
struct TwoRows {
  float32x4_t r0, r1;
  TwoRows(float32x4_t left, float32x4_t right)
      : r0(vreinterpretq_f32_f64(
            vzip1q_f64(vreinterpretq_f64_f32(left), vreinterpretq_f64_f32(right)))),
        r1(vreinterpretq_f32_f64(
            vzip2q_f64(vreinterpretq_f64_f32(left), vreinterpretq_f64_f32(right)))) {}
};

template <int Terms, int M>
__attribute__((noinline)) void multiply_pairs(const bfloat16_t* a, const Factor<float>* factors,
                                              int count, std::int64_t units, float* y,
                                              std::int64_t ldy, bool add, const Dots<float>* dots) {
  constexpr const TermProducts& products = kTermProducts[Terms];
  if (add) ask_for<M>(y, ldy);
  for (int f = 0; f < count; ++f, add = true) {
    float32x4_t sum[M][4];
    ANNULUS_UNROLL
    for (int m = 0; m < M; ++m) {
      ANNULUS_UNROLL
      for (int n = 0; n < 4; ++n) sum[m][n] = vdupq_n_f32(0);
    }
    for (int p = 0; p < products.count; ++p) {
      const bfloat16_t* pa = a + products.left[p] * units * (kRows * kUnit);
      const bfloat16_t* pb = static_cast<const bfloat16_t*>(factors[f].b) +
                             products.right[p] * units * (kCols * kUnit);
      accumulate<M>(pa, pb, units, sum);
    }
    const float* scale = factors[f].scale;
    ANNULUS_UNROLL
    for (int m = 0; m < M; ++m) {
      float32x4_t dot0 = vdupq_n_f32(0), dot1 = dot0;
      const float32x4_t c0 = vdupq_n_f32(scale != nullptr ? scale[2 * m] : 1);
      const float32x4_t c1 = vdupq_n_f32(scale != nullptr ? scale[2 * m + 1] : 1);
      ANNULUS_UNROLL
      for (int n = 0; n < 4; n += 2) {
        const auto [r0, r1] = TwoRows(sum[m][n], sum[m][n + 1]);
        float* y0 = y + 2 * m * ldy + 2 * n;
        float* y1 = y0 + ldy;
        if (scale == nullptr && !add) {  // of a short product the end is felt
          vst1q_f32(y0, r0);
          vst1q_f32(y1, r1);
        } else {
          vst1q_f32(y0, vfmaq_f32(add ? vld1q_f32(y0) : vdupq_n_f32(0), r0, c0));
          vst1q_f32(y1, vfmaq_f32(add ? vld1q_f32(y1) : vdupq_n_f32(0), r1, c1));
        }
        if (dots != nullptr) {
          const float* s = dots->s + 2 * m * dots->ld + 2 * n;
          dot0 = vfmaq_f32(dot0, vld1q_f32(s), r0);
          dot1 = vfmaq_f32(dot1, vld1q_f32(s + dots->ld), r1);
        }
      }
      if (dots != nullptr) {
        const float32x4_t both = vpaddq_f32(dot0, dot1);
        const float32x4_t sums = vpaddq_f32(both, both);
        vst1_f32(dots->to + f * kRows + 2 * m, vget_low_f32(sums));
      }
    }
  }
}

template <int Terms>
void multiply(const void* a, const Factor<float>* factors, int count, std::int64_t depth, int rows,
              float* y, std::int64_t ldy, bool add, const Dots<float>* dots) {
  const auto* pa = static_cast<const bfloat16_t*>(a);
  const std::int64_t units = (depth + kUnit - 1) / kUnit;
  if (rows > 4) return multiply_pairs<Terms, 4>(pa, factors, count, units, y, ldy, add, dots);
  if (rows > 2) return multiply_pairs<Terms, 2>(pa, factors, count, units, y, ldy, add, dots);
  return multiply_pairs<Terms, 1>(pa, factors, count, units, y, ldy, add, dots);
}

__attribute__((noinline)) void multiply_whole(const bfloat16_t* a, std::int64_t step,
                                              const bfloat16_t* b, std::int64_t units,
                                              std::int64_t panels, float* y, std::int64_t ldy,
                                              bool add) {
  for (; panels > 0; --panels, a += step, y += kRows * ldy) {
    float32x4_t sum[kRows / 2][4];
    ANNULUS_UNROLL
    for (int m = 0; m < kRows / 2; ++m) {
      ANNULUS_UNROLL
      for (int n = 0; n < 4; ++n) sum[m][n] = vdupq_n_f32(0);
    }
    if (add) ask_for<kRows / 2>(y, ldy);
    accumulate<kRows / 2>(a, b, units, sum);
    ANNULUS_UNROLL
    for (int m = 0; m < kRows / 2; ++m) {
      ANNULUS_UNROLL
      for (int n = 0; n < 4; n += 2) {
        const auto [r0, r1] = TwoRows(sum[m][n], sum[m][n + 1]);
        float* y0 = y + 2 * m * ldy + 2 * n;
        float* y1 = y0 + ldy;
        vst1q_f32(y0, add ? vaddq_f32(vld1q_f32(y0), r0) : r0);
        vst1q_f32(y1, add ? vaddq_f32(vld1q_f32(y1), r1) : r1);
      }
    }
  }
}
template <int Terms>
void multiply_panels(const void* a, std::int64_t step, const void* b, std::int64_t depth,
                     std::int64_t rows, float* y, std::int64_t ldy, bool add) {
  const std::int64_t whole = Terms == 1 ? rows / kRows : 0;
  multiply_whole(static_cast<const bfloat16_t*>(a), step / std::int64_t{sizeof(bfloat16_t)},
                 static_cast<const bfloat16_t*>(b), (depth + kUnit - 1) / kUnit, whole, y, ldy,
                 add);
  detail::multiply_each<float, kRows, multiply<Terms>>(
      static_cast<const std::byte*>(a) + whole * step, step, b, depth, rows - whole * kRows,
      y + whole * kRows * ldy, ldy, add);
}

// Eight numbers to bfloat16: of each term what it holds, and the rest goes to the next.
template <int Terms>
inline void store_terms(float32x4_t low, float32x4_t high, bfloat16_t* to, std::int64_t step) {
  ANNULUS_UNROLL
  for (int t = 0; t < Terms; ++t) {
    const bfloat16x8_t part = vcvtq_high_bf16_f32(vcvtq_low_bf16_f32(low), high);
    vst1q_bf16(to + t * step, part);
    if (t + 1 < Terms) {
      low = vsubq_f32(low, vcvtq_low_f32_bf16(part));
      high = vsubq_f32(high, vcvtq_high_f32_bf16(part));
    }
  }
}

inline float32x4_t load4(const float* x) { return vld1q_f32(x); }
inline float32x4_t load4(const bfloat16* x) {
  return vreinterpretq_f32_u32(vshll_n_u16(vld1_u16(&x->bits), 16));
}
inline float32x4_t load4(const float16* x) {
  return vcvt_f32_f16(vreinterpret_f16_u16(vld1_u16(&x->bits)));
}
template <class T>
inline float32x4_t load_some(const T* x, std::int64_t n) {
  float v[4] = {};
  for (std::int64_t i = 0; i < n; ++i) v[i] = static_cast<float>(x[i]);
  return vld1q_f32(v);
}

template <int Terms, class T>
void pack_rows_of(const T* x, std::int64_t ld, int valid, std::int64_t depth, void* to) {
  static_assert(kRows == kCols);
  constexpr int R = kRows;
  auto* p = static_cast<bfloat16_t*>(to);
  const std::int64_t units = (depth + kUnit - 1) / kUnit;
  const std::int64_t step = units * R * kUnit;
  const std::int64_t whole = depth / kUnit;
  for (int r = 0; r < R; r += 2) {
    const T* x0 = x + r * ld;
    const T* x1 = x0 + ld;
    const bool first = r < valid, second = r + 1 < valid;
    const float32x4_t zero = vdupq_n_f32(0);
    bfloat16_t* q = p + r * kUnit;
    std::int64_t u = 0;
    if (second) {
      for (; u < whole; ++u) {
        if constexpr (Terms == 1 && std::is_same_v<T, bfloat16>) {  // as they are
          vst1q_u16(reinterpret_cast<std::uint16_t*>(q + u * R * kUnit),
                    vcombine_u16(vld1_u16(&x0[u * kUnit].bits), vld1_u16(&x1[u * kUnit].bits)));
          continue;
        }
        store_terms<Terms>(load4(x0 + u * kUnit), load4(x1 + u * kUnit), q + u * R * kUnit, step);
      }
    }
    for (; u < units; ++u) {
      const std::int64_t rest = depth - u * kUnit < kUnit ? depth - u * kUnit : kUnit;
      store_terms<Terms>(first ? load_some(x0 + u * kUnit, rest) : zero,
                         second ? load_some(x1 + u * kUnit, rest) : zero, q + u * R * kUnit, step);
    }
  }
}
template <int Terms>
void pack_rows(Side, const Matrix& x, int valid, std::int64_t depth, void* to) {
  detail::visit_rows<float>(x,
                            [&](auto* rows) { pack_rows_of<Terms>(rows, x.ld, valid, depth, to); });
}

void pack_tiles(const float* x, std::int64_t step, int valid, std::int64_t depth, void* to) {
  auto* p = static_cast<bfloat16_t*>(to);
  for (std::int64_t d = 0; d < depth; d += kCols, x += step, p += kRows * kCols) {
    pack_rows_of<1>(x, kCols, valid, kCols, p);
  }
}

// Eight rows by four along the depth, of which h has one each.
inline void store_unit(const uint16x8_t (&h)[4], bfloat16_t* to) {
  auto* p = reinterpret_cast<std::uint32_t*>(to);
  const uint32x4_t a = vreinterpretq_u32_u16(vzip1q_u16(h[0], h[1]));
  const uint32x4_t b = vreinterpretq_u32_u16(vzip1q_u16(h[2], h[3]));
  const uint32x4_t c = vreinterpretq_u32_u16(vzip2q_u16(h[0], h[1]));
  const uint32x4_t d = vreinterpretq_u32_u16(vzip2q_u16(h[2], h[3]));
  vst1q_u32(p, vzip1q_u32(a, b));
  vst1q_u32(p + 4, vzip2q_u32(a, b));
  vst1q_u32(p + 8, vzip1q_u32(c, d));
  vst1q_u32(p + 12, vzip2q_u32(c, d));
}
// The same of floats: rounded, then turned.
template <int Terms>
inline void store_turned(float32x4_t (&v)[4][2], bfloat16_t* to, std::int64_t step) {
  ANNULUS_UNROLL
  for (int t = 0; t < Terms; ++t) {
    uint16x8_t h[4];
    ANNULUS_UNROLL
    for (int k = 0; k < 4; ++k) {
      const bfloat16x8_t part = vcvtq_high_bf16_f32(vcvtq_low_bf16_f32(v[k][0]), v[k][1]);
      h[k] = vreinterpretq_u16_bf16(part);
      if (t + 1 < Terms) {
        v[k][0] = vsubq_f32(v[k][0], vcvtq_low_f32_bf16(part));
        v[k][1] = vsubq_f32(v[k][1], vcvtq_high_f32_bf16(part));
      }
    }
    store_unit(h, to + t * step);
  }
}

template <int Terms, class T>
void pack_columns_of(const T* x, std::int64_t ld, const std::int32_t* index, const float* scale,
                     int valid, std::int64_t depth, void* to) {
  static_assert(kRows == 8 && kCols == 8);
  constexpr int R = kRows;
  auto* p = static_cast<bfloat16_t*>(to);
  const std::int64_t units = (depth + kUnit - 1) / kUnit;
  const std::int64_t step = units * R * kUnit;
  for (std::int64_t u = 0; u < units; ++u) {
    const std::int64_t some = depth - u * kUnit < kUnit ? depth - u * kUnit : kUnit;
    if constexpr (Terms == 1 && std::is_same_v<T, bfloat16>) {
      if (some == kUnit && valid == R && index == nullptr && scale == nullptr) {  // as they are
        uint16x8_t h[4];
        ANNULUS_UNROLL
        for (int k = 0; k < 4; ++k) h[k] = vld1q_u16(&x[(u * kUnit + k) * ld].bits);
        store_unit(h, p + u * R * kUnit);
        continue;
      }
    }
    float32x4_t v[4][2];
    ANNULUS_UNROLL
    for (int k = 0; k < 4; ++k) {
      v[k][0] = v[k][1] = vdupq_n_f32(0);
      if (k >= some) continue;
      const std::int64_t d = u * kUnit + k;
      const T* row = x + (index != nullptr ? index[d] : d) * ld;
      v[k][0] = valid >= 4 ? load4(row) : load_some(row, valid);
      v[k][1] = valid == 8 ? load4(row + 4) : load_some(row + 4, valid - 4);
      if (scale != nullptr) {
        v[k][0] = vmulq_n_f32(v[k][0], scale[d]);
        v[k][1] = vmulq_n_f32(v[k][1], scale[d]);
      }
    }
    store_turned<Terms>(v, p + u * R * kUnit, step);
  }
}
template <int Terms>
void pack_columns(Side, const Matrix& x, const std::int32_t* index, const float* scale, int valid,
                  std::int64_t depth, void* to) {
  detail::visit_rows<float>(
      x, [&](auto* rows) { pack_columns_of<Terms>(rows, x.ld, index, scale, valid, depth, to); });
}

template <int Terms>
const Tiles<float>* make_tiles(const char* name) {
  static const Tiles<float> tiles = {{kRows, kCols, kUnit, Terms, sizeof(bfloat16_t), name},
                                     pack_rows<Terms>,
                                     pack_columns<Terms>,
                                     pack_tiles,
                                     multiply<Terms>,
                                     multiply_panels<Terms>,
                                     nullptr};
  return &tiles;
}

}  // namespace

const Tiles<float>* detail::bf16_tiles_arm(Precision precision) {
  if (!has_arm_bf16()) return nullptr;
  return of_terms(precision, make_tiles<1>("bfmmla"), make_tiles<2>("bfmmla x3"),
                  make_tiles<3>("bfmmla x6"));
}

}  // namespace annulus::cpu

#if !defined(__clang__)
#pragma GCC pop_options
#endif

#else

namespace annulus::cpu {
const Tiles<float>* detail::bf16_tiles_arm(Precision) { return nullptr; }
}  // namespace annulus::cpu

#endif
