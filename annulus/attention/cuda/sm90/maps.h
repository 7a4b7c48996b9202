// The maps by which the copy engine brings tiles of a call's tensors.
#pragma once

#include <algorithm>
#include <cstdint>

#include "annulus/attention/cuda/arguments.cuh"
#include "annulus/cuda/tma.cuh"
#include "annulus/cuda/wgmma.cuh"

namespace annulus::attention::cuda::sm90 {

using namespace annulus::cuda;

// Of a (batch, rows, heads, columns) tensor whose lines of rows have certain steps, a map a step. Row t of a map with step r is
// (t mod r, t div r): a line is one of the former, and rows of the latter that follow each other.
struct RowMaps {
  static constexpr int kMost = 4;
  TensorMap map[kMost];
  std::int64_t step[kMost] = {};
  std::int64_t rows = 0;
  int count = 0;  // none: threads bring all rows
};

// Where a line of rows lies in its map.
struct MappedLine {
  int map = -1;  // there is none
  int residue, first;
  bool ends;  // behind its last row the map has no other: what a box has beyond it are zeros

  __device__ void find(const RowMaps& maps, const Line& line) {
    map = -1;
    for (int i = 0; i < maps.count; ++i) {
      if (maps.step[i] == line.step) map = i;
    }
    if (map < 0) return;
    const std::int64_t r = line.step;
    first = static_cast<int>(r == 1 ? line.first : line.first / r);
    residue = static_cast<int>(line.first - first * r);
    // (Where rows are no multiple of the step the last ones of the map are not the tensor's.)
    ends = line.at(line.count) >= maps.rows && (r == 1 || maps.rows % r == 0);
  }
};

// Whether there can be one for every step up to `step`: the copy engine knows neither negative strides nor those of expanded axes.
inline bool has_map(const Operand& t, std::int64_t batch, std::int64_t rows, std::int64_t heads,
                    std::int64_t step) {
  const auto fits = [](std::int64_t size, std::int64_t elements) {
    return size <= 1 || (elements > 0 && elements < std::int64_t{1} << 38);
  };
  return batch > 0 && rows > 0 && heads > 0 && fits(rows, t.row) && fits(rows, t.row * step) &&
         fits(heads, t.head) && fits(batch, t.batch);
}

// Boxes of `box` rows of a head, 128 bytes of each. None where rows follow an order.
template <class T>
RowMaps maps_of(const char* op, const Problem& p, const Operand& t, std::int64_t rows,
                std::int64_t heads, int columns, int box) {
  RowMaps maps;
  maps.rows = rows;
  std::int64_t widest = 1;
  const Dilated& dilated = p.pattern.dilated;
  const bool thinned = p.pattern.kind == Kind::kDilated;
  for (int i = 0; thinned && i < dilated.branches; ++i) widest = std::max(widest, dilated.rate[i]);
  if (p.order.defined() || !has_map(t, p.B, rows, heads, widest)) return maps;
  const auto add = [&](std::int64_t step) {
    for (int i = 0; i < maps.count; ++i) {
      if (maps.step[i] == step) return;
    }
    if (maps.count == RowMaps::kMost) return;
    const std::int64_t shape[5] = {columns, step, tiles_of(rows, step), heads, p.B};
    // Strides of axes of size 1 may be anything, and are not used.
    constexpr auto kSize = static_cast<std::int64_t>(sizeof(T));
    const auto stride = [](std::int64_t size, std::int64_t elements) {
      return size > 1 ? elements * kSize : 16;
    };
    const std::int64_t strides[4] = {stride(step, t.row), stride(shape[2], t.row * step),
                                     stride(heads, t.head), stride(p.B, t.batch)};
    const int boxes[5] = {128 / kSize, 1, box, 1, 1};
    maps.map[maps.count] = make_tensor_map(op, {dtype_of<T>, t.data, shape, strides, boxes, 128});
    maps.step[maps.count++] = step;
  };
  if (!thinned || dilated.mode == DilatedMode::kGroupedKv) add(1);
  for (int i = 0; thinned && i < dilated.branches; ++i) add(dilated.rate[i]);
  return maps;
}

// Of two tensors whose tiles come together.
inline void both_or_none(RowMaps& one, RowMaps& two) {
  if (one.count != two.count) one.count = two.count = 0;
}

#if ANNULUS_DEVICE_HOPPER

// Rows of a line from number `first` on, by one thread; as many as the map's boxes have.
template <class Tile>
__device__ __forceinline__ void load_boxes(Tile tile, const RowMaps& maps, const MappedLine& line,
                                           std::int64_t first, std::int64_t b, std::int64_t h,
                                           SharedBarrier* full) {
#pragma unroll
  for (int i = 0; i < Tile::kColumns / 64; ++i) {
    load_box(tile.data + i * Tile::kPanel, maps.map[line.map],
             {64 * i, line.residue, line.first + static_cast<int>(first), static_cast<int>(h),
              static_cast<int>(b)},
             full);
  }
}

// The same for rows of fp32 back to sums, by one thread: 64 columns from `column` on, as far as there are `columns`.
template <class Tile>
__device__ __forceinline__ void add_boxes(Tile tile, const RowMaps& maps, const MappedLine& line,
                                          int column, int columns, std::int64_t first,
                                          std::int64_t b, std::int64_t h) {
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    if (column + 32 * i >= columns) continue;
    add_box(maps.map[line.map],
            {column + 32 * i, line.residue, line.first + static_cast<int>(first),
             static_cast<int>(h), static_cast<int>(b)},
            tile.data + i * Tile::kPanel);
  }
}

#endif

}  // namespace annulus::attention::cuda::sm90
