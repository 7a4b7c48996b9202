// The tensor-core path of ring RNN: how a call is cut, and what its kernels share.
//
// Every step is D[b, n] = sum over channels k of c[b, k] sum_m X[b, m] V_k[m, n]:
//   forward   X = s, V_k[m, n] = W_k[n, m]      backward   X = g, V_k[m, n] = W_k[m, n]
// A block of threads owns 64 columns n (a tile), `rows` samples and a part of the sum: some chunks
// of m and some of the channels (a split). It multiplies X by each V_k on its own and scales the
// product by c in f32 before adding it up, so c is never rounded, and the products u_k that dA needs
// exist on the way. The parts are added by the blocks of a tile, each some rows, in fixed order.
// (Hopper's loop with one term and without dA scales X by c, as the sum of two bf16, instead. Small
// networks have kernels of their own: cuda/cluster/loop.cuh.)
//
// Operands are sums of 1, 2 or 3 bf16 terms (bf16, bf16x3, bf16x6). X and V lie in memory as the
// fragments of mma.cuh want them, so that a lane's words are 16 neighbouring bytes: no shuffling
// through shared memory, no bank conflicts.
//
// How the sum is split depends on B, N, the precision and the GPU, never on K: channels of zeros at
// the end change no bit.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_runtime.h>

#include <cstddef>
#include <cstdint>

#include "annulus/core/context.h"
#include "annulus/cuda/persistent.cuh"
#include "annulus/cuda/rows.cuh"
#include "annulus/ring_rnn/cuda/arguments.cuh"
#include "annulus/ring_rnn/plan.h"

namespace annulus::ring_rnn::cuda::tensor {

using annulus::cuda::load_bits;
using annulus::cuda::load_row;
using annulus::cuda::number_of;
using annulus::cuda::prefetch_row;
using annulus::cuda::store_row;
using annulus::cuda::visit_narrow;

inline constexpr int kTile = 64;      // columns of a tile
inline constexpr int kWarpRows = 64;  // a warp owns 64 rows x 32 columns
inline constexpr int kStages = 8;     // blocks of weights in shared memory while streaming
inline constexpr int kMaxSplits = 32;

// Rows m of a block of weights. Portable: as many as leave room in registers for the fragments of X.
constexpr int depth_of(int terms) { return terms == 1 ? 64 : terms == 2 ? 32 : 16; }
inline constexpr int kHopperDepth = 64;
inline constexpr int kHopperPlane = kHopperDepth * kTile * 2;  // bytes of one term
// A block of weights, all terms: what one stage holds.
constexpr int block_bytes(int terms) { return depth_of(terms) * kTile * 2 * terms; }
__host__ __device__ constexpr int hopper_block_bytes(int terms) { return kHopperPlane * terms; }
// Where one term meets s . u_k, X of so many chunks at once lies in shared memory, swizzled like the
// weights.
inline constexpr int kGroupChunks = 2;
__host__ __device__ constexpr int x_buffer_bytes(int rows) {
  return kGroupChunks * rows * kHopperDepth * 2;
}
// Hopper's ring of stages, ahead of the multiplying warps: how many at most, blocks of weights in
// each, and threads that fetch them.
inline constexpr int kMostStages = 6;
constexpr int hopper_stage_blocks(int terms) { return terms == 1 ? 2 : 1; }
template <int Terms>
inline constexpr int kStageBlocks = hopper_stage_blocks(Terms);
inline constexpr int kFetchers = 2;
inline constexpr int kGroupChannels = 32;  // whose c lie in shared memory at once: a word of a mask
// What a group of channels is, and barriers of the stages.
__host__ __device__ constexpr int hopper_barrier_bytes(int stages) {
  return (16 + (2 * stages + 3) * 8 + 15) / 16 * 16;
}

// Small networks in clusters of blocks (compute capability 9.0).
inline constexpr int kClusterNeurons = 32;  // of a block
inline constexpr int kMostBlocks = 4;       // of a cluster
inline constexpr int kStagedChannels = 64;  // whose c lie in shared memory

// How a call is cut.
struct Shape {
  std::int64_t B = 0, T = 0, N = 0;
  int channels = 1;  // K + 1; channel 0 is Wo
  int terms = 1;
  int padded_n = 0;  // N in whole tiles
  int tiles = 0;
  int chunks = 0;  // of m
  int rows = 64;   // of a block: 64, 128 or 256
  int batch_tiles = 0;
  std::int64_t padded_b = 0;
  int chunk_splits = 1;    // parts of the chunks
  int channel_splits = 1;  // parts of the channels, a power of two: channel k goes to part k % it
  int mask_words = 1;      // of 32 channels each
  int slots = kStages;     // blocks of weights in shared memory
  bool resident = false;   // they are all that a block of threads ever needs
  int resident_channels = 0;   // of a chunk, where they are
  int channel_split_bits = 0;  // log2 of channel_splits
  bool hopper = false;         // wgmma and bulk copies
  int ring = 0;                // stages of weights on their way (Hopper)
  int scale_bytes = 4;         // of c as the multiplying warps take it: float, or Scale
  bool row_major = false;      // X lies in rows, not as fragments
  int x_buffers = 0;           // of X in shared memory
  int dot_parts = 1;           // warps that share rows of a tile
  int row_parts = 0;           // blocks that share a row: what they leave of its sums
  int cluster = 0;             // blocks of a cluster; 0: not in clusters
  int samples = 0;             // of a cluster
  int slot_bytes = 0;  // of a channel's weights in shared memory, where slots count channels
  int grid = 0;        // blocks of threads
  int threads = 0;
  std::size_t shared_bytes = 0, most_shared_bytes = 0;

