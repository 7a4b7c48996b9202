// The phases of a tile of tokens: which rows of sines and cosines each token's phase is the product of.
//
// The product is off by up to 2e-7 (of 5e8 pairs of phases aimed at the limits below, 1.96e-7 in fp32 and
// 2.32e-7 where the fine row is scaled), which is fp32's own bound; but close to a zero of the
// sine that is more than a 16-bit ulp of the value itself. A row that holds such an element (one in
// twenty-five of 128 columns in bf16, if phases are spread evenly) is found beforehand, by 16 bits of its
// phases, and made in a buffer of its own with those elements from the exact phase.
#if defined(ANNULUS_LRPE_COSINE_PHASES_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef ANNULUS_LRPE_COSINE_PHASES_INL_H_
#undef ANNULUS_LRPE_COSINE_PHASES_INL_H_
#else
#define ANNULUS_LRPE_COSINE_PHASES_INL_H_
#endif

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstdint>

#include "annulus/core/checked.h"
#include "annulus/cpu/simd-inl.h"
#include "annulus/lrpe_cosine/lrpe_cosine_rows-inl.h"

HWY_BEFORE_NAMESPACE();
namespace annulus::lrpe::HWY_NAMESPACE {

// Below this |value| the product's error e may cost more than is left of the one ulp that is promised: 0.307 of
// bfloat16's (lrpe_cosine_stored-inl.h uses the rest), e = 2.5e-7 / (0.307 2^-8); half of float16's,
// e = 2.1e-7 / (0.5 2^-11) and a little.
template <class T>
inline constexpr float kNearZero = 0.0f;
template <>
inline constexpr float kNearZero<bfloat16> = 2.1e-4f;
template <>
inline constexpr float kNearZero<float16> = 9.0e-4f;

// The same question in whole numbers, asked of all phases of a row: the place of a phase in its quarter
// turn, in 2^-16 of one, is the sum of those of its anchor and its fine part; either is cut off, so
// the sum is low by less than 2. |sin cos| < limit needs a place within 2 limit / pi quarter turns
// of a whole one (the 1.01 holds the curvature and the rounding of sin and cos). kNearHalf is added
// to the anchor's place: what is near then lies below kNearWindow.
template <class T>
inline constexpr int kNearHalf = static_cast<int>(kNearZero<T> * 65536 * 0.6366198f * 1.01f) + 3;
template <class T>
inline constexpr int kNearWindow = 2 * kNearHalf<T> - 2;

// Whether the sum of two places is below `window` in any of n columns; rows are padded to kRowPad.
inline bool any_near(const std::uint16_t* a, const std::uint16_t* b, std::int64_t n, int window) {
#if ANNULUS_HAVE_HWY
  namespace hn = hwy::HWY_NAMESPACE;
  const hn::CappedTag<std::uint16_t, kRowPad> d;
  // A minimum for each vector of the padding: one would wait for itself.
  constexpr int kChains = static_cast<int>(kRowPad / hn::MaxLanes(d));
  const auto lanes = static_cast<std::int64_t>(hn::Lanes(d));
  hn::Vec<decltype(d)> least[kChains];
  ANNULUS_UNROLL
  for (int i = 0; i < kChains; ++i) least[i] = hn::Set(d, 0xffff);
  for (std::int64_t k = 0; k < n; k += kRowPad) {
    ANNULUS_UNROLL
    for (int i = 0; i < kChains; ++i) {
      const std::int64_t at = k + i * lanes;
      least[i] = hn::Min(least[i], hn::Add(hn::LoadU(d, a + at), hn::LoadU(d, b + at)));
    }
  }
  ANNULUS_UNROLL
  for (int i = 1; i < kChains; ++i) least[0] = hn::Min(least[0], least[i]);
  return !hn::AllFalse(d, hn::Lt(least[0], hn::Set(d, static_cast<std::uint16_t>(window))));
#else
  bool near = false;
  for (std::int64_t k = 0; k < n; ++k) near |= static_cast<std::uint16_t>(a[k] + b[k]) < window;
  return near;
#endif
}

// Where the phases of one segment of one token come from: the product of two rows of cosines, each with its
// sines `sines` further on. Where it is `alone`, the first row is the phase itself and the second is phase
// zero, (1, 0), which changes no bit of it (there is no -0 in it).
struct TokenPhase {
  const float *anchor, *fine;
};

// (anchor) * (fine), for a vector of columns and for one of them, rounded alike.
HWY_INLINE void compose_vector(const float* anchor, const float* fine, std::int64_t sines,
                               simd_t& s, simd_t& c) {
  const auto ac = simd::load(anchor);
  const auto as = simd::load(anchor + sines);
  const auto fc = simd::load(fine);
  const auto fs = simd::load(fine + sines);
  c = ops::neg_mul_add(as, fs, ops::mul(ac, fc));
  s = ops::mul_add(ac, fs, ops::mul(as, fc));
}
inline void compose(const float* anchor, const float* fine, std::int64_t sines, float& s,
                    float& c) {
  c = ops::one_mul_add(-anchor[sines], fine[sines], anchor[0] * fine[0]);
  s = ops::one_mul_add(anchor[0], fine[sines], anchor[sines] * fine[0]);
}

// Up to kTile consecutive tokens. The anchors last used on an axis are kept: a run of 64 tokens meets at most
// 4 of them (an extent of 33 alternates between two), so that the one used longest ago is not of this tile.
inline constexpr int kTile = 64;
inline constexpr int kAnchors = 8;

template <class T, class Real = compute_t<T>>
class Phases;

template <class T>
class Phases<T, float> {
 public:
  static constexpr bool kExactNearZero = kNearZero<T> > 0;
  // Rows with an element near zero that a tile may hold; it ends where there is no room for another.
  static constexpr int kMended = kExactNearZero ? 8 : 0;
  static_assert(kMended == 0 || kMended >= LrpeGrid::kMaxAxes);
  // Scratch per worker for `segments` rows of `width`: floats, turns and places in the quarter turn.
  static std::int64_t reals(int segments, std::int64_t width) {
    return kRowPad + 2 * (kAnchors * segments + kFixed + kMended) * width;
  }
  static std::int64_t turns(int segments, std::int64_t width) { return segments * width; }
  static std::int64_t places(std::int64_t width) { return kExactNearZero ? width : 0; }

