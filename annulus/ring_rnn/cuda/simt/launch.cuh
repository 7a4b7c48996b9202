// Host side of the general path, shared by its directions: scratch, grids and launches.
#pragma once

#include <algorithm>
#include <cstdint>

#include "annulus/core/checked.h"
#include "annulus/core/scratch.h"
#include "annulus/cuda/check.h"
#include "annulus/cuda/persistent.cuh"
#include "annulus/ring_rnn/cuda/simt/step.cuh"

namespace annulus::ring_rnn::cuda::general {

inline constexpr std::int64_t kMostGroups = 1024;
// Words of the barriers' counters.
inline std::int64_t counter_words(const Plan& plan) {
  return std::min(ceil_div(plan.B, 32), kMostGroups) * GroupBarrier::kStride;
}

// Blocks of kTileThreads threads, as many as elements ask for.
inline unsigned blocks_for(std::int64_t elements) {
  return static_cast<unsigned>(std::clamp<std::int64_t>(ceil_div(elements, kTileThreads), 1, 4096));
}

// Large tiles where there are enough of them to fill a GPU. Depends on neither T nor K: a sequence
// may be split and channels may be added without a change of a bit.
inline bool large_tiles(std::int64_t rows, std::int64_t columns) {
  return ceil_div(rows, 64) * ceil_div(columns, 64) >= 64;
}
template <class Real, class F>
decltype(auto) visit_tile(bool large, F&& f) {
  if (large) return f.template operator()<LargeTile<Real>>();
  return f.template operator()<SmallTile<Real>>();
}

// Weights whose rows can be read four numbers at a time.
template <class T>
bool whole_weights(const Args& a) {
  return a.N % 4 == 0 && aligned_weights(a, sizeof(T), 4 * sizeof(T));
}

// Sets the counters to 0 and fills the readout's table, (N, 2), where there is one.
template <class Real>
void launch_prepare(const char* op, unsigned* counters, std::int64_t words, Real* table,
                    std::int64_t N, cudaStream_t stream);

}  // namespace annulus::ring_rnn::cuda::general
