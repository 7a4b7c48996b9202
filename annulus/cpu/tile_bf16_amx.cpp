// bf16 tiles by Intel's AMX: tdpbf16ps multiplies 16 rows by 16 columns over a depth of 32, summed
// in f32. The instruction rounds its sums to nearest even and takes subnormals as zero. The left
// operand lies in memory row by row; of the right, a row has the pairs of all columns at one depth:
//
//   left  [term][depth / 32][32 rows][32]      right  [term][depth / 32][16 pairs][32 columns][2]

#include "annulus/cpu/features.h"
#include "annulus/cpu/tile.h"

#if defined(__x86_64__) && defined(__linux__)

#if defined(__GNUC__) && !defined(__clang__)
// GCC 12 takes the undefined operands within its own intrinsics for ours (its bug 105593).
#pragma GCC diagnostic ignored "-Wmaybe-uninitialized"
#pragma GCC diagnostic ignored "-Wuninitialized"
#endif
#if defined(__clang__)
#pragma clang attribute push(                                                                   \
    __attribute__((target("avx512f,avx512bw,avx512vl,avx512dq,avx512bf16,amx-tile,amx-bf16"))), \
    apply_to = function)
#else
#pragma GCC push_options
#pragma GCC target("avx512f,avx512bw,avx512vl,avx512dq,avx512bf16,amx-tile,amx-bf16")
#endif
#include <immintrin.h>

#include "annulus/cpu/tile_bf16_x86-inl.h"

