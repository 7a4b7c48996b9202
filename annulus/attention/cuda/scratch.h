// The scratch of a call on a GPU.
#pragma once

#include <algorithm>
#include <cstdint>

#include "annulus/attention/cuda/launch.h"
#include "annulus/attention/cuda/problem.h"
#include "annulus/core/scratch.h"

namespace annulus::attention::cuda {

// Into how many parts the keys of a tile of queries are divided: as many as the device has room for beside what there is, if
// each has several tiles of keys. Below four merging costs more than it gains. It depends on the problem and the device alone.
inline int parts_of(const Plan& plan) {
  constexpr std::int64_t kMost = 16, kFewest = 4, kTile = 64, kFewestTiles = 4;
  if (plan.part || plan.layers > 1 || no_queries(plan) || no_sequences(plan)) return 1;
  const AnyPattern pattern = pattern_of(plan);
  if (pattern.kind == Kind::kBlocks) return 1;
  // Hopper's kernels are faster with a quarter of the device than others with all of it. (Whoever asks for the others, or has
  // strides for them, has the same scratch.)
  if (plan.dtype != DType::kF32 && plan.D <= 128 && plan.Dv <= 128 && plan.D % 8 == 0 &&
      plan.Dv % 8 == 0 && !plan.dropout.any() && pattern.longest_sweep(0, true) > kShortSweep &&
      is_hopper(plan.device.index) &&
      4 * plan.B * plan.H * pattern.slots(0, true, 128) >= multiprocessors_of(plan.device.index)) {
    return 1;
  }
  std::int64_t keys = pattern.longest_sweep(0, false);
  if (pattern.kind == Kind::kDense && pattern.dense.left < kFar && pattern.dense.right < kFar) {
    keys = std::min(keys, pattern.dense.left + pattern.dense.right + kTile);
  }
  const std::int64_t tiles = plan.B * plan.H * pattern.slots(0, true, kTile),
                     places = 2 * multiprocessors_of(plan.device.index);
  const std::int64_t parts =
      std::min({kMost, places / std::max<std::int64_t>(tiles, 1), keys / (kTile * kFewestTiles)});
  return parts < kFewest ? 1 : static_cast<int>(parts);
}

struct ForwardScratch {
  States states;
  int parts = 1;

  void lay_out(const Plan& plan, ScratchLayout& scratch) {
    if (no_queries(plan)) return;
    parts = parts_of(plan);
    if (plan.layers == 1 && parts == 1) return;
    const std::int64_t rows =
        plan.layers > 1 ? plan.B * plan.H * layer_rows(plan).count : parts * query_rows(plan);
    scratch(states.acc, rows * LayerRows::pitch(plan.Dv));
    scratch(states.m, rows);
    scratch(states.l, rows);
  }
};

// Whether gradients of q, k and v are made together, if all are wanted: with atomics, and tiles that need much shared memory.
inline bool in_one_pass(const Plan& plan) {
  return !plan.deterministic && plan.dtype != DType::kF32 && plan.D <= 128 && plan.Dv <= 128 &&
         has_much_shared(plan.device.index);
}

struct BackwardScratch {
  float* delta = nullptr;
  ForwardScratch forward;  // where every layer has a delta of its own
  // In one pass: sums in fp32, of the rows of layers where there are several; and GradientArgs::not_finite.
  float* dq = nullptr;
  int* not_finite = nullptr;
  // Of layers: the rows of dq, and once those are summed (or in one pass) of dk, and of dv.
  float *of_layers = nullptr, *dv_of_layers = nullptr;
  // Sums in fp32 over heads that share keys, but not the same ones; and where keys may be of no tile.
  float *dk = nullptr, *dv = nullptr;

  void lay_out(const Plan& plan, ScratchLayout& scratch) {
    if (no_queries(plan)) return;
    const std::int64_t rows = layer_rows(plan).count;
    const bool own_deltas = plan.stop_alpha_gradient && plan.layers > 1;
    scratch(delta, own_deltas ? plan.B * plan.H * rows : query_rows(plan));
    if (own_deltas) forward.lay_out(plan, scratch);
    if (plan.layers > 1) scratch(of_layers, plan.B * plan.H * rows * LayerRows::pitch(plan.D));
    if (no_keys(plan)) return;
    if (in_one_pass(plan)) {
      scratch(dq, dq_count(plan));
      scratch(not_finite, 1);
    }
    if (!is_dilated(plan)) return;
    if (plan.layers > 1) {
      scratch(dv_of_layers, plan.B * plan.Hkv * rows * LayerRows::pitch(plan.Dv));
    }
    if (plan.layers == 1 || plan.heads_per_key() > 1) {
      scratch(dk, key_rows(plan) * LayerRows::pitch(plan.D));
      scratch(dv, key_rows(plan) * LayerRows::pitch(plan.Dv));
    }
  }
  static std::int64_t dq_count(const Plan& plan) {
    const std::int64_t rows =
        plan.layers > 1 ? plan.B * plan.H * layer_rows(plan).count : query_rows(plan);
    return rows * LayerRows::pitch(plan.D);
  }
  Deltas deltas(const Plan& plan) const {
    const bool apart = plan.part && plan.part->delta_rows > 0;
    return {delta, forward.states.acc != nullptr, apart ? plan.part->delta_rows : plan.Tq};
  }
};

}  // namespace annulus::attention::cuda