  Phases(int axes, const Segments& segments, const ThetaTables<float>& tables, float* scratch,
         std::uint64_t* turns, std::uint16_t* places)
      : axes_(axes),
        segments_(segments),
        tables_(tables),
        rows_(scratch + kRowPad),  // what is read before a row is this worker's own
        turn_(turns),
        place_(places) {
    std::fill_n(row(kUnit), sines(), 1.0f);
    std::fill_n(row(kZeroPhase), sines(), kPhaseScale<T>);
    for (const int fixed : {kUnit, kZeroPhase}) std::fill_n(row(fixed) + sines(), sines(), 0.0f);
  }

  void start_head(std::int64_t theta_row) {
    head_ = theta_row;
    fine_ = tables_.fine_cos(head_, 0);
    for (Axis& a : axis_) a = {};
    // The padding of a row starts an eighth of a turn from every zero, so that it seldom looks near one.
    for (int i = 0; i < segments_.count; ++i) {
      const std::int64_t length = segments_.at[i].length;
      std::fill(turn(i) + length, turn(i) + round_up(length, kRowPad), 1ull << 61);
    }
  }

  void start_tile() {
    mended_rows_ = 0;
    all_alone_ = true;
  }

  // The tokens from `token` on have phase zero, ...
  void set_zero_phase(int token, int tokens) {
    for (int i = 0; i < segments_.count; ++i)
      set(i, token, tokens, {row(kZeroPhase), row(kUnit)}, true);
  }

  // ... or positions that start at `position` and go up along the last axis. Returns for how many of `tokens`:
  // up to the anchor's last, and to the last for which there is a row where one is to be mended.
  int set_positions(int token, int tokens, const std::int64_t* position) {
    if (mended_rows_ + segments_.count > kMended && kExactNearZero) return 0;
    const int still = std::min(segments_.count, axes_ - 1);
    TokenPhase phase[kMaxSegments];
    bool alone[kMaxSegments];
    for (int i = 0; i < still; ++i) {
      const std::int64_t fine = move_to(i, position[i]);
      const Anchor& anchor = axis_[i].now;
      phase[i] = phase_of(anchor, fine);
      alone[i] = anchor.position == 0;
      if (kExactNearZero && anchor.near >> fine & 1u) {
        phase[i] = mended(i, phase[i], position[i]);
        alone[i] = true;
      }
    }
    if (still < segments_.count) tokens = set_last_axis(token, tokens, position[still]);
    for (int i = 0; i < still; ++i) set(i, token, tokens, phase[i], alone[i]);
    return tokens;
  }

  const TokenPhase& at(int i, int token) const { return at_[i][token]; }
  std::int64_t sines() const { return tables_.width; }
  bool alone(int i, int token) const { return alone_[i][token]; }
  bool all_alone() const { return all_alone_; }  // all segments of all tokens

  // The whole row of a token.
  void make_row(int token, float* c, float* s) const {
    for (int i = 0; i < segments_.count; ++i) {
      const Segment& g = segments_.at[i];
      compose_row(at_[i][token], g.length, c + g.slot, s + g.slot);
    }
  }

