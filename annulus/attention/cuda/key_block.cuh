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
      first += column * blocks.size;
      end = (column + 1) * blocks.size < blocks.keys ? (column + 1) * blocks.size : blocks.keys;
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
      search(block.seen.first / a.p.pattern.blocks.size);
      find();
    } else {
      at = block.seen.first;
      end = block.seen.end;
    }
  }
  __device__ void next() {
    at += kQueries;
    if (at < end) return;
    if (listed()) return find();
    ++head;
    at = block.seen.first;
  }

 private:
  // Which of the kThreads rows of blocks from `first` on have the column.
  __device__ void search(std::int64_t first) {
    const Blocks& blocks = a.p.pattern.blocks;
    window = row = first;
    const std::int64_t own = first + threadIdx.x;
    const bool has = own * blocks.size < block.seen.end &&
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
        const std::int64_t first = row * size, last = first + size;
        at = first > block.seen.first ? first : block.seen.first;
        end = last < block.seen.end ? last : block.seen.end;
        ++row;
        if (at < end) return;
        --row;
      }
      std::int64_t next = window + kThreads;
      if (next * size >= block.seen.end) {
        if (++head >= a.heads) return;
        next = block.seen.first / size;
      }
      search(next);
    }
  }
};

}  // namespace annulus::attention::cuda
