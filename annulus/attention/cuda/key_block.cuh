// What a block of threads that has a tile of a line of keys knows of it, and its walk over the queries that see any of them.
#pragma once

#include <cstdint>

#include "annulus/attention/cuda/mask.cuh"
#include "annulus/cuda/pipeline.cuh"

namespace annulus::attention::cuda {

// In shared memory, as QueryBlock.
struct KeyBlock {
  Sweep sweep;
  int layer;
  std::int64_t b, h, group_head;  // h: of the keys; the first head of queries
  std::int64_t column;            // of blocks in a list
  std::int64_t first;
  // Where there are several layers: of the first key, and of the sweep's first query in the first head.
  std::int64_t layer_row, query_row;
  int count;   // of keys, from `first` on
  Range seen;  // the queries that see any of them

  // By one thread.
  __device__ void start(const KeyGradientArgs& a, int keys) {
    const Problem& p = a.p;
    const BlockPlace at(p, blockIdx.x, p.Hkv);
    layer = at.layer;
    b = at.b;
    h = at.h;
    group_head = at.h * p.group + a.first_head;
    // The first keys first: where causal, they are seen by the most queries.
    const Place place = p.pattern.place(at.layer, group_head, at.slots - 1 - at.slot, false, keys);
    column = place.sweep;
    first = place.tile * keys;
    Sweep own;
    std::int64_t end;
    if (p.pattern.kind == Kind::kBlocks) {  // of all rows of blocks at once: the walk says which
      const Blocks& blocks = p.pattern.blocks;
      own = blocks.row(at.b, 0);
      own.queries.count = blocks.queries;
      p.pattern.window.cut(own);
      const std::int64_t begin = column * blocks.size - p.pattern.window.first_key;
      end = begin + blocks.size < own.keys.count ? begin + blocks.size : own.keys.count;
      // Of a column that begins before the part the first tile has less, so that the others lie as ever.
      first += begin;
      if (first + keys < end) end = first + keys;
      if (first < 0) first = 0;
    } else {
      own = p.pattern.sweep(at.layer, at.b, group_head, place.sweep);
      end = own.keys.count;
    }
    if (p.layers > 1) {
      layer_row = p.layer_row(at.layer, at.b, at.h, p.Hkv, place.sweep) + first;
      query_row = p.layer_row(at.layer, at.b, group_head, p.H, place.sweep);
    }
    sweep = own;
    const std::int64_t left = end - first;
    count = place.tile < 0 || left <= 0 ? 0 : left < keys ? static_cast<int>(left) : keys;
    seen = {};
    if (count > 0 && own.queries.count > 0) seen = own.seeing_any({first, first + count});
  }
};

// Is `number` among the blocks?
__device__ __forceinline__ bool contains(const BlockList& blocks, std::int64_t number) {
  std::int64_t low = 0, high = blocks.count;
  while (low < high) {
    const std::int64_t middle = (low + high) / 2;
    if (blocks.at(middle) < number) {
      low = middle + 1;
    } else {
      high = middle;
    }
  }
  return low < blocks.count && blocks.at(low) == number;
}

// The tiles of queries that see a tile of keys: head by head, and of a block list the rows that have the column, which all
// threads look for together, one row of blocks each.
// (kBarrier: theirs, where they are not all threads of the block.)
template <int kThreads, int kQueries, int kBarrier = 0>
struct QueryWalk {
  const KeyGradientArgs& a;
  const KeyBlock& block;
  std::uint32_t* found;  // shared memory, a word a warp
  int head = 0;
  std::int64_t at = 0, end = 0;
  std::int64_t window = 0,
               row =
                   0;  // the rows of blocks that `found` is about begin there; the next to look at

  __device__ bool listed() const { return a.p.pattern.kind == Kind::kBlocks; }
  __device__ bool done() const { return head >= a.heads; }
  __device__ Range tile() const { return {at, at + kQueries < end ? at + kQueries : end}; }
  __device__ std::int64_t query_head() const { return block.group_head + head; }

  __device__ void start() {
    if (block.seen.empty()) {
      head = a.heads;
    } else if (listed()) {
      at = end = 0;
      search(first_block());
      find();
    } else {
      at = first_query();
      end = block.seen.end;
    }
  }
  __device__ void next() {
    at += kQueries;
    if (at < end) return;
    if (listed()) return find();
    ++head;
    at = first_query();
  }

 private:
  // See Problem::fixed.
  __device__ std::int64_t first_query() const {
    return a.p.fixed ? block.seen.first / kQueries * kQueries : block.seen.first;
  }
  // Rows of blocks are those of the whole pattern.
  __device__ std::int64_t row_of(std::int64_t query) const {
    return query + a.p.pattern.window.first_query;
  }
  __device__ std::int64_t first_block() const {
    return row_of(block.seen.first) / a.p.pattern.blocks.size;
  }
  // Which of the kThreads rows of blocks from `first` on have the column.
  __device__ void search(std::int64_t first) {
    const Blocks& blocks = a.p.pattern.blocks;
    window = row = first;
    const std::int64_t own = first + threadIdx.x;
    const bool has = own * blocks.size < row_of(block.seen.end) &&
                     contains(blocks.blocks(query_head(), own), block.column);
    sync_threads(kBarrier, kThreads);  // all have read the words of the window before
    const unsigned ballot = __ballot_sync(~0u, has);
    if (threadIdx.x % 32 == 0) found[threadIdx.x / 32] = ballot;
    sync_threads(kBarrier, kThreads);
  }
  __device__ void find() {
    const std::int64_t size = a.p.pattern.blocks.size;
    while (true) {
      for (; row < window + kThreads; ++row) {
        const auto bit = static_cast<int>(row - window);
        const std::uint32_t left = found[bit / 32] >> (bit % 32);
        if (left == 0) {
          row += 31 - bit % 32;  // to the last of the word
          continue;
        }
        row += __ffs(static_cast<int>(left)) - 1;
        const std::int64_t first = row * size - row_of(0), last = first + size;
        const std::int64_t earliest = a.p.fixed ? 0 : block.seen.first;
        at = first > earliest ? first : earliest;
        end = last < block.seen.end ? last : block.seen.end;
        ++row;
        if (at < end) return;
        --row;
      }
      std::int64_t next = window + kThreads;
      if (next * size >= row_of(block.seen.end)) {
        if (++head >= a.heads) return;
        next = first_block();
      }
      search(next);
    }
  }
};

}  // namespace annulus::attention::cuda
