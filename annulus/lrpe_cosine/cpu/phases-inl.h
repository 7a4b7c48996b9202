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
#include <span>

#include "annulus/core/checked.h"
#include "annulus/cpu/simd-inl.h"
#include "annulus/lrpe_cosine/cpu/rows-inl.h"

HWY_BEFORE_NAMESPACE();
namespace annulus::lrpe_cosine::HWY_NAMESPACE {

// Whether a value is below near_zero (cpu/rows-inl.h), asked in whole numbers of all phases of a row: the
// place of a phase in its quarter turn, in 2^-16 of one, is the sum of those of its anchor and its fine part;
// either is cut off, so the sum is low by less than 2. |sin cos| < limit needs a place within 2 limit / pi quarter
// turns of a whole one (the 1.01 holds the curvature and the rounding of sin and cos). `half` is added to the
// anchor's place: what is near then lies below `window`.
struct Near {
  int half, window;
};
inline Near near_of(float near_zero) {
  const int half = static_cast<int>(near_zero * 65536 * 0.6366198f * 1.01f) + 3;
  return {half, 2 * half - 2};
}

// Whether the sum of two places is below `window` in any of n columns; rows are padded to kRowPad.
inline bool any_near(const std::uint16_t* a, const std::uint16_t* b, std::int64_t n, int window) {
#if ANNULUS_SIMD
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

// Where the phases of some columns come from, for the tokens of a run: a row of cosines, the next token's `step`
// further on, times an anchor's row, which is the same for all. The sines of either are one row further on. Where
// the first row stands alone the anchor is phase zero, (1, 0), which changes no bit of it (there is no -0 in it).
struct Source {
  const float *fine, *anchor;
  std::int64_t step;

  Source from(std::int64_t column) const { return {fine + column, anchor + column, step}; }
};

// Tokens that follow each other along the last axis, with one anchor.
struct Run {
  int tokens;
  bool alone;  // all of its rows stand alone
  Source at[LrpeGrid::kMaxAxes];
};

// anchor * fine, for one column or a vector of them.
template <class V>
HWY_INLINE void compose(V ac, V as, V fc, V fs, V& s, V& c) {
  c = ops::neg_mul_add(as, fs, ac * fc);
  s = ops::mul_add(ac, fs, as * fc);
}
HWY_INLINE void compose_vector(const float* anchor, const float* anchor_sin, const float* fine,
                               const float* fine_sin, simd_t& s, simd_t& c) {
  const simd_t ac = simd::load(anchor), as = simd::load(anchor_sin);
  const simd_t fc = simd::load(fine), fs = simd::load(fine_sin);
  compose(ac, as, fc, fs, s, c);
}

// Up to kTile consecutive tokens. (With 64 of them a forward of 16 x 16 x 16 tokens in bf16 took 1.41 ms instead of
// 1.37 on two Neoverse-V1 cores; with 256 a backward 1.81 instead of 1.67.) The anchors last used on an axis are
// kept: a tile meets at most 5 of them (in 1-D), so that the one used longest ago is not of this tile.
inline constexpr int kTile = 128;
inline constexpr int kAnchors = 8;

template <class Real>
class Phases;

template <>
class Phases<float> {
 public:
  // Rows of their own that a tile may hold, for elements near zero or for a token that is in no run; it ends where
  // there is no room for another.
  static constexpr int kOwnRows = 8;
  static_assert(kOwnRows >= LrpeGrid::kMaxAxes);
  // Floats per worker for `segments` rows of `width`, beside as many turns, and a row of places in the quarter turn
  // where near zero phases are exact.
  static std::int64_t reals(int segments, std::int64_t width) {
    return kRowPad + 2 * ((kAnchors + kLone) * segments + kFixed + kOwnRows) * width;
  }

  Phases(int axes, const Segments& segments, const ThetaTables<float>& tables,
         const Rounding& rounding, float* scratch, std::uint64_t* turns, std::uint16_t* places)
      : axes_(axes),
        rounding_(rounding),
        segments_(segments),
        tables_(tables),
        rows_(scratch + kRowPad),  // what is read before a row is this worker's own
        turn_(turns),
        place_(places) {
    std::fill_n(row(kUnit), sines(), 1.0f);
    std::fill_n(row(kZeroPhase), sines(), rounding.scale);
    for (const int fixed : {kUnit, kZeroPhase}) std::fill_n(row(fixed) + sines(), sines(), 0.0f);
  }

  void start_head(std::int64_t theta_row) {
    head_ = theta_row;
    for (Axis& a : axis_) a = {};
    // The padding of a row starts an eighth of a turn from every zero, so that it seldom looks near one.
    for (int i = 0; i < segments_.count; ++i) {
      const std::int64_t length = segments_.at[i].length;
      std::fill(turn(i) + length, turn(i) + round_up(length, kRowPad), 1ull << 61);
    }
  }

  void start_tile() {
    runs_ = own_rows_ = 0;
    for (Axis& a : axis_) {
      a.uses_before = a.uses;
      a.used[a.slot] = ++a.uses;  // the tile may go on where the last one ended
    }
  }

  // The next tokens have phase zero, ...
  void set_zero_phase(int tokens) {
    if (tokens == 0) return;
    Run run{};
    run.tokens = tokens;
    std::fill_n(run.at, segments_.count, alone(row(kZeroPhase), 0));
    add(run);
  }

  // ... or positions that start at `position` and go up along the last axis. Returns for how many of `tokens`:
  // up to the anchor's last, and to the last for which there is a row where one is to be mended; 0 where the tile
  // has no room for them.
  int set_positions(int tokens, const std::int64_t* position) {
    if (own_rows_ + segments_.count > kOwnRows && exact_near_zero()) return 0;
    Run run{};
    run.tokens = tokens;
    const int still = std::min(segments_.count, axes_ - 1);
    for (int i = 0; i < still; ++i) {
      if (!move_to(i, position[i])) return 0;
      const std::int64_t fine = fine_part(position[i]);
      run.at[i] = source(i, fine, 0);
      if (axis_[i].now.near >> fine & 1u) run.at[i] = mended(i, run.at[i], position[i]);
    }
    if (still < segments_.count) return add_last_axis(run, position[still]);
    add(run);
    return tokens;
  }

  // The next token, by itself: its rows are made, which is cheaper than to search all fine rows of an anchor for zeros.
  // The same bits as in a run. Returns 1, or 0 where the tile has no room for it.
  int set_position(const std::int64_t* position) {
    if (own_rows_ + segments_.count > kOwnRows) return 0;
    Run run{};
    run.tokens = 1;
    for (int i = 0; i < segments_.count; ++i) {
      const std::int64_t fine = fine_part(position[i]);
      const std::int64_t anchor = position[i] - fine;
      run.at[i] = alone(tables_.fine_cos(head_, fine), 0);
      if (anchor == 0) continue;
      float* c = lone_row(i);
      if (axis_[i].lone != anchor) {
        set_turns(i, anchor);
        sincos_row(turn(i), segments_.at[i].length, 1.0f, c + sines(), c);
        axis_[i].lone = anchor;
      }
      run.at[i].anchor = c;
      run.at[i] = mended(i, run.at[i], position[i]);
    }
    add(run);
    return 1;
  }

  std::span<const Run> runs() const { return {run_, static_cast<std::size_t>(runs_)}; }
  std::int64_t sines() const { return tables_.width; }

  // f(token) for the tile's tokens, with the row of each made.
  template <class F>
  void for_rows(float* c, float* s, F&& f) const {
    int token = 0;
    for (const Run& run : runs()) {
      for (int t = 0; t < run.tokens; ++t) {
        for (int i = 0; i < segments_.count; ++i) {
          const Segment& g = segments_.at[i];
          compose_row(run.at[i], t, g.length, c + g.slot, s + g.slot);
        }
        f(token++);
      }
    }
  }

 private:
  bool exact_near_zero() const { return rounding_.near_zero > 0; }
  const float* unit() const { return row(kUnit); }
  static constexpr int kMaxSegments = LrpeGrid::kMaxAxes;
  // Rows of cosines and their sines: two that never change, tokens' own, and each segment's anchors: of runs, and the
  // last one of a token by itself.
  enum Fixed { kUnit, kZeroPhase, kFixed };
  static constexpr int kLone = 1;
  float* row(std::int64_t r) const { return rows_ + 2 * r * sines(); }
  float* anchor_row(int i, int slot) const {
    return row(kFixed + kOwnRows + (kAnchors + kLone) * i + slot);
  }
  float* lone_row(int i) const { return anchor_row(i, kAnchors); }
  std::uint64_t* turn(int i) const { return turn_ + i * tables_.width; }

  void add(const Run& run) {
    Run& added = run_[runs_++] = run;
    added.alone = true;
    for (int i = 0; i < segments_.count; ++i) added.alone &= run.at[i].anchor == unit();
  }

  // The tokens of `run` from a position of the last axis on, as far as its anchor goes: in one run, or in several
  // where rows in between are mended.
  int add_last_axis(Run run, std::int64_t position) {
    const int i = axes_ - 1;
    if (!move_to(i, position)) return 0;
    const std::int64_t fine = fine_part(position);
    const int tokens =
        static_cast<int>(std::min<std::int64_t>(run.tokens, tables_.fine_count() - fine));
    const std::uint64_t near = axis_[i].now.near >> fine;
    for (int t = 0; t < tokens; t += run.tokens) {
      const Source here = source(i, fine + t, 2 * sines());
      if (near >> t & 1u) {
        if (own_rows_ == kOwnRows) return t;
        run.tokens = 1;
        run.at[i] = mended(i, here, wrapping_add(position, t));
      } else {
        run.tokens = std::min(tokens - t, near >> t == 0 ? tokens : std::countr_zero(near >> t));
        run.at[i] = here;
      }
      add(run);
    }
    return tokens;
  }

  struct Anchor {
    std::int64_t position = 1;  // none: not a multiple of any number of fine rows
    const float* row = nullptr;
    std::uint64_t near = 0;  // bit f: with fine position f, an element is near zero
  };
  struct Axis {
    Anchor now, kept[kAnchors];
    int slot = 0;                                // where `now` is kept
    std::int64_t used[kAnchors] = {}, uses = 0;  // when each was moved to last
    std::int64_t uses_before = 0;                // this tile
    std::int64_t turned = 1;                     // the position that turn() is of
    std::int64_t lone = 1;                       // ... that lone_row() is of
  };

  void compose_row(const Source& p, int t, std::int64_t n, float* c, float* s) const {
    const auto lanes = static_cast<std::int64_t>(simd::lanes());
    const float* fine = p.fine + t * p.step;
    for (std::int64_t k = 0; k < n; k += lanes) {
      simd_t vc, vs;
      compose_vector(p.anchor + k, p.anchor + sines() + k, fine + k, fine + sines() + k, vs, vc);
      simd::store(vc, c + k);
      simd::store(vs, s + k);
    }
  }

  std::int64_t fine_part(std::int64_t position) const {
    return position & (tables_.fine_count() - 1);
  }
  // Moves to the anchor of a position; false where the tile uses every row there is for anchors (never on a grid).
  HWY_INLINE bool move_to(int i, std::int64_t position) {
    const std::int64_t anchor = position - fine_part(position);
    return axis_[i].now.position == anchor || move_anchor(i, anchor);
  }

  Source alone(const float* row, std::int64_t step) const { return {row, unit(), step}; }

  // Where the anchor is 0, as on most axes of a grid, which are short, the fine row is the phase.
  Source source(int i, std::int64_t fine, std::int64_t step) const {
    Source s = alone(tables_.fine_cos(head_, fine), step);
    if (axis_[i].now.position != 0) s.anchor = axis_[i].now.row;
    return s;
  }

  HWY_NOINLINE bool move_anchor(int i, std::int64_t position) {
    Axis& a = axis_[i];
    int slot = 0;  // the one that holds it, or the one used longest ago
    for (int k = 0; k < kAnchors; ++k) {
      if (a.kept[k].position == position) {
        slot = k;
        break;
      }
      if (a.used[k] < a.used[slot]) slot = k;
    }
    if (a.kept[slot].position != position) {
      if (a.used[slot] > a.uses_before) return false;
      a.kept[slot] = make_anchor(i, position, slot);
    }
    a.used[slot] = ++a.uses;
    a.slot = slot;
    a.now = a.kept[slot];
    return true;
  }

  // turn(i) = the phases of a position.
  void set_turns(int i, std::int64_t position) {
    const std::int64_t length = segments_.at[i].length;
    const std::uint64_t* step = tables_.step + head_ * tables_.width;
    Axis& a = axis_[i];
    if (a.turned != 1 && position == wrapping_add(a.turned, tables_.fine_count())) {
      advance_turns(step, tables_.fine_bits, length, turn(i));
    } else {
      for (std::int64_t k = 0; k < length; ++k) turn(i)[k] = turn_at(step[k], position);
    }
    a.turned = position;
  }

  Anchor make_anchor(int i, std::int64_t position, int slot) {
    if (position == 0) return {0, nullptr, 0};  // fine rows stand alone, and are exact
    set_turns(i, position);
    float* c = anchor_row(i, slot);
    sincos_row(turn(i), segments_.at[i].length, 1.0f, c + sines(), c);
    return {position, c, near_rows(i)};
  }

  // Asked of all fine rows at once: their table is read in one go, not in between other rows.
  std::uint64_t near_rows(int i) {
    if (!exact_near_zero()) return 0;
    const Near limit = near_of(rounding_.near_zero);
    const std::int64_t length = segments_.at[i].length;
    for (std::int64_t k = 0; k < round_up(length, kRowPad); ++k) {
      place_[k] = static_cast<std::uint16_t>(place_in_quarter(turn(i)[k]) + limit.half);
    }
    std::uint64_t near = 0;
    for (int f = 0; f < tables_.fine_count(); ++f) {
      if (!(tables_.fine_rows >> f & 1u)) continue;
      const bool here = any_near(place_, tables_.fine_near(head_, f), length, limit.window);
      near |= static_cast<std::uint64_t>(here) << f;
    }
    return near;
  }

  // A phase of segment i as a row of its own, exact where the product is too coarse.
  HWY_NOINLINE Source mended(int i, const Source& phase, std::int64_t position) {
    const std::int64_t length = segments_.at[i].length;
    float* c = row(kFixed + own_rows_++);
    float* s = c + sines();
    compose_row(phase, 0, length, c, s);
    if (exact_near_zero()) {
      mend_row(tables_.step + head_ * tables_.width, position, length, rounding_.near_zero,
               rounding_.scale, s, c);
    }
    return alone(c, 0);
  }

  int axes_;
  Rounding rounding_;
  const Segments& segments_;
  const ThetaTables<float>& tables_;
  float* rows_;
  std::uint64_t* turn_;
  std::uint16_t* place_;
  int own_rows_ = 0;
  int runs_ = 0;
  Run run_[kTile];
  std::int64_t head_ = 0;
  Axis axis_[kMaxSegments];
};

template <>
class Phases<double> {
 public:
  Phases(int axes, const Segments& segments, const ThetaTables<double>& tables, const Rounding&,
         double*, std::uint64_t*, std::uint16_t*)
      : axes_(axes), segments_(segments), tables_(tables) {}

  void start_head(std::int64_t theta_row) { head_ = theta_row; }
  void start_tile() { tokens_ = 0; }
  void set_zero_phase(int tokens) {
    std::fill_n(placed_ + tokens_, tokens, false);
    tokens_ += tokens;
  }
  int set_positions(int tokens, const std::int64_t* position) {
    for (int t = 0; t < tokens; ++t) {
      std::copy_n(position, axes_, position_[tokens_ + t]);
      position_[tokens_ + t][axes_ - 1] = wrapping_add(position[axes_ - 1], t);
    }
    std::fill_n(placed_ + tokens_, tokens, true);
    tokens_ += tokens;
    return tokens;
  }
  int set_position(const std::int64_t* position) { return set_positions(1, position); }
  template <class F>
  void for_rows(double* c, double* s, F&& f) const {
    for (int token = 0; token < tokens_; ++token) {
      make_row(token, c, s);
      f(token);
    }
  }

 private:
  void make_row(int token, double* c, double* s) const {
    for (const Segment& g : segments_) {
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

  int axes_;
  const Segments& segments_;
  const ThetaTables<double>& tables_;
  std::int64_t head_ = 0;
  int tokens_ = 0;
  std::int64_t position_[kTile][LrpeGrid::kMaxAxes] = {};
  bool placed_[kTile] = {};
};

}  // namespace annulus::lrpe_cosine::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#endif  // toggling guard
