// One type's forward: its tilings, and which of them a call gets.
#pragma once

#include <algorithm>
#include <cstdint>
#include <optional>

#include "annulus/attention/cuda/sm90/even.h"
#include "annulus/attention/cuda/sm90/forward.cuh"
#include "annulus/attention/cuda/sm90/launch.h"

namespace annulus::attention::cuda::sm90 {

// Close to what a tiling reaches on an H200 in TFLOP/s, of 64 or 128 columns, where all see all of 16384 tokens; and how many us
// later than the others its first tiles are there.
struct TilingRate {
  int columns, queries, keys;
  double rate, begin = 0;
};

// us of a launch. A tile of queries costs one and a half tiles of keys more than it has: at its ends nothing overlaps. Where all
// have the same keys, multiprocessors take as many rounds as there are. Otherwise they take tiles in turns, there and back, the
// longest first, and the short ones fill most of what is left.
inline double estimated_time(const Problem& p, const TilingRate& tiling,
                             std::int64_t multiprocessors) {
  const auto places = static_cast<double>(multiprocessors);
  const bool causal = p.pattern.is_causal();
  double all = 0, longest = 0;
  std::int64_t blocks = 0;
  for (int i = 0; i < p.layers; ++i) {
    const int layer = p.order_of_layers[i];
    const std::int64_t keys = p.pattern.longest_sweep(layer, false);
    const auto padded = static_cast<double>(tiles_of(keys, tiling.keys) * tiling.keys);
    const auto time_of = [&](double of_keys) {
      return 4.0 * tiling.columns * tiling.queries * (of_keys + 1.5 * tiling.keys) * places /
             (tiling.rate * 1e6);
    };
    const auto rows = static_cast<double>(std::min(p.pattern.longest_sweep(layer, true), keys));
    const std::int64_t own = p.B * p.H * p.pattern.slots(layer, true, tiling.queries);
    blocks += own;
    all += static_cast<double>(own) *
           time_of(causal ? static_cast<double>(keys) - (rows - tiling.queries - tiling.keys) / 2
                          : padded);
    longest = std::max(longest, time_of(padded));
  }
  if (blocks == 0) return 0;
  const auto turns = static_cast<double>(tiles_of(blocks, multiprocessors));
  const double mean = all / static_cast<double>(blocks);
  const double busy =
      causal ? std::max(longest, all / places + longest / (4 * turns)) : mean * turns;
  return tiling.begin + busy;
}

// Which kernels a tiling has. (All of them would be more than they gain: even ones of three warpgroups, and of tiles of 176 keys, are within 1 %
// of the others.)
enum class Kernels : std::uint8_t { kAny, kEven, kBoth };

// False where the tiling has none for the call: even ones alone, and it is not even or has no maps. One that is gets its own where that pays.
template <class T, int kColumns, int kConsumers, int kKeys, int kStages, Kernels kKernels>
bool launch_tiling(const char* op, ForwardArgs a, bool even_pays, cudaStream_t stream) {
  constexpr int kQueries = 64 * kConsumers;
  Problem& p = a.p;
  ForwardMaps maps{maps_of<T>(op, p, p.q, p.Tq, p.H, p.D, kQueries),
                   maps_of<T>(op, p, p.k, p.Tk, p.Hkv, p.D, kKeys),
                   maps_of<T>(op, p, p.v, p.Tk, p.Hkv, p.Dv, kKeys)};
  both_or_none(maps.k, maps.v);
  if constexpr (kKernels != Kernels::kAny) {
    const auto grid =
        even_pays ? EvenGrid::of(p, maps.q, maps.k, kQueries, kKeys) : std::optional<EvenGrid>();
    if (grid) {
      using Even = ForwardTiling<T, kColumns, kConsumers, kKeys, kStages, true>;
      launch_forward<Even>(op, a, maps, *grid, grid->blocks(), stream);
      return true;
    }
  }
  if constexpr (kKernels != Kernels::kEven) {
    using Any = ForwardTiling<T, kColumns, kConsumers, kKeys, kStages, false>;
    const std::int64_t blocks = p.number_blocks(p.H, true, kQueries);
    launch_forward<Any>(op, a, maps, NoGrid(), blocks, stream);
  }
  return kKernels != Kernels::kEven;
}

template <class T>
void forward_of(const char* op, const ForwardArgs& a, cudaStream_t stream) {
  const Problem& p = a.p;
  const bool narrow = p.D <= 64 && p.Dv <= 64;
  // A launch of an even kernel takes 3 to 16 us less where it is short (n 1024: dense, LongNet). Of more keys than these, where power is what sets the clock, its tiles take 3 % longer
  // (32 768 tokens, 128 columns, both in one run; 64 columns: 1 %); why is not known.
  const bool even_pays = p.longest_sweep(false) <= (narrow ? 16384 : 8192);
  const auto launch =
      [&]<int kColumns, int kConsumers, int kKeys, int kStages, Kernels kKernels>() {
        return launch_tiling<T, kColumns, kConsumers, kKeys, kStages, kKernels>(op, a, even_pays,
                                                                                stream);
      };
  const std::int64_t places = multiprocessors_of(current_device(op));
  const auto time_of = [&](const TilingRate& tiling) { return estimated_time(p, tiling, places); };
  const bool in_blocks = p.pattern.kind == Kind::kBlocks;  // tiles that are blocks
  const double later =
      even_pays && is_even(p, 128) ? 12 : 0;  // us, about, of what has no even kernel
  if (narrow) {
    const double plain = time_of({64, 128, 128, 465});
    const double three = in_blocks ? plain : time_of({64, 192, 128, 540, later});
    if (even_pays && is_even(p, 208) && time_of({64, 128, 208, 500}) <= std::min(plain, three) &&
        launch.template operator()<64, 2, 208, 3, Kernels::kEven>()) {
      return;
    }
    if (three < plain) {
      launch.template operator()<64, 3, 128, 5, Kernels::kAny>();
    } else {
      launch.template operator()<64, 2, 128, 5, Kernels::kBoth>();
    }
    return;
  }
  const double plain = time_of({128, 128, 128, 675});
  const double wide = in_blocks ? plain : time_of({128, 128, 176, 726, std::max(later, 5.0)});
  if (even_pays && is_even(p, 160) && time_of({128, 128, 160, 714}) <= std::min(plain, wide) &&
      launch.template operator()<128, 2, 160, 2, Kernels::kEven>()) {
    return;
  }
  if (wide < plain) {
    launch.template operator()<128, 2, 176, 2, Kernels::kAny>();
  } else {
    launch.template operator()<128, 2, 128, 2, Kernels::kBoth>();
  }
}

}  // namespace annulus::attention::cuda::sm90
