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

// Rows that are in flight at once: the chain of an exponential is long.
constexpr int kRows = 4;

// Scores of a row, -inf where they do not count; every one is looked at only where a mask says so.
template <bool kMasked>
struct Scores {
  const Tile& tile;
  int lane;
  VF scale;
  hn::Vec<hn::RebindToSigned<F32>> lo, hi;

  Scores(const Tile& t, int c, float factor) : tile(t), lane(c), scale(hn::Set(F32(), factor)) {
    if constexpr (kMasked) {
      const hn::RebindToSigned<F32> di;
      lo = t.mask.lo != nullptr ? hn::LoadU(di, t.mask.lo + c) : hn::Set(di, INT32_MIN);
      hi = t.mask.hi != nullptr ? hn::LoadU(di, t.mask.hi + c) : hn::Set(di, INT32_MAX);
    }
  }
  M counts(std::int64_t r) const {
    const hn::RebindToSigned<F32> di;
    const auto at = hn::Set(di, static_cast<std::int32_t>(r));
    auto inside =
        hn::AndNot(hn::VecFromMask(di, hn::Lt(at, lo)), hn::VecFromMask(di, hn::Lt(at, hi)));
    if (tile.mask.keep != nullptr) {
      const hn::Rebind<std::uint8_t, F32> d8;
      const auto kept = hn::PromoteTo(di, hn::LoadU(d8, tile.mask.keep + r * tile.ld + lane));
      inside = hn::IfThenElseZero(hn::Ne(kept, hn::Zero(di)), inside);
    }
    return hn::RebindMask(F32(), hn::MaskFromVec(inside));
  }
  VF at(std::int64_t r) const {
    const VF s = hn::Mul(scale, hn::LoadU(F32(), tile.s + r * tile.ld + lane));
    if constexpr (!kMasked) return s;
    return hn::IfThenElse(counts(r), s, hn::Set(F32(), kNoScore));
  }
};

// exp(x) for x about 0 or less; a NaN stays one where the tile is not tame.
template <bool kTameTile>
HWY_INLINE VF exp_of(VF x) {
  const VF e = simd::exp_negative(x);
  if constexpr (kTameTile) return e;
  return hn::IfThenElse(hn::Eq(x, x), e, x);
}

template <bool kMasked, bool kTameTile>
bool weigh_tile(const Tile& t, float scale, float* m, float* l, float* factor) {
  const F32 d;
  bool any = false;
  for (int c = 0; c < t.lanes; c += static_cast<int>(simd::lanes())) {
    const Scores<kMasked> scores(t, c, scale);
    const VF before = hn::LoadU(d, m + c);
    VF most[kRows];
    for (VF& v : most) v = before;
    // The larger one; a NaN, once there is one.
    const auto take = [&](VF& max, VF s) {
      if constexpr (kTameTile) {
        max = hn::Max(max, s);
      } else {
        max = hn::IfThenElse(hn::Or(hn::Le(s, max), hn::Ne(max, max)), max, s);
      }
    };
    std::int64_t r = t.first;
    for (; r + kRows <= t.end; r += kRows) {
      ANNULUS_UNROLL
      for (int i = 0; i < kRows; ++i) take(most[i], scores.at(r + i));
    }
    for (; r < t.end; ++r) take(most[0], scores.at(r));
    VF now = most[0];
    for (int i = 1; i < kRows; ++i) take(now, most[i]);
    const auto none = hn::Eq(now, hn::Set(d, kNoScore));
    const VF origin = hn::IfThenElseZero(hn::Not(none), now);
    VF sum[kRows];
    for (VF& v : sum) v = hn::Zero(d);
    const auto weigh = [&](std::int64_t row, VF& to) {
      const VF p = exp_of<kTameTile>(hn::Sub(scores.at(row), origin));
      hn::StoreU(p, d, t.s + row * t.ld + c);
      to = hn::Add(to, p);
    };
    r = t.first;
    for (; r + kRows <= t.end; r += kRows) {
      ANNULUS_UNROLL
      for (int i = 0; i < kRows; ++i) weigh(r + i, sum[i]);
    }
    for (; r < t.end; ++r) weigh(r, sum[0]);
    const VF all = hn::Add(hn::Add(sum[0], sum[1]), hn::Add(sum[2], sum[3]));
    // What was summed before the first score is nothing, whatever it is multiplied by.
    const VF f = hn::IfThenElse(none, hn::Set(d, 1.0f), exp_of<kTameTile>(hn::Sub(before, origin)));
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
  const VF zero = hn::Zero(d);
  for (int c = 0; c < t.lanes; c += static_cast<int>(simd::lanes())) {
    const Scores<kMasked> scores(t, c, scale);
    const VF sums = hn::LoadU(d, lse + c);
    const VF origin = hn::IfThenElse(hn::Eq(sums, hn::Set(d, kNoScore)), zero, sums);
    const VF less = hn::LoadU(d, delta + c);
    const auto one = [&](std::int64_t r) {
      const std::int64_t at = r * t.ld + c;
      VF p = exp_of<kTameTile>(hn::Sub(scores.at(r), origin));
      VF grad = hn::LoadU(d, g + at);
      VF w = p;
      if (z != nullptr) {
        const VF kept = hn::LoadU(d, z + at);
        grad = hn::Mul(grad, kept);
        w = hn::Mul(p, kept);
      }
      VF ds = hn::Mul(hn::Mul(scores.scale, p), hn::Sub(grad, less));
      if constexpr (kMasked) {  // 0 by choice: a factor of 0 would keep a NaN
        const M here = scores.counts(r);
        w = hn::IfThenElse(here, w, zero);
        ds = hn::IfThenElse(here, ds, zero);
      }
      hn::StoreU(w, d, t.s + at);
      hn::StoreU(ds, d, g + at);
    };
    std::int64_t r = t.first;
    for (; r + kRows <= t.end; r += kRows) {
      ANNULUS_UNROLL
      for (int i = 0; i < kRows; ++i) one(r + i);
    }
    for (; r < t.end; ++r) one(r);
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
      g[at] = here ? scale * p * (kept * g[at] - delta[c]) : 0;
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
