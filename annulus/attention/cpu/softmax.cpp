#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "annulus/attention/cpu/softmax.cpp"
#if ANNULUS_HAVE_HWY && ANNULUS_HWY_DISPATCH
#include <hwy/foreach_target.h>  // compiles this file once per instruction set
#endif

#include "annulus/attention/cpu/softmax.h"
#include "annulus/attention/state.h"
#include "annulus/cpu/math-inl.h"
#include "annulus/cpu/simd-inl.h"

HWY_BEFORE_NAMESPACE();
namespace annulus::attention::cpu::HWY_NAMESPACE {

namespace simd = annulus::cpu::HWY_NAMESPACE;

// Beyond it a sum of 256 products might not be finite.
constexpr float kTame = 1e15f;

#if ANNULUS_SIMD

namespace hn = hwy::HWY_NAMESPACE;
using simd::F32;
using simd::VF;
using M = hn::Mask<F32>;

// Rows that are in flight at once: the chain of an exponential is long. All are read before any is written, or they would wait for
// one another: a compiler cannot know that rows are apart.
constexpr int kRows = 4;

constexpr float kLog2e = 1.44269504f;

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

// exp(x), x about 0 or less: the difference comes first and is turned to powers of two after, or large scores would lose
// what their difference has. Where every score is finite a weight that would be less than 2^-126 is that; else it is 0, and of a
// NaN NaN.
template <bool kTameTile>
HWY_INLINE VF weight_of(VF x) {
  const F32 d;
  const VF t = hn::Mul(x, hn::Set(d, kLog2e)), least = hn::Set(d, -126.0f);
  const VF w = simd::exp2_weight(hn::Max(t, least));
  if constexpr (kTameTile) return w;
  return hn::IfThenElse(hn::Eq(t, t), hn::IfThenElseZero(hn::Gt(t, least), w), t);
}

template <bool kMasked, bool kTameTile>
bool weigh_tile(const Tile& t, float scale, float* m, float* l, float* factor) {
  const F32 d;
  const VF none = hn::Set(d, kNoScore), zero = hn::Zero(d), factor_of_scores = hn::Set(d, scale);
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
    const VF before = hn::LoadU(d, m + c);
    VF now = before;
    take(now, hn::IfThenElse(hn::Eq(most[0], none), none, hn::Mul(most[0], factor_of_scores)));
    const auto empty = hn::Eq(now, none);
    const VF origin = hn::IfThenElse(empty, zero, now);
    VF sum[kRows] = {zero, zero, zero, zero};
    const auto weight = [&](std::int64_t row) HWY_ATTR {
      const VF w = weight_of<kTameTile>(hn::MulSub(column.at(row), factor_of_scores, origin));
      if constexpr (kMasked) return hn::IfThenElseZero(column.counts(row), w);
      return w;
    };
    r = first;
    for (; r + kRows <= end; r += kRows) {
      VF w[kRows];
      ANNULUS_UNROLL
      for (int i = 0; i < kRows; ++i) w[i] = weight(r + i);
      ANNULUS_UNROLL
      for (int i = 0; i < kRows; ++i) {
        hn::StoreU(w[i], d, column.s + (r + i) * column.ld);
        sum[i] = hn::Add(sum[i], w[i]);
      }
    }
    for (; r < end; ++r) {
      const VF w = weight(r);
      hn::StoreU(w, d, column.s + r * column.ld);
      sum[0] = hn::Add(sum[0], w);
    }
    const VF all = hn::Add(hn::Add(sum[0], sum[1]), hn::Add(sum[2], sum[3]));
    // Where there was no score before, what was summed is 0, whatever it is multiplied by.
    const auto start = hn::Eq(before, none);
    VF f = weight_of<false>(hn::Sub(before, origin));
    f = hn::IfThenElse(start, hn::Set(d, 1.0f), f);
    hn::StoreU(hn::MulAdd(hn::LoadU(d, l + c), f, all), d, l + c);
    hn::StoreU(now, d, m + c);
    hn::StoreU(f, d, factor + c);
    any = any || !hn::AllTrue(d, hn::Eq(f, hn::Set(d, 1.0f)));
  }
  return any;
}

