// The matrix product on the ordinary cores, in f32 or f64: one tile of the output by one block of
// 256 threads, from operands of any type and layout, which functions of the caller load four
// numbers at a time.
//
// A tile is Rows x Columns numbers, 8 x 8 to 4 x 4 of them a thread: the more, the fewer loads from
// shared memory a multiplication. Slices of the block share the depth of the product, and their
// sums are added at the end, in order. Panels of kDepth lines are loaded into registers while the
// panels before them are multiplied, then stored to the other of two buffers in shared memory. The
// order of sums depends on nothing but the tile.
#pragma once

#include <algorithm>
#include <cstdint>
#include <type_traits>

#include "annulus/core/dtype.h"
#include "annulus/cuda/math.cuh"
#include "annulus/cuda/rows.cuh"

namespace annulus::cuda::simt {

inline constexpr int kTileThreads = 256;

template <class Real_, int Rows, int Columns, int Slices, int Down, int Across, int Depth>
struct Tile {
  using Real = Real_;
  static constexpr int kRows = Rows, kColumns = Columns, kSlices = Slices, kDepth = Depth;
  static constexpr int kDown = Down, kAcross = Across;  // numbers a thread
  static constexpr int kSliceThreads = kTileThreads / Slices;
  static constexpr int kThreadsAcross = Columns / Across;
  static_assert(Rows / Down * kThreadsAcross == kSliceThreads && kThreadsAcross <= 32);
  // What all slices together advance in one round.
  static constexpr int kRound = Depth * Slices;
};
// Tiles for many and for few; the small one has a slice a warp, which waits for no other.
template <class Real>
using LargeTile = std::conditional_t<std::is_same_v<Real, double>, Tile<Real, 64, 64, 1, 4, 4, 16>,
                                     Tile<Real, 64, 64, 4, 8, 8, 8>>;
template <class Real>
using SmallTile = std::conditional_t<std::is_same_v<Real, double>, Tile<Real, 32, 32, 4, 4, 4, 8>,
                                     Tile<Real, 32, 32, 8, 8, 4, 8>>;

template <class TileT>
using Sums = typename TileT::Real[TileT::kDown][TileT::kAcross];

template <class Real>
struct alignas(16) Four {
  Real v[4];
};

template <class TileT>
struct PanelShared {
  using Real = typename TileT::Real;
  // Padded by one vector: stores of a transposed panel meet in a bank two at a time, not 16.
  Real left[2][TileT::kSlices][TileT::kDepth][TileT::kRows + 4];
  Real right[2][TileT::kSlices][TileT::kDepth][TileT::kColumns + 4];
};
// Slices whose sums there is room for at a time.
template <class TileT>
inline constexpr int kSlicesHeld = std::min<int>(TileT::kSlices,
                                                 sizeof(PanelShared<TileT>) /
                                                     sizeof(typename TileT::Real) /
                                                     (TileT::kRows * TileT::kColumns));
template <class TileT>
union alignas(16) TileShared {
  PanelShared<TileT> panel;
  typename TileT::Real sum[kSlicesHeld<TileT>][TileT::kRows][TileT::kColumns];
};

// Where a thread stands in its tile. Its numbers are fours of rows and columns, Rows 4 / Down and
// Columns 4 / Across apart: neighbours in a warp then read neighbours in shared memory.
template <class TileT>
struct Place {
  int slice, thread;  // thread within the slice
  int down, across;
  __device__ __forceinline__ Place() {
    slice = static_cast<int>(threadIdx.x) / TileT::kSliceThreads;
    thread = static_cast<int>(threadIdx.x) % TileT::kSliceThreads;
    down = thread / TileT::kThreadsAcross * 4;
    across = thread % TileT::kThreadsAcross * 4;
  }
  __device__ __forceinline__ int row(int i) const {
    return down + i % 4 + i / 4 * (TileT::kRows * 4 / TileT::kDown);
  }
  __device__ __forceinline__ int column(int j) const {
    return across + j % 4 + j / 4 * (TileT::kColumns * 4 / TileT::kAcross);
  }
};

// How a panel of Lines x Depth numbers goes from memory to shared memory: four neighbours at a
// time, along the depth (kAlongDepth: they are then turned) or along the lines.
template <class TileT, int Lines, bool kAlongDepth>
struct PanelMap {
  using Real = typename TileT::Real;
  static constexpr int kVectors = Lines * TileT::kDepth / 4 / TileT::kSliceThreads;
  static_assert(kVectors * 4 * TileT::kSliceThreads == Lines * TileT::kDepth);

