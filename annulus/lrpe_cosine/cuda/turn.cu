// LRPE-cosine on CUDA: the kernel that turns, and the host side of both directions.
//
// Bandwidth is the only limit: 6 bytes an element in bf16 at 4.1 to 4.4 TB/s on an H200. A phase
// does not depend on the batch, so a thread makes the sines and cosines of its V columns of one
// (head, token) once and applies them to batch_per_thread sequences; it has the first loads in
// flight before it computes them. The steps (theta / 2pi in fixed point, about 60 instructions
// each) are made once per block in shared memory. Loads and stores are 16 bytes where the layout
// allows it, else one element at a time.

#include "annulus/core/scratch.h"
#include "annulus/cuda/check.h"
#include "annulus/cuda/memory.h"
#include "annulus/lrpe_cosine/cuda/arguments.cuh"
#include "annulus/lrpe_cosine/cuda/short.cuh"
#include "annulus/lrpe_cosine/cuda/turn.cuh"

namespace annulus::lrpe_cosine::cuda {

namespace {

// Blocks of 128 threads, seven of them to a multiprocessor: 72 registers a thread, no spill.
// Measured on an H200 in bf16, n = 4096 forward / backward, as a multiple of a kernel that only
// moves the bytes: 1.05 / 1.04; 256 threads and 80 registers 1.06 / 1.06; eight blocks (64
// registers, 60 bytes spilled) 1.16 / 1.04; blocks of 64 1.07 / 1.06. Left alone the compiler takes
// 125 registers.
constexpr int kTurnThreads = 128;
template <class T>
inline constexpr int kMinBlocks = std::is_same_v<T, double> ? 4 : 7;

// Softmax over tokens: where the statistics begin in shared memory, behind the table of steps.
__host__ __device__ constexpr std::size_t stats_offset(std::size_t table) {
  return (table + 15) / 16 * 16;
}

// Copies the statistics of the columns a block works on at a time, of all its sequences. Read where
// they are, each loop waited for the cache: 0.131 / 0.163 ms at n = 4096 instead of 0.125 / 0.155.
template <class Real>
__device__ __forceinline__ SoftmaxStats copy_stats(const Args& a, const Place& p,
                                                   std::int64_t b_begin, int sequences,
                                                   int first_column, int width, Real* shared) {
  const int thread = static_cast<int>(threadIdx.y * blockDim.x + threadIdx.x);
  const int threads = static_cast<int>(blockDim.x * blockDim.y);
  const int piece = a.batch_per_thread * width;
  const auto* high = static_cast<const Real*>(a.stats.high);
  const auto* scale = static_cast<const Real*>(a.stats.scale);
  const auto* dot = static_cast<const Real*>(a.stats.dot);
  for (int i = thread; i < width && first_column + i < a.C; i += threads) {
    std::int64_t from = (b_begin * a.heads + p.flat_head) * a.C + first_column + i;
#pragma unroll 6
    for (int j = 0; j < sequences; ++j) {
      shared[j * width + i] = high[from];
      shared[piece + j * width + i] = scale[from];
      if (dot != nullptr) shared[2 * piece + j * width + i] = dot[from];
      from += static_cast<std::int64_t>(a.heads) * a.C;
    }
  }
  return {shared, shared + piece, shared + 2 * piece};
}

// Thread (x, y) of a block owns V columns from V (x + i blockDim.x) on, of token tile * blockDim.y
// + y, of batch_per_thread sequences.
template <class T, int V, Mode kMode, Act kAct>
__global__ void __launch_bounds__(kTurnThreads, kMinBlocks<T>)
    turn_kernel(const __grid_constant__ Args a) {
  using Real = compute_t<T>;
  constexpr bool kActivated = kAct != Act::kNone;
  constexpr bool kTwoIn = kReadsSecond<kMode>;
  constexpr bool kThreeIn = kReadsX<kMode, kAct>;
  // Sequences whose loads are in flight together.
  constexpr int kAhead = kThreeIn ? 1 : kTwoIn || kActivated ? 2 : 4;
  static_assert(!kThreeIn || kAhead == 1);  // Loaded::x is of one
  extern __shared__ __align__(16) unsigned char shared[];
  const int width = static_cast<int>(blockDim.x) * V;  // columns a block takes at a time
  StepTable<T> table(shared, width);

  const Place p = find_place(a);
  const SideArgs& side = a.side[p.side];
  const Operand& in = source<kMode>(side, a.backward);
  const Operand& out = target<kMode>(side, a.backward);
  const std::int64_t t = static_cast<std::int64_t>(p.tile) * blockDim.y + threadIdx.y;
  const std::int64_t b_begin = static_cast<std::int64_t>(p.group) * a.batch_per_thread;
  const std::int64_t b_end =
      b_begin + a.batch_per_thread < a.B ? b_begin + a.batch_per_thread : a.B;
  const bool live = t < a.L;
  if (out.first == nullptr) return;  // of q and k, only one gradient was asked for

  struct Loaded {
    Vec<T, V> first[kAhead], second[kAhead], x;
  } next;
  const std::int64_t source_row = element(in, b_begin, p.head, t, 0);
  const std::int64_t target_row = element(out, b_begin, p.head, t, 0);
  // The next kAhead of `left` sequences.
  auto fetch_next = [&](std::int64_t at, std::int64_t left) {
#pragma unroll
    for (int j = 0; j < kAhead; ++j) {
      if (j >= left) break;
      const std::int64_t i = at + j * in.stride[0];
      next.first[j] = fetch<V>(static_cast<const T*>(in.first) + i);
      if constexpr (kTwoIn) {
        next.second[j] = fetch<V>(static_cast<const T*>(in.second) + i);
      }
    }
  };
  [[maybe_unused]] const T* x_from = nullptr;
  [[maybe_unused]] auto fetch_x = [&] {
    next.x = fetch<V>(x_from);
    x_from += side.x.stride[0];
  };

  std::int64_t s[device::kAxes] = {};
  const bool placed = live && t >= a.positions.prefix;
  const auto sequences = static_cast<int>(b_end - b_begin);
  const Real sign = a.backward ? Real(-1) : Real(1);

  for (int first_column = 0; first_column < a.C; first_column += width) {
    const int slot = static_cast<int>(threadIdx.x) * V;
    const int column = first_column + slot;
    const bool mine = live && column < a.C;
    std::int64_t from = source_row + column * in.stride[3];
    std::int64_t to = target_row + column * out.stride[3];
    if (mine) {  // in flight while the table is made
      fetch_next(from, sequences);
      if constexpr (kThreeIn) {
        x_from = static_cast<const T*>(side.x.first) + element(side.x, b_begin, p.head, t, column);
        if (sequences > 0) fetch_x();
      }
    }
    if (first_column == 0 && placed) {
      a.positions.unravel(t, s);
    }
    if (first_column > 0) __syncthreads();  // all have read the table before it is made anew
    SoftmaxStats stats = a.stats;
    if constexpr (kAct == Act::kColumns) {
      stats =
          copy_stats(a, p, b_begin, sequences, first_column, width,
                     reinterpret_cast<Real*>(shared + stats_offset(StepTable<T>::bytes(width))));
    }
    const bool suspect = table.fill(a, p.theta_row, first_column, width);
    if (!mine) continue;
    device::SinCos<Real, V> phase;
    if (placed) {
      make_phases<T, V>(a, table, slot, s, column, suspect, phase);
    } else {
      phase.set_zero_phase();
    }
    // Of the statistics.
    [[maybe_unused]] std::int64_t stat_row = (b_begin * a.heads + p.flat_head) * a.L + t;
    [[maybe_unused]] int stat_column = slot;
    for (int done = 0; done < sequences; done += kAhead) {
      auto fetch_from = [&](int sequence) {
        from += kAhead * in.stride[0];
        fetch_next(from, sequences - sequence);
        if constexpr (kThreeIn) fetch_x();
      };
      if (!kActivated && done > 0) fetch_from(done);
      const Loaded now = next;
      // An activation takes long enough to have the next loads in flight meanwhile.
      if (kActivated && done + kAhead < sequences) fetch_from(done + kAhead);
#pragma unroll
      for (int j = 0; j < kAhead; ++j) {
        if (done + j >= sequences) break;
        turn_columns<T, V, kMode, kAct>(a.activation, stats, stat_row, stat_column, phase, sign,
                                        now.first[j], now.second[j], now.x, out, to);
        to += out.stride[0];
        stat_row += a.heads * a.L;
        stat_column += width;
      }
    }
  }
}

// ---------------------------------------------------------------------------------------------------
// Host

// 16-byte accesses need dense columns in whole vectors, and every row on a 16-byte boundary.
bool vector_layout(const Operand& o, std::int64_t C, int width) {
  if (!o.defined()) return true;
  if (o.stride[3] != 1 || C % width != 0) return false;
  for (int i = 0; i < 3; ++i) {
    if (o.stride[i] % width != 0) return false;
  }
  const auto aligned = [&](void* p) { return reinterpret_cast<std::uintptr_t>(p) % 16 == 0; };
  return aligned(o.first) && (o.second == nullptr || aligned(o.second));
}

bool use_vectors(const Plan& plan) {
  if (plan.dtype == DType::kF64) return false;  // not a matter of bandwidth: sincospi in double
  const auto width = static_cast<int>(16 / size_of(plan.dtype));
  if (plan.axes > 1 && plan.E < width) return false;  // a vector would lie on three axes
  for (int i = 0; i < plan.sides; ++i) {
    const Side& s = plan.side[i];
    for (const Operand* o : {&s.x, &s.y, &s.dy, &s.dx}) {
      if (!vector_layout(*o, plan.C, width)) return false;
    }
  }
  return true;
}

Args make_args(const Plan& plan, bool backward) {
  if (plan.C > (1 << 29) || plan.E > (1 << 29) || plan.heads() >= (std::int64_t{1} << 31)) {
    throw NotSupported("[" + std::string(plan.op) +
                       "] x and theta must have at most 2^29 columns and 2^31 - 1 heads on cuda");
  }
  Args a;
  a.positions = device::make_positions(plan.axes, plan.extent, plan.prefix, plan.offset, plan.E);
  a.theta = plan.theta.data;
  a.theta_dtype = plan.theta.dtype;
  a.theta_stride[0] = plan.theta.stride[0];
  a.theta_stride[1] = plan.theta.stride[1];
  a.offsets = Integers(plan.offsets);
  a.position_ids = Integers(plan.position_ids);
  a.own_positions = plan.own_positions();
  a.B = plan.B;
  a.L = plan.L;
  a.C = static_cast<std::int32_t>(plan.C);
  a.E = static_cast<std::int32_t>(plan.E);
  a.heads = static_cast<std::int32_t>(plan.heads());
  a.heads_first = static_cast<std::int32_t>(plan.side[0].heads);
  a.activation = plan.activation;
  a.backward = backward;
  for (int i = 0; i < plan.sides; ++i) {
    const Side& s = plan.side[i];
    a.side[i] = {s.x, s.y, s.dy, s.dx, FastDiv(static_cast<std::uint32_t>(s.heads_per_row))};
  }
  return a;
}

bool empty(const Plan& plan) {
  return plan.B == 0 || plan.L == 0 || plan.C == 0 || plan.heads() == 0;
}

template <class T, int V, Mode kMode, Act kAct>
bool launch_if_short(const Plan& plan, const Args& a, cudaStream_t stream) {
  if constexpr (V > 1 && kAct == Act::kNone) {
    ShortArgs s;
    if (plan.B * plan.heads() * plan.L * (plan.C / V) <= kShortVectors &&
        make_short_args(plan, a.backward, s)) {
      launch_short<T, V, kMode>(s, plan.heads(), stream);
      check_launch(plan.op, "short_kernel");
      return true;
    }
  }
  return false;
}

template <class T, int V, Mode kMode, Act kAct>
void launch_turn(const Plan& plan, Args a, cudaStream_t stream) {
  const std::int64_t lanes = plan.C / V;
  // Statistics in shared memory: 128 columns of 16-bit tensors, or less, at a time.
  constexpr int kMostLanes = kAct == Act::kColumns && V > 1 ? 16 : kTurnThreads;
  const auto lanes_x = static_cast<int>(std::min<std::int64_t>(lanes, kMostLanes));
  const dim3 shape(static_cast<unsigned>(lanes_x), static_cast<unsigned>(kTurnThreads / lanes_x));
  a.batch_per_thread = batch_per_thread(plan.B * plan.heads() * plan.L * lanes, plan.B);
  const unsigned blocks = number_blocks(plan, ceil_div(plan.L, shape.y), a.batch_per_thread, a);
  std::size_t shared = StepTable<T>::bytes(lanes_x * V);
  if constexpr (kAct == Act::kColumns) {
    shared = stats_offset(shared) +
             3 * sizeof(compute_t<T>) * static_cast<std::size_t>(a.batch_per_thread * lanes_x * V);
  }
  turn_kernel<T, V, kMode, kAct><<<blocks, shape, shared, stream>>>(a);
  check_launch(plan.op, "turn_kernel");
}

void turn(const Plan& plan, const Args& a, bool vectors, cudaStream_t stream) {
  if (row_fits_warp(plan)) {
    return launch_rows(plan, a, vectors, a.backward ? RowTask::kBackward : RowTask::kForward,
                       stream);
  }
  const bool walks = plan.B == 1 || plan.own_positions() || plan.position_ids.defined();
  visit_width(plan.dtype, vectors, [&]<class T, int V>() {
    visit_turn(plan, a.backward, [&]<Mode kMode, Act kAct>() {
      if (launch_if_short<T, V, kMode, kAct>(plan, a, stream)) return;
      if (walks) return launch_walk<T, V>(plan, a, stream);
      launch_turn<T, V, kMode, kAct>(plan, a, stream);
    });
  });
}

// Softmax over features in one pass has no statistics in memory, except for the gradient of theta.
bool needs_stats(const Plan& plan) {
  return plan.softmax() && (!row_fits_warp(plan) || plan.need_dtheta);
}

bool over_tokens(const Plan& plan) { return plan.activation == LrpeActivation::kSoftmaxTokens; }

// What a call has in memory between its kernels.
struct Scratch {
  SoftmaxStats stats;  // one Real per row or column
  std::byte* column_stats = nullptr;
  double* partial = nullptr;
};
Scratch lay_out(const Plan& plan, bool backward, ScratchLayout& layout) {
  Scratch s;
  if (needs_stats(plan)) {
    const std::int64_t count = plan.B * plan.heads() * (over_tokens(plan) ? plan.C : plan.L);
    const std::int64_t bytes = count * (plan.dtype == DType::kF64 ? 8 : 4);
    s.stats.high = layout.take<std::byte>(bytes);
    s.stats.scale = layout.take<std::byte>(bytes);
    if (backward) s.stats.dot = layout.take<std::byte>(bytes);
    if (over_tokens(plan)) {
      layout(s.column_stats, static_cast<std::int64_t>(column_scratch_bytes(plan, backward)));
    }
  }
  if (backward && plan.need_dtheta) layout(s.partial, dtheta_partials(plan));
  return s;
}

void add_stats(const Plan& plan, Args& a, const Scratch& s, bool vectors, cudaStream_t stream) {
  if (!needs_stats(plan)) return;
  a.stats = s.stats;
  if (over_tokens(plan)) {
    launch_column_stats(plan, a, vectors, a.backward, s.column_stats, stream);
  } else if (row_fits_warp(plan)) {
    launch_rows(plan, a, vectors, RowTask::kStatistics, stream);
  } else {
    launch_row_stats(plan, a, a.backward, stream);
  }
}

std::size_t bytes_of(const Plan& plan, bool backward) {
  if (empty(plan)) return 0;
  return scratch_bytes([&](ScratchLayout& layout) { (void)lay_out(plan, backward, layout); });
}

void run(const Plan& plan, bool backward, Context& context) {
  const DeviceGuard guard(plan.device.index);
  auto* stream = static_cast<cudaStream_t>(context.stream);
  const bool dtheta = backward && plan.need_dtheta;
  if (empty(plan)) {
    if (dtheta) launch_zero_dtheta(plan, stream);
    return;
  }
  const bool vectors = use_vectors(plan);
  Args a = make_args(plan, backward);
  Scratch scratch;
  const Workspace workspace(context, plan.op, plan.device, [&](ScratchLayout& layout) {
    scratch = lay_out(plan, backward, layout);
  });
  add_stats(plan, a, scratch, vectors, stream);
  if (dtheta) {
    launch_dtheta(plan, a, vectors, scratch.partial, stream);
  } else if (!backward || plan.side[0].dx.defined() ||
             (plan.sides > 1 && plan.side[1].dx.defined())) {
    turn(plan, a, vectors, stream);
  }
  launch_pass(plan, a, stream);
}

}  // namespace

// Sequences per thread. More of them spread the cost of the sines, fewer of them fill the machine.
// Measured on an H200 (B = 12, in multiples of the moving kernel): 6 is best from n = 256 up (n =
// 4096: 3 1.07 / 1.14, 6 1.05 / 1.04, 12 1.06 / 1.06), 3 at n = 64 (1.33; 6 1.44), where 6 would
// leave 25 000 threads.
int batch_per_thread(std::int64_t vectors, std::int64_t B) {
  constexpr std::int64_t kMost = 6;
  constexpr std::int64_t kEnoughThreads = 48 * 1024;
  const std::int64_t most = std::clamp<std::int64_t>(vectors / kEnoughThreads, 1, kMost);
  return static_cast<int>(ceil_div(B, ceil_div(B, most)));  // even shares
}

unsigned checked_blocks(const Plan& plan, std::int64_t blocks) {
  if (blocks < (std::int64_t{1} << 31)) return static_cast<unsigned>(blocks);
  throw NotSupported("[" + std::string(plan.op) + "] x must need fewer than 2^31 blocks on cuda");
}

unsigned number_blocks(const Plan& plan, std::int64_t tiles, std::int64_t sequences, Args& a) {
  const unsigned blocks = checked_blocks(plan, tiles * plan.heads() * ceil_div(plan.B, sequences));
  a.tiles = FastDiv(static_cast<std::uint32_t>(tiles));
  a.heads_div = FastDiv(static_cast<std::uint32_t>(plan.heads()));
  return blocks;
}

std::size_t forward_workspace(const Plan& plan) { return bytes_of(plan, false); }
std::size_t backward_workspace(const Plan& plan) { return bytes_of(plan, true); }

void forward(const Plan& plan, Context& context) { run(plan, false, context); }
void backward(const Plan& plan, Context& context) { run(plan, true, context); }

Support support() {
  const std::string why = why_unavailable();
  if (!why.empty()) return {false, why};
  return kernel_support(turn_kernel<float, 4, Mode::kSpread, Act::kNone>, build_info().cuda);
}

}  // namespace annulus::lrpe_cosine::cuda
