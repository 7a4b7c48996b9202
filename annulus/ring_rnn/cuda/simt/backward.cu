// The general path of ring RNN on CUDA, backward: what comes before and after the loop from the last
// step to the first (cuda/simt/backward_loop.cuh), and the sums that are left when it is done. The
// weights' gradients are one product after it (cuda/simt/dweights.cu).

#include <algorithm>

#include "annulus/core/dispatch.h"
#include "annulus/ring_rnn/cuda/simt/backward.cuh"
#include "annulus/ring_rnn/cuda/simt/launch.cuh"

namespace annulus::ring_rnn::cuda::general {

namespace {

// The states of all steps, where y of all of them was saved, to the forward's bits; and the
// barriers' counters to 0.
template <class T>
__global__ void __launch_bounds__(kTileThreads)
    states_kernel(const __grid_constant__ Args a, compute_t<T>* states, unsigned* counters,
                  std::int64_t count) {
  using Real = compute_t<T>;
  const std::int64_t start = blockIdx.x * static_cast<std::int64_t>(kTileThreads) + threadIdx.x;
  const std::int64_t stride = static_cast<std::int64_t>(gridDim.x) * kTileThreads;
  for (std::int64_t e = start; e < count; e += stride) counters[e] = 0;
  const std::int64_t elements = a.B * a.N;
  for (std::int64_t e = start; e < elements; e += stride) {
    const std::int64_t b = e / a.N;
    const std::int64_t i = e % a.N;
    StepInputs<Real> in{
        begin_step<T, true>(a, b, i, 0, get_either<T>(a.r0, b, i), resets(a, b, 0))};
    in.alpha = get<T>(a.alpha, i);
    for (std::int64_t t = 0;; ++t) {
      states[t * elements + e] = in.s;
      if (t + 1 == a.T) break;
      in.live = live(a, b, t);
      in.resets_next = resets(a, b, t + 1);
      // y has the product, the sum and the drive in it already.
      const Real y = get<Real>(a.saved, t, b, i);
      in.s = finish_step<T, true>(a, b, i, t, in, y, Real(0), Real(0)).next;
    }
  }
}

// dA, dJ0, dJ1 and dalpha from the loop's partial sums. `samples`: for how many the loop ran.
template <class T>
__global__ void __launch_bounds__(kTileThreads)
    finish_kernel(const __grid_constant__ Args a,
                  const __grid_constant__ BackwardScratch<compute_t<T>> w, std::int64_t samples) {
  using Real = compute_t<T>;
  __shared__ double scratch[kTileThreads / 32];
  const auto sum_of = [&](const auto* p, std::int64_t n) {
    double v = 0;
    for (std::int64_t i = threadIdx.x; i < n; i += kTileThreads) v += static_cast<double>(p[i]);
    return static_cast<Real>(block_sum<kTileThreads>(v, scratch));
  };
  if (blockIdx.x == 0) {
    if (a.dJ0) {
      const Real v = sum_of(w.dJ0, samples);
      if (threadIdx.x == 0) put_at<T>(a.dJ0.data, a.dJ0.wide, 0, v);
    }
    if (a.dJ1) {
      const Real v = sum_of(w.dJ1, samples * w.parts);
      if (threadIdx.x == 0) put_at<T>(a.dJ1.data, a.dJ1.wide, 0, v);
    }
    if (a.dalpha && !a.alpha_per_neuron) {
      const Real v = sum_of(w.dalpha, samples * sum_groups(a.N));
      if (threadIdx.x == 0) put_at<T>(a.dalpha.data, a.dalpha.wide, 0, v);
    }
  }
  const std::int64_t start = blockIdx.x * static_cast<std::int64_t>(kTileThreads) + threadIdx.x;
  const std::int64_t stride = static_cast<std::int64_t>(gridDim.x) * kTileThreads;
  if (a.dalpha && a.alpha_per_neuron) {
    for (std::int64_t i = start; i < a.N; i += stride) {
      double v = 0;
      for (std::int64_t b = 0; b < samples; ++b) v += static_cast<double>(w.dalpha[b * a.N + i]);
      put_either<T>(a.dalpha, static_cast<Real>(v), i);
    }
  }
  if (a.dA) {
    for (std::int64_t e = start; e < a.T * a.B * a.K; e += stride) {
      Real v = 0;
      for (std::int64_t p = 0; p < w.parts; ++p) v += w.dA[e * w.parts + p];
      const std::int64_t k = e % a.K;
      const std::int64_t row = e / a.K;
      put<T>(a.dA, v, row % a.B, row / a.B, k);
    }
  }
}

// ---------------------------------------------------------------------------------------------------
// Host

template <class Real>
struct CallScratch {
  BackwardScratch<Real> loop;
  unsigned* counters = nullptr;
};

template <class Real>
CallScratch<Real> lay_out(const Plan& plan, ScratchLayout& scratch) {
  CallScratch<Real> w;
  const auto& grad = plan.grad;
  const std::int64_t B = plan.B, T = plan.T, N = plan.N;
  if (B == 0 || N == 0) return w;
  const std::int64_t groups = sum_groups(N);
  BackwardScratch<Real>& l = w.loop;
  scratch(w.counters, counter_words(plan));
  l.g_steps = plan.needs_dweights() ? T : std::min<std::int64_t>(T, 2);
  scratch(l.g, l.g_steps * B * N);
  scratch(l.carry, B * N);
  scratch(l.g_sums, 2 * B * groups);
  l.parts = visit_tile<Real>(large_tiles(B, N), [&]<class TileT>() {
    return ceil_div(N, TileT::kColumns) * TileT::kSlices;
  });
  l.reset_to_r0 = !plan.in.reset_state.defined();
  if (plan.in.reset.defined() && (l.reset_to_r0 ? grad.dr0 : grad.dreset_state).defined()) {
    scratch(l.dreset, B * N);
  }
  if (T == 0) return w;
  if (grad.dJ0.defined()) {
    scratch(l.s_sums, 2 * B * groups);
    scratch(l.dJ0, B);
  }
  if (grad.dJ1.defined()) scratch(l.dJ1, B * l.parts);
  if (grad.dA.defined() && plan.K > 0) {
    scratch(l.dA, T * B * plan.K * l.parts);
  }
  if (grad.dalpha.defined()) {
    scratch(l.dalpha, B * (plan.alpha_per_neuron() ? N : groups));
  }
  if (plan.checkpoint > 0) {
    scratch(l.ys, std::min(plan.checkpoint, T) * B * N);
    scratch(l.step.state, 2 * B * N);
    scratch(l.step.sums, 2 * B * groups);
  }
  const bool needs_states = grad.dA.defined() || grad.dJ0.defined() || grad.dJ1.defined() ||
                            grad.dalpha.defined() || plan.needs_dweights();
  if (needs_states && size_of(plan.dtype) == 2) {
    // One segment at a time is enough where nothing after the loop reads them.
    const bool segments = plan.checkpoint > 0 && !plan.needs_dweights();
    l.step.kept_steps = segments ? std::min(plan.checkpoint, T) : T;
    scratch(l.step.kept, l.step.kept_steps * B * N);
  }
  return w;
}

// What has to be there before the loop.
template <class T>
void prepare(const Plan& plan, const Args& a, const CallScratch<compute_t<T>>& w,
             cudaStream_t stream) {
  const std::int64_t words = counter_words(plan);
  if constexpr (kRoundsStates<T>) {
    if (w.loop.step.kept != nullptr && plan.checkpoint == 0) {
      states_kernel<T><<<blocks_for(std::max(words, plan.B * plan.N)), kTileThreads, 0, stream>>>(
          a, w.loop.step.kept, w.counters, words);
      check_launch(plan.op, "states_kernel");
      return;
    }
  }
  launch_prepare<compute_t<T>>(plan.op, w.counters, words, nullptr, plan.N, stream);
}

template <class T>
void run(const Plan& plan, Context& context) {
  using Real = compute_t<T>;
  const Args a = make_args(plan);
  auto* stream = static_cast<cudaStream_t>(context.stream);
  CallScratch<Real> w;
  const Workspace block(context, plan.op, plan.device,
                        [&](ScratchLayout& s) { w = lay_out<Real>(plan, s); });
  const bool empty = plan.B == 0 || plan.N == 0;
  if (!empty) {
    w.loop.step.whole_rows = plan.N % 4 == 0;
    w.loop.step.whole_weights = whole_weights<T>(a);
    prepare<T>(plan, a, w, stream);
    launch_backward_loop<T>(plan, a, w.loop, w.counters, stream);
  }
  if (plan.needs_dweights()) launch_dweights(plan, a, w.loop.g, w.loop.step.kept, stream);
  const auto& grad = plan.grad;
  if (grad.dA.defined() || grad.dJ0.defined() || grad.dJ1.defined() || grad.dalpha.defined()) {
    const std::int64_t elements = std::max({std::int64_t{1}, plan.N, plan.T * plan.B * plan.K});
    finish_kernel<T><<<blocks_for(elements), kTileThreads, 0, stream>>>(
        a, w.loop, empty || plan.T == 0 ? 0 : plan.B);
    check_launch(plan.op, "finish_kernel");
  }
}

}  // namespace

std::size_t backward_workspace(const Plan& plan) {
  return scratch_bytes([&](ScratchLayout& s) {
    plan.dtype == DType::kF64 ? (void)lay_out<double>(plan, s) : (void)lay_out<float>(plan, s);
  });
}

void backward(const Plan& plan, Context& context) {
  visit_floating(plan.dtype, [&]<class T>() { run<T>(plan, context); });
}

}  // namespace annulus::ring_rnn::cuda::general
