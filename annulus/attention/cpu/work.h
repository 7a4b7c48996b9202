// Sizes of the CPU's tiles, and what forward and backward need of a tile of scores beside its products.
#pragma once

#include <algorithm>
#include <cstdint>

#include "annulus/attention/cpu/rows.h"
#include "annulus/attention/cpu/softmax.h"
#include "annulus/attention/plan.h"
#include "annulus/core/checked.h"
#include "annulus/cpu/features.h"
#include "annulus/cpu/parallel.h"
#include "annulus/cpu/tile.h"

namespace annulus::attention::cpu {

using annulus::cpu::Factor;
using annulus::cpu::Side;
using annulus::cpu::Tiles;

// Queries that share what is packed of the keys: enough that packing is a few percent of the products, few enough that what is
// kept of them stays in a core's own cache. Twice as many, and twice again, where there are then still `items` for as many cores, and
// twice as many the next time, which the problem alone decides, and so all bits. (Forward of H 8, f32 on two AVX-512 cores: n 1024 11.7
// ms by 16 items of 512, 13.4 by 32; n 4096 161 ms by 32 items of 1024, 171 by 64.)
inline constexpr std::int64_t kQueries = 256;
inline constexpr std::int64_t kForwardItems = 16, kForwardMost = 4 * kQueries;
inline constexpr std::int64_t kBackwardItems = 64, kBackwardMost = 2 * kQueries;
// Of a chunk's queries and sums, in f32.
inline constexpr std::int64_t kKeptBytes = std::int64_t{1} << 20;
inline std::int64_t chunk_of(const Plan& p, std::int64_t items, std::int64_t most) {
  std::int64_t queries = kQueries;
  const auto fits = [&](std::int64_t n) {
    return n <= most && n * (p.D + p.Dv) * std::int64_t{sizeof(float)} <= kKeptBytes &&
           p.B * p.H * ceil_div(p.Tq, n) >= items;
  };
  for (; fits(2 * queries); queries *= 2) items *= 2;
  return queries;
}
// Keys of a tile: divisible by every tile's rows and unit. A forward has one tile of scores for a few queries; a backward keeps two
// of all queries of its chunk.
inline constexpr std::int64_t kKeys = 192;
inline constexpr std::int64_t kForwardKeys = 384;
static_assert(kQueries % annulus::cpu::kMaxTileCols == 0);

// bf16 without instructions that are worth it is fp32, widened once as it is packed: weights need not be rounded, then.
inline const Tiles<float>& tiles_for(DType dtype) {
  if (dtype == DType::kBF16) {
    const Tiles<float>& t = annulus::cpu::tiles<float>(Precision::kBf16);
    const bool pairs = t.element == 2 && t.unit == 2;  // vdpbf16ps
    if (t.element == 2 && (!pairs || annulus::cpu::has_fast_avx512_bf16())) return t;
  }
  return annulus::cpu::tiles<float>(Precision::kFp32);
}
// Of kForwardKeys those that a forward takes at once: its tile of scores, read by every product with values, stays in the nearest
// cache beside a panel, however many queries are in a vector.
inline std::int64_t forward_keys(const Tiles<float>& t) {
  return t.cols <= 8 ? kForwardKeys : t.cols <= 16 ? kForwardKeys / 2 : kForwardKeys / 3;
}
// Likewise of kKeys; a backward reads two tiles of scores.
inline std::int64_t backward_keys(const Tiles<float>& t) {
  return t.cols <= 16 ? kKeys : kKeys / 2;
}
// Queries over which gradients of keys are summed at once: what is packed of them for a tile's columns stays in the nearest cache for
// all keys.
inline std::int64_t summed_queries(const Tiles<float>& t) {
  return t.element == sizeof(float) ? 128 : 256;
}

// Whether a tile of a product is a right panel of the next one as it lies.
inline bool chains(const Tiles<float>& t) { return t.element == sizeof(float) && t.unit == 1; }

// Whether weights can be written as a right panel of the next product: see kPanelUnit.
inline bool writes_panels(const Tiles<float>& t) {
  return t.element == 2 && t.terms == 1 && t.unit % kPanelUnit == 0 && t.cols % 8 == 0;
}

// Whether a backward's weights and their gradients are rounded where they are made.
inline bool narrows(const Tiles<float>& t) { return kNarrows && writes_panels(t); }

inline bool unites(const Plan& plan) {
  const Dilated* d = std::get_if<Dilated>(&plan.pattern);
  return d != nullptr && d->unite;
}

// Rows of the pattern that row 0 of q and of k are.
inline std::int64_t first_query(const Plan& p) { return p.part ? p.part->first_query : 0; }
inline std::int64_t first_key(const Plan& p) { return p.part ? p.part->first_key : 0; }
inline bool fixed_tiles(const Plan& p) { return p.part && p.part->fixed; }

// f(layer) for those of the call.
template <class F>
void for_each_layer(const Plan& p, F&& f) {
  const int first = p.part ? p.part->layer : 0, end = p.part ? first + 1 : p.layers;
  for (int i = first; i < end; ++i) f(i);
}

// f(tile) for the keys of `seen`.
template <class F>
void for_each_key_tile(const Plan& p, const Sweep& sweep, Range seen, std::int64_t most, F&& f) {
  if (fixed_tiles(p)) return for_each_fixed_tile(sweep, seen, most, f);
  for_each_tile(sweep, seen, most, f);
}

// Slots of scratch, each for one thread at a time. The number depends on the machine and the problem, never on how many threads
// a call has, so that a workspace query is exact.
inline int slots_for(std::int64_t items) {
  return static_cast<int>(std::clamp<std::int64_t>(items, 1, annulus::cpu::resolve_threads(0)));
}
// f(slot, item) for every item; a slot is never used by two threads at once.
template <class F>
void for_each_item(std::int64_t items, int slots, int threads, F&& f) {
  if (items == 0) return;
  const int team = std::min(slots, annulus::cpu::resolve_threads(threads));
  annulus::cpu::run_team(team, [&](annulus::cpu::Member& member) {
    member.each(items, 1, [&](std::int64_t first, std::int64_t end) {
      for (std::int64_t i = first; i < end; ++i) f(member.rank(), i);
    });
  });
}

// The keys after a tile, as many as it has, in as many parts as there are tiles of queries: each asks for one.
class Ahead {
 public:
  Ahead(Range tile, std::int64_t end, std::int64_t parts)
      : first_(tile.end),
        end_(std::min(end, tile.end + tile.end - tile.first)),
        step_(ceil_div(tile.end - tile.first, parts)) {}
  Range part(std::int64_t i) const {
    return {first_ + i * step_, std::min(end_, first_ + (i + 1) * step_)};
  }

