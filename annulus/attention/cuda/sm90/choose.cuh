// Which tiling a call gets, and the maps of its tensors.
#pragma once

#include <algorithm>
#include <cstdint>
#include <utility>

#include "annulus/attention/cuda/launch.h"
#include "annulus/attention/cuda/sm90/launch.h"
#include "annulus/cuda/tensor_map.h"

namespace annulus::attention::cuda::sm90 {

using namespace annulus::cuda;

// A map of a (batch, rows, heads, columns) tensor for boxes of `box` rows of a head, 64 columns each.
inline TensorMap map_of(const char* op, DType dtype, const Operand& t, std::int64_t batch,
                        std::int64_t rows, std::int64_t heads, int columns, int box) {
  const std::int64_t shape[4] = {columns, rows, heads, batch};
  // Strides of axes of size 1 may be anything, and are not used.
  const auto stride = [](std::int64_t size, std::int64_t elements) {
    return size > 1 ? elements * 2 : 16;
  };
  const std::int64_t strides[3] = {stride(rows, t.row), stride(heads, t.head),
                                   stride(batch, t.batch)};
  const int boxes[4] = {64, box, 1, 1};
  return make_tensor_map(op, {dtype, t.data, shape, strides, boxes, 128});
}
// Whether there can be one: the copy engine knows neither negative strides nor those of expanded axes.
inline bool has_map(const Operand& t, std::int64_t batch, std::int64_t rows, std::int64_t heads) {
  const auto fits = [](std::int64_t size, std::int64_t elements) {
    return size <= 1 || (elements > 0 && elements < std::int64_t{1} << 38);
  };
  return batch > 0 && rows > 0 && heads > 0 && fits(rows, t.row) && fits(heads, t.head) &&
         fits(batch, t.batch);
}

// Time of a launch with tiles of that many queries and keys, in units of products over `rate`. A tile of queries costs one and a
// half tiles of keys more than it has: at its ends nothing overlaps. Where all have the same keys, multiprocessors take as
// many rounds as there are; otherwise the short ones fill what is left, but for half of a long one.
inline double estimated_time(const Problem& p, int queries, int keys, double rate,
                             std::int64_t multiprocessors) {
  double all = 0, longest = 0;
  std::int64_t blocks = 0;
  for (int i = 0; i < p.layers; ++i) {
    const auto padded =
        static_cast<double>(tiles_of(p.pattern.longest_sweep(i, false), keys) * keys);
    const double one = queries * (padded + 1.5 * keys) / rate;
    const std::int64_t own = p.B * p.H * p.pattern.slots(i, true, queries);
    blocks += own;
    all += one * static_cast<double>(own);
    longest = std::max(longest, one);
  }
  if (blocks == 0) return 0;
  if (p.pattern.is_causal()) return all / static_cast<double>(multiprocessors) + longest / 2;
  return all / static_cast<double>(blocks) * static_cast<double>(tiles_of(blocks, multiprocessors));
}

}  // namespace annulus::attention::cuda::sm90