template <bool kMasked, bool kTameTile>
void differentiate_tile(const Tile& t, float scale, const float* lse, const float* delta,
                        const float* z, float* g) {
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
    const auto one = [&](std::int64_t r, VF& w, VF& ds) HWY_ATTR {
      const std::int64_t at = r * column.ld;
      const VF p = weight_of<kTameTile>(hn::MulSub(column.at(r), factor, origin));
      VF grad = hn::LoadU(d, gradients + at);
      w = p;
      if (kept != nullptr) {
        const VF by = hn::LoadU(d, kept + at);
        grad = hn::IfThenElseZero(hn::Ne(by, zero),
                                  hn::Mul(grad, by));  // what is dropped may be infinite
        w = hn::Mul(p, by);
      }
      ds = hn::Mul(hn::Mul(factor, p), hn::Sub(grad, less));
      if constexpr (kMasked) {  // 0 by choice: a factor of 0 would keep a NaN
        const M here = column.counts(r);
        w = hn::IfThenElseZero(here, w);
        ds = hn::IfThenElseZero(here, ds);
      }
    };
    VF w[kRows], ds[kRows];
    for (std::int64_t r = first; r < end; r += kRows) {
      const int some = static_cast<int>(end - r < kRows ? end - r : kRows);
      if (some == kRows) {
        ANNULUS_UNROLL
        for (int i = 0; i < kRows; ++i) one(r + i, w[i], ds[i]);
      } else {
        for (int i = 0; i < some; ++i) one(r + i, w[i], ds[i]);
      }
      for (int i = 0; i < some; ++i) {
        hn::StoreU(w[i], d, column.s + (r + i) * column.ld);
        hn::StoreU(ds[i], d, gradients + (r + i) * column.ld);
      }
    }
  }
}

void rescale(float* x, std::int64_t rows, int lanes, const float* factor) {
  const F32 d;
  for (int c = 0; c < lanes; c += static_cast<int>(simd::lanes())) {
    const VF f = hn::LoadU(d, factor + c);
    for (std::int64_t r = 0; r < rows; ++r) {
      hn::StoreU(hn::Mul(f, hn::LoadU(d, x + r * lanes + c)), d, x + r * lanes + c);
    }
  }
}

template <class T>
bool tame_rows(const T* x, std::int64_t ld, std::int64_t rows, std::int64_t columns) {
  const F32 d;
  const auto n = static_cast<std::int64_t>(simd::lanes());
  const VF most = hn::Set(d, kTame);
  for (std::int64_t r = 0; r < rows; ++r) {
    const T* row = x + r * ld;
    auto fine = hn::Eq(most, most);
    std::int64_t i = 0;
    for (; i + n <= columns; i += n)
      fine = hn::And(fine, hn::Le(hn::Abs(simd::load(row + i)), most));
    bool all = hn::AllTrue(d, fine);
    for (; i < columns; ++i) {
      const float v = static_cast<float>(row[i]);
      all = all && v <= kTame && v >= -kTame;
    }
    if (!all) return false;
  }
  return true;
}

void add(const float* x, std::int64_t n, float* y) {
  const F32 d;
  const auto step = static_cast<std::int64_t>(simd::lanes());
  std::int64_t i = 0;
  for (; i + step <= n; i += step)
    hn::StoreU(hn::Add(hn::LoadU(d, y + i), hn::LoadU(d, x + i)), d, y + i);
  for (; i < n; ++i) y[i] += x[i];
}

#else  // one lane

template <bool kMasked>
bool counts(const Tile& t, std::int64_t r, int c) {
  if constexpr (!kMasked) return true;
  const Mask& m = t.mask;
  return (m.lo == nullptr || r >= m.lo[c]) && (m.hi == nullptr || r < m.hi[c]) &&
         (m.keep == nullptr || m.keep[r * t.ld + c] != 0);
}