 private:
  std::int64_t first_, end_, step_;
};

// A tile of scores of some lanes of queries and the keys tile.first .. tile.end-1 of a sweep.
template <class P>
class TileMask {
 public:
  TileMask(const P& pattern, const Plan& plan, const Sweep& sweep, std::int64_t head)
      : pattern_(pattern), plan_(plan), sweep_(sweep), head_(head) {}

  // Rows of the tile that any of the lanes may see, and what of them each does. `valid` lanes are queries first, first + 1, ..;
  // the others of `lanes` see nothing. lo, hi: room for `lanes`; keep: for tile rows x ld.
  Range look(Range tile, std::int64_t first, int valid, int lanes, std::int64_t ld,
             std::int32_t* lo, std::int32_t* hi, std::uint8_t* keep) {
    const Range queries{first, first + valid};
    const Range any = cut(sweep_.seen_by_any(queries), tile),
                all = cut(sweep_.seen_by_all(queries), tile);
    mask_ = {};
    if (any.empty()) return {0, 0};
    const bool differ = valid < lanes || all.first > any.first || all.end < any.end;
    masked_ = differ || any.first > tile.first || any.end < tile.end;
    if (differ) {
      for (int c = 0; c < lanes; ++c) {
        Range r{tile.first, tile.first};
        if (c < valid) r = cut(sweep_.seen_from(sweep_.queries.at(first + c)), tile);
        lo[c] = static_cast<std::int32_t>(r.first - tile.first);
        hi[c] = static_cast<std::int32_t>(std::max(r.first, r.end) - tile.first);
      }
      mask_.lo = lo;
      mask_.hi = hi;
    }
    if constexpr (!P::kIntervals) {
      if (pattern_.unite && pattern_.branch > 0) {
        masked_ = true;
        for (std::int64_t k = any.first; k < any.end; ++k) {
          for (int c = 0; c < lanes; ++c) {
            keep[(k - tile.first) * ld + c] =
                c < valid &&
                pattern_.counts(head_, sweep_.queries.at(first + c), sweep_.keys.at(k));
          }
        }
        mask_.keep = keep;
      }
    }
    return {any.first - tile.first, any.end - tile.first};
  }

  // Of the tile, what any of these queries may see.
  Range rows_of(Range tile, Range queries) const {
    const Range any = cut(sweep_.seen_by_any(queries), tile);
    return {any.first - tile.first, any.end - tile.first};
  }
  // Whether a key of the line counts for a query of it.
  bool sees(std::int64_t query, std::int64_t key) const {
    const std::int64_t row = sweep_.queries.at(query);
    const Range seen = sweep_.seen_from(row);
    return key >= seen.first && key < seen.end && pattern_.counts(head_, row, sweep_.keys.at(key));
  }

  const Mask& mask() const { return mask_; }
  // Some entry of the tile does not count.
  bool masked() const { return masked_; }

  // z of dropout: what every weight of the tile's rows is multiplied by.
  void drop(Range tile, Range rows, std::int64_t first, int valid, int lanes, std::int64_t ld,
            const HeadRows& query_rows, const HeadRows& key_rows, float* z) const {
    for (int c = 0; c < lanes; ++c) {
      const std::uint64_t row =
          c < valid ? plan_.dropout.row(
                          sweep_.sample, head_,
                          query_rows.token(sweep_.queries.at(first + c)) - sweep_.first_query)
                    : 0;
      for (std::int64_t r = rows.first; r < rows.end; ++r) {
        const std::int64_t key = key_rows.token(sweep_.keys.at(tile.first + r)) - sweep_.first_key;
        z[r * ld + c] = c < valid && plan_.dropout.keeps(row, key) ? plan_.dropout.scale : 0.0f;
      }
    }
  }

 private:
  static Range cut(Range r, Range to) {
    return {std::clamp(r.first, to.first, to.end), std::clamp(r.end, to.first, to.end)};
  }

  const P& pattern_;
  const Plan& plan_;
  const Sweep& sweep_;
  std::int64_t head_;
  Mask mask_;
  bool masked_ = false;
};

}  // namespace annulus::attention::cpu
