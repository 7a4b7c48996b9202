// The weights' gradients of the general path: dW_k = sum over steps t and samples b of
// c_k[b,t] g_t[b,:] s_t[b,:]^T, one product of depth T B a matrix, each element written once.
//
// The depth runs t first, then b. It is taken 512 lines at a time, whose coefficients and positions of
// s are found first; rounds in which every coefficient is 0 are left out, so a channel that nobody
// uses costs a look at its actions.

#include "annulus/core/dispatch.h"
#include "annulus/ring_rnn/cuda/simt/backward.cuh"
#include "annulus/ring_rnn/cuda/simt/launch.cuh"

namespace annulus::ring_rnn::cuda::general {

namespace {

// Lines of the depth that are looked at before they are multiplied.
constexpr int kLines = 2 * kTileThreads;

template <class TileT>
struct DepthShared {
  using Real = typename TileT::Real;
  TileShared<TileT> tile;
  // s of a line: its first element, or nullptr beyond the depth; what it is of decides its stride.
  // Not in use where the states were kept.
  const void* row[kLines];
  enum Source : unsigned char { kOut, kR0, kResetState };
  Source source[kLines];
  Real c[kLines];
  int active[kLines / TileT::kRound];
};

template <class T, class TileT>
__device__ __forceinline__ void find_line(const Args& a, DepthShared<TileT>& shared, int slot,
                                          std::int64_t d, std::int64_t k) {
  using Shared = DepthShared<TileT>;
  shared.c[slot] = 0;
  shared.row[slot] = nullptr;
  if (d >= a.T * a.B) return;
  const std::int64_t t = d / a.B;
  const std::int64_t b = d - t * a.B;
  shared.c[slot] = coefficient<T>(a, b, t, k);
  if constexpr (!kRoundsStates<T>) {
    shared.row[slot] = state_row<T>(a, b, t).data;
    shared.source[slot] = resets(a, b, t) ? Shared::kResetState
                          : t == 0        ? Shared::kR0
                                          : Shared::kOut;
  }
}

// s[j .. j + 3] of a line, from the tensors.
template <class T, class TileT>
__device__ __forceinline__ Four<compute_t<T>> load_state(const Args& a,
                                                         const DepthShared<TileT>& shared, int slot,
                                                         std::int64_t j, bool whole_out) {
  using Shared = DepthShared<TileT>;
  const void* row = shared.row[slot];
  if (row == nullptr) return {};
  const auto source = shared.source[slot];
  if (source == Shared::kOut) {
    const std::int64_t step = a.out.stride[2];
    return load_four(static_cast<const T*>(row) + j * step, step, a.N - j, whole_out);
  }
  const Ref<2>& from = source == Shared::kR0 ? a.r0 : a.reset_state;
  const std::int64_t step = from.stride[1];
  return load_four(static_cast<const T*>(row) + j * step, step, a.N - j, false);
}

// Block (k, row tile, column tile): channels first_channel on, N x N / tile of each.
template <class T, class TileT>
__global__ void __launch_bounds__(kTileThreads, 1)
    dweights_kernel(const __grid_constant__ Args a, const compute_t<T>* g,
                    [[maybe_unused]] const compute_t<T>* states, std::int64_t first_channel,
                    bool whole_g, [[maybe_unused]] bool whole_out) {
  using Real = compute_t<T>;
  __shared__ DepthShared<TileT> shared;
  const Place<TileT> at;
  const unsigned tiles = static_cast<unsigned>((a.N + TileT::kRows - 1) / TileT::kRows);
  const std::int64_t j0 = static_cast<std::int64_t>(blockIdx.x % tiles) * TileT::kColumns;
  const std::int64_t i0 = static_cast<std::int64_t>(blockIdx.x / tiles % tiles) * TileT::kRows;
  const std::int64_t k = first_channel + blockIdx.x / tiles / tiles;
  const std::int64_t depth_end = a.T * a.B;
  const int thread = static_cast<int>(threadIdx.x);

  Sums<TileT> sum = {};
  for (std::int64_t d0 = 0; d0 < depth_end; d0 += kLines) {
    __syncthreads();  // the lines before these have been used
#pragma unroll
    for (int slot = thread; slot < kLines; slot += kTileThreads) {
      find_line<T>(a, shared, slot, d0 + slot, k);
    }
    __syncthreads();
    constexpr int kRounds = kLines / TileT::kRound;
    if (thread < kRounds) {
      bool used = false;
      for (int q = 0; q < TileT::kRound; ++q) used |= shared.c[thread * TileT::kRound + q] != 0;
      shared.active[thread] = used;
    }
    __syncthreads();
    int rounds = 0;
    for (int q = 0; q < kRounds; ++q) rounds += shared.active[q];
    if (rounds == 0) continue;
    int round = -1;
    multiply<TileT, false, false>(
        shared.tile.panel, rounds,
        [&] {
          do ++round;
          while (shared.active[round] == 0);
        },
        [&](int line, int depth) {
          const int slot = round * TileT::kRound + at.slice * TileT::kDepth + depth;
          const std::int64_t i = i0 + line;
          Four<Real> x = {};
          if (d0 + slot >= depth_end) return x;
          x = load_four(g + (d0 + slot) * a.N + i, 1, a.N - i, whole_g);
          const Real c = shared.c[slot];
#pragma unroll
          for (int q = 0; q < 4; ++q) x.v[q] = mul_of(c, x.v[q]);
          return x;
        },
        [&](int line, int depth) {
          const int slot = round * TileT::kRound + at.slice * TileT::kDepth + depth;
          if constexpr (kRoundsStates<T>) {
            const std::int64_t j = j0 + line;
            if (d0 + slot >= depth_end) return Four<Real>{};
            return load_four(states + (d0 + slot) * a.N + j, 1, a.N - j, whole_g);
          } else {
            return load_state<T>(a, shared, slot, j0 + line, whole_out);
          }
        },
        [](Sums<TileT>&) {}, sum);
  }
  __syncthreads();
  spread<TileT>(shared.tile, sum);
  for_each_element<TileT>(
      [&](int row, int column) { return total<TileT>(shared.tile, row, column); },
      [&](int row, int column, Real v) {
        const std::int64_t i = i0 + row;
        const std::int64_t j = j0 + column;
        if (i >= a.N || j >= a.N) return;
        if (k == 0) {
          put<T>(a.dWo, v, i, j);
        } else {
          put<T>(a.dWa, v, k - 1, i, j);
        }
      });
}

}  // namespace

void launch_dweights(const Plan& plan, const Args& a, const void* g, const void* states,
                     cudaStream_t stream) {
  const std::int64_t first = plan.grad.dWo.defined() ? 0 : 1;
  const std::int64_t last = plan.grad.dWa.defined() ? plan.K : 0;
  if (plan.N == 0 || last < first) return;
  visit_floating(plan.dtype, [&]<class T>() {
    using Real = compute_t<T>;
    const bool whole_g = plan.N % 4 == 0;
    const bool whole_out = whole_g && a.out.stride[2] == 1 && a.out.stride[0] % 4 == 0 &&
                           a.out.stride[1] % 4 == 0 &&
                           reinterpret_cast<std::uintptr_t>(a.out.data) % (4 * sizeof(T)) == 0;
    // Of N alone: a channel more or less changes no bit of the others.
    visit_tile<Real>(large_tiles(plan.N, plan.N), [&]<class TileT>() {
      const std::int64_t tiles = ceil_div(plan.N, TileT::kRows);
      const auto blocks = static_cast<unsigned>(tiles * tiles * (last - first + 1));
      dweights_kernel<T, TileT><<<blocks, kTileThreads, 0, stream>>>(
          a, static_cast<const Real*>(g), static_cast<const Real*>(states), first, whole_g,
          whole_out);
    });
  });
  check_launch(plan.op, "dweights_kernel");
}

}  // namespace annulus::ring_rnn::cuda::general
