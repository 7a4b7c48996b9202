// The loop of the general backward: its stages, the kernel that runs them, and its launch.
//
// Stage "backward t" has g_t of all neurons before it. It makes u_k, dL/ds_t and from that l of step
// t - 1 and g_{t-1}, which the next stage reads. u_k is summed apart from its coefficient, so that
// dA_k = s . u_k falls out of the same registers. Sums over neurons are left as one partial a tile,
// sums over steps are kept by the thread that adds to them: no atomics, one order.
//
// With checkpoints, y of a segment of steps is computed again before its steps are gone through
// backwards, by the forward's own stages.
//
// s comes from `out`, or, where that is rounded to 16 bits, from a buffer of its own: filled before
// the loop from y, element by element, or by the steps that are computed again.
#pragma once

#include "annulus/ring_rnn/cuda/simt/backward.cuh"
#include "annulus/ring_rnn/cuda/simt/launch.cuh"

namespace annulus::ring_rnn::cuda::general {

// s_t of sample b at neuron i as the sums over it want it.
template <class T>
__device__ __forceinline__ compute_t<T> exact_state(const Args& a,
                                                    const StepScratch<compute_t<T>>& w,
                                                    std::int64_t b, std::int64_t t,
                                                    std::int64_t i) {
  if constexpr (kRoundsStates<T>) {
    return __ldcg(w.kept + (t % w.kept_steps * a.B + b) * a.N + i);
  } else {
    return state_before<T>(a, b, t, i);
  }
}

// What opening step t at (b, i) needs beside what is carried to it.
template <class Real>
struct OpenInputs {
  Real dout = 0, y = 0, alpha = 0, s = 0;
  bool live = false;
};
template <class T>
__device__ __forceinline__ OpenInputs<compute_t<T>> load_open(
    const Args& a, const BackwardScratch<compute_t<T>>& w, std::int64_t b, std::int64_t i,
    std::int64_t t) {
  using Real = compute_t<T>;
  OpenInputs<Real> in;
  in.live = live(a, b, t);
  if (a.dout) in.dout = get<T>(a.dout, b, t, i);
  in.y =
      w.ys != nullptr ? w.ys[(t % a.checkpoint * a.B + b) * a.N + i] : get<Real>(a.saved, t, b, i);
  in.alpha = get<T>(a.alpha, i);
  if (a.dalpha || w.s_sums != nullptr) in.s = exact_state<T>(a, w.step, b, t, i);
  return in;
}

template <class Real>
struct Opened {
  Real g = 0, s = 0, dalpha = 0;
};

// l of step t at (b, i) is `carry` and what comes in at dout; g follows. Keeps both.
template <class T>
__device__ __forceinline__ Opened<compute_t<T>> open_element(
    const Args& a, const BackwardScratch<compute_t<T>>& w, std::int64_t b, std::int64_t i,
    std::int64_t t, const OpenInputs<compute_t<T>>& in, compute_t<T> carry) {
  using Real = compute_t<T>;
  if (a.dout) carry += in.dout;
  w.carry[b * a.N + i] = carry;
  Opened<Real> o;
  if (in.live) {
    const Activated<Real> f = activate_and_slope(a.activation, in.y);
    o.g = mul_of(mul_of(in.alpha, f.slope), carry);
    o.s = in.s;
    o.dalpha = mul_of(carry, f.value - in.s);
  }
  w.g[(t % w.g_steps * a.B + b) * a.N + i] = o.g;
  if (a.ddrive) put<T>(a.ddrive, o.g, b, t, i);
  return o;
}

// The sums over neurons of what open_element gave for step t. Whole warps.
template <class T>
__device__ __forceinline__ void record_opened(const Args& a, const BackwardScratch<compute_t<T>>& w,
                                              std::int64_t b, std::int64_t i, std::int64_t t,
                                              const Opened<compute_t<T>>& o) {
  using Real = compute_t<T>;
  const std::int64_t groups = sum_groups(a.N);
  const std::int64_t half = (t & 1) * a.B * groups;
  put_group(w.g_sums + half, o.g, b, i, a.B, a.N);
  if (w.s_sums != nullptr) put_group(w.s_sums + half, o.s, b, i, a.B, a.N);
  if (!a.dalpha) return;
  const bool inside = b < a.B && i < a.N;
  const bool first = t == a.T - 1;
  if (a.alpha_per_neuron) {
    if (inside) {
      Real* sum = w.dalpha + b * a.N + i;
      *sum = first ? o.dalpha : *sum + o.dalpha;
    }
  } else {
    const Real v = warp_sum(o.dalpha);
    if (threadIdx.x % 32 == 0 && inside) {
      Real* sum = w.dalpha + b * groups + i / kSumGroup;
      *sum = first ? v : *sum + v;
    }
  }
}

// g of step t from what was carried to it: from dh_n, or over a checkpoint.
template <class T, class TileT>
__device__ void open_stage(const Args& a, const BackwardScratch<compute_t<T>>& w,
                           std::int64_t row_tile, std::int64_t column_tile, std::int64_t t) {
  using Real = compute_t<T>;
  const std::int64_t b0 = row_tile * TileT::kRows;
  const std::int64_t i0 = column_tile * TileT::kColumns;
  for_each_element<TileT>(
      [&](int row, int column) {
        const std::int64_t b = b0 + row;
        const std::int64_t i = i0 + column;
        if (a.T == 0 || b >= a.B || i >= a.N) return OpenInputs<Real>{};
        return load_open<T>(a, w, b, i, t);
      },
      [&](int row, int column, const OpenInputs<Real>& in) {
        const std::int64_t b = b0 + row;
        const std::int64_t i = i0 + column;
        Opened<Real> o;
        if (b < a.B && i < a.N) {
          Real carry = 0;
          if (t < a.T - 1) {
            carry = w.carry[b * a.N + i];
          } else if (a.dh_n) {
            carry = get<Real>(a.dh_n, b, i);
          }
          if (a.T > 0) {
            o = open_element<T>(a, w, b, i, t, in, carry);
          } else {  // h_n is r0
            if (a.dr0) put_either<T>(a.dr0, carry, b, i);
            if (a.dreset_state) put_either<T>(a.dreset_state, Real(0), b, i);
          }
        }
        if (a.T > 0) record_opened<T>(a, w, b, i, t, o);
      });
}

// dJ0 += sum(g) sum(s) of step t, for a tile's samples.
template <class TileT>
__device__ __forceinline__ void add_dJ0(const Args& a,
                                        const BackwardScratch<typename TileT::Real>& w,
                                        std::int64_t b0, std::int64_t t) {
  using Real = typename TileT::Real;
  const std::int64_t half = (t & 1) * a.B * sum_groups(a.N);
  // The thread that has the one sum of a sample has the other, too.
  Real g = 0;
  add_groups<TileT>(
      a.B, a.N, b0, [&](std::int64_t k) { return __ldcg(w.g_sums + half + k); },
      [&](int, Real v) { g = v; });
  add_groups<TileT>(
      a.B, a.N, b0, [&](std::int64_t k) { return __ldcg(w.s_sums + half + k); },
      [&](int r, Real s) {
        double* sum = w.dJ0 + b0 + r;
        *sum = fma_of(static_cast<double>(g), static_cast<double>(s), t == a.T - 1 ? 0.0 : *sum);
      });
}

// What the end of a backward stage needs at (b, i) beside the product.
template <class Real>
struct CloseInputs {
  Real carry = 0, alpha = 0, reset = 0;
  bool live = false, was_reset = false;
  OpenInputs<Real> open;
};

// dA_k = s . u_k or dJ1 += s . u_0 of step t, as far as this thread's slice and tile go.
template <class T, class TileT>
__device__ __forceinline__ void add_dots(const Args& a, const BackwardScratch<compute_t<T>>& w,
                                         const Place<TileT>& at, std::int64_t b0, std::int64_t j0,
                                         std::int64_t t, std::int64_t k, const Sums<TileT>& u) {
  using Real = compute_t<T>;
  const std::int64_t part = j0 / TileT::kColumns * TileT::kSlices + at.slice;
#pragma unroll
  for (int i = 0; i < TileT::kDown; ++i) {
    const std::int64_t b = b0 + at.row(i);
    const bool counts = b < a.B && live(a, b, t);
    Real dot = 0;
    if (counts) {
      const auto state = [&] {
        if constexpr (kRoundsStates<T>) {
          return w.step.kept + (t % w.step.kept_steps * a.B + b) * a.N;
        } else {
          return state_row<T>(a, b, t);
        }
      }();
#pragma unroll
      for (int j = 0; j < TileT::kAcross; ++j) {
        const std::int64_t column = j0 + at.column(j);
        if (column >= a.N) continue;
        if constexpr (kRoundsStates<T>) {
          dot = fma_of(__ldcg(state + column), u[i][j], dot);
        } else {
          dot = fma_of(get<T>(state, column), u[i][j], dot);
        }
      }
    }
    dot = warp_sum<TileT::kThreadsAcross>(dot);
    if (at.across == 0 && b < a.B) {
      if (k == 0) {
        Real* p = w.dJ1 + b * w.parts + part;
        *p = t == a.T - 1 ? dot : *p + dot;
      } else {
        w.dA[((t * a.B + b) * a.K + k - 1) * w.parts + part] = dot;
      }
    }
  }
}

template <class T, class TileT>
__device__ void backward_stage(const Args& a, const BackwardScratch<compute_t<T>>& w,
                               StageShared<TileT>& shared, Prepared prepared, std::int64_t row_tile,
                               std::int64_t column_tile, std::int64_t t) {
  using Real = compute_t<T>;
  using Shared = StageShared<TileT>;
  const Place<TileT> at;
  const std::int64_t b0 = row_tile * TileT::kRows;
  const std::int64_t j0 = column_tile * TileT::kColumns;
  const Real* g = w.g + t % w.g_steps * a.B * a.N;
  const bool last_step = t == a.T - 1;
  const bool want_A = w.dA != nullptr;
  const bool want_J1 = w.dJ1 != nullptr;

  __syncthreads();  // the tile before this one has been read
  const std::int64_t half = (t & 1) * a.B * sum_groups(a.N);
  add_groups<TileT>(
      a.B, a.N, b0, [&](std::int64_t k) { return __ldcg(w.g_sums + half + k); },
      [&](int r, Real v) { shared.row[r] = v; });
  if (w.dJ0 != nullptr && column_tile == 0) add_dJ0<TileT>(a, w, b0, t);

  Sums<TileT> sum = {};
  Sums<TileT> u = {};
  const int rounds = static_cast<int>((a.N + TileT::kRound - 1) / TileT::kRound);
  for (std::int64_t k0 = 0; k0 <= a.K; k0 += Shared::kChannels) {
    const int active = prepared.active >= 0
                           ? prepared.active
                           : load_channels<T>(a, shared, b0, t, k0, want_A, want_J1);
    if (active == 0) continue;
    Cursor cursor(shared.active, rounds);
    Cursor done(shared.active, rounds);
    multiply<TileT, true, false>(
        shared.tile.panel, active * rounds, [&] { cursor.advance(shared.active); },
        [&](int line, int depth) {
          const std::int64_t b = b0 + line;
          const std::int64_t i = cursor.depth<TileT>(at.slice) + depth;
          if (b >= a.B) return Four<Real>{};
          return load_four_shared(g + b * a.N + i, a.N - i, w.step.whole_rows);
        },
        [&](int line, int depth) {
          const std::int64_t i = cursor.depth<TileT>(at.slice) + depth;
          const std::int64_t j = j0 + line;
          if (i >= a.N) return Four<Real>{};
          const Weights<T> m(a, k0 + cursor.channel);
          return load_four(m.data + i * m.row + j * m.column, m.column, a.N - j,
                           w.step.whole_weights);
        },
        [&](Sums<TileT>& partial) {
          done.advance(shared.active);
          if (done.round != rounds - 1) return;
          // u_k is complete, as far as this slice goes.
          const std::int64_t k = k0 + done.channel;
          if (k == 0 ? want_J1 : want_A) add_dots<T, TileT>(a, w, at, b0, j0, t, k, partial);
#pragma unroll
          for (int i = 0; i < TileT::kDown; ++i) {
            const Real c = shared.c[done.channel][at.row(i)];
#pragma unroll
            for (int j = 0; j < TileT::kAcross; ++j) {
              sum[i][j] = fma_of(c, partial[i][j], sum[i][j]);
              partial[i][j] = 0;
            }
          }
        },
        u);
  }
  spread<TileT>(shared.tile, sum);

  const Real J0 = get<T>(a.J0);
  const bool opens = t > 0 && !(a.checkpoint > 0 && t % a.checkpoint == 0);
  for_each_element<TileT>(
      [&](int row, int column) {
        const std::int64_t b = b0 + row;
        const std::int64_t i = j0 + column;
        CloseInputs<Real> in;
        if (b >= a.B || i >= a.N) return in;
        in.carry = w.carry[b * a.N + i];
        in.alpha = get<T>(a.alpha, i);
        in.live = live(a, b, t);
        in.was_reset = resets(a, b, t);
        if (w.dreset != nullptr && !last_step) in.reset = w.dreset[b * a.N + i];
        if (opens) in.open = load_open<T>(a, w, b, i, t - 1);
        return in;
      },
      [&](int row, int column, const CloseInputs<Real>& in) {
        const std::int64_t b = b0 + row;
        const std::int64_t i = j0 + column;
        Opened<Real> o;
        if (b < a.B && i < a.N) {
          Real carry = in.carry;
          if (in.live) {
            carry = fma_of(Real(1) - in.alpha, carry,
                           fma_of(J0, shared.row[row], total<TileT>(shared.tile, row, column)));
          }
          Real reset = in.reset;
          if (in.was_reset) {
            reset += carry;
            carry = 0;
          }
          if (w.dreset != nullptr) w.dreset[b * a.N + i] = reset;
          if (opens) {
            o = open_element<T>(a, w, b, i, t - 1, in.open, carry);
          } else if (t > 0) {
            w.carry[b * a.N + i] = carry;
          } else {
            if (a.dreset_state) put_either<T>(a.dreset_state, reset, b, i);
            if (a.dr0) put_either<T>(a.dr0, w.reset_to_r0 ? carry + reset : carry, b, i);
          }
        }
        if (opens) record_opened<T>(a, w, b, i, t - 1, o);
      });
}

// Operations first..last of the list of cuda/simt/backward.cuh.
template <class T, class TileT>
__global__ void __launch_bounds__(kTileThreads, 1)
    backward_kernel(const Stages stages, const __grid_constant__ Args a,
                    const __grid_constant__ BackwardScratch<compute_t<T>> w, unsigned* counters) {
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
    for (std::int64_t index = stages.first; index <= stages.last; ++index) {
      const Operation op = operation(index, a.T, a.checkpoint);
      for (std::int64_t column = member; column < column_tiles; column += grid.members) {
        switch (op.kind) {
          case Operation::kBegin:
            begin_stage<T, TileT, true>(a, w.step, row, column, op.t);
            break;
          case Operation::kForward:
            forward_stage<T, TileT, true>(a, w.step, shared, prepared, row, column, op.t,
                                          w.ys + op.t % a.checkpoint * a.B * a.N);
            break;
          case Operation::kOpen:
            open_stage<T, TileT>(a, w, row, column, op.t);
            break;
          case Operation::kBackward:
            backward_stage<T, TileT>(a, w, shared, prepared, row, column, op.t);
            break;
        }
      }
      if (index == stages.last) break;
      const Operation next = operation(index + 1, a.T, a.checkpoint);
      if (prepares && (next.kind == Operation::kForward || next.kind == Operation::kBackward)) {
        const bool back = next.kind == Operation::kBackward;
        prepared.active = load_channels<T>(a, shared, row * TileT::kRows, next.t, 0,
                                           back && w.dA != nullptr, back && w.dJ1 != nullptr);
      }
      barrier.wait();
    }
  }
}

template <class T>
void launch_backward_loop(const Plan& plan, const Args& a, const BackwardScratch<compute_t<T>>& w,
                          unsigned* counters, cudaStream_t stream) {
  visit_tile<compute_t<T>>(large_tiles(plan.B, plan.N), [&]<class TileT>() {
    launch_stages(plan.op, "backward_kernel", backward_kernel<T, TileT>, kTileThreads,
                  ceil_div(plan.B, TileT::kRows), ceil_div(plan.N, TileT::kColumns), kMostGroups, 0,
                  operation_count(plan.T, plan.checkpoint) - 1, plan.stepwise, stream, a, w,
                  counters);
  });
}

}  // namespace annulus::ring_rnn::cuda::general
