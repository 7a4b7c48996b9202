// Calls in which every query sees all keys of its line and the copy engine brings all of them: dense attention without a bound or an
// order, and LongNet's of two branches or more and at most four rates, where rates divide segments and those divide the tokens, and a segment is
// whole tiles of keys or the only one. A block of threads then finds where it is by a few multiplications with what the host made. (Found in
// the Problem it takes 2 us, of LongNet 6, and at the beginning of a kernel, when neither its instructions nor its arguments are in a
// cache, twice that.)
#pragma once

#include <cstdint>
#include <optional>

#include "annulus/attention/cuda/query_block.cuh"
#include "annulus/attention/cuda/sm90/maps.h"
#include "annulus/cuda/fast_div.h"

namespace annulus::attention::cuda::sm90 {

// Line i of a head has rows i length + offset, i length + offset + step and so on.
struct EvenLayer {
  std::int32_t blocks = 0;             // of threads, over all samples and heads
  std::int32_t slots = 0, tiles = 0;   // of those a head has and a line has
  std::int32_t queries = 0, keys = 0;  // rows of a line
  std::int32_t length = 0, step = 1;
  std::int32_t layer = 0, map = 0;
  bool heads_in_blocks = false;  // see DilatedOffsets
  FastDiv by_slots, by_tiles, by_offset;
};

struct EvenGrid {
  std::int32_t heads = 0, queries = 0;  // the latter of a tile
  FastDiv by_heads, by_group;
  EvenLayer layer[Dilated::kMost];

  // Of tiles of so many queries and keys; none where the call is not such a one.
  static std::optional<EvenGrid> of(const Problem& p, const RowMaps& q, const RowMaps& k,
                                    int queries, int keys);
  std::int64_t blocks() const {
    std::int64_t all = 0;
    for (const EvenLayer& i : layer) all += i.blocks;
    return all;
  }

  // Block `number` of them, and of which line its rows and its keys are, by one thread.
  template <class Block>
  __device__ void find(Block& block, const Problem& p, std::int32_t number) const {
    int i = 0;
    while (number >= layer[i].blocks) number -= layer[i++].blocks;
    const EvenLayer& own = layer[i];
    const auto divide = [](const FastDiv& by, std::int32_t n) {
      return static_cast<std::int32_t>(by.divide(static_cast<std::uint32_t>(n)));
    };
    const std::int32_t head = divide(own.by_slots, number), slot = number - head * own.slots;
    const std::int32_t b = divide(by_heads, head), h = head - b * heads;
    const std::int32_t line = divide(own.by_tiles, slot), tile = slot - line * own.tiles;
    const std::int32_t part = divide(own.by_offset, h);
    const std::int32_t offset = own.heads_in_blocks ? part : h - part * own.step;
    const std::int32_t first = tile * queries, left = own.queries - first;
    block.layer = own.layer;
    block.b = b;
    block.h = h;
    block.first = first;
    block.count = left < queries ? left : queries;
    block.sweep.queries = {std::int64_t{line} * own.length + offset, own.step, own.queries};
    block.layer_row = (std::int64_t{b} * heads + h) * p.rows.count + p.rows.first[own.layer] +
                      std::int64_t{line} * own.queries + first;
    block.line = {own.map, offset, line * own.queries, true};
    block.keys = own.keys;
    block.key_head = divide(by_group, h);
  }
};

// Is the call one, but for what the copy engine says, with tiles of so many keys? What is behind a line's end is masked, but has to be
// numbers: zeros behind the tensor's. Behind another's lie its neighbour's rows, which may be anything.
inline bool is_even(const Problem& p, int keys) {
  const AnyPattern& pattern = p.pattern;
  if (pattern.has_one) {
    const Sweep& one = pattern.one;
    return one.band.lowest < -kFar / 2 && one.band.highest > kFar / 2 && one.queries.first == 0 &&
           one.queries.count == p.Tq && one.keys.first == 0 && one.keys.count == p.Tk && p.Tk > 0;
  }
  const Dilated& d = pattern.dilated;
  if (pattern.kind != Kind::kDilated || d.mode != DilatedMode::kLongNet || p.layers < 2 ||
      d.causal || d.unite) {
    return false;
  }
  bool even = true;
  for (int i = 0; i < d.branches; ++i) {
    const std::int64_t w = d.length[i], r = d.rate[i];
    even = even && d.tokens % w == 0 && w % r == 0 && (w / r % keys == 0 || w == d.tokens);
  }
  return even;
}

inline std::optional<EvenGrid> EvenGrid::of(const Problem& p, const RowMaps& q, const RowMaps& k,
                                            int queries, int keys) {
  if (q.count == 0 || k.count == 0 || !is_even(p, keys)) return {};
  const auto by = [](std::int64_t n) { return FastDiv(static_cast<std::uint32_t>(n)); };
  EvenGrid grid;
  grid.queries = queries;
  grid.heads = static_cast<std::int32_t>(p.H);
  grid.by_heads = by(p.H);
  grid.by_group = by(p.group);
  std::int64_t all = 0;
  const auto add = [&](int i, std::int64_t lines, std::int64_t of_queries, std::int64_t of_keys) {
    EvenLayer& own = grid.layer[i];
    own.queries = static_cast<std::int32_t>(of_queries);
    own.keys = static_cast<std::int32_t>(of_keys);
    const std::int64_t tiles = tiles_of(of_queries, queries);
    all += p.B * p.H * lines * tiles;
    own.tiles = static_cast<std::int32_t>(tiles);
    own.slots = static_cast<std::int32_t>(lines * tiles);
    own.blocks = static_cast<std::int32_t>(p.B * p.H * lines * tiles);
    own.by_slots = by(lines * tiles);
    own.by_tiles = by(tiles);
  };
  if (p.layers == 1) {
    add(0, 1, p.Tq, p.Tk);
  } else {
    const Dilated& d = p.pattern.dilated;
    for (int i = 0; i < p.layers; ++i) {
      const int at = p.order_of_layers[i];
      const std::int64_t w = d.length[at], r = d.rate[at];
      EvenLayer& own = grid.layer[i];
      own.map = -1;
      for (int m = 0; m < q.count && m < k.count; ++m) {
        if (q.step[m] == r && k.step[m] == r) own.map = m;
      }
      if (own.map < 0) return {};
      own.layer = at;
      own.length = static_cast<std::int32_t>(w);
      own.step = static_cast<std::int32_t>(r);
      own.heads_in_blocks = d.offsets == DilatedOffsets::kBlock;
      own.by_offset = by(own.heads_in_blocks ? tiles_of(p.H, r) : r);
      add(i, d.tokens / w, w / r, w / r);
    }
  }
  if (all >= INT32_MAX) return {};
  return grid;
}

}  // namespace annulus::attention::cuda::sm90