  __host__ __device__ int splits() const { return chunk_splits * channel_splits; }
  __host__ __device__ std::int64_t items() const {
    return static_cast<std::int64_t>(batch_tiles) * tiles * splits();
  }
};

// The weights: block (tile, chunk, channel) of `terms` planes. Portable: as fragments,
// [depth / 16][n / 16][lane][b0, b1 of columns 0-7, b0, b1 of columns 8-15]. Hopper: as wgmma reads
// them, K-major as wgmma.cuh says.
inline std::int64_t weight_bytes(const Shape& s) {
  return static_cast<std::int64_t>(s.tiles) * s.chunks * s.channels *
         (s.hopper ? hopper_block_bytes(s.terms) : block_bytes(s.terms));
}

// Parts of a step. kBegin makes the X of the first.
inline constexpr unsigned kBegin = 1, kMultiply = 2, kFinish = 4;

// A factor of pairs of bf16, the sum of two pairs.
struct alignas(8) Scale {
  std::uint32_t high, low;
};

// What the forward loop and the backward loop work on; the same memory means s in the one and
// l = dL/dr in the other where a comment says so.
struct Loop {
  Args args;
  Shape shape;
  DType dtype = DType::kF32;
  const uint4* weights = nullptr;
  const float* c = nullptr;                  // [T][channel][padded_b]
  const std::uint32_t* active = nullptr;     // [T][batch tile][mask_words]: channels not all zero
  const Scale* scales = nullptr;             // as c, where the multiplying warps take Scale
  const std::uint32_t* two_terms = nullptr;  // as active: channels with a c that is no bf16
  // s or g: [2][term][row / 16][column / 16][lane][4], or bf16 [2][padded_b][padded_n].
  std::uint32_t* operand = nullptr;
  float* state = nullptr;        // [padded_b][padded_n]: s or l
  float* row_sums = nullptr;     // [2][tile][padded_b]: of s or g
  float* partial = nullptr;      // [item][rows][64]
  unsigned* counters = nullptr;  // of the barriers; zero before a launch
  float* vectors = nullptr;      // [T][row part][padded_b][2]: of the population vector, or not

