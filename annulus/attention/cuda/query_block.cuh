// What a block of threads that has a tile of queries knows of it, in shared memory: in registers it would take 20 of each
// thread.
#pragma once

#include <cstdint>

#include "annulus/attention/cuda/mask.cuh"

namespace annulus::attention::cuda {

struct QueryBlock {
  Sweep sweep;
  int layer;
  std::int64_t b, h, first;
  std::int64_t layer_row;  // of the first query, where there are several layers
  int count;               // of queries, from `first` on
  int part;                // of the keys: see ForwardArgs
  Range seen, all;         // the keys that any of them sees, and those that all do
  const void *k, *v;

  // By one thread. Without queries there is nothing to do.
  template <class T>
  __device__ void start(const Problem& p, int queries) {
    start<T>(p, queries, blockIdx.x);
  }
  // Of `parts` blocks in a row the keys are divided by whole tiles of `keys`.
  template <class T>
  __device__ void start(const Problem& p, int queries, int parts, int keys) {
    start<T>(p, queries, blockIdx.x / parts);
    part = static_cast<int>(blockIdx.x % parts);
    if (parts == 1 || count == 0) return;
    const std::int64_t each = tiles_of(tiles_of(seen.end - seen.first, keys), parts) * keys;
    seen.first += part * each;
    if (seen.first + each < seen.end) seen.end = seen.first + each;
  }
  template <class T>
  __device__ void start(const Problem& p, int queries, std::int64_t block) {
    const BlockPlace at(p, block, p.H);
    const Place place = p.pattern.place(at.layer, at.h, at.slot, true, queries);
    layer = at.layer;
    b = at.b;
    h = at.h;
    first = place.tile * queries;
    const std::int64_t key_head = p.group == 1 ? at.h : at.h / p.group;
    k = p.k.at<T>(at.b, key_head);
    v = p.v.at<T>(at.b, key_head);
    if (p.layers > 1) layer_row = p.layer_row(layer, b, h, p.H, place.sweep) + first;
    sweep = p.pattern.sweep(at.layer, at.b, at.h, place.sweep);
    // What follows reads it where it lies: a kernel whose loops need all registers has none for it here.
    asm volatile("" ::: "memory");
    const std::int64_t left = sweep.queries.count - first;
    count = place.tile < 0 || left <= 0 ? 0 : left < queries ? static_cast<int>(left) : queries;
    if (count == 0) return;
    const Range part{first, first + count};
    seen = sweep.seen_by_any(part);
    all = sweep.seen_by_all(part);
  }

  __device__ std::int64_t query(int row) const { return sweep.queries.at(first + row); }
  // Do all keys of the tile count for all queries?
  __device__ bool all_see(const Problem& p, Range tile) const {
    return !p.pattern.has_holes() && tile.first >= all.first && tile.end <= all.end;
  }
  __device__ bool masks(const Problem& p, Range tile, int keys) const {
    return !all_see(p, tile) || tile.end - tile.first < keys;
  }
};

template <int kQueries, int kKeys, int kThreads>
__device__ __forceinline__ void make_query_mask(std::uint32_t* mask, const Problem& p,
                                                const QueryBlock& block, Range tile) {
  make_mask<kQueries, kKeys, kThreads>(
      mask,
      [&](int row) {
        const Range r = row < block.count ? block.sweep.seen_from(block.query(row)) : Range{};
        // A tile ends where its block of the list does.
        return Range{r.first - tile.first, (r.end < tile.end ? r.end : tile.end) - tile.first};
      },
      p.pattern.has_holes(),
      [&](int row, int column) {
        return p.pattern.counts(block.layer, block.h, block.query(row),
                                block.sweep.keys.at(tile.first + column));
      });
}
template <int kQueries, int kKeys, int kThreads>
__device__ __forceinline__ void make_query_kept(std::uint32_t* kept, const Problem& p,
                                                const QueryBlock& block, Range tile,
                                                const std::uint64_t* drawn) {
  make_kept<kQueries, kKeys, kThreads>(kept, [&](int row, int column) {
    const std::int64_t key = tile.first + column;
    return row < block.count && key < tile.end &&
           p.dropout.keeps(drawn[row], p.token(block.sweep.keys.at(key)) - block.sweep.first_key);
  });
}

}  // namespace annulus::attention::cuda
