// Which keys a query may see, said by where rows are, so that it is right for any tiling (and on any shard).
//
// A pattern cuts the queries of a head into sweeps: rows that look along the same line of keys. Within a sweep every query
// sees one interval of the line's keys, by a band on the difference of positions; a block list leaves out whole blocks
// of the line. That is all that a tile loop knows: the next keys, and which of them count for which row.
//
// A pattern is a struct like those in pattern/ (dense, dilated, blocks):
//   sweeps()          how many each head has, at most
//   longest()         how many queries a sweep has, at most
//   sweep(b, h, i)    the i-th; its queries or keys may be none. Those of one (b, h) have no query in common.
//   per_cell()        sweeps i and j have no key in common, whatever their heads, unless i div per_cell() = j div per_cell()
//   counts(...)       whether a key within the interval counts (LongNet's union is no interval)
// Rows are ranks where the call has an order, and tokens otherwise.
#pragma once

#include <cstdint>

#include "annulus/core/macros.h"

namespace annulus::attention {

inline constexpr std::int64_t kFar = std::int64_t{1} << 61;  // no bound, and room to add rows to it

// Rows first, first + step, ...
struct Line {
  std::int64_t first = 0, step = 1, count = 0;

  ANNULUS_HD std::int64_t at(std::int64_t i) const { return first + i * step; }
  // How many of its rows are less than `row`.
  ANNULUS_HD std::int64_t before(std::int64_t row) const {
    if (row <= first) return 0;
    if (row > at(count - 1)) return count;  // mostly: a division is what takes time here
    return step == 1 ? row - first : (row - first + step - 1) / step;
  }
  // Its rows from `from` to `to` - 1.
  ANNULUS_HD Line cut(std::int64_t from, std::int64_t to) const {
    const std::int64_t begin = before(from), end = before(to);
    return {at(begin), step, end > begin ? end - begin : 0};
  }
};

// The part first..end-1 of something.
struct Range {
  std::int64_t first = 0, end = 0;

  ANNULUS_HD bool empty() const { return end <= first; }
  ANNULUS_HD std::int64_t count() const { return end - first; }
};

// Bounds of key row - query row, both included.
struct Band {
  std::int64_t lowest = -kFar, highest = kFar;
};

// Blocks of a line of keys that are there, by number and ascending; i32 that lie `stride` apart.
struct BlockList {
  const std::int32_t* number = nullptr;
  std::int64_t stride = 1, count = 0, size = 0;
  std::int64_t first_row = 0;  // which row of them row 0 of the keys is (CUDA's parts alone)

  ANNULUS_HD bool defined() const { return size > 0; }  // not: the line is not cut into blocks

  ANNULUS_HD std::int64_t at(std::int64_t i) const { return number[i * stride]; }
};

struct Sweep {
  Line queries, keys;
  Band band;
  BlockList blocks;
  // What dropout calls a row: the sequence it is in, and where that begins among the queries and among the keys.
  std::int64_t sample = 0, first_query = 0, first_key = 0;

  // The keys, by their number in the line, that a query row may see; neither end ever falls from a row to the next.
  ANNULUS_HD Range seen_from(std::int64_t query_row) const {
    return {keys.before(query_row + band.lowest), keys.before(query_row + band.highest + 1)};
  }
  // Those that any, and those that every one of the queries part.first..part.end-1 of the line may see.
  ANNULUS_HD Range seen_by_any(Range part) const {
    return {seen_from(queries.at(part.first)).first, seen_from(queries.at(part.end - 1)).end};
  }
  ANNULUS_HD Range seen_by_all(Range part) const {
    return {seen_from(queries.at(part.end - 1)).first, seen_from(queries.at(part.first)).end};
  }
  // The queries, by their number in the line, that may see any of the keys part.first..part.end-1.
  ANNULUS_HD Range seeing_any(Range part) const {
    return {queries.before(keys.at(part.first) - band.highest),
            queries.before(keys.at(part.end - 1) - band.lowest + 1)};
  }
};

// f(Range) for the keys of `seen`, in tiles of at most `most` keys, ascending: of the whole line, or of the blocks there are.
// A tile never has keys of two blocks.
template <class F>
ANNULUS_HD void for_each_tile(const Sweep& sweep, Range seen, std::int64_t most, F&& f) {
  const BlockList& blocks = sweep.blocks;
  if (!blocks.defined()) {
    for (std::int64_t at = seen.first; at < seen.end; at += most) {
      f(Range{at, at + most < seen.end ? at + most : seen.end});
    }
    return;
  }
  for (std::int64_t i = 0; i < blocks.count; ++i) {
    const std::int64_t begin = blocks.at(i) * blocks.size - sweep.keys.first;
    const std::int64_t first = begin > seen.first ? begin : seen.first;
    const std::int64_t end = begin + blocks.size < seen.end ? begin + blocks.size : seen.end;
    for (std::int64_t at = first; at < end; at += most) {
      f(Range{at, at + most < end ? at + most : end});
    }
  }
}

// The same in tiles that lie at multiples of `size` rows, whatever is seen of them and however the line was cut: what is summed in a
// tile is summed in the same order wherever the others are. (Blocks lie so anyway.)
template <class F>
void for_each_fixed_tile(const Sweep& sweep, Range seen, std::int64_t size, F&& f) {
  if (sweep.blocks.defined()) return for_each_tile(sweep, seen, size, f);
  while (!seen.empty()) {
    const std::int64_t cell = sweep.keys.at(seen.first) / size;
    const Range tile{sweep.keys.before(cell * size), sweep.keys.before((cell + 1) * size)};
    f(tile);
    seen.first = tile.end;
  }
}

}  // namespace annulus::attention