 private:
  static constexpr int kMaxSegments = LrpeGrid::kMaxAxes;
  // Rows of cosines and their sines: two that never change, mended ones, and each segment's anchors.
  enum Fixed { kUnit, kZeroPhase, kFixed };
  float* row(std::int64_t r) const { return rows_ + 2 * r * sines(); }
  float* anchor_row(int i, int slot) const { return row(kFixed + kMended + kAnchors * i + slot); }
  std::uint64_t* turn(int i) const { return turn_ + i * sines(); }

  void set(int i, int token, int tokens, TokenPhase phase, bool alone) {
    std::fill_n(at_[i] + token, tokens, phase);
    std::fill_n(alone_[i] + token, tokens, alone);
    all_alone_ &= alone;
  }

  int set_last_axis(int token, int tokens, std::int64_t position) {
    const int i = axes_ - 1;
    const std::int64_t fine = move_to(i, position);
    const Anchor& anchor = axis_[i].now;
    tokens = static_cast<int>(std::min<std::int64_t>(tokens, kFine - fine));
    const TokenPhase first = phase_of(anchor, fine);
    const bool alone = anchor.position == 0;
    // The fine row, which stands first where it stands alone, is the one that goes on.
    const std::int64_t next = 2 * sines();
    for (int t = 0; t < tokens; ++t) {
      at_[i][token + t] = {first.anchor + (alone ? t * next : 0),
                           first.fine + (alone ? 0 : t * next)};
    }
    std::fill_n(alone_[i] + token, tokens, alone);
    all_alone_ &= alone;
    if constexpr (kExactNearZero) {
      for (unsigned near = anchor.near >> fine; near != 0; near &= near - 1) {
        const int t = std::countr_zero(near);
        if (t >= tokens) break;
        if (mended_rows_ == kMended) return t;
        at_[i][token + t] = mended(i, at_[i][token + t], wrapping_add(position, t));
        alone_[i][token + t] = true;
      }
    }
    return tokens;
  }

  struct Anchor {
    std::int64_t position = 1;  // none: not a multiple of kFine
    const float* row = nullptr;
    unsigned near = 0;  // bit f: with fine position f, an element is near zero
  };
  struct Axis {
    Anchor now, kept[kAnchors];
    std::int64_t used[kAnchors] = {}, uses = 0;  // when each was moved to last
    std::int64_t turned = 1;                     // the position that turn() is of
  };

  void compose_row(const TokenPhase& p, std::int64_t n, float* c, float* s) const {
    const auto lanes = static_cast<std::int64_t>(simd::lanes());
    for (std::int64_t k = 0; k < n; k += lanes) {
      simd_t vc, vs;
      compose_vector(p.anchor + k, p.fine + k, sines(), vs, vc);
      simd::store(vc, c + k);
      simd::store(vs, s + k);
    }
  }

  // Moves to the anchor of a position and returns what is left over.
  HWY_INLINE std::int64_t move_to(int i, std::int64_t position) {
    const std::int64_t fine = position & (kFine - 1);
    if (axis_[i].now.position != position - fine) move_anchor(i, position - fine);
    return fine;
  }

  // Where the anchor is 0, as on most axes of a grid, which are short, the fine row is the phase.
  TokenPhase phase_of(const Anchor& anchor, std::int64_t fine) const {
    const float* fine_row = fine_ + 2 * fine * sines();
    if (anchor.position == 0) return {fine_row, row(kUnit)};
    return {anchor.row, fine_row};
  }

  HWY_NOINLINE void move_anchor(int i, std::int64_t position) {
    Axis& a = axis_[i];
    int slot = 0;  // the one that holds it, or the one used longest ago
    for (int k = 0; k < kAnchors; ++k) {
      if (a.kept[k].position == position) {
        slot = k;
        break;
      }
      if (a.used[k] < a.used[slot]) slot = k;
    }
    if (a.kept[slot].position != position) a.kept[slot] = make_anchor(i, position, slot);
    a.used[slot] = ++a.uses;
    a.now = a.kept[slot];
  }

  Anchor make_anchor(int i, std::int64_t position, int slot) {
    const std::int64_t length = segments_.at[i].length;
    const std::uint64_t* step = tables_.step + head_ * tables_.width;
    Axis& a = axis_[i];
    if (a.turned != 1 && position == wrapping_add(a.turned, kFine)) {
      advance_turns<kFineBits>(step, length, turn(i));
    } else {
      for (std::int64_t k = 0; k < length; ++k) turn(i)[k] = turn_at(step[k], position);
    }
    a.turned = position;
    float* c = anchor_row(i, slot);
    sincos_row(turn(i), length, c + sines(), c);
    return {position, c, near_rows(i, position)};
  }

