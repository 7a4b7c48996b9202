// Host side of the tensor-core path: what is launched, in which order.
#include "annulus/ring_rnn/cuda/tensor.cuh"

#include <algorithm>

#include "annulus/cuda/check.h"
#include "annulus/cuda/one_graph.h"
#include "annulus/ring_rnn/cuda/scratch.cuh"

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

void run_loop(const ForwardPass& pass, const GridOperands& x, const Tiling& tiling,
              const Launch& launch) {
  std::visit(Overloaded{[&](const ClusterTiling& t) { run_forward(pass, t, launch); },
                        [&](const auto& t) { run_forward(pass, x, t, launch); }},
             tiling.kernels);
}

void run_loop(const BackwardPass& pass, const GridOperands& x, const Tiling& tiling,
              const Launch& launch) {
  std::visit(Overloaded{[&](const ClusterTiling& t) { run_backward(pass, t, launch); },
                        [&](const auto& t) {
                          pass.dots != nullptr ? run_backward_dots(pass, x, t, launch)
                                               : run_backward(pass, x, t, launch);
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
    run_loop(again, b.again.x, forward_tiling, launch);
    clear_counters(tiling, b.x, launch);
    run_loop(b.pass, b.x, tiling, launch);
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
  run_loop(f.pass, f.x, tiling, launch);
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
    run_loop(b.pass, b.x, tiling, launch);
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