  // Backward.
  void* g = nullptr;      // of all steps: see cuda/sm90/row_tiles.cuh
  float* dots = nullptr;  // [T][tile * splits * dot_parts][channel][padded_b]: parts of s . u_k
  float* alpha_sums = nullptr;  // [padded_b][padded_n]: l (F(y) - s), summed over steps
  float* reset_sums = nullptr;  // [padded_b][padded_n]: l of the steps that began with a reset
  float* g_sums = nullptr;      // [T][row part][padded_b]
  float* s_sums = nullptr;      // [T][row part][padded_b]
  static constexpr int kSlices = 32;      // of the sums that are single numbers: dJ0, dJ1, dalpha
  double* slice_sums = nullptr;           // [3][kSlices]
  unsigned* slice_counters = nullptr;     // [3], zero before the last launch
  const std::uint16_t* states = nullptr;  // [term]: s_t of all steps, by state_at()
  const float* y = nullptr;               // of steps y_first.., [.][B][N]: saved, or computed again
  std::int64_t y_first = 0;
  std::int64_t y_stride[3] = {};

  bool own_reset_state = false;  // resets have a state, and a gradient, of their own

  // Which steps this launch runs, and which of their parts.
  std::int64_t first = 0, last = 0;  // steps first .. last - 1
  unsigned phases = kBegin | kMultiply | kFinish;
  bool backward = false;  // steps run from last - 1 down to first
  bool together = true;   // in one launch, with barriers in between
  Ref<2> restart;         // forward: the state to begin with, where that is not the call's own
  // Backward: this launch leaves l of the step before this one to the next launch, which makes g.
  std::int64_t leave_at = 0;
  float* y_again = nullptr;  // forward from `restart`: y at [t - y_first][B][N], and no more
};

// One counter for the blocks of the same samples, and one a tile for its splits.
inline std::int64_t counters_of(const Shape& s) {
  return static_cast<std::int64_t>(s.batch_tiles) * (s.tiles + 1) *
         annulus::cuda::GroupBarrier::kStride;
}

// What is made before the loop; a null pointer is not made.
struct Prepare {
  Args args;
  Shape shape;
  bool backward = false;      // V_k[m, n] = W_k[m, n]
  bool all_channels = false;  // every channel counts as active: dA needs all u_k
  uint4* weights = nullptr;
  float* c = nullptr;
  std::uint32_t* active = nullptr;
  Scale* scales = nullptr;
  std::uint32_t* two_terms = nullptr;
  std::uint32_t* active_rows = nullptr;  // [T][padded_b / 32][mask_words]
  std::uint16_t* states = nullptr;       // [term]: s_t of all steps, by state_at()
  std::uint32_t* stretch_c = nullptr;    // c again, by store_stretch_c()
  unsigned* counters = nullptr;
  std::int64_t counter_count = 0;
  unsigned* slice_counters = nullptr;
  bool whole_rows = false;  // of the weights can be read in vectors
  std::int64_t weight_lanes = 0, weight_blocks = 0, coefficient_blocks = 0, state_quads = 0;
  std::int64_t hopper_blocks = 0;  // of weights
  int at_once = 1;                 // of them that a block of threads packs
};

struct WeightGradients {
  Args args;
  Shape shape;
  DType dtype = DType::kF32;
  const void* g = nullptr;
  const float* c = nullptr;
  const std::uint32_t* stretch_c = nullptr;
  const std::uint32_t* active_rows = nullptr;
  const std::uint16_t* states = nullptr;
  float* parts = nullptr;  // [split of the depth][channel][128 sides][128 sides]
  int sides = 0;           // tiles of 128
  int depth_splits = 1;
  int first_channel = 0, last_channel = 0;  // dWo alone, dWa alone or both
  // Where the loop has left s . u_k to this launch: see cuda/sm90/late_dots.cuh.
  float* dots = nullptr;           // as Loop has them
  const uint4* weights = nullptr;  // V
  unsigned blocks = 0;  // of threads that make the gradients; those after them make these
};

struct GatherBlocks {
  std::int64_t alpha = 0, actions = 0, weights = 0;
  int dot_shares = 1;             // threads that share an s . u_k
  std::int64_t weights_each = 0;  // blocks of a channel
  int weights_of_thread = 1;
};

// The path as the driver of the backend calls it. Sizes are at least 1 and dtype is not f64.
int terms_of(Precision precision);  // 0: not a precision of this path
std::size_t forward_workspace(const Plan& plan);
std::size_t backward_workspace(const Plan& plan);
std::size_t pack_bytes(const Plan& plan);
void forward(const Plan& plan, Context& context);
void backward(const Plan& plan, Context& context);
void pack(const Plan& plan, Context& context);

// The launches. Nothing waits.
void run_prepare(Prepare prepare, DType dtype, const char* op, cudaStream_t stream);
void run_portable_forward(const Loop& loop, const char* op, cudaStream_t stream);
void run_hopper_forward(const Loop& loop, const char* op, cudaStream_t stream);
void run_readout(const Loop& loop, const char* op, cudaStream_t stream);
void run_portable_backward(const Loop& loop, bool dots, const char* op, cudaStream_t stream);
void run_hopper_backward(const Loop& loop, const char* op, cudaStream_t stream);
void run_hopper_dots(const Loop& loop, const char* op, cudaStream_t stream);
void run_cluster_forward(const Loop& loop, const char* op, cudaStream_t stream);
void run_cluster_backward(const Loop& loop, const char* op, cudaStream_t stream);
void run_dweights(const WeightGradients& gradients, const char* op, cudaStream_t stream);
// Channels that one of its blocks of threads takes at once make a group.
constexpr std::int64_t hopper_dweights_groups(int terms, std::int64_t channels) {
  const int each = terms == 1 ? 6 : 4;
  return (channels + each - 1) / each;
}
void run_hopper_dweights(WeightGradients gradients, const char* op, cudaStream_t stream);
void run_gather(const Loop& loop, const WeightGradients& gradients, DType dtype, const char* op,
                cudaStream_t stream);

// ---- pieces

template <class F>
auto with_terms(int terms, F&& f) {
  switch (terms) {
    case 1:
      return f.template operator()<1>();
    case 2:
      return f.template operator()<2>();
    default:
      return f.template operator()<3>();
  }
}

// A pair of bf16 times c.
__device__ __forceinline__ std::uint32_t scaled_pair(std::uint32_t pair, std::uint32_t c) {
  const __nv_bfloat162 v = __hmul2(*reinterpret_cast<const __nv_bfloat162*>(&pair),
                                   *reinterpret_cast<const __nv_bfloat162*>(&c));
  return *reinterpret_cast<const std::uint32_t*>(&v);
}
__device__ __forceinline__ std::uint32_t scaled_pair(std::uint32_t pair, const Scale& c) {
  const auto x = *reinterpret_cast<const __nv_bfloat162*>(&pair);
  const __nv_bfloat162 v = __hfma2(x, *reinterpret_cast<const __nv_bfloat162*>(&c.high),
                                   __hmul2(x, *reinterpret_cast<const __nv_bfloat162*>(&c.low)));
  return *reinterpret_cast<const std::uint32_t*>(&v);
}

// Where a pair of columns (col even) of a row of X lies, in words.
__device__ __forceinline__ std::int64_t operand_word(std::int64_t row, int col, int padded_n) {
  const std::int64_t tile = (row >> 4) * (padded_n >> 4) + (col >> 4);
  return tile * 128 + (((row & 7) << 2) + ((col & 7) >> 1)) * 4 + ((row >> 3) & 1) +
         (((col >> 3) & 1) << 1);
}

__device__ __forceinline__ void put_weight_gradient(const WeightGradients& w, int channel,
                                                    std::int64_t i, std::int64_t j, float v) {
  const Args& a = w.args;
  if (i >= a.N || j >= a.N) return;
  visit_narrow(w.dtype, [&]<class T>() {
    if (channel == 0) {
      put<T>(a.dWo, v, i, j);
    } else {
      put<T>(a.dWa, v, channel - 1, i, j);
    }
  });
}

// The products of terms that count, smallest first so that the large ones do not swallow them:
// which term of X and which of V the i-th takes.
template <int Terms>
__host__ __device__ constexpr int term_of_x(int i) {
  return Terms == 1 ? 0 : Terms == 2 ? (i == 0 ? 1 : 0) : (i == 1 ? 2 : i == 0 || i == 3 ? 1 : 0);
}
template <int Terms>
__host__ __device__ constexpr int term_of_v(int i) {
  return Terms == 1 ? 0 : Terms == 2 ? (i == 1 ? 1 : 0) : (i == 2 ? 2 : i == 0 || i == 4 ? 1 : 0);
}

}  // namespace annulus::ring_rnn::cuda::tensor
