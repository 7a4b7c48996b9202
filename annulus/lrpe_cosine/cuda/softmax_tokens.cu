// Statistics of softmax over tokens on CUDA, ahead of turn_kernel: each column is cut in runs; a
// block finds the maximum and the sum of powers of each column of its run, in the backward also
// sum(p g), in one pass; a second kernel adds the runs.
//
// A block is `lanes` x rows threads. A thread owns V columns and takes kSumTokens tokens at a time, a
// row apart: with 16-bit tensors of 128 columns a block takes 64. For dots it makes their phases in
// shared memory once and applies them to its sequences one by one, so that the sums of one sequence
// stay in registers. A token's registers are loaded anew, for the next sequence, as soon as they have
// been read.
//
// Everything is in Real, every order is fixed and the same for every layout.
//
// Turning in the same way, statistics in registers and phases from shared memory, was slower than
// turn_kernel: 0.139 / 0.223 ms at n = 4096 instead of 0.125 / 0.155.

#include "annulus/cuda/check.h"
#include "annulus/lrpe_cosine/cuda/arguments.cuh"

namespace annulus::lrpe_cosine::cuda {

namespace {

constexpr int kColumnThreads = 128;
constexpr int kColumnWarps = kColumnThreads / 32;
constexpr int kMostLanes = 16;
constexpr int kSumTokens = 8;  // so that the phases of a block are 64 KiB at most
constexpr int kPieces = 4;     // of kSumTokens tokens a thread, where there are no phases
// Five blocks to a multiprocessor, three of those with phases: that is what shared memory holds. On
// an H200 in bf16 at n = 4096 sums take 0.046 ms, with dots 0.150, of which reading is 0.036 and
// 0.108. 2 or 8 pieces, 4 or 6 blocks: 0.049 to 0.06; 256 threads of 4 tokens: 0.05 and 0.28.
template <bool kDots>
inline constexpr int kMinBlocks = kDots ? 3 : 5;

// Tokens of a run, for each row.
__host__ __device__ constexpr int sum_tokens(bool dots) {
  return dots ? kSumTokens : kSumTokens * kPieces;
}

// What a maximum of nothing but -inf is replaced by, so that its powers are 0 and not NaN.
template <class Real>
__device__ __forceinline__ Real finite_high(Real high) {
  return high == -static_cast<Real>(INFINITY) ? Real(0) : high;
}

// What a thread of these kernels works on. Blocks are numbered by tile (run of tokens, then block of
// columns), head, and group of batch_per_thread sequences.
struct ColumnPlace {
  Place block;
  std::int64_t run, t0;  // first token of the block
  std::int64_t b_begin;
  int sequences;
  int lane, row, rows;
  int first_column, column;

  __device__ __forceinline__ ColumnPlace(const Args& a, int lanes, int width, std::int64_t runs,
                                         int tokens_per_thread)
      : block(find_place(a)) {
    run = block.tile % static_cast<std::uint32_t>(runs);
    first_column = static_cast<int>(block.tile / static_cast<std::uint32_t>(runs)) * width;
    lane = static_cast<int>(threadIdx.x) % lanes;
    row = static_cast<int>(threadIdx.x) / lanes;
    rows = kColumnThreads / lanes;
    column = first_column + lane * (width / lanes);
    t0 = run * rows * tokens_per_thread;
    b_begin = static_cast<std::int64_t>(block.group) * a.batch_per_thread;
    const std::int64_t left = a.B - b_begin;
    sequences = left < a.batch_per_thread ? static_cast<int>(left) : a.batch_per_thread;
  }
};

// Which tokens of a piece, and which of a thread's columns, exist.
struct TokenRange {
  bool complete;  // all of the block
  int tokens, columns;
  int row, rows;

