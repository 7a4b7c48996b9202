// A forward step of the general path, one tile of samples x neurons at a time, as the forward runs
// it and the backward runs it again between checkpoints.
//
// The work of a call is a list of stages with a barrier between each two of them: begin_stage makes
// s_0, forward_stage t turns s_t into s_{t+1}. States lie in two buffers that take turns, and with
// them the sums of each 32 neighbouring neurons, which the next stage adds up to sum_j s_j.
#pragma once

#include <cstdint>

#include "annulus/cuda/reduce.cuh"
#include "annulus/cuda/simt_gemm.cuh"
#include "annulus/ring_rnn/cuda/arguments.cuh"

namespace annulus::ring_rnn::cuda {

using namespace annulus::cuda::simt;

// Neurons whose sum one warp makes.
inline constexpr int kSumGroup = 32;
ANNULUS_HD inline std::int64_t sum_groups(std::int64_t N) {
  return (N + kSumGroup - 1) / kSumGroup;
}

template <class Real>
struct StepScratch {
  Real* state = nullptr;        // (2, B, N): s_t in half t & 1
  Real* sums = nullptr;         // (2, B, groups): of s_t in half t & 1
  Real* vectors = nullptr;      // (2, 2, B, groups): X and Y of r_t in half t & 1
  const Real* table = nullptr;  // (N, 2): cos and sin of 2 pi i / N
  bool whole_rows = false;      // rows of N numbers are multiples of 4 long
  bool whole_weights = false;   // and so are those of Wo and Wa, which are dense and aligned
  // (kept_steps, B, N): s_t at t mod kept_steps, for a backward whose `out` is rounded; else nullptr.
  Real* kept = nullptr;
  std::int64_t kept_steps = 1;
};

// `out` has the states rounded, so a backward that promises f32 has to keep its own.
template <class T>
inline constexpr bool kRoundsStates = sizeof(T) < sizeof(compute_t<T>);

template <class TileT>
struct StageShared {
  using Real = typename TileT::Real;
  // Channels whose coefficients are held at a time.
  static constexpr int kChannels = sizeof(Real) == 8 ? 16 : 32;
  TileShared<TileT> tile;
  Real c[kChannels][TileT::kRows + 1];
  Real row[TileT::kRows];  // a sum over all neurons for each sample
  int active[kChannels];
};

// f(r, sum) for each sample first + r of a tile, by one of the kTileThreads / Rows threads that add
// up its groups.
template <class TileT, class Load, class F>
__device__ __forceinline__ void add_groups(std::int64_t B, std::int64_t N, std::int64_t first,
                                           Load&& load, F&& f) {
  constexpr int kShare = kTileThreads / TileT::kRows;
  const std::int64_t groups = sum_groups(N);
  const int r = static_cast<int>(threadIdx.x) / kShare;
  const int share = static_cast<int>(threadIdx.x) % kShare;
  auto v = decltype(load(0)){};
  if (first + r < B) {
#pragma unroll 4
    for (std::int64_t g = share; g < groups; g += kShare) v += load((first + r) * groups + g);
  }
  v = warp_sum<kShare>(v);
  if (share == 0 && first + r < B) f(r, v);
}

// The sum over a warp's 32 neurons of sample b, the first of which is i - lane, to its group.
template <class Real>
__device__ __forceinline__ void put_group(Real* sums, Real v, std::int64_t b, std::int64_t i,
                                          std::int64_t B, std::int64_t N) {
  v = warp_sum(v);
  if (threadIdx.x % 32 == 0 && b < B && i < N) sums[b * sum_groups(N) + i / kSumGroup] = v;
}

// Coefficients of channels k0 to k0 + kChannels - 1 of a tile's samples at step t, and which of the channels
// are to be run: those that a sample uses, and those that are wanted in any case. Returns how many;
// ends synchronised.
template <class T, class TileT>
__device__ __forceinline__ int load_channels(const Args& a, StageShared<TileT>& shared,
                                             std::int64_t first, std::int64_t t, std::int64_t k0,
                                             bool want_A, bool want_J1) {
  constexpr int kChannels = StageShared<TileT>::kChannels;
  const int count = a.K + 1 - k0 < kChannels ? static_cast<int>(a.K + 1 - k0) : kChannels;
  __syncthreads();  // the channels before these have been used
  const int thread = static_cast<int>(threadIdx.x);
  for (int e = thread; e < TileT::kRows * count; e += kTileThreads) {
    const int r = e / count;
    const int k = e % count;
    shared.c[k][r] = first + r < a.B ? coefficient<T>(a, first + r, t, k0 + k) : compute_t<T>(0);
  }
  __syncthreads();
  for (int k = thread / 32; k < count; k += kTileThreads / 32) {
    bool used = k0 + k == 0 ? want_J1 : want_A;
    for (int r = thread % 32; r < TileT::kRows; r += 32) used |= shared.c[k][r] != 0;
    const bool any = __any_sync(0xffffffffu, used) != 0;
    if (thread % 32 == 0) shared.active[k] = any;
  }
  __syncthreads();
  int active = 0;
  for (int k = 0; k < count; ++k) active += shared.active[k];
  return active;
}

// Walks over the rounds of a product: `rounds` of each active channel, in order.
struct Cursor {
  int channel = 0;
  int round = -1;
  int rounds;
  __device__ __forceinline__ Cursor(const int* active, int rounds) : rounds(rounds) {
    if (rounds > 0) skip(active);
  }
  __device__ __forceinline__ void skip(const int* active) {
    while (active[channel] == 0) ++channel;
  }
  // First line of this round's panel of a slice.
  template <class TileT>
  __device__ __forceinline__ std::int64_t depth(int slice) const {
    return static_cast<std::int64_t>(round) * TileT::kRound + slice * TileT::kDepth;
  }
  // Not called after the last round of the last active channel.
  __device__ __forceinline__ void advance(const int* active) {
    if (++round == rounds) {
      round = 0;
      ++channel;
      skip(active);
    }
  }
};

// The matrix of channel k.
template <class T>
struct Weights {
  const T* data;
  std::int64_t row, column;
  __device__ __forceinline__ Weights(const Args& a, std::int64_t k) {
    const bool first = k == 0;
    data = first ? static_cast<const T*>(a.Wo.data)
                 : static_cast<const T*>(a.Wa.data) + (k - 1) * a.Wa.stride[0];
    row = first ? a.Wo.stride[0] : a.Wa.stride[1];
    column = first ? a.Wo.stride[1] : a.Wa.stride[2];
  }
};

// The state the segment of steps from t0 on begins with: from r0, or from a checkpoint.
template <class T, class TileT, bool kRecompute>
__device__ void begin_stage(const Args& a, const StepScratch<compute_t<T>>& w,
                            std::int64_t row_tile, std::int64_t column_tile, std::int64_t t0) {
  using Real = compute_t<T>;
  const std::int64_t half = t0 & 1;
  const std::int64_t b0 = row_tile * TileT::kRows;
  const std::int64_t i0 = column_tile * TileT::kColumns;
  for_each_element<TileT>(
      [&](int row, int column) {
        const std::int64_t b = b0 + row;
        const std::int64_t i = i0 + column;
        if (b >= a.B || i >= a.N) return Real(0);
        if constexpr (kRecompute) {
          return begin_step<T, true>(a, b, i, t0, get<Real>(a.saved, t0 / a.checkpoint, b, i),
                                     resets(a, b, t0));
        } else {
          return first_state<T>(a, b, i);
        }
      },
      [&](int row, int column, Real s) {
        const std::int64_t b = b0 + row;
        const std::int64_t i = i0 + column;
        if (b < a.B && i < a.N) {
          w.state[(half * a.B + b) * a.N + i] = s;
          if constexpr (kRecompute && kRoundsStates<T>) {
            if (w.kept != nullptr) w.kept[(t0 % w.kept_steps * a.B + b) * a.N + i] = s;
          }
        }
        put_group(w.sums + half * a.B * sum_groups(a.N), s, b, i, a.B, a.N);
      });
}

// Channels whose coefficients were loaded before the barrier that leads to their step: they do not
// depend on the state. -1: none were.
struct Prepared {
  int active = -1;
};

// Does a block that has `columns` tiles of a step, and goes on to another, prepare for it?
template <class TileT>
__device__ __forceinline__ bool can_prepare(const Args& a, std::int64_t columns) {
  return columns == 1 && a.K < StageShared<TileT>::kChannels;
}

// Step t of one tile. kRecompute: y goes to `ys` (B, N), and nothing else but the next state is kept,
// that of a step of the same segment in w.kept, too.
template <class T, class TileT, bool kRecompute>
__device__ void forward_stage(const Args& a, const StepScratch<compute_t<T>>& w,
                              StageShared<TileT>& shared, Prepared prepared, std::int64_t row_tile,
                              std::int64_t column_tile, std::int64_t t,
                              [[maybe_unused]] compute_t<T>* ys) {
  using Real = compute_t<T>;
  using Shared = StageShared<TileT>;
  const Place<TileT> at;
  const std::int64_t b0 = row_tile * TileT::kRows;
  const std::int64_t i0 = column_tile * TileT::kColumns;
  const std::int64_t half = t & 1;
  const std::int64_t group_half = a.B * sum_groups(a.N);
  const Real* state = w.state + half * a.B * a.N;

  __syncthreads();  // the tile before this one has been read
  add_groups<TileT>(
      a.B, a.N, b0, [&](std::int64_t g) { return __ldcg(w.sums + half * group_half + g); },
      [&](int r, Real v) { shared.row[r] = v; });

  Sums<TileT> sum = {};
  const int rounds = static_cast<int>((a.N + TileT::kRound - 1) / TileT::kRound);
  for (std::int64_t k0 = 0; k0 <= a.K; k0 += Shared::kChannels) {
    const int active = prepared.active >= 0 ? prepared.active
                                            : load_channels<T>(a, shared, b0, t, k0, false, false);
    if (active == 0) continue;
    Cursor cursor(shared.active, rounds);
    multiply<TileT, true, true>(
        shared.tile.panel, active * rounds, [&] { cursor.advance(shared.active); },
        [&](int line, int depth) {
          const std::int64_t b = b0 + line;
          const std::int64_t j = cursor.depth<TileT>(at.slice) + depth;
          Four<Real> x = {};
          if (b >= a.B) return x;
          x = load_four_shared(state + b * a.N + j, a.N - j, w.whole_rows);
          const Real c = shared.c[cursor.channel][line];
#pragma unroll
          for (int q = 0; q < 4; ++q) x.v[q] = mul_of(c, x.v[q]);
          return x;
        },
        [&](int line, int depth) {
          const std::int64_t i = i0 + line;
          const std::int64_t j = cursor.depth<TileT>(at.slice) + depth;
          if (i >= a.N) return Four<Real>{};
          const Weights<T> m(a, k0 + cursor.channel);
          return load_four(m.data + i * m.row + j * m.column, m.column, a.N - j, w.whole_weights);
        },
        [](Sums<TileT>&) {}, sum);
  }
  spread<TileT>(shared.tile, sum);

  const Real J0 = get<T>(a.J0);
  for_each_element<TileT>(
      [&](int row, int column) {
        const std::int64_t b = b0 + row;
        const std::int64_t i = i0 + column;
        if (b >= a.B || i >= a.N) return StepInputs<Real>{Real(0)};
        return load_step<T>(a, b, i, t, __ldcg(state + b * a.N + i));
      },
      [&](int row, int column, const StepInputs<Real>& in) {
        const std::int64_t b = b0 + row;
        const std::int64_t i = i0 + column;
        Real next = 0;
        Real X = 0;
        Real Y = 0;
        if (b < a.B && i < a.N) {
          const Stepped<Real> step = finish_step<T, kRecompute>(
              a, b, i, t, in, total<TileT>(shared.tile, row, column), shared.row[row], J0);
          next = step.next;
          w.state[((half ^ 1) * a.B + b) * a.N + i] = next;
          if constexpr (kRecompute) ys[b * a.N + i] = step.y;
          if constexpr (kRecompute && kRoundsStates<T>) {
            if (w.kept != nullptr && t + 1 < a.T && (t + 1) % a.checkpoint != 0) {
              w.kept[((t + 1) % w.kept_steps * a.B + b) * a.N + i] = next;
            }
          }
          if (!kRecompute && w.vectors != nullptr) {
            X = mul_of(step.r, w.table[2 * i]);
            Y = mul_of(step.r, w.table[2 * i + 1]);
          }
        }
        put_group(w.sums + (half ^ 1) * group_half, next, b, i, a.B, a.N);
        if (!kRecompute && w.vectors != nullptr) {
          put_group(w.vectors + 2 * half * group_half, X, b, i, a.B, a.N);
          put_group(w.vectors + (2 * half + 1) * group_half, Y, b, i, a.B, a.N);
        }
      });
}

}  // namespace annulus::ring_rnn::cuda