namespace annulus::cpu {

namespace {

// 32 x 32: four tiles of sums and two of either operand are all eight there are. By Intel's manual
// an instruction takes 16 cycles and its result 52, which four sums hide; loads take half of that.
//
// Of 16 rows or fewer two sums are made, 52 cycles for 32 columns and a unit of depth, however few
// the rows. vdpbf16ps takes 128 for 8 rows and, waiting six for each pair, 96 for fewer: there is
// no number of rows for which its tiles had to be kept beside these. (Counted, not measured.)
constexpr int kRows = 32;
constexpr int kHalf = 16;  // rows or columns of one tile
constexpr int kUnit = 32;
constexpr int kBlock = kRows * kUnit;  // elements of a panel in a unit of depth
static_assert(kRows == kCols && kHalf == kLanes);
static_assert(kRows <= kMaxTileRows && kCols <= kMaxTileCols);

using Element = std::uint16_t;  // a bfloat16

// Elements between rows of a tile, and between the two tiles of a unit.
constexpr int kLeftRow = kUnit;
constexpr int kLeftTile = kHalf * kUnit;
constexpr int kRightRow = 2 * kCols;
constexpr int kRightTile = 2 * kHalf;

inline std::int64_t units_of(std::int64_t depth) { return (depth + kUnit - 1) / kUnit; }

// All eight tiles: 16 rows of 64 bytes. (Constant also because GCC 12 believes that the instruction
// reads the first eight bytes alone: it might not write the others of a variable.)
struct alignas(64) Config {
  std::uint8_t palette = 1, start_row = 0, reserved[14] = {};
  std::uint16_t row_bytes[16] = {64, 64, 64, 64, 64, 64, 64, 64};
  std::uint8_t rows[16] = {16, 16, 16, 16, 16, 16, 16, 16};
};
constexpr Config kConfig;
static_assert(sizeof(Config) == 64);

// What one term of each operand adds to the four sums; units of the left lie `step` elements apart.
inline void add_products(const Element* a, std::int64_t step, const Element* b,
                         std::int64_t units) {
  for (std::int64_t i = 0; i < units; ++i, a += step, b += kBlock) {
    _tile_loadd(4, a, kLeftRow * sizeof(Element));
    _tile_loadd(6, b, kRightRow * sizeof(Element));
    _tile_dpbf16ps(0, 4, 6);
    _tile_loadd(7, b + kRightTile, kRightRow * sizeof(Element));
    _tile_dpbf16ps(1, 4, 7);
    _tile_loadd(5, a + kLeftTile, kLeftRow * sizeof(Element));
    _tile_dpbf16ps(2, 5, 6);
    _tile_dpbf16ps(3, 5, 7);
  }
}

// Where the depth is two units the right operand stays in four tiles for all rows, which are summed 16 at a time: the sums of one half
// are stored while those of the next are made. (Four tiles of sums at a time took 1.4 times as long.)
void sum_two_units(const Element* a, std::int64_t row_step, const Element* b, std::int64_t rows,
                   float* y, std::int64_t ldy) {
  const auto row_bytes = static_cast<std::size_t>(ldy) * sizeof(float);
  _tile_loadd(4, b, kRightRow * sizeof(Element));
  _tile_loadd(5, b + kRightTile, kRightRow * sizeof(Element));
  _tile_loadd(6, b + kBlock, kRightRow * sizeof(Element));
  _tile_loadd(7, b + kBlock + kRightTile, kRightRow * sizeof(Element));
  for (; rows > 0; rows -= kRows, a += row_step, y += kRows * ldy) {
    for (int half = 0; half < 2; ++half) {
      const Element* pa = a + half * kLeftTile;
      float* to = y + half * kHalf * ldy;
      _tile_loadd(2, pa, kLeftRow * sizeof(Element));
      _tile_zero(0);
      _tile_dpbf16ps(0, 2, 4);
      _tile_loadd(3, pa + kBlock, kLeftRow * sizeof(Element));
      _tile_zero(1);
      _tile_dpbf16ps(1, 2, 5);
      _tile_dpbf16ps(0, 3, 6);
      _tile_dpbf16ps(1, 3, 7);
      _tile_stored(0, to, row_bytes);
      _tile_stored(1, to + kHalf, row_bytes);
    }
  }
}

// The sums of one factor, [32][32]; where Halves is 1, of the first 16 rows. An element is summed
// in the same order either way.
template <int Terms, int Halves>
inline void sum_products(const Element* a, const Element* b, std::int64_t units, float* sum) {
  constexpr const TermProducts& products = kTermProducts[Terms];
  _tile_zero(0);
  _tile_zero(1);
  if constexpr (Halves == 2) {
    _tile_zero(2);
    _tile_zero(3);
  }
  for (int p = 0; p < products.count; ++p) {
    const Element* pa = a + products.left[p] * units * kBlock;
    const Element* pb = b + products.right[p] * units * kBlock;
    if constexpr (Halves == 2) {
      add_products(pa, kBlock, pb, units);
      continue;
    }
    for (std::int64_t i = 0; i < units; ++i, pa += kBlock, pb += kBlock) {
      _tile_loadd(4, pa, kLeftRow * sizeof(Element));
      _tile_loadd(6, pb, kRightRow * sizeof(Element));
      _tile_dpbf16ps(0, 4, 6);
      _tile_loadd(7, pb + kRightTile, kRightRow * sizeof(Element));
      _tile_dpbf16ps(1, 4, 7);
    }
  }
  _tile_stored(0, sum, kCols * sizeof(float));
  _tile_stored(1, sum + kHalf, kCols * sizeof(float));
  if constexpr (Halves == 2) {
    _tile_stored(2, sum + kHalf * kCols, kCols * sizeof(float));
    _tile_stored(3, sum + kHalf * kCols + kHalf, kCols * sizeof(float));
  }
}

template <int Terms, int Halves>
__attribute__((noinline)) void multiply_rows(const Element* a, const Factor<float>* factors,
                                             int count, std::int64_t units, int rows, float* y,
                                             std::int64_t ldy, bool add, const Dots<float>* dots) {
  alignas(64) float sums[Halves * kHalf * kCols];
  for (int f = 0; f < count; ++f, add = true) {
    sum_products<Terms, Halves>(a, static_cast<const Element*>(factors[f].b), units, sums);
    const float* scale = factors[f].scale;
    for (int m = 0; m < rows; ++m) {
      const __m512 sum[kVectors] = {_mm512_load_ps(sums + m * kCols),
                                    _mm512_load_ps(sums + m * kCols + kLanes)};
      finish_row(sum, scale != nullptr ? scale[m] : 1.0f, y + m * ldy, add,
                 dots != nullptr ? dots->s + m * dots->ld : nullptr,
                 dots != nullptr ? dots->to + f * kRows + m : nullptr);
    }
  }
}

// The tiles are configured for each call and given back at its end. That costs tens of cycles,
// beside 64 for every factor and unit of depth. But tiles in use are 8 KiB more that each context
// switch of this thread saves, keep its core from deep sleep, and whatever else in the process has
// tiles may have configured them otherwise since the last call.
template <int Terms>
void multiply(const void* a, const Factor<float>* factors, int count, std::int64_t depth, int rows,
              float* y, std::int64_t ldy, bool add, const Dots<float>* dots) {
  const auto* pa = static_cast<const Element*>(a);
  const std::int64_t units = units_of(depth);
  _tile_loadconfig(&kConfig);
  if (rows > kHalf) {
    multiply_rows<Terms, 2>(pa, factors, count, units, rows, y, ldy, add, dots);
  } else {
    multiply_rows<Terms, 1>(pa, factors, count, units, rows, y, ldy, add, dots);
  }
  _tile_release();
}

// Products of one term, without a call or a configuration a tile: whole tiles are summed where they lie, others on the stack. (All
// by way of the stack they took 3 times as long over a depth of 64.) Row tiles of the left operand lie `row_step`, its units `step`
// elements apart.
void sum_in_place(const Element* a, std::int64_t row_step, std::int64_t step, const Element* b,
                  std::int64_t depth, std::int64_t rows, float* y, std::int64_t ldy, bool add) {
  const std::int64_t units = units_of(depth);
  _tile_loadconfig(&kConfig);
  if (units == 2 && !add && step == kBlock) {
    const std::int64_t whole = rows / kRows * kRows;
    sum_two_units(a, row_step, b, whole, y, ldy);
    a += rows / kRows * row_step;
    y += whole * ldy;
    rows -= whole;
  }
  for (; rows > 0; rows -= kRows, a += row_step, y += kRows * ldy) {
    alignas(64) float sums[kRows * kCols];
    const bool whole = rows >= kRows;
    float* const to = whole ? y : sums;
    const std::int64_t ld = whole ? ldy : kCols;
    const auto row_bytes = static_cast<std::size_t>(ld) * sizeof(float);
    float* const below = to + kHalf * ld;
    // (Sums go on from what there is, so that an element's bits do not depend on how many rows come along.)
    for (std::int64_t m = 0; m < kRows && add && !whole; ++m) {
      for (int v = 0; v < kVectors; ++v) {
        _mm512_store_ps(sums + m * kCols + v * kLanes,
                        m < rows ? _mm512_loadu_ps(y + m * ldy + v * kLanes) : _mm512_setzero_ps());
      }
    }
    if (add) {
      _tile_loadd(0, to, row_bytes);
      _tile_loadd(1, to + kHalf, row_bytes);
      _tile_loadd(2, below, row_bytes);
      _tile_loadd(3, below + kHalf, row_bytes);
    } else {
      _tile_zero(0);
      _tile_zero(1);
      _tile_zero(2);
      _tile_zero(3);
    }
    add_products(a, step, b, units);
    _tile_stored(0, to, row_bytes);
    _tile_stored(1, to + kHalf, row_bytes);
    _tile_stored(2, below, row_bytes);
    _tile_stored(3, below + kHalf, row_bytes);
    for (std::int64_t m = 0; m < rows && !whole; ++m) {
      const __m512 sum[kVectors] = {_mm512_load_ps(sums + m * kCols),
                                    _mm512_load_ps(sums + m * kCols + kLanes)};
      finish_row(sum, 1.0f, y + m * ldy, false, nullptr, nullptr);
    }
  }
  _tile_release();
}
void multiply_panels(const void* a, std::int64_t step, const void* b, std::int64_t depth,
                     std::int64_t rows, float* y, std::int64_t ldy, bool add) {
  sum_in_place(static_cast<const Element*>(a), step / static_cast<std::int64_t>(sizeof(Element)),
               kBlock, static_cast<const Element*>(b), depth, rows, y, ldy, add);
}
// Rows of a tile of a result are rows of a unit.
void multiply_tiles(const void* a, std::int64_t step, const void* b, std::int64_t depth,
                    std::int64_t rows, float* y, std::int64_t ldy, bool add) {
  static_assert(kCols == kUnit);
  sum_in_place(static_cast<const Element*>(a), kBlock, step, static_cast<const Element*>(b), depth,
               rows, y, ldy, add);
}

// What of 32 numbers bfloat16 holds; the rest stays in low and high.
inline __m512i take_row(__m512& low, __m512& high) {
  const __m512i part = reinterpret_cast<__m512i>(_mm512_cvtne2ps_pbh(high, low));
  const __m256i part0 = _mm512_castsi512_si256(part);
  const __m256i part1 = _mm512_extracti64x4_epi64(part, 1);
  low = _mm512_sub_ps(low, as_floats(_mm512_cvtepu16_epi32(part0)));
  high = _mm512_sub_ps(high, as_floats(_mm512_cvtepu16_epi32(part1)));
  return part;
}

// One of the two tiles of a unit of a panel: v has its rows in memory.
inline void store_tile(Side side, const __m512i (&v)[kHalf], int half, Element* unit) {
  Element* to = unit + half * (side == Side::kLeft ? kLeftTile : kRightTile);
  const int step = side == Side::kLeft ? kLeftRow : kRightRow;
  ANNULUS_UNROLL
  for (int i = 0; i < kHalf; ++i) _mm512_storeu_si512(to + i * step, v[i]);
}

// 16 rows of the operand over a unit of depth are, rounded, the rows of a left tile in memory.
// Those of a right tile are pairs along the depth: the same, turned.
template <int Terms, class T>
void pack_rows_of(Side side, const T* x, std::int64_t ld, int valid, std::int64_t depth, void* to) {
  auto* p = static_cast<Element*>(to);
  const std::int64_t units = units_of(depth);
  for (std::int64_t u = 0; u < units; ++u) {
    const std::int64_t d = u * kUnit;
    for (int half = 0; half < 2; ++half) {
      __m512i v[Terms][kHalf];
      ANNULUS_UNROLL
      for (int i = 0; i < kHalf; ++i) {
        const int r = half * kHalf + i;
        const std::int64_t some = r < valid ? depth - d : 0;
        if constexpr (Terms == 1 && std::is_same_v<T, bfloat16>) {
          v[0][i] = load_pairs(x, r * ld + d, some);
          continue;
        }
        __m512 low = load_some(x, r * ld + d, some);
        __m512 high = load_some(x, r * ld + d + kLanes, some - kLanes);
        ANNULUS_UNROLL
        for (int t = 0; t < Terms; ++t) v[t][i] = take_row(low, high);
      }
      for (int t = 0; t < Terms; ++t) {
        if (side == Side::kRight) turn(v[t]);
        store_tile(side, v[t], half, p + (t * units + u) * kBlock);
      }
    }
  }
}
template <int Terms>
void pack_rows(Side side, const Matrix& x, int valid, std::int64_t depth, void* to) {
  detail::visit_rows<float>(
      x, [&](auto* rows) { pack_rows_of<Terms>(side, rows, x.ld, valid, depth, to); });
}

// A unit of 32 rows of 32 numbers as they lie, whose columns are the operand's rows.
inline void pack_whole_unit(Side side, const bfloat16* x, std::int64_t ld, Element* to) {
  alignas(64) static constexpr Element kPairs[2][2 * kHalf] = {
      {0, 32, 1, 33, 2,  34, 3,  35, 4,  36, 5,  37, 6,  38, 7,  39,
       8, 40, 9, 41, 10, 42, 11, 43, 12, 44, 13, 45, 14, 46, 15, 47},
      {16, 48, 17, 49, 18, 50, 19, 51, 20, 52, 21, 53, 22, 54, 23, 55,
       24, 56, 25, 57, 26, 58, 27, 59, 28, 60, 29, 61, 30, 62, 31, 63}};
  for (int half = 0; half < 2; ++half) {
    const __m512i order = _mm512_load_si512(kPairs[half]);
    __m512i v[kHalf];
    ANNULUS_UNROLL
    for (int i = 0; i < kHalf; ++i) {
      const bfloat16* row = x + 2 * i * ld;
      v[i] =
          _mm512_permutex2var_epi16(_mm512_loadu_si512(row), order, _mm512_loadu_si512(row + ld));
    }
    if (side == Side::kLeft) turn(v);
    store_tile(side, v, half, to);
  }
}

// The other way round: from columns come the pairs, and a left tile has them turned.
template <int Terms, class T>
void pack_columns_of(Side side, const Columns<T>& columns, std::int64_t depth, void* to) {
  auto* p = static_cast<Element*>(to);
  const std::int64_t units = units_of(depth);
  for (std::int64_t u = 0; u < units; ++u) {
    if constexpr (Terms == 1 && std::is_same_v<T, bfloat16>) {
      if (columns.whole(u * kUnit, kUnit)) {
        pack_whole_unit(side, columns.x + u * kUnit * columns.ld, columns.ld, p + u * kBlock);
        continue;
      }
    }
    for (int half = 0; half < 2; ++half) {
      __m512i v[Terms][kHalf];
      ANNULUS_UNROLL
      for (int i = 0; i < kHalf; ++i) {
        const std::int64_t d = u * kUnit + 2 * i;
        if constexpr (Terms == 1 && std::is_same_v<T, bfloat16>) {
          if (columns.scale == nullptr) {
            v[0][i] = columns.pairs(d, half * kHalf);
            continue;
          }
        }
        __m512 first = columns.load(d, half * kHalf);
        __m512 second = columns.load(d + 1, half * kHalf);
        ANNULUS_UNROLL
        for (int t = 0; t < Terms; ++t) v[t][i] = take_pairs(first, second);
      }
      for (int t = 0; t < Terms; ++t) {
        if (side == Side::kLeft) turn(v[t]);
        store_tile(side, v[t], half, p + (t * units + u) * kBlock);
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

// Several terms: a call a tile.
template <int Terms>
constexpr auto panels_function() {
  if constexpr (Terms == 1)
    return multiply_panels;
  else
    return detail::multiply_each<float, kRows, multiply<Terms>>;
}

template <int Terms>
const Tiles<float>* make_tiles(const char* name) {
  static const Tiles<float> tiles = {
      {kRows, kCols, kUnit, Terms, sizeof(Element), name},
      pack_rows<Terms>,
      pack_columns<Terms>,
      detail::pack_each<float, kRows, kCols, sizeof(Element), pack_rows<Terms>>,
      multiply<Terms>,
      panels_function<Terms>(),
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

const Tiles<float>* detail::bf16_tiles_amx(Precision precision) {
  // In this order: tiles that could not be packed are not asked for.
  if (!has_avx512_bf16() || !has_amx_bf16()) return nullptr;
  return of_terms(precision, make_tiles<1>("amx"), make_tiles<2>("amx x3"),
                  make_tiles<3>("amx x6"));
}

}  // namespace annulus::cpu

#else

namespace annulus::cpu {
const Tiles<float>* detail::bf16_tiles_amx(Precision) { return nullptr; }
}  // namespace annulus::cpu

#endif
