// One type's forward: its tilings, and what they reach on an H200 in TFLOP/s (32768 tokens, full).
#pragma once

#include "annulus/attention/cuda/sm90/choose.cuh"
#include "annulus/attention/cuda/sm90/forward.cuh"

namespace annulus::attention::cuda::sm90 {

template <class T>
void forward_of(const char* op, const ForwardArgs& a, cudaStream_t stream) {
  const Problem& p = a.p;
  const auto launch = [&]<class Tiling>() {
    KeyMaps maps;
    maps.any =
        !p.order.defined() && has_map(p.k, p.B, p.Tk, p.Hkv) && has_map(p.v, p.B, p.Tk, p.Hkv);
    if (maps.any) {
      constexpr DType kType = dtype_of<T>;
      maps.k = map_of(op, kType, p.k, p.B, p.Tk, p.Hkv, p.D, Tiling::kKeys);
      maps.v = map_of(op, kType, p.v, p.B, p.Tk, p.Hkv, p.Dv, Tiling::kKeys);
    }
    launch_forward<Tiling>(op, a, maps, stream);
  };
  const bool narrow = p.D <= 64 && p.Dv <= 64;
  if (p.pattern.kind == Kind::kBlocks) {  // tiles that are blocks
    if (narrow) return launch.template operator()<ForwardTiling<T, 64, 2, 128, 4>>();
    return launch.template operator()<ForwardTiling<T, 128, 2, 128, 2>>();
  }
  const std::int64_t count = multiprocessors_of(current_device(op));
  if (!narrow) {
    if (estimated_time(p, 128, 176, 617, count) <= estimated_time(p, 128, 128, 548, count)) {
      return launch.template operator()<ForwardTiling<T, 128, 2, 176, 2>>();
    }
    return launch.template operator()<ForwardTiling<T, 128, 2, 128, 2>>();
  }
  const double three = estimated_time(p, 192, 128, 490, count);
  const double wide = estimated_time(p, 128, 192, 440, count);
  const double plain = estimated_time(p, 128, 128, 417, count);
  if (three <= wide && three <= plain) {
    return launch.template operator()<ForwardTiling<T, 64, 3, 128, 4>>();
  }
  if (wide <= plain) return launch.template operator()<ForwardTiling<T, 64, 2, 192, 3>>();
  return launch.template operator()<ForwardTiling<T, 64, 2, 128, 4>>();
}

}  // namespace annulus::attention::cuda::sm90
