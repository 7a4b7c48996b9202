// One type's forward: its tilings, and close to what they reach on an H200 in TFLOP/s (32768 tokens, full).
#pragma once

#include <algorithm>
#include <cstdint>

#include "annulus/attention/cuda/sm90/forward.cuh"
#include "annulus/attention/cuda/sm90/launch.h"

namespace annulus::attention::cuda::sm90 {

// Time of a launch with tiles of that many queries and keys, in units of products over `rate`. A tile of queries costs one and a
// half tiles of keys more than it has: at its ends nothing overlaps. Where all have the same keys, multiprocessors take as
// many rounds as there are; otherwise the short ones fill what is left, but for half of a long one.
inline double estimated_time(const Problem& p, int queries, int keys, double rate,
                             std::int64_t multiprocessors) {
  double all = 0, longest = 0;
  std::int64_t blocks = 0;
  for (int i = 0; i < p.layers; ++i) {
    const int layer = p.order_of_layers[i];
    const auto padded =
        static_cast<double>(tiles_of(p.pattern.longest_sweep(layer, false), keys) * keys);
    const double one = queries * (padded + 1.5 * keys) / rate;
    const std::int64_t own = p.B * p.H * p.pattern.slots(layer, true, queries);
    blocks += own;
    all += one * static_cast<double>(own);
    longest = std::max(longest, one);
  }
  if (blocks == 0) return 0;
  if (p.pattern.is_causal()) return all / static_cast<double>(multiprocessors) + longest / 2;
  return all / static_cast<double>(blocks) * static_cast<double>(tiles_of(blocks, multiprocessors));
}

template <class T>
void forward_of(const char* op, const ForwardArgs& a, cudaStream_t stream) {
  const Problem& p = a.p;
  const auto launch = [&]<class Tiling>() {
    ForwardMaps maps{maps_of<T>(op, p, p.q, p.Tq, p.H, p.D, Tiling::kQueries),
                     maps_of<T>(op, p, p.k, p.Tk, p.Hkv, p.D, Tiling::kKeys),
                     maps_of<T>(op, p, p.v, p.Tk, p.Hkv, p.Dv, Tiling::kKeys)};
    both_or_none(maps.k, maps.v);
    launch_forward<Tiling>(op, a, maps, stream);
  };
  const bool narrow = p.D <= 64 && p.Dv <= 64;
  if (p.pattern.kind == Kind::kBlocks) {  // tiles that are blocks
    if (narrow) return launch.template operator()<ForwardTiling<T, 64, 2, 128, 5>>();
    return launch.template operator()<ForwardTiling<T, 128, 2, 128, 2>>();
  }
  const std::int64_t count = multiprocessors_of(current_device(op));
  if (!narrow) {
    if (estimated_time(p, 128, 176, 617, count) <= estimated_time(p, 128, 128, 548, count)) {
      return launch.template operator()<ForwardTiling<T, 128, 2, 176, 2>>();
    }
    return launch.template operator()<ForwardTiling<T, 128, 2, 128, 2>>();
  }
  const double three = estimated_time(p, 192, 128, 480, count);
  const double wide = estimated_time(p, 128, 192, 440, count);
  const double plain = estimated_time(p, 128, 128, 417, count);
  if (three <= wide && three <= plain) {
    return launch.template operator()<ForwardTiling<T, 64, 3, 128, 5>>();
  }
  if (wide <= plain) return launch.template operator()<ForwardTiling<T, 64, 2, 192, 4>>();
  return launch.template operator()<ForwardTiling<T, 64, 2, 128, 5>>();
}

}  // namespace annulus::attention::cuda::sm90
