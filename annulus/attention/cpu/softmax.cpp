#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "annulus/attention/cpu/softmax.cpp"
#if ANNULUS_HAVE_HWY && ANNULUS_HWY_DISPATCH
#include <hwy/foreach_target.h>  // compiles this file once per instruction set
#endif

#include <algorithm>
#include <cmath>
#include <numbers>
#include <type_traits>

#include "annulus/attention/cpu/softmax-inl.h"
#include "annulus/attention/cpu/softmax.h"
#include "annulus/attention/state.h"
#include "annulus/cpu/math-inl.h"
#include "annulus/cpu/simd-inl.h"

HWY_BEFORE_NAMESPACE();
namespace annulus::attention::cpu::HWY_NAMESPACE {

#if ANNULUS_SIMD

using M = hn::Mask<F32>;

// Rows that are in flight at once: the chain of an exponential is long. All are read before any is written, or they would wait for
// one another: a compiler cannot know that rows are apart.
constexpr int kRows = kPanelRows;

constexpr float kLog2e = 1.44269504f, kLn2 = 0.69314718f;
constexpr float kLog2eRest = 1.925963033500e-8f;  // log2(e) - kLog2e
// Two numbers of at most that size differ by less than exponents have room for.
constexpr float kNear = 60.0f;

// One vector of lanes of a tile, down its rows.
template <bool kMasked>
struct Column {
  float* s;  // of row 0
  std::int64_t ld;
  const std::uint8_t* keep = nullptr;
  hn::Vec<hn::RebindToSigned<F32>> lo, hi;