  __device__ __forceinline__ TokenRange(const Args& a, const ColumnPlace& p, std::int64_t first,
                                        int width)
      : columns(a.C - p.column), row(p.row), rows(p.rows) {
    const int all = p.rows * kSumTokens;
    const std::int64_t left = a.L - first;
    tokens = left < 0 ? 0 : left < all ? static_cast<int>(left) : all;
    complete = tokens == all && p.first_column + width <= a.C;
  }
  // Columns of the thread's token j.
  __device__ __forceinline__ int left(int j) const { return row + j * rows < tokens ? columns : 0; }
};

// One component of a tensor, walked through token by token, kSumTokens of every sequence. (A pointer
// that moves: of offsets from one that stands still the compiler keeps a register pair for each.)
template <class T, bool kVectors>
struct TokenWalk {
  static constexpr int V = kVectorWidth<T>;
  T* at;
  std::int64_t token_step, sequence_step, column_step;

  __device__ __forceinline__ TokenWalk(const Operand& o, void* component, const ColumnPlace& p)
      : at(static_cast<T*>(component) +
           element(o, p.b_begin, p.block.head, p.t0 + p.row, p.column)),
        token_step(p.rows * o.stride[2]),
        sequence_step(o.stride[0] - kSumTokens * token_step),
        column_step(o.stride[3]) {}

  // Token j of the range, which may be known to be complete.
  template <bool kComplete>
  __device__ __forceinline__ Vec<T, V> fetch(int j, const TokenRange& range, compute_t<T> filler) {
    const T* const here = at;
    at += token_step;
    if (kVectors && kComplete) return annulus::cuda::fetch<V>(here);
    return fetch_row<V, kVectors>(here, column_step, range.left(j), filler);
  }
  __device__ __forceinline__ void next_sequence() { at += sequence_step; }
};

// The phases of a tile: per token cosines, then sines, of `width` columns each. The 16-byte pieces
// of a thread's V columns lie apart, so that threads side by side read memory side by side.
template <class T, int V>
struct PhaseTile {
  using Real = compute_t<T>;
  static constexpr int kPiece = static_cast<int>(16 / sizeof(Real));
  Real* data;
  int lanes;

  __device__ __forceinline__ int slot(int column) const {
    const int within = column % V;
    return (within / kPiece * lanes + column / V) * kPiece + within % kPiece;
  }
  // A thread makes one column. Tokens and columns beyond the end get a finite phase, whatever theta is.
  __device__ __forceinline__ void fill(const Args& a, const Place& p, std::int64_t b,
                                       std::int64_t t0, int tokens, int first_column) const {
    const int width = lanes * V;
    const int column = static_cast<int>(threadIdx.x) % width;
    const int c = first_column + column;
    const bool real = c < a.C;
    const int axis = real ? a.positions.axis_of(c) : 0;
    const Real theta = real ? load_theta<Real>(a, p.theta_row, c - axis * a.E) : Real(0);
    const Real poison = isfinite(theta) ? Real(0) : Real(NAN);
    const step_t<T> step = make_step<T>(theta);
    const std::int64_t left = a.positions.prefix - t0;  // tokens without a position
    const int prefix = left < 0 ? 0 : left < tokens ? static_cast<int>(left) : tokens;
    Real* const column_data = data + slot(column);
    const auto make = [&](int i, std::int64_t position) {
      device::SinCos<Real, 1> phase;
      phase.set(0, turn_at(step, position));
      const bool placed = i >= prefix && t0 + i < a.L;
      column_data[2 * i * width] = placed ? phase.c[0] + poison : Real(1);
      column_data[(2 * i + 1) * width] = placed ? phase.s[0] + poison : Real(0);
    };
    const int first = static_cast<int>(threadIdx.x) / width;
    const int apart = kColumnThreads / width;
    if (a.position_ids.data != nullptr) {
      const Integers& ids = a.position_ids;
      for (int i = first; i < tokens; i += apart) {
        const std::int64_t t = min(t0 + i, a.L - 1);
        make(i, ids.at(b * ids.stride[0] + t * ids.stride[1] + axis * ids.stride[2]));
      }
    } else if (a.positions.axes == 1) {
      const std::int64_t start = t0 - a.positions.prefix + a.positions.offset + load_offset(a, b);
      for (int i = first; i < tokens; i += apart) make(i, start + i);
    } else {
      for (int i = first; i < tokens; i += apart) {
        std::int64_t s[device::kAxes] = {};
        a.positions.unravel(t0 + max(i, prefix), s);
        make(i, a.positions.along(s, axis));
      }
    }
  }
  __device__ __forceinline__ void read(int token, int lane, device::SinCos<Real, V>& phase) const {
    const Real* const row = data + 2 * token * lanes * V;
#pragma unroll
    for (int k = 0; k < V / kPiece; ++k) {
      const int at = (k * lanes + lane) * kPiece;
      const auto c = fetch<kPiece>(row + at);
      const auto s = fetch<kPiece>(row + lanes * V + at);
#pragma unroll
      for (int i = 0; i < kPiece; ++i) {
        phase.c[k * kPiece + i] = c.word[i];
        phase.s[k * kPiece + i] = s.word[i];
      }
    }
  }
};

// Over the rows of a warp: lanes `lanes` apart.
template <int V, class Real, class F>
__device__ __forceinline__ void reduce_warp_rows(Real (&v)[V], int lanes, F&& combine) {
  for (int step = lanes; step < 32; step *= 2) {
#pragma unroll
    for (int i = 0; i < V; ++i) v[i] = combine(v[i], __shfl_xor_sync(0xffffffffu, v[i], step));
  }
}

// Maximum, sum of powers relative to it, and the sum of their products with g, of V columns.
template <class T, int V>
struct ColumnSums {
  using Real = compute_t<T>;
  Real high[V], sum[V], dot[V];

