// The readout of ring RNN on CUDA: two dot products a state, and their gradient.
//
// A warp takes four states at a time, lane l the neurons l, l + 32, ... The directions of up to
// kChunk neurons lie in shared memory, made once a block where that covers the ring, else chunk by
// chunk for each 32 states.

#include <algorithm>

#include "annulus/core/checked.h"
#include "annulus/core/dispatch.h"
#include "annulus/cuda/check.h"
#include "annulus/cuda/reduce.cuh"
#include "annulus/ring_rnn/cuda/readout.cuh"

namespace annulus::ring_rnn::cuda {

namespace {

constexpr int kReadoutThreads = 256;
constexpr int kWarpStates = 4;
constexpr int kBlockStates = kReadoutThreads / 32 * kWarpStates;

struct ReadoutArgs {
  std::int64_t T, N, states;  // states: B T
  Ref<3> in, out;
  Ref<2> angle, amplitude;
};

template <class Real>
struct Directions {
  static constexpr int kChunk = 16384 / static_cast<int>(sizeof(Direction<Real>));
  Direction<Real> table[kChunk];

  // All threads call this; chunks of a ring that one chunk covers are made once.
  __device__ __forceinline__ void hold(std::int64_t chunk, std::int64_t N, std::int64_t& mine) {
    if (mine == chunk) return;
    __syncthreads();  // the chunk before has been read
    for (std::int64_t i = threadIdx.x; i < kChunk && chunk * kChunk + i < N; i += blockDim.x) {
      table[i] = direction<Real>(chunk * kChunk + i, N);
    }
    __syncthreads();
    mine = chunk;
  }
};

// f(q, i, direction) for each of a warp's states q and each of a lane's neurons i.
template <class Real, class F>
__device__ __forceinline__ void for_each_neuron(Directions<Real>& shared, std::int64_t N,
                                                std::int64_t& held, F&& f) {
  constexpr int kChunk = Directions<Real>::kChunk;
  for (std::int64_t chunk = 0; chunk * kChunk < N; ++chunk) {
    shared.hold(chunk, N, held);
    const std::int64_t left = N - chunk * kChunk;
    const int count = left < kChunk ? static_cast<int>(left) : kChunk;
    for (int i = static_cast<int>(threadIdx.x) % 32; i < count; i += 32) {
      const Direction<Real> d = shared.table[i];
#pragma unroll
      for (int q = 0; q < kWarpStates; ++q) f(q, chunk * kChunk + i, d);
    }
  }
}

// kBackward: `out` gets the gradient; angle and amplitude are those that came in.
template <class T, bool kBackward>
__global__ void __launch_bounds__(kReadoutThreads) readout_kernel(const ReadoutArgs a) {
  using Real = compute_t<T>;
  __shared__ Directions<Real> shared;
  std::int64_t held = -1;
  const int warp = static_cast<int>(threadIdx.x) / 32;
  const int lane = static_cast<int>(threadIdx.x) % 32;
  for (std::int64_t base = static_cast<std::int64_t>(blockIdx.x) * kBlockStates; base < a.states;
       base += static_cast<std::int64_t>(gridDim.x) * kBlockStates) {
    std::int64_t b[kWarpStates];
    std::int64_t t[kWarpStates];
    bool live[kWarpStates];
    Real X[kWarpStates] = {};
    Real Y[kWarpStates] = {};
#pragma unroll
    for (int q = 0; q < kWarpStates; ++q) {
      const std::int64_t state = base + warp * kWarpStates + q;
      live[q] = state < a.states;
      b[q] = state / a.T;
      t[q] = state - b[q] * a.T;
    }
    for_each_neuron(shared, a.N, held, [&](int q, std::int64_t i, const Direction<Real>& d) {
      if (!live[q]) return;
      const Real r = get<T>(a.in, b[q], t[q], i);
      X[q] = fma_of(r, d.cos, X[q]);
      Y[q] = fma_of(r, d.sin, Y[q]);
    });
#pragma unroll
    for (int q = 0; q < kWarpStates; ++q) {
      X[q] = warp_sum(X[q]);
      Y[q] = warp_sum(Y[q]);
      if constexpr (!kBackward) {
        if (lane == 0 && live[q]) {
          put<Real>(a.angle, angle_of(X[q], Y[q]), b[q], t[q]);
          put<Real>(a.amplitude, hypot(X[q], Y[q]), b[q], t[q]);
        }
      }
    }
    if constexpr (kBackward) {
      // d angle = (X dY - Y dX) / length^2,  d amplitude = (X dX + Y dY) / length
#pragma unroll
      for (int q = 0; q < kWarpStates; ++q) {
        const Real length = hypot(X[q], Y[q]);
        Real dX = 0;
        Real dY = 0;
        if (live[q] && length != 0) {
          const Real x = X[q] / length;
          const Real y = Y[q] / length;
          const Real around = a.angle ? get<Real>(a.angle, b[q], t[q]) / length : Real(0);
          const Real along = a.amplitude ? get<Real>(a.amplitude, b[q], t[q]) : Real(0);
          dX = fma_of(along, x, -around * y);
          dY = fma_of(along, y, around * x);
        }
        X[q] = dX;
        Y[q] = dY;
      }
      for_each_neuron(shared, a.N, held, [&](int q, std::int64_t i, const Direction<Real>& d) {
        if (live[q]) put<T>(a.out, fma_of(X[q], d.cos, Y[q] * d.sin), b[q], t[q], i);
      });
    }
  }
}

template <bool kBackward>
void launch(const ReadoutPlan& plan, const TensorView& angle, const TensorView& amplitude,
            Context& context) {
  const std::int64_t states = plan.B * plan.T;
  if (states == 0) return;
  const DeviceGuard guard(plan.device.index);
  const ReadoutArgs a{plan.T, plan.N, states, plan.states, plan.dstates, angle, amplitude};
  const auto blocks =
      static_cast<unsigned>(std::min<std::int64_t>(ceil_div(states, kBlockStates), 1024));
  visit_floating(plan.states.dtype, [&]<class T>() {
    readout_kernel<T, kBackward>
        <<<blocks, kReadoutThreads, 0, static_cast<cudaStream_t>(context.stream)>>>(a);
  });
  check_launch(plan.op, "readout_kernel");
}

}  // namespace

void readout_forward(const ReadoutPlan& plan, Context& context) {
  launch<false>(plan, plan.angle, plan.amplitude, context);
}

void readout_backward(const ReadoutPlan& plan, Context& context) {
  if (plan.N == 0) return;
  launch<true>(plan, plan.dangle, plan.damplitude, context);
}

}  // namespace annulus::ring_rnn::cuda
