// The weights' gradients of the general path: dW_k = sum over steps t and samples b of
// c_k[b,t] g_t[b,:] s_t[b,:]^T, one product of depth T B a matrix, each element written once.
//
// The depth runs t first, then b. It is taken 256 lines at a time, whose coefficients and places of
// s are found first; rounds in which every coefficient is 0 are left out, so a channel that nobody
// uses costs a look at its actions.

#include <cuda_runtime.h>

#include <algorithm>

#include "annulus/core/dispatch.h"
#include "annulus/ring_rnn/ring_rnn_cuda_general.cuh"
#include "annulus/ring_rnn/ring_rnn_cuda_general_backward.cuh"

namespace annulus::ring::cuda::general {

namespace {

// Where s of a line of the depth lies. 16-bit tensors may have f32 rows in r0 and reset_state.
enum class Source : int { kNone, kOut, kR0, kResetState };

template <class TileT>
struct DepthShared {
  using Real = typename TileT::Real;
  TileShared<TileT> tile;
  const void* row[kTileThreads];  // the first element of s
  Source source[kTileThreads];
  Real c[kTileThreads];
  int active[kTileThreads / TileT::kRound];
};

template <class T, class TileT>
__device__ __forceinline__ void find_line(const Args& a, DepthShared<TileT>& shared, std::int64_t d,
                                          std::int64_t k) {
  const int slot = static_cast<int>(threadIdx.x);
  shared.c[slot] = 0;
  shared.row[slot] = nullptr;
  shared.source[slot] = Source::kNone;
  if (d >= a.T * a.B) return;
  const std::int64_t t = d / a.B;
  const std::int64_t b = d - t * a.B;
  shared.c[slot] = coefficient<T>(a, b, t, k);
  const auto set = [&](Source source, const void* data, bool wide, std::int64_t offset) {
    shared.source[slot] = source;
    shared.row[slot] = wide ? static_cast<const void*>(static_cast<const float*>(data) + offset)
                            : static_cast<const void*>(static_cast<const T*>(data) + offset);
  };
  if (resets(a, b, t)) {
    set(Source::kResetState, a.reset_state.data, a.reset_state.wide, b * a.reset_state.stride[0]);
  } else if (t == 0) {
    set(Source::kR0, a.r0.data, a.r0.wide, b * a.r0.stride[0]);
  } else {
    set(Source::kOut, a.out.data, false, b * a.out.stride[0] + (t - 1) * a.out.stride[1]);
  }
}

// s[j .. j + 3] of a line.
template <class T, class TileT>
__device__ __forceinline__ Four<compute_t<T>> load_state(const Args& a,
                                                         const DepthShared<TileT>& shared, int slot,
                                                         std::int64_t j, bool whole_out) {
  const Source source = shared.source[slot];
  const void* row = shared.row[slot];
  if (source == Source::kNone) return {};
  if (source == Source::kOut) {
    const std::int64_t step = a.out.stride[2];
    return load_four(static_cast<const T*>(row) + j * step, step, a.N - j, whole_out);
  }
  const Ref<2>& from = source == Source::kR0 ? a.r0 : a.reset_state;
  const std::int64_t step = from.stride[1];
  if constexpr (sizeof(T) == 2) {
    if (from.wide) {
      return load_four(static_cast<const float*>(row) + j * step, step, a.N - j, false);
    }
  }
  return load_four(static_cast<const T*>(row) + j * step, step, a.N - j, false);
}

// Block (k, row tile, column tile): channels first_channel on, N x N / tile of each.
template <class T, class TileT>
__global__ void __launch_bounds__(kTileThreads, sizeof(compute_t<T>) == 8 ? 1 : 2)
    dweights_kernel(const __grid_constant__ Args a, const compute_t<T>* g,
                    std::int64_t first_channel, bool whole_g, bool whole_out) {
  using Real = compute_t<T>;
  __shared__ DepthShared<TileT> shared;
  const Place<TileT> at;
  const unsigned tiles = static_cast<unsigned>((a.N + TileT::kRows - 1) / TileT::kRows);
  const std::int64_t j0 = static_cast<std::int64_t>(blockIdx.x % tiles) * TileT::kColumns;
  const std::int64_t i0 = static_cast<std::int64_t>(blockIdx.x / tiles % tiles) * TileT::kRows;
  const std::int64_t k = first_channel + blockIdx.x / tiles / tiles;
  const std::int64_t depth_end = a.T * a.B;
  const int thread = static_cast<int>(threadIdx.x);

  Real sum[4][4] = {};
  for (std::int64_t d0 = 0; d0 < depth_end; d0 += kTileThreads) {
    // The lines before these have been used: the product ended synchronised.
    find_line<T>(a, shared, d0 + thread, k);
    __syncthreads();
    constexpr int kRounds = kTileThreads / TileT::kRound;
    if (thread < kRounds) {
      bool used = false;
      for (int q = 0; q < TileT::kRound; ++q) used |= shared.c[thread * TileT::kRound + q] != 0;
      shared.active[thread] = used;
    }
    __syncthreads();
    int rounds = 0;
    for (int q = 0; q < kRounds; ++q) rounds += shared.active[q];
    if (rounds == 0) {
      __syncthreads();  // `active` has been read
      continue;
    }
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
          return load_state<T>(a, shared, slot, j0 + line, whole_out);
        },
        [](Real(&)[4][4]) {}, sum);
  }
  __syncthreads();
  spread<TileT>(shared.tile, sum);
  for_each_element<TileT>([&](int row, int column) {
    const std::int64_t i = i0 + row;
    const std::int64_t j = j0 + column;
    if (i >= a.N || j >= a.N) return;
    const Real v = total<TileT>(shared.tile, row, column);
    if (k == 0) {
      put<T>(a.dWo, v, i, j);
    } else {
      put<T>(a.dWa, v, k - 1, i, j);
    }
  });
}

}  // namespace

template <class T>
void launch_dweights(const Plan& plan, const Args& a, const compute_t<T>* g, cudaStream_t stream) {
  using Real = compute_t<T>;
  const std::int64_t first = plan.grad.dWo.defined() ? 0 : 1;
  const std::int64_t last = plan.grad.dWa.defined() ? plan.K : 0;
  if (plan.N == 0 || last < first) return;
  const bool whole_g = plan.N % 4 == 0;
  const bool whole_out = whole_g && a.out.stride[2] == 1 && a.out.stride[0] % 4 == 0 &&
                         a.out.stride[1] % 4 == 0 &&
                         reinterpret_cast<std::uintptr_t>(a.out.data) % (4 * sizeof(T)) == 0;
  // Of N alone: a channel more or less changes no bit of the others.
  visit_tile<Real>(large_tiles(plan.N, plan.N), [&]<class TileT>() {
    const std::int64_t tiles = ceil_div(plan.N, TileT::kRows);
    const auto blocks = static_cast<unsigned>(tiles * tiles * (last - first + 1));
    dweights_kernel<T, TileT><<<blocks, kTileThreads, 0, stream>>>(a, g, first, whole_g, whole_out);
  });
  annulus::cuda::check_launch(plan.op, "dweights_kernel");
}

template void launch_dweights<double>(const Plan&, const Args&, const double*, cudaStream_t);
template void launch_dweights<float>(const Plan&, const Args&, const float*, cudaStream_t);
template void launch_dweights<float16>(const Plan&, const Args&, const float*, cudaStream_t);
template void launch_dweights<bfloat16>(const Plan&, const Args&, const float*, cudaStream_t);

}  // namespace annulus::ring::cuda::general