  __device__ __forceinline__ void clear() {
#pragma unroll
    for (int i = 0; i < V; ++i) {
      high[i] = -static_cast<Real>(INFINITY);
      sum[i] = dot[i] = 0;
    }
  }
};

// One entry for each (sequence, run, column).
template <class Real>
struct RunSums {
  Real *high, *sum, *dot;
};

// Adds up the rows of a warp, then the warps of a block, and writes the entries of sequence b.
// `warp_sums` is in shared memory: [part][warp][width].
template <int V, bool kDots, class T, class Real>
__device__ __forceinline__ void add_warps(const Args& a, const ColumnPlace& p, int lanes,
                                          std::int64_t b, std::int64_t runs, ColumnSums<T, V>& mine,
                                          Real* warp_sums, const RunSums<Real>& sums) {
  const int width = lanes * V;
  const int part = kColumnWarps * width;
  const int thread = static_cast<int>(threadIdx.x);
  const auto add = [](Real u, Real v) { return add_of(u, v); };
  reduce_warp_rows(mine.sum, lanes, add);
  if constexpr (kDots) reduce_warp_rows(mine.dot, lanes, add);
  if (thread % 32 < lanes) {
#pragma unroll
    for (int i = 0; i < V; ++i) {
      Real* const to = warp_sums + thread / 32 * width + p.lane * V + i;
      to[0] = mine.high[i];
      to[part] = mine.sum[i];
      if constexpr (kDots) to[2 * part] = mine.dot[i];
    }
  }
  __syncthreads();
  if (thread < width && p.first_column + thread < a.C) {
    const Real* const column = warp_sums + thread;
    Real high = column[0];
#pragma unroll
    for (int w = 1; w < kColumnWarps; ++w) high = fmax(high, column[w * width]);
    const Real base = finite_high(high);
    Real sum = 0;
    Real dot = 0;
#pragma unroll
    for (int w = 0; w < kColumnWarps; ++w) {
      const Real factor = decay<T>(column[w * width] - base);
      sum = fma_of(column[part + w * width], factor, sum);
      if constexpr (kDots) dot = fma_of(column[2 * part + w * width], factor, dot);
    }
    const std::int64_t entry =
        ((b * a.heads + p.block.flat_head) * runs + p.run) * a.C + p.first_column + thread;
    sums.high[entry] = high;
    sums.sum[entry] = sum;
    if constexpr (kDots) sums.dot[entry] = dot;
  }
  __syncthreads();
}

// Without dots a block works through kPieces pieces of one sequence; with them through one piece of
// all its sequences.
template <class T, bool kVectors, bool kDots>
__global__ void __launch_bounds__(kColumnThreads, kMinBlocks<kDots>)
    column_sums_kernel(const __grid_constant__ Args a, int lanes, std::int64_t runs,
                       RunSums<compute_t<T>> sums) {
  using Real = compute_t<T>;
  constexpr int V = kVectorWidth<T>;
  constexpr int kParts = kDots ? 3 : 2;  // of a run's sums
  constexpr Real kNothing = -static_cast<Real>(INFINITY);
  extern __shared__ __align__(16) unsigned char shared[];
  auto* const warp_sums = reinterpret_cast<Real*>(shared);  // [part][warp][width]
  const int width = lanes * V;
  const PhaseTile<T, V> phases{warp_sums + kParts * kColumnWarps * width, lanes};

  const ColumnPlace p(a, lanes, width, runs, sum_tokens(kDots));
  const SideArgs& side = a.side[p.block.side];
  const int piece_tokens = p.rows * kSumTokens;
  TokenWalk<T, kVectors> x_walk(side.x, side.x.first, p);
  TokenWalk<T, kVectors> d1_walk(side.dy, side.dy.first, p);
  TokenWalk<T, kVectors> d2_walk(side.dy, side.dy.second, p);
  TokenRange range(a, p, p.t0, width);
  Vec<T, V> x[kSumTokens];
  [[maybe_unused]] Vec<T, V> d1[kSumTokens];
  [[maybe_unused]] Vec<T, V> d2[kSumTokens];
  auto fetch_as = [&]<bool kComplete>(int j) {
    x[j] = x_walk.template fetch<kComplete>(j, range, kNothing);
    if constexpr (kDots) {
      d1[j] = d1_walk.template fetch<kComplete>(j, range, Real(0));
      d2[j] = d2_walk.template fetch<kComplete>(j, range, Real(0));
    }
  };
  auto fetch_token = [&](int j) {
    if (kVectors && range.complete) return fetch_as.template operator()<true>(j);
    fetch_as.template operator()<false>(j);
  };
#pragma unroll
  for (int j = 0; j < kSumTokens; ++j) fetch_token(j);

  ColumnSums<T, V> mine;
  mine.clear();
  const int steps = kDots ? p.sequences : kPieces;
  for (int step = 0; step < steps; ++step) {
    if constexpr (kDots) {
      mine.clear();
      if (step == 0 || a.own_positions) {
        phases.fill(a, p.block, p.b_begin + step, p.t0, piece_tokens, p.first_column);
        __syncthreads();
      }
      x_walk.next_sequence();
      d1_walk.next_sequence();
      d2_walk.next_sequence();
    } else {
      range = TokenRange(a, p, p.t0 + (step + 1) * piece_tokens, width);
    }

    Real high[V];
#pragma unroll
    for (int i = 0; i < V; ++i) high[i] = mine.high[i];
#pragma unroll
    for (int j = 0; j < kSumTokens; ++j) {
      Real u[V];
      unpack(x[j], u);
#pragma unroll
      for (int i = 0; i < V; ++i) high[i] = fmax(high[i], u[i]);
    }
    reduce_warp_rows(high, lanes, [](Real u, Real v) { return fmax(u, v); });
#pragma unroll
    for (int i = 0; i < V; ++i) {
      const Real base = finite_high(high[i]);
      if constexpr (!kDots) mine.sum[i] *= decay<T>(mine.high[i] - base);
      mine.high[i] = high[i];
      high[i] = base;
    }
#pragma unroll
    for (int j = 0; j < kSumTokens; ++j) {
      Real e[V];
      unpack(x[j], e);
      [[maybe_unused]] Real u[V];
      [[maybe_unused]] Real w[V];
      if constexpr (kDots) {
        unpack(d1[j], u);
        unpack(d2[j], w);
      }
      if (step + 1 < steps) fetch_token(j);
#pragma unroll
      for (int i = 0; i < V; ++i) {
        e[i] = power<T>(e[i] - high[i]);
        mine.sum[i] = add_of(mine.sum[i], e[i]);
      }
      if constexpr (kDots) {
        Real g[V];
        device::SinCos<Real, V> phase;
        phases.read(j * p.rows + p.row, p.lane, phase);
        device::cosine_tile_backward(u, w, phase, g);
#pragma unroll
        for (int i = 0; i < V; ++i) {
          mine.dot[i] = fma_of(dot_weight<T>(e[i]), g[i], mine.dot[i]);
        }
      }
    }
    if (!kDots && step + 1 < steps) continue;

    add_warps<V, kDots>(a, p, lanes, p.b_begin + (kDots ? step : 0), runs, mine, warp_sums, sums);
  }
}

// Block of 32 columns x 8 shares: share y takes runs y, y + 8, ... in order, then the shares are
// added in order.
constexpr int kShares = 8;
template <class T>
__global__ void __launch_bounds__(32 * kShares)
    merge_runs_kernel(const __grid_constant__ Args a, RunSums<compute_t<T>> sums,
                      std::int64_t runs) {
  using Real = compute_t<T>;
  __shared__ Real shares[3][kShares][32];
  const bool dots = a.stats.dot != nullptr;
  const int lane = static_cast<int>(threadIdx.x);
  const int share = static_cast<int>(threadIdx.y);
  const std::int64_t i = static_cast<std::int64_t>(blockIdx.x) * 32 + lane;
  const bool real = i < a.B * a.heads * a.C;
  const std::int64_t first = real ? i / a.C * runs * a.C + i % a.C : 0;

  Real high = -static_cast<Real>(INFINITY);
  for (std::int64_t r = share; real && r < runs; r += kShares) {
    high = fmax(high, sums.high[first + r * a.C]);
  }
  shares[0][share][lane] = high;
  __syncthreads();
#pragma unroll
  for (int y = 0; y < kShares; ++y) high = fmax(high, shares[0][y][lane]);
  const Real base = finite_high(high);
  Real sum = 0;
  Real dot = 0;
  for (std::int64_t r = share; real && r < runs; r += kShares) {
    const std::int64_t entry = first + r * a.C;
    const Real factor = decay<T>(sums.high[entry] - base);
    sum = fma_of(sums.sum[entry], factor, sum);
    if (dots) dot = fma_of(sums.dot[entry], factor, dot);
  }
  shares[1][share][lane] = sum;
  shares[2][share][lane] = dot;
  __syncthreads();
  if (share != 0 || !real) return;
#pragma unroll
  for (int y = 1; y < kShares; ++y) {
    sum = add_of(sum, shares[1][y][lane]);
    dot = add_of(dot, shares[2][y][lane]);
  }
  const Real scale = inverse<T>(sum);
  static_cast<Real*>(a.stats.high)[i] = high;
  static_cast<Real*>(a.stats.scale)[i] = scale;
  if (dots) static_cast<Real*>(a.stats.dot)[i] = dot_mean<T>(dot, scale);
}

// How a call is cut; by its sizes alone, whatever its layout.
struct ColumnCut {
  int lanes = 1, width = 1;
  std::int64_t runs = 0, column_blocks = 0;

