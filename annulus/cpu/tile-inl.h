// Tiles by Highway: f64, f32, and bf16 on machines without such instructions (its operands are
// rounded as they should be and kept as floats). Included by tile.cpp, once per instruction set.
#if defined(ANNULUS_CPU_TILE_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef ANNULUS_CPU_TILE_INL_H_
#undef ANNULUS_CPU_TILE_INL_H_
#else
#define ANNULUS_CPU_TILE_INL_H_
#endif

#include <algorithm>
#include <cstdint>
#include <type_traits>

#include "annulus/cpu/simd-inl.h"
#include "annulus/cpu/tile.h"

HWY_BEFORE_NAMESPACE();
namespace annulus::cpu::HWY_NAMESPACE {

#if ANNULUS_SIMD

// 16 sums hide the latency of a multiply-add on the cores measured; with 16 registers 12 fit.
#if HWY_TARGET == HWY_AVX2
inline constexpr int kTileRows = 6;
#else
inline constexpr int kTileRows = 8;
#endif
inline constexpr int kTileVectors = 2;

template <class T>
inline constexpr int kLanes = static_cast<int>(hn::MaxLanes(hn::ScalableTag<T>()));
template <class T>
inline constexpr int kTileCols = kTileVectors* kLanes<T>;

#else

inline constexpr int kTileRows = 4;
template <class T>
inline constexpr int kTileCols = 4;

#endif

static_assert(kTileRows <= kMaxTileRows);
static_assert(kTileCols<float> <= kMaxTileCols && kTileCols<double> <= kMaxTileCols);

#if ANNULUS_SIMD

// What a product is added to may be far: it comes while the product is made.
template <int M, class T>
HWY_INLINE void ask_for(const T* y, std::int64_t ldy) {
  ANNULUS_UNROLL
  for (int m = 0; m < M; ++m) __builtin_prefetch(y + m * ldy);
}

// What one term of each operand adds to the sums of a tile. (On AVX-512 half of the numbers can be read by each multiply-add itself,
// an eighth fewer instructions: by itself a loop of it is 13 % faster while the core's other thread is busy and no faster else, and an
// attention was 2 % slower. Other tiles, 8 x 3 or 6 x 4 vectors, gain 2 % at most: 147 GFLOP/s for 144, a core of a Skylake Xeon.)
template <class T, int M>
HWY_INLINE void accumulate(const T* pa, const T* pb, std::int64_t depth,
                           hn::Vec<hn::ScalableTag<T>> (&sum)[M][kTileVectors]) {
  const hn::ScalableTag<T> d;
  using V = hn::Vec<decltype(d)>;
  for (std::int64_t i = 0; i < depth; ++i) {
    V right[kTileVectors];
    ANNULUS_UNROLL
    for (int n = 0; n < kTileVectors; ++n) right[n] = hn::Load(d, pb + n * kLanes<T>);
#if HWY_TARGET == HWY_NEON
    // Multiply-adds by a lane of a register: a broadcast load would take one of their pipes.
    constexpr int kStep = M < kLanes<T> ? M : kLanes<T>;
    ANNULUS_UNROLL
    for (int m = 0; m < M; m += kStep) {
      const V left = hn::LoadU(d, pa + m);
      ANNULUS_UNROLL
      for (int n = 0; n < kTileVectors; ++n) {
        sum[m][n] = hn::MulAdd(right[n], hn::Broadcast<0>(left), sum[m][n]);
        if constexpr (kStep > 1) {
          sum[m + 1][n] = hn::MulAdd(right[n], hn::Broadcast<1>(left), sum[m + 1][n]);
        }
        if constexpr (kStep > 2) {
          sum[m + 2][n] = hn::MulAdd(right[n], hn::Broadcast<2>(left), sum[m + 2][n]);
          sum[m + 3][n] = hn::MulAdd(right[n], hn::Broadcast<3>(left), sum[m + 3][n]);
        }
      }
    }
#else
    ANNULUS_UNROLL
    for (int m = 0; m < M; ++m) {
      const V left = hn::Set(d, pa[m]);
      ANNULUS_UNROLL
      for (int n = 0; n < kTileVectors; ++n) sum[m][n] = hn::MulAdd(right[n], left, sum[m][n]);
    }
#endif
    pa += kTileRows;
    pb += kTileCols<T>;
  }
}

template <class T, int Terms, int M>
HWY_NOINLINE void multiply_rows(const T* a, const Factor<T>* factors, int count, std::int64_t depth,
                                T* y, std::int64_t ldy, bool add, const Dots<T>* dots) {
  const hn::ScalableTag<T> d;
  using V = hn::Vec<decltype(d)>;
  constexpr int kCols = kTileCols<T>;
  constexpr const TermProducts& products = kTermProducts[Terms];
  if (add) ask_for<M>(y, ldy);
  for (int f = 0; f < count; ++f, add = true) {
    V sum[M][kTileVectors];
    ANNULUS_UNROLL
    for (int m = 0; m < M; ++m) {
      ANNULUS_UNROLL
      for (int n = 0; n < kTileVectors; ++n) sum[m][n] = hn::Zero(d);
    }
    for (int p = 0; p < products.count; ++p) {
      const T* pa = a + products.left[p] * depth * kTileRows;
      const T* pb = static_cast<const T*>(factors[f].b) + products.right[p] * depth * kCols;
      accumulate<T, M>(pa, pb, depth, sum);
    }
    const T* scale = factors[f].scale;
    ANNULUS_UNROLL
    for (int m = 0; m < M; ++m) {
      // Of a short product the end is felt: a plain one is stored as it is.
      const bool plain = scale == nullptr && !add;
      const V c = hn::Set(d, scale != nullptr ? scale[m] : T(1));
      ANNULUS_UNROLL
      for (int n = 0; n < kTileVectors; ++n) {
        T* to = y + m * ldy + n * kLanes<T>;
        if (plain) {
          hn::StoreU(sum[m][n], d, to);
        } else {
          const V old = add ? hn::LoadU(d, to) : hn::Zero(d);
          hn::StoreU(hn::MulAdd(sum[m][n], c, old), d, to);
        }
      }
    }
    if (dots != nullptr) {
      ANNULUS_UNROLL
      for (int m = 0; m < M; ++m) {
        const T* s = dots->s + m * dots->ld;
        V dot = hn::Mul(hn::LoadU(d, s), sum[m][0]);
        ANNULUS_UNROLL
        for (int n = 1; n < kTileVectors; ++n) {
          dot = hn::MulAdd(hn::LoadU(d, s + n * kLanes<T>), sum[m][n], dot);
        }
        dots->to[f * kTileRows + m] = hn::GetLane(hn::SumOfLanes(d, dot));
      }
    }
  }
}

template <class T, int Terms>
void multiply(const void* a, const Factor<T>* factors, int count, std::int64_t depth, int rows,
              T* y, std::int64_t ldy, bool add, const Dots<T>* dots) {
  const T* pa = static_cast<const T*>(a);
  if (rows > 4)
    return multiply_rows<T, Terms, kTileRows>(pa, factors, count, depth, y, ldy, add, dots);
  if (rows > 2) return multiply_rows<T, Terms, 4>(pa, factors, count, depth, y, ldy, add, dots);
  if (rows > 1) return multiply_rows<T, Terms, 2>(pa, factors, count, depth, y, ldy, add, dots);
  return multiply_rows<T, Terms, 1>(pa, factors, count, depth, y, ldy, add, dots);
}

template <class T>
HWY_NOINLINE void multiply_whole(const T* a, std::int64_t step, const T* b, std::int64_t depth,
                                 std::int64_t panels, T* y, std::int64_t ldy, bool add) {
  const hn::ScalableTag<T> d;
  using V = hn::Vec<decltype(d)>;
  for (; panels > 0; --panels, a += step, y += kTileRows * ldy) {
    V sum[kTileRows][kTileVectors];
    ANNULUS_UNROLL
    for (int m = 0; m < kTileRows; ++m) {
      ANNULUS_UNROLL
      for (int n = 0; n < kTileVectors; ++n) sum[m][n] = hn::Zero(d);
    }
    if (add) ask_for<kTileRows>(y, ldy);
    accumulate<T, kTileRows>(a, b, depth, sum);
    ANNULUS_UNROLL
    for (int m = 0; m < kTileRows; ++m) {
      ANNULUS_UNROLL
      for (int n = 0; n < kTileVectors; ++n) {
        T* to = y + m * ldy + n * kLanes<T>;
        hn::StoreU(add ? hn::Add(hn::LoadU(d, to), sum[m][n]) : sum[m][n], d, to);
      }
    }
  }
}

#if HWY_TARGET != HWY_NEON
// A number is broadcast from wherever it is: rows need not lie as a panel. (Packing them took a twelfth of a backward.)
template <class T>
void multiply_tiles(const void* a, std::int64_t step, const void* b, std::int64_t depth,
                    std::int64_t rows, T* y, std::int64_t ldy, bool add) {
  const hn::ScalableTag<T> d;
  using V = hn::Vec<decltype(d)>;
  constexpr int kCols = kTileCols<T>;
  const T* rows_of = static_cast<const T*>(a);
  for (; rows > 0; rows -= kTileRows, rows_of += kTileRows * kCols, y += kTileRows * ldy) {
    V sum[kTileRows][kTileVectors];
    ANNULUS_UNROLL
    for (int m = 0; m < kTileRows; ++m) {
      ANNULUS_UNROLL
      for (int n = 0; n < kTileVectors; ++n) sum[m][n] = hn::Zero(d);
    }
    if (add && rows >= kTileRows) ask_for<kTileRows>(y, ldy);
    const T* tile = rows_of;
    const T* pb = static_cast<const T*>(b);
    for (std::int64_t t = 0; t < depth; t += kCols, tile += step) {
      const T* const end = tile + std::min<std::int64_t>(kCols, depth - t);
      for (const T* pa = tile; pa < end; ++pa, pb += kCols) {
        V right[kTileVectors];
        ANNULUS_UNROLL
        for (int n = 0; n < kTileVectors; ++n) right[n] = hn::Load(d, pb + n * kLanes<T>);
        ANNULUS_UNROLL
        for (int m = 0; m < kTileRows; ++m) {
          const V left = hn::Set(d, pa[m * kCols]);
          ANNULUS_UNROLL
          for (int n = 0; n < kTileVectors; ++n) sum[m][n] = hn::MulAdd(right[n], left, sum[m][n]);
        }
      }
    }
    ANNULUS_UNROLL
    for (int m = 0; m < kTileRows; ++m) {
      if (m >= rows) break;
      ANNULUS_UNROLL
      for (int n = 0; n < kTileVectors; ++n) {
        T* to = y + m * ldy + n * kLanes<T>;
        hn::StoreU(add ? hn::Add(hn::LoadU(d, to), sum[m][n]) : sum[m][n], d, to);
      }
    }
  }
}
#endif

#else  // one lane

template <class T, int Terms>
void multiply(const void* a, const Factor<T>* factors, int count, std::int64_t depth, int rows,
              T* y, std::int64_t ldy, bool add, const Dots<T>* dots) {
  constexpr int kCols = kTileCols<T>;
  constexpr const TermProducts& products = kTermProducts[Terms];
  for (int f = 0; f < count; ++f, add = true) {
    T sum[kTileRows][kCols] = {};
    for (int p = 0; p < products.count; ++p) {
      const T* pa = static_cast<const T*>(a) + products.left[p] * depth * kTileRows;
      const T* pb = static_cast<const T*>(factors[f].b) + products.right[p] * depth * kCols;
      for (std::int64_t i = 0; i < depth; ++i) {
        for (int m = 0; m < kTileRows; ++m) {
          for (int n = 0; n < kCols; ++n) sum[m][n] += pa[m] * pb[n];
        }
        pa += kTileRows;
        pb += kCols;
      }
    }
    const T* scale = factors[f].scale;
    for (int m = 0; m < rows; ++m) {
      T dot = 0;
      for (int n = 0; n < kCols; ++n) {
        T* to = y + m * ldy + n;
        const T v = scale != nullptr ? scale[m] * sum[m][n] : sum[m][n];
        *to = add ? *to + v : v;
        if (dots != nullptr) dot += dots->s[m * dots->ld + n] * sum[m][n];
      }
      if (dots != nullptr) dots->to[f * kTileRows + m] = dot;
    }
  }
}

#endif

template <class T, int Terms>
void multiply_panels(const void* a, std::int64_t step, const void* b, std::int64_t depth,
                     std::int64_t rows, T* y, std::int64_t ldy, bool add) {
  std::int64_t whole = 0;
#if ANNULUS_SIMD
  if constexpr (Terms == 1) {
    whole = rows / kTileRows;
    multiply_whole(static_cast<const T*>(a), step / static_cast<std::int64_t>(sizeof(T)),
                   static_cast<const T*>(b), depth, whole, y, ldy, add);
  }
#endif
  annulus::cpu::detail::multiply_each<T, kTileRows, multiply<T, Terms>>(
      static_cast<const std::byte*>(a) + whole * step, step, b, depth, rows - whole * kTileRows,
      y + whole * kTileRows * ldy, ldy, add);
}

// The terms of x: itself, or what of it bfloat16 holds, and what of the rest.
template <class T, bool Round, int Terms>
inline void split(T x, T* term, std::int64_t step) {
  if constexpr (!Round) {
    *term = x;
  } else {
    for (int i = 0; i < Terms; ++i) {
      const T part = static_cast<float>(bfloat16(x));
      term[i * step] = part;
      x -= part;
    }
  }
}

#if ANNULUS_SIMD
// Vectors of T from memory of another type; blocks of 16 bytes are what packing turns in registers.
template <class D>
HWY_INLINE hn::Vec<D> load_block(D d, const hn::TFromD<D>* p) {
  return hn::LoadU(d, p);
}
template <class D>
HWY_INLINE hn::Vec<D> load_block(D d, const bfloat16* p) {
  return hn::PromoteTo(
      d, hn::LoadU(hn::Rebind<hwy::bfloat16_t, D>(), reinterpret_cast<const hwy::bfloat16_t*>(p)));
}
template <class D>
HWY_INLINE hn::Vec<D> load_block(D d, const float16* p) {
  return hn::PromoteTo(
      d, hn::LoadU(hn::Rebind<hwy::float16_t, D>(), reinterpret_cast<const hwy::float16_t*>(p)));
}
template <class T>
using Block = hn::CappedTag<T, 16 / sizeof(T)>;
#endif

template <class T, bool Round, int Terms, class From>
void pack_rows_of(int R, const From* x, std::int64_t ld, int valid, std::int64_t depth, T* p) {
  const std::int64_t step = depth * R;
  int r = 0;
#if ANNULUS_SIMD
  if constexpr (!Round && std::is_same_v<T, float>) {
    // Four rows by four elements at a time, turned in registers.
    const Block<float> d;
    if (hn::Lanes(d) == 4) {
      for (; r + 4 <= valid; r += 4) {
        const From* row = x + r * ld;
        std::int64_t i = 0;
        for (; i + 4 <= depth; i += 4) {
          const auto a0 = load_block(d, row + i);
          const auto a1 = load_block(d, row + ld + i);
          const auto a2 = load_block(d, row + 2 * ld + i);
          const auto a3 = load_block(d, row + 3 * ld + i);
          const auto low01 = hn::InterleaveLower(d, a0, a1);
          const auto low23 = hn::InterleaveLower(d, a2, a3);
          const auto high01 = hn::InterleaveUpper(d, a0, a1);
          const auto high23 = hn::InterleaveUpper(d, a2, a3);
          float* q = p + i * R + r;
          hn::StoreU(hn::ConcatLowerLower(d, low23, low01), d, q);
          hn::StoreU(hn::ConcatUpperUpper(d, low23, low01), d, q + R);
          hn::StoreU(hn::ConcatLowerLower(d, high23, high01), d, q + 2 * R);
          hn::StoreU(hn::ConcatUpperUpper(d, high23, high01), d, q + 3 * R);
        }
        for (; i < depth; ++i) {
          for (int k = 0; k < 4; ++k) p[i * R + r + k] = static_cast<float>(row[k * ld + i]);
        }
      }
    }
  }
#endif
  for (; r < valid; ++r) {
    for (std::int64_t i = 0; i < depth; ++i) {
      split<T, Round, Terms>(static_cast<T>(x[r * ld + i]), p + i * R + r, step);
    }
  }
  for (; r < R; ++r) {
    for (std::int64_t i = 0; i < depth * Terms; ++i) p[i * R + r] = T(0);
  }
}

template <class T, bool Round, int Terms, class From>
void pack_columns_of(int R, const From* x, std::int64_t ld, const std::int32_t* index,
                     const T* scale, int valid, std::int64_t depth, T* p) {
  const std::int64_t step = depth * R;
#if ANNULUS_SIMD && HWY_TARGET != HWY_NEON
  if constexpr (!Round && std::is_same_v<T, float>) {
    // Whole rows as they lie, 8 numbers at a time: what keys' values are packed by.
    const hn::CappedTag<float, 8> d;
    constexpr int kSome = static_cast<int>(hn::MaxLanes(d));
    if (index == nullptr && scale == nullptr && valid == R && R % kSome == 0) {
      for (std::int64_t i = 0; i < depth; ++i, x += ld, p += R) {
        for (int r = 0; r < R; r += kSome) hn::StoreU(load_block(d, x + r), d, p + r);
      }
      return;
    }
  }
#endif
  for (std::int64_t i = 0; i < depth; ++i) {
    const From* row = x + (index != nullptr ? index[i] : i) * ld;
    const T c = scale != nullptr ? scale[i] : T(1);
    T* q = p + i * R;
    int r = 0;
#if ANNULUS_SIMD
    if constexpr (!Round) {
      const Block<T> d;
      const int lanes = static_cast<int>(hn::Lanes(d));
      const auto factor = hn::Set(d, c);
      for (; r + lanes <= valid; r += lanes) {
        hn::StoreU(hn::Mul(factor, load_block(d, row + r)), d, q + r);
      }
    }
#endif
    for (; r < valid; ++r) split<T, Round, Terms>(c * static_cast<T>(row[r]), q + r, step);
    for (; r < R; ++r) {
      for (int k = 0; k < Terms; ++k) q[k * step + r] = T(0);
    }
  }
}

template <class T>
inline int panel_rows(Side side) {
  return side == Side::kLeft ? kTileRows : kTileCols<T>;
}
template <class T, bool Round, int Terms>
void pack_rows(Side side, const Matrix& x, int valid, std::int64_t depth, void* to) {
  annulus::cpu::detail::visit_rows<T>(x, [&](auto* rows) {
    pack_rows_of<T, Round, Terms>(panel_rows<T>(side), rows, x.ld, valid, depth,
                                  static_cast<T*>(to));
  });
}
template <class T, bool Round, int Terms>
void pack_columns(Side side, const Matrix& x, const std::int32_t* index, const T* scale, int valid,
                  std::int64_t depth, void* to) {
  annulus::cpu::detail::visit_rows<T>(x, [&](auto* rows) {
    pack_columns_of<T, Round, Terms>(panel_rows<T>(side), rows, x.ld, index, scale, valid, depth,
                                     static_cast<T*>(to));
  });
}

template <class T, bool Round>
void pack_tiles(const T* x, std::int64_t step, int valid, std::int64_t depth, void* to) {
  T* p = static_cast<T*>(to);
  constexpr int kCols = kTileCols<T>;
  for (std::int64_t d = 0; d < depth; d += kCols, x += step, p += kTileRows * kCols) {
    pack_rows_of<T, Round, 1>(kTileRows, x, kCols, valid, kCols, p);
  }
}

// Where operands are rounded into their panel, they have to be packed.
template <class T, bool Round>
constexpr auto tiles_function() {
  using F = decltype(Tiles<T>::multiply_tiles);
#if ANNULUS_SIMD && HWY_TARGET != HWY_NEON
  if constexpr (!Round) return F(multiply_tiles<T>);
#endif
  return F(nullptr);
}

template <class T, bool Round, int Terms>
const Tiles<T>* make_tiles(const char* name) {
  static const Tiles<T> tiles = {{kTileRows, kTileCols<T>, 1, Terms, sizeof(T), name},
                                 pack_rows<T, Round, Terms>,
                                 pack_columns<T, Round, Terms>,
                                 pack_tiles<T, Round>,
                                 multiply<T, Terms>,
                                 multiply_panels<T, Terms>,
                                 tiles_function<T, Round>()};
  return &tiles;
}

const Tiles<float>* float_tiles(Precision precision) {
  switch (precision) {
    case Precision::kBf16:
      return make_tiles<float, true, 1>("bf16 in f32");
    case Precision::kBf16x3:
      return make_tiles<float, true, 2>("bf16x3 in f32");
    case Precision::kBf16x6:
      return make_tiles<float, true, 3>("bf16x6 in f32");
    default:
      return make_tiles<float, false, 1>("f32");
  }
}
const Tiles<double>* double_tiles() { return make_tiles<double, false, 1>("f64"); }

}  // namespace annulus::cpu::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#endif  // toggling guard
