// The general path of ring RNN on CUDA, forward: any shape and strides, f64 and f32 products.
//
// All T steps are one cooperative launch. The blocks that share a tile of samples form a group and
// wait for each other between two steps; groups know nothing of one another. Where the device has no
// cooperative launch, or refuses this one, each stage is a launch of the same kernel: the same bits.

#include <algorithm>

#include "annulus/core/dispatch.h"
#include "annulus/ring_rnn/cuda/readout.cuh"
#include "annulus/ring_rnn/cuda/simt/launch.cuh"

namespace annulus::ring_rnn::cuda::general {

namespace {

// Angle and amplitude of r_t, whose partial sums the stage of step t left.
template <class T, class TileT>
__device__ void readout_stage(const Args& a, const StepScratch<compute_t<T>>& w,
                              std::int64_t row_tile, std::int64_t t) {
  using Real = compute_t<T>;
  const std::int64_t half = a.B * sum_groups(a.N);
  const Real* X = w.vectors + 2 * (t & 1) * half;
  const std::int64_t b0 = row_tile * TileT::kRows;
  // The thread that has the one sum of a sample has the other, too.
  Real x = 0;
  add_groups<TileT>(
      a.B, a.N, b0, [&](std::int64_t g) { return __ldcg(X + g); }, [&](int, Real v) { x = v; });
  add_groups<TileT>(
      a.B, a.N, b0, [&](std::int64_t g) { return __ldcg(X + half + g); },
      [&](int r, Real y) {
        put<Real>(a.angle, angle_of(x, y), b0 + r, t);
        put<Real>(a.amplitude, hypot(x, y), b0 + r, t);
      });
}

// Stages first..last of -1 (the state before step 0), 0..T-1 (the steps) and T (the last readout).
template <class T, class TileT>
__global__ void __launch_bounds__(kTileThreads, 1)
    forward_kernel(const Stages stages, const __grid_constant__ Args a,
                   const __grid_constant__ StepScratch<compute_t<T>> w, unsigned* counters) {
  const GroupedGrid& grid = stages.grid;
  __shared__ StageShared<TileT> shared;
  const unsigned group = blockIdx.x / grid.members;
  const unsigned member = blockIdx.x % grid.members;
  const std::int64_t row_tiles = (a.B + TileT::kRows - 1) / TileT::kRows;
  const std::int64_t column_tiles = (a.N + TileT::kColumns - 1) / TileT::kColumns;
  const bool prepares = can_prepare<TileT>(a, (column_tiles - member - 1) / grid.members + 1);
  GroupBarrier barrier(counters + group * GroupBarrier::kStride, grid.members);
  for (std::int64_t row = group; row < row_tiles; row += grid.groups) {
    Prepared prepared;
    for (std::int64_t t = stages.first; t <= stages.last; ++t) {
      if (w.vectors != nullptr && t > 0 && member == 0) readout_stage<T, TileT>(a, w, row, t - 1);
      for (std::int64_t column = member; column < column_tiles && t < a.T; column += grid.members) {
        if (t < 0) {
          begin_stage<T, TileT, false>(a, w, row, column, 0);
        } else {
          forward_stage<T, TileT, false>(a, w, shared, prepared, row, column, t, nullptr);
        }
      }
      if (t == stages.last) break;
      if (prepares && t + 1 < a.T) {
        prepared.active = load_channels<T>(a, shared, row * TileT::kRows, t + 1, 0, false, false);
      }
      barrier.wait();
    }
  }
}

// Counters of the barriers to 0, and the readout's directions.
template <class Real>
__global__ void prepare_kernel(unsigned* counters, std::int64_t count, Real* table,
                               std::int64_t N) {
  const std::int64_t stride = static_cast<std::int64_t>(gridDim.x) * blockDim.x;
  const std::int64_t start = blockIdx.x * static_cast<std::int64_t>(blockDim.x) + threadIdx.x;
  for (std::int64_t i = start; i < count; i += stride) counters[i] = 0;
  for (std::int64_t i = start; i < N && table != nullptr; i += stride) {
    const Direction<Real> d = direction<Real>(i, N);
    table[2 * i] = d.cos;
    table[2 * i + 1] = d.sin;
  }
}

// Wo, then Wa, dense, in their own type.
template <class T>
__global__ void pack_kernel(const __grid_constant__ Args a, T* packed) {
  const std::int64_t n = (a.K + 1) * a.N * a.N;
  const std::int64_t stride = static_cast<std::int64_t>(gridDim.x) * blockDim.x;
  for (std::int64_t e = blockIdx.x * static_cast<std::int64_t>(blockDim.x) + threadIdx.x; e < n;
       e += stride) {
    const std::int64_t j = e % a.N;
    const std::int64_t i = e / a.N % a.N;
    const Weights<T> m(a, e / a.N / a.N);
    packed[e] = m.data[i * m.row + j * m.column];
  }
}

// ---------------------------------------------------------------------------------------------------
// Host

template <class Real>
struct ForwardScratch {
  StepScratch<Real> step;
  Real* table = nullptr;
  unsigned* counters = nullptr;
};

template <class Real>
ForwardScratch<Real> lay_out(const Plan& plan, ScratchLayout& scratch) {
  ForwardScratch<Real> w;
  if (plan.B == 0 || plan.N == 0) return w;
  const std::int64_t groups = sum_groups(plan.N);
  scratch(w.counters, counter_words(plan));
  scratch(w.step.state, 2 * plan.B * plan.N);
  scratch(w.step.sums, 2 * plan.B * groups);
  if (plan.out.angle.defined() && plan.T > 0) {
    w.step.vectors = scratch.take<Real>(4 * plan.B * groups);
    w.step.table = w.table = scratch.take<Real>(2 * plan.N);
  }
  return w;
}

template <class T>
void run(const Plan& plan, Context& context) {
  using Real = compute_t<T>;
  Args a = make_args(plan);
  if (plan.in.packed.defined()) {
    a.Wo.data = plan.in.packed.data;
    a.Wa.data = static_cast<T*>(plan.in.packed.data) + plan.N * plan.N;
    a.Wo.stride[0] = a.Wa.stride[1] = plan.N;
    a.Wo.stride[1] = a.Wa.stride[2] = 1;
    a.Wa.stride[0] = plan.N * plan.N;
  }
  ForwardScratch<Real> w;
  const Workspace block(context, plan.op, plan.device,
                        [&](ScratchLayout& s) { w = lay_out<Real>(plan, s); });
  w.step.whole_rows = plan.N % 4 == 0;
  w.step.whole_weights = whole_weights<T>(a);
  auto* stream = static_cast<cudaStream_t>(context.stream);
  launch_prepare(plan.op, w.counters, counter_words(plan), w.table, plan.N, stream);
  const std::int64_t last = w.table != nullptr ? plan.T : plan.T - 1;
  visit_tile<Real>(large_tiles(plan.B, plan.N), [&]<class TileT>() {
    launch_stages(plan.op, "forward_kernel", forward_kernel<T, TileT>, kTileThreads,
                  ceil_div(plan.B, TileT::kRows), ceil_div(plan.N, TileT::kColumns), kMostGroups,
                  -1, last, plan.stepwise, stream, a, w.step, w.counters);
  });
}

}  // namespace

template <class Real>
void launch_prepare(const char* op, unsigned* counters, std::int64_t words, Real* table,
                    std::int64_t N, cudaStream_t stream) {
  const unsigned blocks = blocks_for(std::max(words, table != nullptr ? N : 0));
  prepare_kernel<Real><<<blocks, kTileThreads, 0, stream>>>(counters, words, table, N);
  check_launch(op, "prepare_kernel");
}
template void launch_prepare<float>(const char*, unsigned*, std::int64_t, float*, std::int64_t,
                                    cudaStream_t);
template void launch_prepare<double>(const char*, unsigned*, std::int64_t, double*, std::int64_t,
                                     cudaStream_t);

std::size_t forward_workspace(const Plan& plan) {
  return scratch_bytes([&](ScratchLayout& s) {
    plan.dtype == DType::kF64 ? (void)lay_out<double>(plan, s) : (void)lay_out<float>(plan, s);
  });
}

void forward(const Plan& plan, Context& context) {
  if (plan.B == 0) return;
  if (plan.N == 0) {
    if (!plan.out.angle.defined() || plan.T == 0) return;
    ReadoutPlan readout;  // of nothing: zeros
    readout.op = plan.op;
    readout.device = plan.device;
    readout.B = plan.B;
    readout.T = plan.T;
    readout.states = plan.out.out;
    readout.angle = plan.out.angle;
    readout.amplitude = plan.out.amplitude;
    readout_forward(readout, context);
    return;
  }
  visit_floating(plan.dtype, [&]<class T>() { run<T>(plan, context); });
}

std::size_t pack_bytes(const Plan& plan) {
  return static_cast<std::size_t>((plan.K + 1) * plan.N * plan.N * size_of(plan.dtype));
}

void pack(const Plan& plan, Context& context) {
  if (plan.N == 0) return;
  const Args a = make_args(plan);
  auto* stream = static_cast<cudaStream_t>(context.stream);
  visit_floating(plan.dtype, [&]<class T>() {
    pack_kernel<T><<<blocks_for((plan.K + 1) * plan.N * plan.N), kTileThreads, 0, stream>>>(
        a, static_cast<T*>(plan.in.packed.data));
  });
  check_launch(plan.op, "pack_kernel");
}

Support support() {
  return kernel_support(forward_kernel<float, LargeTile<float>>, build_info().cuda);
}

}  // namespace annulus::ring_rnn::cuda::general