  ColumnCut(const Plan& plan, int tokens_per_thread) {
    const auto V = static_cast<int>(16 / size_of(plan.dtype));
    lanes = lanes_of_row(plan.C, V, kMostLanes);
    width = lanes * V;
    const std::int64_t tokens =
        static_cast<std::int64_t>(kColumnThreads / lanes) * tokens_per_thread;
    runs = ceil_div(plan.L, tokens);
    column_blocks = ceil_div(plan.C, width);
  }
};

std::int64_t run_entries(const Plan& plan, bool dots) {
  return plan.B * plan.heads() * ColumnCut(plan, sum_tokens(dots)).runs * plan.C;
}

// Chooses the sequences of a block, and says how many blocks there are.
unsigned cut_sequences(const Plan& plan, const ColumnCut& cut, bool phases, Args& a) {
  const std::int64_t tiles = cut.runs * cut.column_blocks;
  // Without phases sequences have nothing to share; with them fewer groups make fewer phases, but
  // too few blocks would leave multiprocessors idle.
  constexpr std::int64_t kEnoughBlocks = 768;
  const std::int64_t groups =
      phases ? std::clamp<std::int64_t>(kEnoughBlocks / (tiles * plan.heads()), 1, plan.B) : plan.B;
  a.batch_per_thread = static_cast<std::int32_t>(ceil_div(plan.B, groups));
  return number_blocks(plan, tiles, a.batch_per_thread, a);
}

template <class T, bool kVectors, bool kDots>
void launch_sums(const Plan& plan, Args a, void* scratch, cudaStream_t stream) {
  using Real = compute_t<T>;
  const ColumnCut cut(plan, sum_tokens(kDots));
  const unsigned blocks = cut_sequences(plan, cut, kDots, a);
  auto* const entries = static_cast<Real*>(scratch);
  const std::int64_t count = run_entries(plan, kDots);
  const RunSums<Real> sums{entries, entries + count, entries + 2 * count};
  constexpr std::size_t kWarpSums = (kDots ? 3 : 2) * kColumnWarps * sizeof(Real);
  constexpr std::size_t kPhases =
      kDots ? 2 * sizeof(Real) * kSumTokens * kColumnThreads * kVectorWidth<T> : 0;
  auto* const kernel = column_sums_kernel<T, kVectors, kDots>;
  constexpr std::size_t kMostShared = kPhases + kWarpSums * kMostLanes * kVectorWidth<T>;
  allow_shared(plan.op, "shared memory of column_sums_kernel", kernel, kMostShared);
  const std::size_t shared = kPhases + kWarpSums * static_cast<std::size_t>(cut.width);
  kernel<<<blocks, kColumnThreads, shared, stream>>>(a, cut.lanes, cut.runs, sums);
  check_launch(plan.op, "column_sums_kernel");

  const unsigned merge_blocks = checked_blocks(plan, ceil_div(plan.B * plan.heads() * plan.C, 32));
  merge_runs_kernel<T><<<merge_blocks, dim3(32, kShares), 0, stream>>>(a, sums, cut.runs);
  check_launch(plan.op, "merge_runs_kernel");
}

}  // namespace

std::size_t column_scratch_bytes(const Plan& plan, bool with_dot) {
  const std::size_t real = plan.dtype == DType::kF64 ? 8 : 4;
  return static_cast<std::size_t>(run_entries(plan, with_dot)) * (with_dot ? 3 : 2) * real;
}

void launch_column_stats(const Plan& plan, const Args& a, bool vectors, bool with_dot,
                         void* scratch, cudaStream_t stream) {
  visit_floating(plan.dtype, [&]<class T>() {
    visit_bool(with_dot, [&]<bool kDots>() {
      if constexpr (!std::is_same_v<T, double>) {
        if (vectors) return launch_sums<T, true, kDots>(plan, a, scratch, stream);
      }
      launch_sums<T, false, kDots>(plan, a, scratch, stream);
    });
  });
}

}  // namespace annulus::lrpe_cosine::cuda
