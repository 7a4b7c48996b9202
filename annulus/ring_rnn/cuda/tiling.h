// How the tensor-core path of ring RNN divides a call: sizes of tiles, splits of the sum, what lies in
// shared memory. Plain C++: the GPU comes in as a few facts, so that every choice is tested on the CPU.
//
// Every step is D[b, n] = sum over channels k of c[b, k] sum_m X[b, m] V_k[m, n]:
//   forward   X = s, V_k[m, n] = W_k[n, m]      backward   X = g, V_k[m, n] = W_k[m, n]
// A work item is 64 columns n (a tile), `rows` samples (a batch tile) and a split of the sum: some
// chunks of m and some of the channels. The splits of a tile are added in fixed order.
//
// How the sum is split depends on B, N, the precision and the GPU, never on K: channels of zeros at
// the end change no bit.
#pragma once

#include <cstddef>
#include <cstdint>
#include <variant>

#include "annulus/core/macros.h"
#include "annulus/core/precision.h"

namespace annulus::ring_rnn::cuda::tensor {

// ---- constants of the kernels

inline constexpr int kTile = 64;  // columns of a tile
inline constexpr int kMaxSplits = 32;

// sm80. Rows m of a block of weights: as many as leave room in registers for the fragments of X.
constexpr int depth_of(int terms) { return terms == 1 ? 64 : terms == 2 ? 32 : 16; }
// A block of weights, all terms: what one stage holds.
constexpr int block_bytes(int terms) { return depth_of(terms) * kTile * 2 * terms; }
inline constexpr int kStages = 8;  // blocks of weights in shared memory while streaming

// sm90.
inline constexpr int kHopperDepth = 64;
inline constexpr int kHopperPlane = kHopperDepth * kTile * 2;  // bytes of one term
constexpr int hopper_block_bytes(int terms) { return kHopperPlane * terms; }
inline constexpr int kMostStages = 12;  // of the pipeline, ahead of the consumers
constexpr int most_stages(bool f16) { return f16 ? kMostStages : 6; }  // whose blocks are small
// Blocks of weights of a stage: two where c is multiplied onto X.
constexpr int hopper_stage_blocks(bool factors_on_x) { return factors_on_x ? 2 : 1; }
inline constexpr int kProducers = 2;       // warps
inline constexpr int kGroupChannels = 32;  // whose c lie in shared memory at once: a word of a mask
// Where one term meets s . u_k, X of so many chunks at once lies in shared memory, swizzled like the
// weights.
inline constexpr int kGroupChunks = 2;
constexpr int x_buffer_bytes(int rows) { return kGroupChunks * rows * kHopperDepth * 2; }
// What a group of channels is, and barriers of the stages.
constexpr int hopper_barrier_bytes(int stages) {
  return (16 + (2 * stages + 3) * 8 + 15) / 16 * 16;
}
// A factor c in shared memory: f32, or a pair of bf16 pairs where c is multiplied onto X (see Scale).
inline constexpr int kFactorBytes = 4, kPairFactorBytes = 8;

// Clusters (compute capability 9.0).
inline constexpr int kClusterNeurons = 32;  // of a block
inline constexpr int kMostBlocks = 4;       // of a cluster
inline constexpr int kClusterThreads = 512;
inline constexpr int kClusterWarps = kClusterThreads / 32;
inline constexpr int kDepthWarps = kClusterWarps / 2;  // two rows of 16 neurons
inline constexpr int kStagedChannels = 64;             // whose c lie in shared memory
inline constexpr int kPitch = kClusterNeurons + 4;  // against bank conflicts: 2 pitches = 8 mod 32
// Words of a c in shared memory: with one term, c is multiplied onto X as the sum of two bf16, which
// lie there as pairs.
constexpr int factor_words(int terms) { return terms == 1 ? 2 : 1; }
// Channels whose weights a warp keeps in registers, two at a time. With one term few, since the rest of
// a step needs registers, too (B 256, N 128, K 16, T 20 on an H200: 63 us with 4, 64.5 with 8, both ways
// 139 and 143); with two, as many as let a cluster hold K = 16.
constexpr int held_channels(int terms) { return terms == 1 ? 4 : 12 / terms / 2 * 2; }
constexpr int most_cluster_neurons(int terms) {
  return terms == 3 ? 64 : kClusterNeurons * kMostBlocks;
}
// Buffers for the warps' parts of a sum: with two, a step's are written while the last one's are read;
// with one, a barrier is in between.
constexpr int part_buffers(int terms) { return terms == 1 ? 2 : 1; }
// Size of ClusterShared, beside the weights.
constexpr std::size_t cluster_shared_bytes(int terms, int samples) {
  const int x = 2 * terms * most_cluster_neurons(terms) * samples * 2;
  const int c = 2 * kStagedChannels * factor_words(terms) * samples * 4;
  const int parts = part_buffers(terms) * kDepthWarps * samples * kPitch * 4;
  const int sums = 2 * samples * 16, barriers = 2 * 8, channels = 2 * kStagedChannels;
  return static_cast<std::size_t>(x + c + parts + sums + barriers + channels);
}
// Bytes of a channel's weights in the shared memory of a block.
constexpr int cluster_channel_bytes(int terms) { return terms * kClusterThreads * 16; }

// The weights' gradients.
inline constexpr int kSide = 128;  // of a tile's columns j, and of its rows i on sm80
// Channels that one block of threads of sm90 takes at once make a group.
constexpr std::int64_t hopper_dweights_groups(int terms, std::int64_t channels) {
  const int each = terms == 1 ? 6 : 4;
  return (channels + each - 1) / each;
}

// ---- what comes in

struct Gpu {
  int compute_major = 8;
  int multiprocessors = 1;
  std::size_t shared_bytes = 0;  // of a multiprocessor
  // Clusters of cluster_blocks() blocks, each alone on its multiprocessor, that run at once: fewer than
  // there are multiprocessors for, since a cluster may not cross the borders of their groups.
  int clusters = 0;
};

struct Problem {
  const char* op = "ring_rnn";
  std::int64_t B = 0, T = 0, K = 0, N = 0;
  int terms = 1;      // of every operand
  bool f16 = false;   // terms are f16 (one term), not bf16
  bool dots = false;  // the products also give s . u_k
};

// ---- what comes out

// Sizes, padded to whole tiles, and how arrays of all steps lie in memory.
struct Layout {
  std::int64_t B = 0, T = 0, N = 0;
  int channels = 1;     // K + 1; channel 0 is Wo
  int terms = 1;        // of X and V
  bool f16 = false;     // they are f16, not bf16: see format.cuh
  int state_terms = 1;  // of s of all steps, in bf16
  int padded_n = 0;     // N in whole tiles
  int tiles = 0;
  std::int64_t padded_b = 0;
  int mask_words = 1;      // of 32 channels each
  int row_parts = 0;       // blocks that share a row: what they leave of its sums
  bool row_tiles = false;  // s and g of all steps lie as sm90/row_tiles.cuh says, else in rows
  bool narrow_g = false;   // g of all steps is bf16, not f32