  static __device__ __forceinline__ int line(int thread, int v) {
    const int n = thread + v * TileT::kSliceThreads;
    return kAlongDepth ? n / (TileT::kDepth / 4) : n % (Lines / 4) * 4;
  }
  static __device__ __forceinline__ int depth(int thread, int v) {
    const int n = thread + v * TileT::kSliceThreads;
    return kAlongDepth ? n % (TileT::kDepth / 4) * 4 : n / (Lines / 4);
  }
  static __device__ __forceinline__ void store(int thread, const Four<Real> (&in)[kVectors],
                                               Real (&panel)[TileT::kDepth][Lines + 4]) {
#pragma unroll
    for (int v = 0; v < kVectors; ++v) {
      const int l = line(thread, v);
      const int d = depth(thread, v);
      if constexpr (kAlongDepth) {
#pragma unroll
        for (int q = 0; q < 4; ++q) panel[d + q][l] = in[v].v[q];
      } else {
        *reinterpret_cast<Four<Real>*>(&panel[d][l]) = in[v];
      }
    }
  }
};

// sum += left right over `rounds` rounds. `advance()` is called before the panels of each round are
// fetched, `left(line, depth)` and `right(line, depth)` give four numbers of that round's panel of
// this thread's slice, zeros outside of the operand, and `after(sum)` is called when a round has
// been added. All threads of the block call this with the same number of rounds, having
// synchronised since `shared` was last read. Ends synchronised.
template <class TileT, bool kLeftAlongDepth, bool kRightAlongDepth, class Advance, class Left,
          class Right, class After>
__device__ __forceinline__ void multiply(PanelShared<TileT>& shared, int rounds, Advance&& advance,
                                         Left&& left, Right&& right, After&& after,
                                         Sums<TileT>& sum) {
  using Real = typename TileT::Real;
  using LeftMap = PanelMap<TileT, TileT::kRows, kLeftAlongDepth>;
  using RightMap = PanelMap<TileT, TileT::kColumns, kRightAlongDepth>;
  const Place<TileT> at;
  Four<Real> l[LeftMap::kVectors];
  Four<Real> r[RightMap::kVectors];

  auto fetch = [&]() {
    advance();
#pragma unroll
    for (int v = 0; v < LeftMap::kVectors; ++v) {
      l[v] = left(LeftMap::line(at.thread, v), LeftMap::depth(at.thread, v));
    }
#pragma unroll
    for (int v = 0; v < RightMap::kVectors; ++v) {
      r[v] = right(RightMap::line(at.thread, v), RightMap::depth(at.thread, v));
    }
  };
  auto store = [&](int buffer) {
    LeftMap::store(at.thread, l, shared.left[buffer][at.slice]);
    RightMap::store(at.thread, r, shared.right[buffer][at.slice]);
  };

  // A slice has its own panels: threads wait for those of their slice, or, where that is not a
  // warp, for all.
  auto synchronize = [] {
    if constexpr (TileT::kSliceThreads == 32) {
      __syncwarp();
    } else {
      __syncthreads();
    }
  };

  if (rounds > 0) {
    fetch();
    store(0);
  }
  synchronize();
  for (int round = 0; round < rounds; ++round) {
    const bool more = round + 1 < rounds;
    if (more) fetch();
    auto& a = shared.left[round & 1][at.slice];
    auto& b = shared.right[round & 1][at.slice];
#pragma unroll
    for (int d = 0; d < TileT::kDepth; ++d) {
      Four<Real> x[TileT::kDown / 4];
      Four<Real> w[TileT::kAcross / 4];
#pragma unroll
      for (int i = 0; i < TileT::kDown / 4; ++i) {
        x[i] = *reinterpret_cast<const Four<Real>*>(&a[d][at.row(4 * i)]);
      }
#pragma unroll
      for (int j = 0; j < TileT::kAcross / 4; ++j) {
        w[j] = *reinterpret_cast<const Four<Real>*>(&b[d][at.column(4 * j)]);
      }
#pragma unroll
      for (int i = 0; i < TileT::kDown; ++i) {
#pragma unroll
        for (int j = 0; j < TileT::kAcross; ++j) {
          sum[i][j] = fma_of(x[i / 4].v[i % 4], w[j / 4].v[j % 4], sum[i][j]);
        }
      }
    }
    after(sum);
    // The other buffer was read in the round before, which every thread has left behind.
    if (more) store((round + 1) & 1);
    synchronize();
  }
  if constexpr (TileT::kSliceThreads == 32) __syncthreads();
}

// Puts the threads' numbers where all of the block can read them with total(). Ends synchronised.
template <class TileT>
__device__ __forceinline__ void spread(TileShared<TileT>& shared, const Sums<TileT>& sum) {
  using Real = typename TileT::Real;
  constexpr int kHeld = kSlicesHeld<TileT>;
  const Place<TileT> at;
#pragma unroll
  for (int first = 0; first < TileT::kSlices; first += kHeld) {
    if (at.slice >= first && at.slice < first + kHeld) {
#pragma unroll
      for (int i = 0; i < TileT::kDown; ++i) {
#pragma unroll
        for (int j = 0; j < TileT::kAcross; j += 4) {
          auto* p =
              reinterpret_cast<Four<Real>*>(&shared.sum[at.slice - first][at.row(i)][at.column(j)]);
          Four<Real> v;
          if (first > 0) v = *p;
#pragma unroll
          for (int q = 0; q < 4; ++q) v.v[q] = first > 0 ? v.v[q] + sum[i][j + q] : sum[i][j + q];
          *p = v;
        }
      }
    }
    __syncthreads();
  }
}
template <class TileT>
__device__ __forceinline__ typename TileT::Real total(const TileShared<TileT>& shared, int row,
                                                      int column) {
  typename TileT::Real sum = shared.sum[0][row][column];
#pragma unroll
  for (int s = 1; s < kSlicesHeld<TileT>; ++s) sum += shared.sum[s][row][column];
  return sum;
}

// finish(row, column, load(row, column)) for every number of a tile, four loads ahead. A warp takes
// 32 neighbours of one row, always the same. `finish` holds every activation and stands there once,
// at the price of a few words on the stack: four copies of it are a third of a kernel's code.
template <class TileT, class Load, class Finish>
__device__ __forceinline__ void for_each_element(Load&& load, Finish&& finish) {
  constexpr int kAhead = 4;
  static_assert(TileT::kRows * TileT::kColumns % (kAhead * kTileThreads) == 0);
#pragma unroll 1
  for (int first = static_cast<int>(threadIdx.x); first < TileT::kRows * TileT::kColumns;
       first += kAhead * kTileThreads) {
    decltype(load(0, 0)) item[kAhead];
#pragma unroll
    for (int q = 0; q < kAhead; ++q) {
      const int e = first + q * kTileThreads;
      item[q] = load(e / TileT::kColumns, e % TileT::kColumns);
    }
#pragma unroll 1
    for (int q = 0; q < kAhead; ++q) {
      const int e = first + q * kTileThreads;
      finish(e / TileT::kColumns, e % TileT::kColumns, item[q]);
    }
  }
}

// Four numbers that other blocks wrote in this launch: not through the first-level cache, which
// does not see them.
template <class Real>
__device__ __forceinline__ Four<Real> load_four_shared(const Real* p) {
  Four<Real> f;
  if constexpr (std::is_same_v<Real, double>) {
    const double2 a = __ldcg(reinterpret_cast<const double2*>(p));
    const double2 b = __ldcg(reinterpret_cast<const double2*>(p) + 1);
    f.v[0] = a.x, f.v[1] = a.y, f.v[2] = b.x, f.v[3] = b.y;
  } else {
    const float4 a = __ldcg(reinterpret_cast<const float4*>(p));
    f.v[0] = a.x, f.v[1] = a.y, f.v[2] = a.z, f.v[3] = a.w;
  }
  return f;
}
// `left` neighbours are there; beyond them zeros. `whole`: rows are multiples of 4 long and
// aligned.
template <class Real>
__device__ __forceinline__ Four<Real> load_four_shared(const Real* p, std::int64_t left,
                                                       bool whole) {
  if (whole && left > 0) return load_four_shared(p);
  Four<Real> f;
#pragma unroll
  for (int q = 0; q < 4; ++q) f.v[q] = q < left ? __ldcg(p + q) : Real(0);
  return f;
}

// Four numbers of type T, `step` apart.
template <class T>
__device__ __forceinline__ Four<compute_t<T>> load_four(const T* p, std::int64_t step,
                                                        std::int64_t left, bool whole) {
  Four<compute_t<T>> f;
  load_row(p, step, left, whole, f.v);
  return f;
}

}  // namespace annulus::cuda::simt
