// Which rows of a sequence are where, and which of them a rank needs of another.
#pragma once

#include <algorithm>
#include <array>
#include <cstdint>
#include <span>
#include <vector>

#include "annulus/attention/pattern.h"
#include "annulus/attention/plan.h"
#include "annulus/ring_attention/ring_attention.h"

namespace annulus::ring {

using attention::Line;
using attention::Plan;
using attention::Range;

inline constexpr std::int64_t kMostTokens = std::int64_t{1} << 40;  // with room to count chunks

// How a sequence is cut.
struct Shards {
  std::int64_t tokens = 0;
  int ranks = 1;
  Balance balance = Balance::kZigzag;
  std::int64_t slice = 1536;  // rows that travel at once, at most

  int chunks() const { return balance == Balance::kZigzag ? 2 * ranks : ranks; }
  Range chunk(int c) const { return {tokens * c / chunks(), tokens * (c + 1) / chunks()}; }
  std::int64_t longest_chunk() const { return (tokens + chunks() - 1) / chunks(); }
  std::int64_t slices_of_chunk() const { return (longest_chunk() + slice - 1) / slice; }
  std::int64_t longest_slice() const { return std::min(slice, longest_chunk()); }
  int owner(int c) const { return c < ranks ? c : 2 * ranks - 1 - c; }
  // What a rank has, in order; the second may be empty.
  std::array<Range, 2> of(int rank) const {
    return {chunk(rank), balance == Balance::kZigzag ? chunk(2 * ranks - 1 - rank) : Range{}};
  }
  std::int64_t rows_of(int rank) const { return of(rank)[0].count() + of(rank)[1].count(); }
};

// A slice beyond the sequence is all of it, and can be added to.
inline Shards shards_of(const RingOptions& ring, int ranks, Device device) {
  const std::int64_t slice = ring.slice > 0                    ? ring.slice
                             : device.type == DeviceType::kCPU ? 1536
                                                               : 8192;
  return {ring.tokens, ranks, ring.balance,
          std::min(slice, std::max<std::int64_t>(ring.tokens, 1))};
}

// Which rows travel.
enum class Side : std::uint8_t { kKeys, kQueries };

// Rows of each head, as lines without a row in common.
using Rows = std::vector<std::vector<Line>>;
std::int64_t count_of(const std::vector<Line>& lines);
std::int64_t count_of(const Rows& rows);  // of all heads together

// Those rows of `piece` of a layer's keys that queries of `others` see; or of its queries, those that see keys of `others`. With a
// cell, all rows that lie with such a one in a cell of so many.
Rows needed(const Plan& plan, int layer, Side side, std::span<const Range> others, Range piece,
            std::int64_t cell);

}  // namespace annulus::ring