  // Asked of all fine rows at once: their table is read in one go, not in between other rows.
  unsigned near_rows([[maybe_unused]] int i, [[maybe_unused]] std::int64_t position) {
    unsigned near = 0;
    if constexpr (kExactNearZero) {
      const std::int64_t length = segments_.at[i].length;
      for (std::int64_t k = 0; k < round_up(length, kRowPad); ++k) {
        place_[k] = static_cast<std::uint16_t>(place_in_quarter(turn(i)[k]) + kNearHalf<T>);
      }
      for (int f = 0; f < kFine; ++f) {
        if (!(tables_.fine_rows >> f & 1u)) continue;
        const bool here = any_near(place_, tables_.fine_near(head_, f), length, kNearWindow<T>);
        near |= static_cast<unsigned>(here) << f;
      }
      if (position == 0) near &= ~1u;  // at position 0 the product is exact
    }
    return near;
  }

  // A phase of segment i as a row of its own, exact where the product is too coarse.
  HWY_NOINLINE TokenPhase mended(int i, const TokenPhase& phase, std::int64_t position) {
    const std::int64_t length = segments_.at[i].length;
    float* c = row(kFixed + mended_rows_++);
    float* s = c + sines();
    compose_row(phase, length, c, s);
    const std::uint64_t* step = tables_.step + head_ * tables_.width;
    const auto lanes = static_cast<std::int64_t>(simd::lanes());
    for (std::int64_t k0 = 0; k0 < length; k0 += lanes) {
      const auto product = ops::mul(simd::load(c + k0), simd::load(s + k0));
      if (!ops::some_below(product, kNearZero<T>)) continue;
      for (std::int64_t k = k0; k < std::min(k0 + lanes, length); ++k) {
        if (std::abs(c[k] * s[k]) < kNearZero<T>) {
          sincos_turn(turn_at(step[k], position), s[k], c[k]);
          // Never -0, which the product of two rows would not be.
          s[k] = s[k] * kPhaseScale<T> + 0.0f;
          c[k] = c[k] * kPhaseScale<T> + 0.0f;
        }
      }
    }
    return {c, row(kUnit)};
  }

  int axes_;
  const Segments& segments_;
  const ThetaTables<float>& tables_;
  float* rows_;
  std::uint64_t* turn_;
  std::uint16_t* place_;
  int mended_rows_ = 0;
  TokenPhase at_[kMaxSegments][kTile] = {};
  bool alone_[kMaxSegments][kTile] = {};
  bool all_alone_ = true;
  std::int64_t head_ = 0;
  const float* fine_ = nullptr;  // the head's first fine row
  Axis axis_[kMaxSegments];
};

template <>
class Phases<double, double> {
 public:
  static std::int64_t reals(int, std::int64_t) { return 0; }
  static std::int64_t turns(int, std::int64_t) { return 0; }
  static std::int64_t places(std::int64_t) { return 0; }

  Phases(int axes, const Segments& segments, const ThetaTables<double>& tables, double*,
         std::uint64_t*, std::uint16_t*)
      : axes_(axes), segments_(segments), tables_(tables) {}

  void start_head(std::int64_t theta_row) { head_ = theta_row; }
  void start_tile() {}
  void set_zero_phase(int token, int tokens) { std::fill_n(placed_ + token, tokens, false); }
  int set_positions(int token, int tokens, const std::int64_t* position) {
    for (int t = 0; t < tokens; ++t) {
      std::copy_n(position, axes_, position_[token + t]);
      position_[token + t][axes_ - 1] = wrapping_add(position[axes_ - 1], t);
    }
    std::fill_n(placed_ + token, tokens, true);
    return tokens;
  }

  void make_row(int token, double* c, double* s) const {
    for (int i = 0; i < segments_.count; ++i) {
      const Segment& g = segments_.at[i];
      for (std::int64_t k = 0; k < g.length; ++k) {
        double& sk = s[g.slot + k] = 0.0;
        double& ck = c[g.slot + k] = 1.0;
        if (!placed_[token]) continue;
        const std::int64_t entry = head_ * tables_.width + k;
        sincos_turn(turn_at(tables_.step[entry], position_[token][g.axis]), sk, ck);
        sk += tables_.poison[entry];
        ck += tables_.poison[entry];
      }
    }
  }

 private:
  int axes_;
  const Segments& segments_;
  const ThetaTables<double>& tables_;
  std::int64_t head_ = 0;
  std::int64_t position_[kTile][LrpeGrid::kMaxAxes] = {};
  bool placed_[kTile] = {};
};

}  // namespace annulus::lrpe::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#endif  // toggling guard
