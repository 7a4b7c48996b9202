#include "annulus/ring_rnn/cuda/scratch.cuh"

#include <algorithm>

#include "annulus/core/checked.h"
#include "annulus/cuda/persistent.cuh"
#include "annulus/ring_rnn/cuda/sm90/row_tiles.cuh"

namespace annulus::ring_rnn::cuda::tensor {

namespace {

Pass pass_of(const Plan& plan, const Layout& layout) {
  return {.args = make_args(plan), .layout = layout, .dtype = plan.dtype, .last = plan.T};
}

GridOperands take_operands(ScratchLayout& scratch, const Plan& plan, const Tiling& tiling) {
  GridOperands x;
  const Layout& layout = tiling.layout;
  const StepTiling& step = *tiling.step();
  // Two buffers of 16-bit numbers.
  const std::int64_t words = layout.terms * layout.padded_b * layout.padded_n;
  const auto* sm90 = std::get_if<Sm90Tiling>(&tiling.kernels);
  if (sm90 != nullptr && sm90->x_buffers > 0) {
    scratch(x.x_rows, 2 * words);
  } else {
    scratch(x.x_fragments, words);
  }
  if (layout.f16) scratch(x.x_scales, 2 * layout.tiles * layout.padded_b);
  scratch(x.row_sums, 2 * layout.tiles * layout.padded_b);
  scratch(x.partial, step.items() * step.rows * kTile);
  scratch(x.counters, counters_of(step));
  x.together = !plan.stepwise;
  return x;
}

Coefficients take_coefficients(ScratchLayout& scratch, const Tiling& tiling) {
  Coefficients c;
  const Layout& layout = tiling.layout;
  const std::int64_t masks = layout.T * tiling.batch_tiles() * layout.mask_words;
  const std::int64_t count = layout.T * layout.channels * layout.padded_b;
  scratch(c.c, count);
  scratch(c.active, masks);
  const auto* sm90 = std::get_if<Sm90Tiling>(&tiling.kernels);
  if (sm90 != nullptr && sm90->factor_bytes == kPairFactorBytes) {
    scratch(c.scales, count);
    scratch(c.two_terms, masks);
  }
  return c;
}

}  // namespace

std::int64_t counters_of(const StepTiling& tiling) {
  return static_cast<std::int64_t>(tiling.batch_tiles) * (tiling.tiles + 1) * GroupBarrier::kStride;
}

ForwardScratch take_forward(ScratchLayout& scratch, const Plan& plan, const Tiling& tiling) {
  ForwardScratch f;
  const Layout& layout = tiling.layout;
  const auto* cluster = std::get_if<ClusterTiling>(&tiling.kernels);
  static_cast<Pass&>(f.pass) = pass_of(plan, layout);
  if (plan.in.packed.defined()) {
    f.pass.weights = static_cast<const uint4*>(plan.in.packed.data);
  } else if (cluster == nullptr || !cluster->holds_all_weights(layout)) {
    scratch(f.weights, weight_bytes(layout) / 16);
    f.pass.weights = f.weights;
  }
  if (cluster == nullptr) {  // clusters read A itself, and nothing of a step leaves them
    f.pass.coefficients = take_coefficients(scratch, tiling);
    f.x = take_operands(scratch, plan, tiling);
    scratch(f.pass.s, layout.padded_b * layout.padded_n);
  }
  if (plan.out.angle.defined()) {
    scratch(f.pass.vectors, layout.T * layout.row_parts * layout.padded_b * 2);
  }
  return f;
}

BackwardScratch take_backward(ScratchLayout& scratch, const Plan& plan, const Tiling& tiling,
                              const Tiling& forward_tiling, const Gpu& gpu) {
  BackwardScratch b;
  BackwardPass& pass = b.pass;
  WeightGradients& w = b.gradients;
  const Layout& layout = tiling.layout;
  const RingRnnGradients& grad = plan.grad;
  const std::int64_t plane = layout.padded_b * layout.padded_n;
  const bool dots = needs_dots(plan);
  static_cast<Pass&>(pass) = pass_of(plan, layout);
  pass.own_reset_state = plan.in.reset_state.defined();
  scratch(b.weights, weight_bytes(layout) / 16);
  pass.weights = b.weights;
  pass.coefficients = take_coefficients(scratch, tiling);
  if (!tiling.in_clusters()) b.x = take_operands(scratch, plan, tiling);
  scratch(pass.l, plane);  // in clusters between launches alone
  if (dots) {
    scratch(pass.dots,
            layout.T * tiling.dot_parts().of_step(layout) * layout.channels * layout.padded_b);
  }
  if (dots || plan.needs_dweights()) scratch(b.states, layout.state_terms * layout.T * plane);
  pass.states = b.states;
  if (plan.needs_dweights() || (dots && tiling.in_clusters())) scratch(pass.g, g_bytes(layout));
  w.args = pass.args;
  w.layout = layout;
  w.dtype = plan.dtype;
  w.states = b.states;
  if (plan.needs_dweights()) {
    if (layout.row_tiles) scratch(b.tile_c, tile_c_words(layout));
    scratch(b.active_rows, layout.T * (layout.padded_b / kRowTile) * layout.mask_words);
    w.active_rows = b.active_rows;
    w.first_channel = grad.dWo.defined() ? 0 : 1;
    w.last_channel = grad.dWa.defined() ? layout.channels : 1;
    w.sides = static_cast<int>(ceil_div(plan.N, kSide));
    w.depth_splits = depth_splits(layout, gpu);
    const std::int64_t side = round_up(plan.N, kSide);
    if (w.depth_splits > 1) scratch(w.parts, w.depth_splits * layout.channels * side * side);
  }
  scratch(b.slice_sums, 3 * Gather::kSlices);
  scratch(b.slice_counters, 3);
  if (grad.dalpha.defined()) scratch(pass.alpha_sums, plane);
  if (plan.in.reset.defined()) scratch(pass.reset_sums, plane);
  if (grad.dJ0.defined()) {
    scratch(pass.g_sums, layout.T * layout.row_parts * layout.padded_b);
    scratch(pass.s_sums, layout.T * layout.row_parts * layout.padded_b);
  }
  if (plan.checkpoint > 0) {
    ForwardPass& again = (b.again = take_forward(scratch, plan, forward_tiling)).pass;
    again.vectors = nullptr;  // y is all that is asked for
    scratch(again.y_again, std::min(plan.checkpoint, plan.T) * plan.B * plan.N);
    pass.y = again.y_again;
    pass.y_stride[0] = plan.B * plan.N;
    pass.y_stride[1] = plan.N;
    pass.y_stride[2] = 1;
  } else {
    pass.y = static_cast<const float*>(plan.out.saved.data);
    std::copy_n(pass.args.saved.stride, 3, pass.y_stride);
  }
  return b;
}

}  // namespace annulus::ring_rnn::cuda::tensor