template <bool kMasked, bool>
bool weigh_tile(const Tile& t, float scale, float* m, float* l, float* factor) {
  bool any = false;
  for (int c = 0; c < t.lanes; ++c) {
    float now = m[c];
    for (std::int64_t r = t.first; r < t.end; ++r) {
      float& s = t.s[r * t.ld + c];
      s = counts<kMasked>(t, r, c) ? scale * s : kNoScore;
      now = now == now ? larger_score(now, s) : now;
    }
    const float origin = origin_of(now);
    factor[c] = now == kNoScore ? 1.0f : simd::exp(m[c] - origin);
    float sum = 0;
    for (std::int64_t r = t.first; r < t.end; ++r) {
      float& s = t.s[r * t.ld + c];
      sum += s = simd::exp(s - origin);
    }
    l[c] = l[c] * factor[c] + sum;
    m[c] = now;
    any = any || factor[c] != 1;
  }
  return any;
}

template <bool kMasked, bool>
void differentiate_tile(const Tile& t, float scale, const float* lse, const float* delta,
                        const float* z, float* g) {
  for (int c = 0; c < t.lanes; ++c) {
    for (std::int64_t r = t.first; r < t.end; ++r) {
      const std::int64_t at = r * t.ld + c;
      const bool here = counts<kMasked>(t, r, c);
      const float p = here ? simd::exp(scale * t.s[at] - origin_of(lse[c])) : 0;
      const float kept = z != nullptr ? z[at] : 1;
      t.s[at] = here ? p * kept : 0;
      g[at] = here ? scale * p * ((kept == 0 ? 0 : kept * g[at]) - delta[c]) : 0;
    }
  }
}

void rescale(float* x, std::int64_t rows, int lanes, const float* factor) {
  for (std::int64_t r = 0; r < rows; ++r) {
    for (int c = 0; c < lanes; ++c) x[r * lanes + c] *= factor[c];
  }
}

template <class T>
bool tame_rows(const T* x, std::int64_t ld, std::int64_t rows, std::int64_t columns) {
  for (std::int64_t r = 0; r < rows; ++r) {
    for (std::int64_t i = 0; i < columns; ++i) {
      const float v = static_cast<float>(x[r * ld + i]);
      if (!(v <= kTame && v >= -kTame)) return false;
    }
  }
  return true;
}

void add(const float* x, std::int64_t n, float* y) {
  for (std::int64_t i = 0; i < n; ++i) y[i] += x[i];
}

#endif

bool is_masked(const Mask& m) { return m.lo != nullptr || m.hi != nullptr || m.keep != nullptr; }

bool weigh(const Tile& t, float scale, float* m, float* l, float* factor) {
  if (scale < 0) {  // rare: the largest score is then that of the smallest product
    for (std::int64_t r = t.first; r < t.end; ++r) {
      for (int c = 0; c < t.lanes; ++c) t.s[r * t.ld + c] = -t.s[r * t.ld + c];
    }
    scale = -scale;
  }
  if (is_masked(t.mask)) {
    return t.tame ? weigh_tile<true, true>(t, scale, m, l, factor)
                  : weigh_tile<true, false>(t, scale, m, l, factor);
  }
  return t.tame ? weigh_tile<false, true>(t, scale, m, l, factor)
                : weigh_tile<false, false>(t, scale, m, l, factor);
}

void differentiate(const Tile& t, float scale, const float* lse, const float* delta, const float* z,
                   float* g) {
  if (is_masked(t.mask)) {
    return t.tame ? differentiate_tile<true, true>(t, scale, lse, delta, z, g)
                  : differentiate_tile<true, false>(t, scale, lse, delta, z, g);
  }
  return t.tame ? differentiate_tile<false, true>(t, scale, lse, delta, z, g)
                : differentiate_tile<false, false>(t, scale, lse, delta, z, g);
}

bool tame(const annulus::cpu::Matrix& x, std::int64_t rows, std::int64_t columns) {
  bool all = true;
  annulus::cpu::detail::visit_rows<float>(
      x, [&](auto* first) { all = tame_rows(first, x.ld, rows, columns); });
  return all;
}

const Softmax* make_softmax() {
  static const Softmax s = {weigh, differentiate, rescale, tame, add};
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
