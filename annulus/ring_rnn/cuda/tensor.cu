// Host side of the tensor-core path: its scratch memory, and what is launched, in which order.
#include "annulus/ring_rnn/cuda/tensor.cuh"

#include <algorithm>

#include "annulus/core/checked.h"
#include "annulus/core/dispatch.h"
#include "annulus/core/scratch.h"
#include "annulus/cuda/check.h"
#include "annulus/cuda/one_graph.h"
#include "annulus/cuda/persistent.cuh"
#include "annulus/ring_rnn/cuda/backward_epilogue.cuh"
#include "annulus/ring_rnn/cuda/forward_epilogue.cuh"
#include "annulus/ring_rnn/cuda/sm90/row_tiles.cuh"

namespace annulus::ring_rnn::cuda::tensor {

namespace {

int attribute(cudaDeviceAttr which, const Plan& plan) {
  int value = 0;
  ANNULUS_CUDA_CHECK(plan.op, cudaDeviceGetAttribute(&value, which, plan.device.index));
  return value;
}

Problem problem_of(const Plan& plan, bool dots) {
  const bool f16 = plan.precision == Precision::kF16;
  return {plan.op, plan.B, plan.T, plan.K, plan.N, terms_of(plan.precision), f16, dots};
}

// What packing the weights asks for, and the rest.
Gpu gpu_of(const Plan& plan, bool clusters = true) {
  Gpu gpu;
  // Tests ask for the portable kernels where the GPU has better.
  gpu.compute_major = plan.portable ? 8 : attribute(cudaDevAttrComputeCapabilityMajor, plan);
  gpu.multiprocessors = attribute(cudaDevAttrMultiProcessorCount, plan);
  gpu.shared_bytes =
      static_cast<std::size_t>(attribute(cudaDevAttrMaxSharedMemoryPerMultiprocessor, plan));
  const int blocks = clusters ? cluster_blocks(problem_of(plan, false), gpu) : 0;
  if (blocks > 0) gpu.clusters = clusters_at_once(blocks, gpu.shared_bytes - 1024, plan.op);
  return gpu;
}

// ---- what the kernels of a call work on, with its arrays in the call's scratch memory

// Pointers are null where a call needs no such array.
struct ForwardScratch {
  ForwardPass pass;
  GridOperands x;
  uint4* weights = nullptr;  // to be packed
};

struct BackwardScratch {
  BackwardPass pass;
  GridOperands x;
  uint4* weights = nullptr;
  std::uint16_t* states = nullptr;
  std::uint32_t *active_rows = nullptr, *tile_c = nullptr;
  WeightGradients gradients;
  double* slice_sums = nullptr;
  unsigned* slice_counters = nullptr;
  ForwardScratch again;  // with checkpoints: for y of the steps between two of them
};

// Does a backward need s . u_k? Clusters leave them to the launch after the loop.
bool needs_dots(const Plan& plan) { return plan.grad.dA.defined() || plan.grad.dJ1.defined(); }

// Barrier counters: one for the blocks of the same samples, and one a tile for its splits.
std::int64_t counters_of(const StepTiling& tiling) {
  return static_cast<std::int64_t>(tiling.batch_tiles) * (tiling.tiles + 1) * GroupBarrier::kStride;
}

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

// ---- launches

PackWeights packing(const Layout& layout, uint4* to, bool transposed) {
  return {to, layout.row_tiles, transposed,
          layout.padded_n / (layout.row_tiles ? kHopperDepth : depth_of(layout.terms))};
}

MakeCoefficients coefficients_of(const Tiling& tiling, const Coefficients& to) {
  return {.to = to, .rows = tiling.rows, .batch_tiles = tiling.batch_tiles()};
}

ClearCounters clearing(const Tiling& tiling, const GridOperands& x) {
  return {x.counters, x.counters == nullptr ? 0 : counters_of(*tiling.step())};
}

void clear_counters(const Tiling& tiling, const GridOperands& x, const Launch& launch) {
  const ClearCounters clear = clearing(tiling, x);
  if (clear.count == 0) return;
  ANNULUS_CUDA_CHECK(
      launch.op,
      cudaMemsetAsync(clear.counters, 0, static_cast<std::size_t>(clear.count) * sizeof(unsigned),
                      launch.stream));
}

// Clusters need nothing prepared where they hold all weights, or find them packed.
void prepare_forward(const ForwardScratch& f, const Tiling& tiling, const Launch& launch) {
  if (f.weights == nullptr && tiling.in_clusters()) return;
  Prepare p;
  p.args = f.pass.args;
  p.layout = tiling.layout;
  p.pack = packing(tiling.layout, f.weights, false);
  p.coefficients = coefficients_of(tiling, f.pass.coefficients);
  p.clear = clearing(tiling, f.x);
  run_prepare(p, f.pass.dtype, launch);
}

template <class... F>
struct Overloaded : F... {
  using F::operator()...;
};

void run_steps(const ForwardPass& pass, const GridOperands& x, const Tiling& tiling,
               const Launch& launch) {
  std::visit(Overloaded{[&](const ClusterTiling& t) { run_forward(pass, t, launch); },
                        [&]<class T>(const T& t) {
                          run_loop(GridLoop<Forward, T>{pass, x, t}, launch);
                        }},
             tiling.kernels);
}

void run_steps(const BackwardPass& pass, const GridOperands& x, const Tiling& tiling,
               const Launch& launch) {
  std::visit(Overloaded{[&](const ClusterTiling& t) { run_backward(pass, t, launch); },
                        [&]<class T>(const T& t) {
                          visit_bool(pass.dots != nullptr, [&]<bool kDots>() {
                            run_loop(GridLoop<Backward<kDots>, T>{pass, x, t}, launch);
                          });
                        }},
             tiling.kernels);
}

// Both loops by turns, from the last kept state to the first: forward again for y, which is all that
// loop writes, then backward.
void backward_from_checkpoints(const Plan& plan, BackwardScratch b, const Tiling& tiling,
                               const Tiling& forward_tiling, const Launch& launch) {
  ForwardPass& again = b.again.pass;
  const Ref<3>& saved = again.args.saved;
  prepare_forward(b.again, forward_tiling, launch);
  for (std::int64_t i = plan.saved_steps(); i-- > 0;) {
    const std::int64_t first = i * plan.checkpoint;
    const std::int64_t last = std::min(first + plan.checkpoint, plan.T);
    again.restart.data = static_cast<float*>(saved.data) + i * saved.stride[0];
    again.restart.stride[0] = saved.stride[1];
    again.restart.stride[1] = saved.stride[2];
    again.again_first = again.first = first;
    b.pass.first = b.pass.leave_at = b.pass.y_first = first;
    again.last = b.pass.last = last;
    clear_counters(forward_tiling, b.again.x, launch);
    run_steps(again, b.again.x, forward_tiling, launch);
    clear_counters(tiling, b.x, launch);
    run_steps(b.pass, b.x, tiling, launch);
  }
}

}  // namespace

int terms_of(Precision precision) {
  if (precision == Precision::kTf32) return 2;  // see why_not in dispatch.cu
  const PrecisionFacts& facts = facts_of(precision);
  return size_of(facts.element) == 2 ? facts.terms : 0;
}

std::size_t pack_bytes(const Plan& plan) {
  return static_cast<std::size_t>(
      weight_bytes(weights_layout(problem_of(plan, false), gpu_of(plan, false))));
}

void pack(const Plan& plan, Context& context) {
  Prepare p;
  p.args = make_args(plan);
  p.layout = weights_layout(problem_of(plan, false), gpu_of(plan, false));
  p.pack = packing(p.layout, static_cast<uint4*>(plan.in.packed.data), false);
  run_prepare(p, plan.dtype, {plan.op, static_cast<cudaStream_t>(context.stream)});
}

std::size_t forward_workspace(const Plan& plan) {
  const Tiling tiling = tile(problem_of(plan, false), gpu_of(plan));
  return scratch_bytes([&](ScratchLayout& scratch) { (void)take_forward(scratch, plan, tiling); });
}

std::size_t backward_workspace(const Plan& plan) {
  const Gpu gpu = gpu_of(plan);
  const Tiling tiling = tile(problem_of(plan, needs_dots(plan)), gpu);
  const Tiling forward_tiling = tile(problem_of(plan, false), gpu);
  return scratch_bytes([&](ScratchLayout& scratch) {
    (void)take_backward(scratch, plan, tiling, forward_tiling, gpu);
  });
}

void forward(const Plan& plan, Context& context) {
  const Launch launch{plan.op, static_cast<cudaStream_t>(context.stream)};
  const Tiling tiling = tile(problem_of(plan, false), gpu_of(plan));
  ForwardScratch f;
  const Workspace workspace(context, plan.op, plan.device, [&](ScratchLayout& scratch) {
    f = take_forward(scratch, plan, tiling);
  });
  prepare_forward(f, tiling, launch);
  run_steps(f.pass, f.x, tiling, launch);
  if (f.pass.vectors != nullptr) {
    const Args& args = f.pass.args;
    run_readout({tiling.layout, f.pass.vectors, args.angle, args.amplitude}, launch);
  }
  context.ran_on(plan.op, DeviceType::kCUDA, tiling.name());
}

void backward(const Plan& plan, Context& context) {
  const Launch launch{plan.op, static_cast<cudaStream_t>(context.stream)};
  const bool dots = needs_dots(plan);
  const Gpu gpu = gpu_of(plan);
  const Tiling tiling = tile(problem_of(plan, dots), gpu);
  const Tiling forward_tiling = tile(problem_of(plan, false), gpu);
  BackwardScratch b;
  const Workspace workspace(context, plan.op, plan.device, [&](ScratchLayout& scratch) {
    b = take_backward(scratch, plan, tiling, forward_tiling, gpu);
  });

  Prepare p;
  p.args = b.pass.args;
  p.layout = tiling.layout;
  p.pack = packing(tiling.layout, b.weights, true);
  p.coefficients = coefficients_of(tiling, b.pass.coefficients);
  p.coefficients.active_rows = b.active_rows;
  p.coefficients.tile_c = b.tile_c;
  p.coefficients.all_channels = dots;
  p.states = b.states;
  p.clear = clearing(tiling, b.x);
  p.clear.slice_counters = b.slice_counters;
  if (plan.checkpoint == 0) {
    run_prepare(p, plan.dtype, launch);
    run_steps(b.pass, b.x, tiling, launch);
  } else {
    record_as_one_node(plan.op, launch.stream, [&](cudaStream_t recorded) {
      run_prepare(p, plan.dtype, {plan.op, recorded});
      backward_from_checkpoints(plan, b, tiling, forward_tiling, {plan.op, recorded});
    });
  }

  const WeightGradients& w = b.gradients;
  if (tiling.layout.row_tiles) {
    Sm90WeightGradients gradients{w, b.pass.g, b.tile_c};
    if (dots && tiling.in_clusters()) {
      gradients.chunks = tiling.layout.tiles;
      gradients.dots = b.pass.dots;
      gradients.weights = b.weights;
    }
    run_dweights(gradients, gpu.multiprocessors, launch);
  } else {
    run_dweights({w, reinterpret_cast<const float*>(b.pass.g), b.pass.coefficients.c}, launch);
  }
  if (dots || plan.grad.dJ0.defined() || plan.grad.dalpha.defined() || w.depth_splits > 1) {
    run_gather({b.pass, w, tiling.dot_parts(), b.slice_sums, b.slice_counters}, launch);
  }
  context.ran_on(plan.op, DeviceType::kCUDA, tiling.name());
}

}  // namespace annulus::ring_rnn::cuda::tensor