  ANNULUS_HD bool factors_on_x() const { return terms == 1 && !f16; }
};

// How many parts of each s . u_k there are, and which of them a channel has.
struct DotParts {
  int splits = 1;  // of a tile's sum; channel k is in split % channel_splits = k % channel_splits
  int channel_splits = 1;  // a power of two
  int warps = 1;           // that share rows of a tile

  ANNULUS_HD std::int64_t of_step(const Layout& layout) const {
    return static_cast<std::int64_t>(layout.tiles) * splits * warps;
  }
};

struct LaunchSize {
  int grid = 0;  // blocks of threads
  int threads = 0;
  std::size_t shared_bytes = 0;
  std::size_t most_shared_bytes = 0;  // that any launch of the kernel may ask for
};

// The work items of a step.
struct StepTiling {
  int tiles = 0;
  int chunks = 0;  // of m
  int rows = 64;   // of a batch tile: 64, 128 or 256
  int batch_tiles = 0;
  int chunk_splits = 1;    // parts of the chunks
  int channel_splits = 1;  // parts of the channels, a power of two: channel k goes to part k % it

  ANNULUS_HD int splits() const { return chunk_splits * channel_splits; }
  ANNULUS_HD std::int64_t items() const {
    return static_cast<std::int64_t>(batch_tiles) * tiles * splits();
  }
};

struct Sm80Tiling : StepTiling {
  bool resident = false;      // a block of threads keeps all weights it needs in shared memory
  int resident_channels = 0;  // of a chunk, where it does
  int weight_blocks = 0;      // in shared memory
  LaunchSize launch;
};

struct Sm90Tiling : StepTiling {
  bool resident = false;
  int resident_channels = 0;
  int channel_split_bits = 0;  // log2 of channel_splits
  int weight_blocks = 0;       // in shared memory
  int stages = 0;              // of weights on their way
  int factor_bytes = kFactorBytes;
  int x_buffers = 0;  // of X in shared memory
  LaunchSize launch;
};

struct ClusterTiling {
  int blocks = 0;           // of a cluster
  int samples = 0;          // of a cluster: 8 or 16
  int shared_channels = 0;  // whose weights lie in shared memory, after those in registers
  LaunchSize launch;

  // All weights are in registers and shared memory: a forward then needs nothing prepared.
  bool holds_all_weights(const Layout& layout) const {
    return layout.channels <= held_channels(layout.terms) + shared_channels;
  }
};

struct Tiling {
  Layout layout;
  int rows = 0;  // of a batch tile
  std::variant<Sm80Tiling, Sm90Tiling, ClusterTiling> kernels;

  int batch_tiles() const { return static_cast<int>(layout.padded_b / rows); }
  bool in_clusters() const { return std::holds_alternative<ClusterTiling>(kernels); }
  // The work items of the loops on a grid; null in clusters.
  const StepTiling* step() const;
  DotParts dot_parts() const;
  const char* name() const;  // of the kernels, for last_backend()
};

// Blocks of a cluster, or 0: this problem does not run in clusters.
int cluster_blocks(const Problem& problem, const Gpu& gpu);

// Fills the GPU: first the batch and the columns, then the sum. Throws NotSupported for sizes beyond
// what the kernels count.
Tiling tile(const Problem& problem, const Gpu& gpu);

// Of the weights alone: what packing them needs.
Layout weights_layout(const Problem& problem, const Gpu& gpu);
std::int64_t weight_bytes(const Layout& layout);

// Into how many parts the sum over B T rows of the weights' gradients is split.
int depth_splits(const Layout& layout, const Gpu& gpu);

}  // namespace annulus::ring_rnn::cuda::tensor