  Column(const Tile& t, int c) : s(t.s + c), ld(t.ld) {
    if constexpr (kMasked) {
      const hn::RebindToSigned<F32> di;
      lo = t.mask.lo != nullptr ? hn::LoadU(di, t.mask.lo + c) : hn::Set(di, INT32_MIN);
      hi = t.mask.hi != nullptr ? hn::LoadU(di, t.mask.hi + c) : hn::Set(di, INT32_MAX);
      if (t.mask.keep != nullptr) keep = t.mask.keep + c;
    }
  }
  VF at(std::int64_t r) const { return hn::LoadU(F32(), s + r * ld); }
  M counts(std::int64_t r) const {
    const hn::RebindToSigned<F32> di;
    const auto row = hn::Set(di, static_cast<std::int32_t>(r));
    auto inside =
        hn::AndNot(hn::VecFromMask(di, hn::Lt(row, lo)), hn::VecFromMask(di, hn::Lt(row, hi)));
    if (keep != nullptr) {
      const hn::Rebind<std::uint8_t, F32> d8;
      const auto kept = hn::PromoteTo(di, hn::LoadU(d8, keep + r * ld));
      inside = hn::IfThenElseZero(hn::Ne(kept, hn::Zero(di)), inside);
    }
    return hn::RebindMask(F32(), hn::MaskFromVec(inside));
  }
};

// 2^t, t about 0 or less, where scores may be anything: 0 below 2^-126, and of a NaN NaN.
HWY_INLINE VF careful_power(VF t) {
  const F32 d;
  const VF least = hn::Set(d, -126.0f);
  const VF w = simd::exp2_weight(hn::Min(hn::Max(t, least), hn::Zero(d)));
  return hn::IfThenElse(hn::Eq(t, t), hn::IfThenElseZero(hn::Gt(t, least), w), t);
}

// kRows weights of each lane to bf16, as the rows of a right panel in units of kPanelUnit rows, of which a lane's lie together. They
// are not negative, and half of the last place is added before the rest is cut off.
HWY_INLINE void store_unit(const VF (&w)[kRows], std::uint16_t* to,
                           [[maybe_unused]] std::int64_t lanes) {
  static_assert(kRows == 4 && (kPanelUnit == 2 || kPanelUnit == 4));
  const hn::RebindToUnsigned<F32> du;
#if HWY_ARCH_ARM_A64
  const hn::Repartition<std::uint16_t, F32> d16;
  const auto rounded = [&](int i) HWY_ATTR {
    return hn::BitCast(d16, hn::Add(hn::BitCast(du, w[i]), hn::Set(du, 0x8000u))).raw;
  };
  const uint32x4_t first = vreinterpretq_u32_u16(vtrn2q_u16(rounded(0), rounded(1)));
  const uint32x4_t second = vreinterpretq_u32_u16(vtrn2q_u16(rounded(2), rounded(3)));
  vst1q_u16(to, vreinterpretq_u16_u32(vzip1q_u32(first, second)));
  vst1q_u16(to + 8, vreinterpretq_u16_u32(vzip2q_u32(first, second)));
#else
  const auto rounded = [&](int i) HWY_ATTR {
    return hn::Add(hn::BitCast(du, w[i]), hn::Set(du, 0x8000u));
  };
  ANNULUS_UNROLL
  for (int i = 0; i < kRows; i += 2) {
    const auto pair =
        hn::Or(hn::ShiftRight<16>(rounded(i)), hn::And(rounded(i + 1), hn::Set(du, 0xffff0000u)));
    hn::StoreU(pair, du, reinterpret_cast<std::uint32_t*>(to + i * lanes));
  }
#endif
}

// Exponents are counted from the next whole number, so that what it is costs no bits, and a factor is seldom not 1.
template <bool kMasked, bool kTameTile, bool kCoarse, bool kPanel>
bool weigh_tile(const Tile& t, float scale, float* m, float* l, float* factor, std::uint16_t* panel,
                bool few) {
  const F32 d;
  const VF none = hn::Set(d, kNoScore), zero = hn::Zero(d), by = hn::Set(d, scale * kLog2e);
  const VF rest =
      hn::Set(d, static_cast<float>(scale * std::numbers::log2e - double{scale * kLog2e}));
  const VF near = hn::Set(d, kNear);
  const std::int64_t first = t.first, end = t.end;
  bool any = false;
  for (int c = 0; c < t.lanes; c += static_cast<int>(simd::lanes())) {
    const Column<kMasked> column(t, c);
    // The largest score; a NaN, once there is one.
    const auto take = [&](VF& max, VF s) HWY_ATTR {
      if constexpr (kTameTile) {
        max = hn::Max(max, s);
      } else {
        max = hn::IfThenElse(hn::Or(hn::Le(s, max), hn::Ne(max, max)), max, s);
      }
    };
    const auto score = [&](std::int64_t r) HWY_ATTR {
      if constexpr (kMasked) return hn::IfThenElse(column.counts(r), column.at(r), none);
      return column.at(r);
    };
    const VF before = hn::LoadU(d, m + c);
    VF now = before, top = none;
    // Where no score can be far from 0 the largest one is not looked for: what it cannot exceed is as good.
    bool bounded = false;
    if constexpr (kTameTile) {
      if (t.reach != nullptr && !few) {
        const VF most =
            hn::Ceil(hn::Mul(hn::Mul(by, hn::LoadU(d, t.reach + c)), hn::Set(d, t.far)));
        const VF least_now = hn::Max(most, hn::Ceil(before));
        bounded = hn::AllTrue(d, hn::And(hn::Le(most, near), hn::Le(least_now, near)));
        if (bounded) now = least_now;
      }
    }
    if (!bounded) {
      VF most[kRows] = {none, none, none, none};
      std::int64_t r = first;
      for (; r + kRows <= end; r += kRows) {
        ANNULUS_UNROLL
        for (int i = 0; i < kRows; ++i) take(most[i], score(r + i));
      }
      for (; r < end; ++r) take(most[0], score(r));
      take(most[0], most[1]);
      take(most[2], most[3]);
      take(most[0], most[2]);
      // Scores count times the scale, which is not negative; -inf stays what it is.
      top = hn::IfThenElse(hn::Eq(most[0], none), none, hn::Mul(most[0], hn::Set(d, scale)));
      take(now, hn::Mul(top, hn::Set(d, kLog2e)));
    }
    const bool whole_numbers =
        kTameTile && !few &&
        hn::AllTrue(d, hn::Or(hn::Eq(now, none), hn::Lt(hn::Abs(now), hn::Set(d, 0x1p20f))));
    if (whole_numbers) now = hn::Ceil(now);
    const VF origin = hn::IfThenElse(hn::Eq(now, none), zero, now);
    // Else from the largest score itself, so that the weight of a key alone is 1; m is only near it, which weights put right.
    const VF exact = hn::IfThenElse(hn::Eq(now, before), hn::Mul(origin, hn::Set(d, kLn2)), top);
    const VF apart =
        hn::MulAdd(exact, hn::Set(d, kLog2eRest), hn::MulSub(exact, hn::Set(d, kLog2e), origin));
    const VF right =
        simd::exp2_weight(hn::Max(hn::Min(apart, hn::Set(d, 1.0f)), hn::Set(d, -1.0f)));
    const VF shift = hn::Sub(hn::Set(d, 12582912.0f), origin);
    const VF least = hn::Div(hn::Sub(origin, hn::Set(d, 125.0f)), by);
    VF sum[kRows] = {zero, zero, zero, zero};
    // Rows of which some may be none of the tile's: their weights are 0.
    const auto weigh_rows = [&](auto fast, std::int64_t row, auto whole) HWY_ATTR {
      VF w[kRows];
      ANNULUS_UNROLL
      for (int i = 0; i < kRows; ++i) w[i] = column.at(row + i);
      if constexpr (decltype(fast)::value) {
        simd::exp2_from<kCoarse, decltype(fast)::value == 2>(w, by, rest, shift, least);
      } else {
        ANNULUS_UNROLL
        for (int i = 0; i < kRows; ++i) {
          const VF less = hn::MulSub(w[i], hn::Set(d, scale), exact);
          w[i] = hn::Mul(right, careful_power(hn::Mul(less, hn::Set(d, kLog2e))));
        }
      }
      if constexpr (kMasked) {
        ANNULUS_UNROLL
        for (int i = 0; i < kRows; ++i) w[i] = hn::IfThenElseZero(column.counts(row + i), w[i]);
      }
      if constexpr (!decltype(whole)::value) {
        ANNULUS_UNROLL
        for (int i = 0; i < kRows; ++i)
          if (row + i < first || row + i >= end) w[i] = zero;
      }
      if constexpr (kPanel) {
        store_unit(w, panel + row * t.lanes + c * kPanelUnit, t.lanes);
      } else {
        ANNULUS_UNROLL
        for (int i = 0; i < kRows; ++i) hn::StoreU(w[i], d, column.s + (row + i) * column.ld);
      }
      ANNULUS_UNROLL
      for (int i = 0; i < kRows; ++i) sum[i] = hn::Add(sum[i], w[i]);
    };
    const auto weigh_all = [&](auto fast) HWY_ATTR {
      std::int64_t row = first / kRows * kRows;
      if (row < first) {
        weigh_rows(fast, row, std::false_type());
        row += kRows;
      }
      for (; row + kRows <= end; row += kRows) weigh_rows(fast, row, std::true_type());
      if (row < end) weigh_rows(fast, row, std::false_type());
    };
    // 0: anything may come; 1: a score may be too small; 2: none is.
    if (bounded) {
      weigh_all(std::integral_constant < int, kTameTile ? 2 : 0 > ());
    } else if (whole_numbers) {
      weigh_all(std::integral_constant<int, 1>());
    } else {
      weigh_all(std::integral_constant<int, 0>());
    }
    const VF all = hn::Add(hn::Add(sum[0], sum[1]), hn::Add(sum[2], sum[3]));
    // Where there was no score before, what was summed is 0, whatever it is multiplied by.
    const auto start = hn::Eq(before, none);
    VF f = careful_power(hn::Sub(before, origin));
    f = hn::IfThenElse(start, hn::Set(d, 1.0f), f);
    hn::StoreU(hn::MulAdd(hn::LoadU(d, l + c), f, all), d, l + c);
    hn::StoreU(now, d, m + c);
    hn::StoreU(f, d, factor + c);
    any = any || !hn::AllTrue(d, hn::Eq(f, hn::Set(d, 1.0f)));
  }
  return any;
}

// A row of bf16; halves are rounded away from zero.
HWY_INLINE void store_row(hn::Vec<hn::RebindToUnsigned<F32>> bits, std::uint16_t* to) {
  const hn::Rebind<std::uint16_t, F32> d16;
  hn::StoreU(hn::TruncateTo(d16, hn::ShiftRight<16>(bits)), d16, to);
}

template <bool kMasked, bool kTameTile, bool kCoarse, bool kNarrow>
void differentiate_tile(const Tile& t, float scale, const float* lse, const float* delta,
                        const float* z, float* g, [[maybe_unused]] const NarrowTile* narrow) {
  const F32 d;
  const VF zero = hn::Zero(d), factor = hn::Set(d, scale);
  const std::int64_t first = t.first, end = t.end;
  for (int c = 0; c < t.lanes; c += static_cast<int>(simd::lanes())) {
    const Column<kMasked> column(t, c);
    const VF sums = hn::LoadU(d, lse + c);
    const VF origin = hn::IfThenElse(hn::Eq(sums, hn::Set(d, kNoScore)), zero, sums);
    const VF less = hn::LoadU(d, delta + c);
    float* const gradients = g + c;
    const float* const kept = z == nullptr ? nullptr : z + c;
    const auto some_rows = [&](std::int64_t row, auto whole) HWY_ATTR {
      VF w[kRows], ds[kRows];
      // The difference comes first and is turned to powers of two after, or large scores would lose what it has.
      ANNULUS_UNROLL
      for (int i = 0; i < kRows; ++i) w[i] = hn::MulSub(column.at(row + i), factor, origin);
      if constexpr (kTameTile) {
        simd::exp_all<kCoarse>(w);
      } else {
        ANNULUS_UNROLL
        for (int i = 0; i < kRows; ++i) w[i] = careful_power(hn::Mul(w[i], hn::Set(d, kLog2e)));
      }
      ANNULUS_UNROLL
      for (int i = 0; i < kRows; ++i) {
        const std::int64_t at = (row + i) * column.ld;
        VF grad = hn::LoadU(d, gradients + at);
        const VF p = w[i];
        if (kept != nullptr) {
          const VF by = hn::LoadU(d, kept + at);
          w[i] = hn::Mul(p, by);
          grad = hn::IfThenElseZero(hn::Ne(by, zero), grad);  // what is dropped may be infinite
          grad = hn::MulSub(grad, by, less);
        } else {
          grad = hn::Sub(grad, less);
        }
        // The difference comes first: scaled before, two numbers that cancel would leave the rounding of the larger.
        ds[i] = hn::Mul(hn::Mul(p, factor), grad);
        if constexpr (kMasked) {  // 0 by choice: a factor of 0 would keep a NaN
          const M here = column.counts(row + i);
          w[i] = hn::IfThenElseZero(here, w[i]);
          ds[i] = hn::IfThenElseZero(here, ds[i]);
        }
        if (kNarrow && !decltype(whole)::value && (row + i < first || row + i >= end)) {
          w[i] = ds[i] = zero;
        }
      }
      if constexpr (kNarrow) {
        const hn::RebindToUnsigned<F32> du;
        ANNULUS_UNROLL
        for (int i = 0; i < kRows; ++i) {
          const std::int64_t at = (row + i) * column.ld + c;
          const auto half = hn::Set(du, 0x8000u);
          store_row(hn::Add(hn::BitCast(du, w[i]), half), narrow->p + at);
          store_row(hn::Add(hn::BitCast(du, ds[i]), half), narrow->ds + at);
        }
        store_unit(ds, narrow->panel + row * column.ld + c * kPanelUnit, column.ld);
        return;
      }
      ANNULUS_UNROLL
      for (int i = 0; i < kRows; ++i) {
        if (!decltype(whole)::value && row + i >= end) break;
        hn::StoreU(w[i], d, column.s + (row + i) * column.ld);
        hn::StoreU(ds[i], d, gradients + (row + i) * column.ld);
      }
    };
    std::int64_t row = first;
    if (kNarrow && row % kRows != 0) {
      row = row / kRows * kRows;
      some_rows(row, std::false_type());
      row += kRows;
    }
    for (; row + kRows <= end; row += kRows) some_rows(row, std::true_type());
    if (row < end) some_rows(row, std::false_type());
  }
}

#else  // one lane

template <bool kMasked>
bool counts(const Tile& t, std::int64_t r, int c) {
  if constexpr (!kMasked) return true;
  const Mask& m = t.mask;
  return (m.lo == nullptr || r >= m.lo[c]) && (m.hi == nullptr || r < m.hi[c]) &&
         (m.keep == nullptr || m.keep[r * t.ld + c] != 0);
}

// A lane's weight in a right panel of bf16 (see writes_panels()).
std::uint16_t& in_panel(std::uint16_t* panel, const Tile& t, std::int64_t row, int lane) {
  return panel[row / kPanelUnit * kPanelUnit * t.lanes + lane * kPanelUnit + row % kPanelUnit];
}

template <bool kMasked, bool, bool, bool kPanel>
bool weigh_tile(const Tile& t, float scale, float* m, float* l, float* factor,
                [[maybe_unused]] std::uint16_t* panel, bool) {
  constexpr double kLog2OfE = std::numbers::log2e;
  bool any = false;
  for (int c = 0; c < t.lanes; ++c) {
    float top = kNoScore;
    for (std::int64_t r = t.first; r < t.end; ++r) {
      float& s = t.s[r * t.ld + c];
      s = counts<kMasked>(t, r, c) ? scale * s : kNoScore;
      top = top == top ? larger_score(top, s) : top;
    }
    const float before = m[c], in_twos = static_cast<float>(top * kLog2OfE);
    const float now = before == before ? larger_score(before, in_twos) : before;
    const float origin = origin_of(now);
    // As above: from the largest score itself.
    const double exact = now == before ? origin / kLog2OfE : top;
    const double right = std::exp2(exact * kLog2OfE - origin);
    factor[c] = now == kNoScore ? 1.0f : std::exp2(before - origin);
    float sum = 0;
    for (std::int64_t r = t.first; r < t.end; ++r) {
      float& s = t.s[r * t.ld + c];
      sum += s = s == kNoScore ? 0.0f : static_cast<float>(right * std::exp(s - exact));
      if constexpr (kPanel) in_panel(panel, t, r, c) = bfloat16(s).bits;
    }
    if constexpr (kPanel) {  // the rest of the first rows written together and of the last
      for (std::int64_t r = t.first; r % kPanelRows != 0;) in_panel(panel, t, --r, c) = 0;
      for (std::int64_t r = t.end; r % kPanelRows != 0; ++r) in_panel(panel, t, r, c) = 0;
    }
    l[c] = l[c] * factor[c] + sum;
    m[c] = now;
    any = any || factor[c] != 1;
  }
  return any;
}

template <bool kMasked, bool, bool, bool kNarrow>
void differentiate_tile(const Tile& t, float scale, const float* lse, const float* delta,
                        const float* z, float* g, [[maybe_unused]] const NarrowTile* narrow) {
  for (int c = 0; c < t.lanes; ++c) {
    for (std::int64_t r = t.first; r < t.end; ++r) {
      const std::int64_t at = r * t.ld + c;
      const bool here = counts<kMasked>(t, r, c);
      const float p = here ? simd::exp(scale * t.s[at] - origin_of(lse[c])) : 0;
      const float kept = z != nullptr ? z[at] : 1;
      t.s[at] = here ? p * kept : 0;
      g[at] = here ? scale * p * ((kept == 0 ? 0 : kept * g[at]) - delta[c]) : 0;
    }
    if constexpr (kNarrow) {
      for (std::int64_t r = t.first / kPanelRows * kPanelRows; r < t.end || r % kPanelRows != 0;
           ++r) {
        const std::int64_t at = r * t.ld + c;
        const bool here = r >= t.first && r < t.end;
        narrow->p[at] = bfloat16(here ? t.s[at] : 0).bits;
        narrow->ds[at] = in_panel(narrow->panel, t, r, c) = bfloat16(here ? g[at] : 0).bits;
      }
    }
  }
}

#endif

// f(masked, tame, coarse) as constants, which a tile that is not tame has no use for the last of.
template <class F>
auto visit_kind(const Tile& t, F&& f) {
  const Mask& m = t.mask;
  const auto by_mask = [&](auto masked) {
    if (!t.tame) return f(masked, std::false_type(), std::false_type());
    return t.coarse ? f(masked, std::true_type(), std::true_type())
                    : f(masked, std::true_type(), std::false_type());
  };
  const bool masked = m.lo != nullptr || m.hi != nullptr || m.keep != nullptr;
  return masked ? by_mask(std::true_type()) : by_mask(std::false_type());
}

// Whether no lane sees more than a few keys: what is lost of each is then not lost among others.
bool sees_few(const Tile& t) {
  constexpr std::int64_t kFew = 8;
  std::int64_t most = t.end - t.first;
  if (most > kFew && t.mask.lo != nullptr) {
    most = 0;
    for (int c = 0; c < t.lanes; ++c)
      most = std::max<std::int64_t>(most, t.mask.hi[c] - t.mask.lo[c]);
  }
  return most <= kFew;
}

bool weigh(const Tile& t, float scale, float* m, float* l, float* factor, std::uint16_t* panel) {
  if (scale < 0) {  // rare: the largest score is then that of the smallest product
    for (std::int64_t r = t.first; r < t.end; ++r) {
      for (int c = 0; c < t.lanes; ++c) t.s[r * t.ld + c] = -t.s[r * t.ld + c];
    }
    scale = -scale;
  }
  const bool few = t.fixed || sees_few(t);
  return visit_kind(t, [&](auto masked, auto tame, auto coarse) {
    constexpr bool kMasked = masked.value, kTameTile = tame.value, kCoarse = coarse.value;
    if (kTameTile && panel != nullptr) {
      return weigh_tile<kMasked, kTameTile, kCoarse, kTameTile>(t, scale, m, l, factor, panel, few);
    }
    return weigh_tile<kMasked, kTameTile, kCoarse, false>(t, scale, m, l, factor, nullptr, few);
  });
}

void differentiate(const Tile& t, float scale, const float* lse, const float* delta, const float* z,
                   float* g, const NarrowTile* narrow) {
  visit_kind(t, [&](auto masked, auto tame, auto coarse) {
    constexpr bool kMasked = masked.value, kTameTile = tame.value, kCoarse = coarse.value;
    if constexpr (kNarrows && kTameTile && kCoarse) {
      if (narrow != nullptr)
        return differentiate_tile<kMasked, true, true, true>(t, scale, lse, delta, z, g, narrow);
    }
    differentiate_tile<kMasked, kTameTile, kCoarse, false>(t, scale, lse, delta, z, g, nullptr);
  });
}

bool tame(const annulus::cpu::Matrix& x, std::int64_t rows, std::int64_t columns) {
  bool all = true;
  annulus::cpu::detail::visit_rows<float>(
      x, [&](auto* first) { all = tame_rows(first, x.ld, rows, columns); });
  return all;
}

float norms(const annulus::cpu::Matrix& x, std::int64_t rows, std::int64_t columns, float* norm) {
  float most = 0;
  annulus::cpu::detail::visit_rows<float>(
      x, [&](auto* first) { most = norms_of(first, x.ld, rows, columns, norm); });
  return most;
}

const Softmax* make_softmax() {
  static const Softmax s = {weigh, differentiate, rescale, turn, tame, norms, dot, add};
  return &s;
}

}  // namespace annulus::attention::cpu::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#if HWY_ONCE

namespace annulus::attention::cpu {

ANNULUS_CPU_EXPORT(make_softmax);

const Softmax& softmax() {
  static const Softmax& s = *ANNULUS_CPU_CALL(make_softmax)();
  return s;
}

}  // namespace annulus::attention::cpu

#endif
