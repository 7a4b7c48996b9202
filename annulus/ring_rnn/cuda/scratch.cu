#include "annulus/ring_rnn/cuda/scratch.cuh"

#include <algorithm>

#include "annulus/core/checked.h"
#include "annulus/cuda/persistent.cuh"
#include "annulus/ring_rnn/cuda/sm90/row_tiles.cuh"

namespace annulus::ring_rnn::cuda::tensor {

namespace {

GridOperands take_operands(ScratchLayout& scratch, const Layout& layout, const Tiling& tiling) {
  GridOperands x;
  const StepTiling& step = *tiling.step();
  // Two buffers of 16-bit numbers.
  const std::int64_t words = layout.terms * layout.padded_b * layout.padded_n;
  const auto* sm90 = std::get_if<Sm90Tiling>(&tiling.kernels);
  if (sm90 != nullptr && sm90->x_buffers > 0) {
    x.x_rows = scratch.take<std::uint16_t>(2 * words);
  } else {
    x.x_fragments = scratch.take<std::uint32_t>(words);
  }
  if (layout.f16) x.x_scales = scratch.take<float>(2 * layout.tiles * layout.padded_b);
  x.row_sums = scratch.take<float>(2 * layout.tiles * layout.padded_b);
  x.partial = scratch.take<float>(step.items() * step.rows * kTile);
  x.counters = scratch.take<unsigned>(counters_of(step));
  return x;
}

Coefficients take_coefficients(ScratchLayout& scratch, const Layout& layout, const Tiling& tiling,
                               int batch_tiles) {
  Coefficients c;
  const std::int64_t masks = layout.T * batch_tiles * layout.mask_words;
  c.c = scratch.take<float>(layout.T * layout.channels * layout.padded_b);
  c.active = scratch.take<std::uint32_t>(masks);
  const auto* sm90 = std::get_if<Sm90Tiling>(&tiling.kernels);
  if (sm90 != nullptr && sm90->factor_bytes == kPairFactorBytes) {
    c.scales = scratch.take<Scale>(layout.T * layout.channels * layout.padded_b);
    c.two_terms = scratch.take<std::uint32_t>(masks);
  }
  return c;
}

}  // namespace

std::int64_t counters_of(const StepTiling& tiling) {
  return static_cast<std::int64_t>(tiling.batch_tiles) * (tiling.tiles + 1) *
         annulus::cuda::GroupBarrier::kStride;
}

ForwardScratch take_forward(ScratchLayout& scratch, const Plan& plan, const Tiling& tiling) {
  ForwardScratch f;
  const Layout& layout = tiling.layout;
  const auto* cluster = std::get_if<ClusterTiling>(&tiling.kernels);
  const bool holds_all = cluster != nullptr && cluster->holds_all_weights(layout);
  if (!plan.in.packed.defined() && !holds_all) {
    f.weights = scratch.take<uint4>(weight_bytes(layout) / 16);
  }
  if (cluster == nullptr) {  // clusters read A itself, and nothing of a step leaves them
    f.coefficients = take_coefficients(scratch, layout, tiling, tiling.batch_tiles());
    f.x = take_operands(scratch, layout, tiling);
    f.s = scratch.take<float>(layout.padded_b * layout.padded_n);
  }
  if (plan.out.angle.defined()) {
    f.vectors = scratch.take<float>(layout.T * layout.row_parts * layout.padded_b * 2);
  }
  return f;
}

BackwardScratch take_backward(ScratchLayout& scratch, const Plan& plan, const Tiling& tiling,
                              const Tiling& forward_tiling, const Gpu& gpu) {
  BackwardScratch b;
  const Layout& layout = tiling.layout;
  const RingRnnGradients& grad = plan.grad;
  const std::int64_t plane = layout.padded_b * layout.padded_n;
  const bool dots = needs_dots(plan);
  b.weights = scratch.take<uint4>(weight_bytes(layout) / 16);
  b.coefficients = take_coefficients(scratch, layout, tiling, tiling.batch_tiles());
  if (!tiling.in_clusters()) b.x = take_operands(scratch, layout, tiling);
  b.l = scratch.take<float>(plane);  // in clusters between launches alone
  if (dots) {
    b.sums.dots = scratch.take<float>(layout.T * tiling.dot_parts().of_step(layout) *
                                      layout.channels * layout.padded_b);
  }
  if (dots || plan.needs_dweights()) {
    b.states = scratch.take<std::uint16_t>(layout.state_terms * layout.T * plane);
  }
  if (plan.needs_dweights() || (dots && tiling.in_clusters())) {
    b.g = scratch.take<std::byte>(g_bytes(layout));
  }
  if (plan.needs_dweights()) {
    if (layout.row_tiles) b.tile_c = scratch.take<std::uint32_t>(tile_c_words(layout));
    b.active_rows =
        scratch.take<std::uint32_t>(layout.T * (layout.padded_b / kRowTile) * layout.mask_words);
    b.depth_splits = depth_splits(layout, gpu);
    const std::int64_t side = round_up(plan.N, kSide);
    if (b.depth_splits > 1) {
      b.parts = scratch.take<float>(b.depth_splits * layout.channels * side * side);
    }
  }
  b.slice_sums = scratch.take<double>(3 * Gather::kSlices);
  b.slice_counters = scratch.take<unsigned>(3);
  if (grad.dalpha.defined()) b.sums.alpha_sums = scratch.take<float>(plane);
  if (plan.in.reset.defined()) b.reset_sums = scratch.take<float>(plane);
  if (grad.dJ0.defined()) {
    b.sums.g_sums = scratch.take<float>(layout.T * layout.row_parts * layout.padded_b);
    b.sums.s_sums = scratch.take<float>(layout.T * layout.row_parts * layout.padded_b);
  }
  if (plan.checkpoint > 0) {
    b.again = take_forward(scratch, plan, forward_tiling);
    b.y = scratch.take<float>(std::min(plan.checkpoint, plan.T) * plan.B * plan.N);
  }
  return b;
}

}  // namespace annulus::ring_rnn::cuda::tensor
