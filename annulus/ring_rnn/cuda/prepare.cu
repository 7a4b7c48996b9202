// Before the loop, in one launch: the packed weights, the coefficients c with the masks of
// channels that are not zero, the states before each step as terms (backward), the barriers' counters.
#include "annulus/core/checked.h"
#include "annulus/core/dispatch.h"
#include "annulus/cuda/check.h"
#include "annulus/cuda/mma.cuh"
#include "annulus/cuda/rows.cuh"
#include "annulus/ring_rnn/cuda/format.cuh"
#include "annulus/ring_rnn/cuda/sm90/row_tiles.cuh"
#include "annulus/ring_rnn/cuda/tensor.cuh"

namespace annulus::ring_rnn::cuda::tensor {

namespace {

constexpr int kThreads = 256;

// Which blocks of threads do what.
struct Work {
  std::int64_t weight_blocks = 0, coefficient_blocks = 0, state_quads = 0;
  std::int64_t weight_lanes = 0;   // fragments
  std::int64_t packed_blocks = 0;  // swizzled: of weights, ...
  int at_once = 1;                 // ... of which a block of threads packs so many
  bool whole_rows = false;         // of the weights can be read 16 bytes at a time
};
struct Prepared : Prepare, Work {};

// Row m, column n of V of a channel; zero outside.
template <class T, bool Backward>
__device__ __forceinline__ float weight(const Args& a, int channel, std::int64_t m,
                                        std::int64_t n) {
  const std::int64_t i = Backward ? m : n;
  const std::int64_t j = Backward ? n : m;
  if (i >= a.N || j >= a.N) return 0;
  return channel == 0 ? get<T>(a.Wo, i, j) : get<T>(a.Wa, channel - 1, i, j);
}

// Fragments, [tile][chunk][channel][term][depth / 16][n / 16][lane][b0, b1 of columns 0-7, b0, b1 of
// columns 8-15]: one lane's 16 bytes of every term.
template <class Format, class T, bool Backward>
__device__ __forceinline__ void pack_lane(const Prepared& p, std::int64_t index) {
  constexpr int kDeep = depth_of(Format::kTerms) / 16;
  const int channels = p.layout.channels;
  const int chunks = p.pack.chunks;
  const int lane = static_cast<int>(index & 31);
  std::int64_t rest = index >> 5;
  const int n16 = static_cast<int>(rest & 3);
  rest >>= 2;
  const int d = static_cast<int>(rest % kDeep);
  const std::int64_t block = rest / kDeep;
  const int channel = static_cast<int>(block % channels);
  const std::int64_t where = block / channels;
  const std::int64_t m = where % chunks * depth_of(Format::kTerms) + d * 16 + (lane & 3) * 2;
  const std::int64_t n = where / chunks * kTile + n16 * 16 + (lane >> 2);
  std::uint32_t word[4][Format::kTerms];
#pragma unroll
  for (int w = 0; w < 4; ++w) {
    const std::int64_t mw = m + (w & 1) * 8;
    const std::int64_t nw = n + (w >> 1) * 8;
    Format::split(weight<T, Backward>(p.args, channel, mw, nw),
                  weight<T, Backward>(p.args, channel, mw + 1, nw), word[w]);
  }
  uint4* to = p.pack.to + (block * Format::kTerms * kDeep + d) * 128 + n16 * 32 + lane;
#pragma unroll
  for (int term = 0; term < Format::kTerms; ++term) {
    to[term * kDeep * 128] = make_uint4(word[0][term], word[1][term], word[2][term], word[3][term]);
  }
}

template <class Format>
__device__ __forceinline__ void store_piece(const Prepared& p, std::int64_t block, int n, int piece,
                                            const std::uint32_t (&word)[4][Format::kTerms]) {
  uint4* to = p.pack.to + (block * Format::kTerms * kTile + n) * 8 + (piece ^ (n & 7));
#pragma unroll
  for (int term = 0; term < Format::kTerms; ++term) {
    to[term * kTile * 8] = make_uint4(word[0][term], word[1][term], word[2][term], word[3][term]);
  }
}

// Eight columns of row i of W of a channel, where rows can be read in vectors.
template <class T>
__device__ __forceinline__ void whole_piece(const Args& a, int channel, std::int64_t i,
                                            std::int64_t j, float (&v)[8]) {
  const T* row = channel == 0 ? static_cast<const T*>(a.Wo.data) + i * a.Wo.stride[0]
                              : static_cast<const T*>(a.Wa.data) + (channel - 1) * a.Wa.stride[0] +
                                    i * a.Wa.stride[1];
  load<8>(row + j, v);
}

// Eight rows m of a column, 16 bytes of every term.
template <class Format>
__device__ __forceinline__ void split_piece(const float (&v)[8],
                                            std::uint32_t (&word)[4][Format::kTerms]) {
#pragma unroll
  for (int w = 0; w < 4; ++w) {
    Format::split(v[2 * w], v[2 * w + 1], word[w]);
  }
}

// Swizzled, [tile][chunk][channel][term] K-major as wgmma.cuh says: one thread makes 16 bytes, eight rows m of a column, of every term. Threads
// that are neighbours read neighbours: along m forward, along n backward.
template <class Format, class T, bool Backward>
__device__ __forceinline__ void pack_piece(const Prepared& p, std::int64_t block, int channel,
                                           std::int64_t first_m, std::int64_t first_n, int within) {
  const int piece = Backward ? within >> 6 : within & 7;
  const int n = Backward ? within & 63 : within >> 3;
  const std::int64_t m = first_m + piece * 8;
  const std::int64_t column = first_n + n;
  float v[8];
  if (!Backward && p.whole_rows && column < p.args.N && m + 8 <= p.args.N) {
    whole_piece<T>(p.args, channel, column, m, v);
  } else {
#pragma unroll
    for (int i = 0; i < 8; ++i) v[i] = weight<T, Backward>(p.args, channel, m + i, column);
  }
  std::uint32_t word[4][Format::kTerms];
  split_piece<Format>(v, word);
  store_piece<Format>(p, block, n, piece, word);
}

// Backward, rows that can be read in vectors: eight of them, turned in registers into eight columns.
template <class Format, class T>
__device__ __forceinline__ void turn_piece(const Prepared& p, std::int64_t block, int channel,
                                           std::int64_t first_m, std::int64_t first_n, int within) {
  const int piece = within >> 3;
  const int n = (within & 7) * 8;
  float v[8][8];
#pragma unroll
  for (int i = 0; i < 8; ++i) {
    whole_piece<T>(p.args, channel, first_m + piece * 8 + i, first_n + n, v[i]);
  }
#pragma unroll
  for (int j = 0; j < 8; ++j) {
    const float column[8] = {v[0][j], v[1][j], v[2][j], v[3][j],
                             v[4][j], v[5][j], v[6][j], v[7][j]};
    std::uint32_t word[4][Format::kTerms];
    split_piece<Format>(column, word);
    store_piece<Format>(p, block, n + j, piece, word);
  }
}

// `at_once` blocks of weights, a part of the threads each.
template <class Format, class T>
__device__ __forceinline__ void pack_blocks(const Prepared& p, std::int64_t first) {
  const auto channels = static_cast<unsigned>(p.layout.channels);
  const int each = kThreads / p.at_once;
  const int thread = static_cast<int>(threadIdx.x) % each;
  const std::int64_t block = first * p.at_once + static_cast<int>(threadIdx.x) / each;
  if (block >= p.packed_blocks) return;
  const int channel = static_cast<int>(static_cast<unsigned>(block) % channels);
  const unsigned where = static_cast<unsigned>(block) / channels;
  const auto chunks = static_cast<unsigned>(p.pack.chunks);
  const std::int64_t m = static_cast<std::int64_t>(where % chunks) * kHopperDepth;
  const std::int64_t n = static_cast<std::int64_t>(where / chunks) * kTile;
  if (p.pack.transposed && p.whole_rows && m + kHopperDepth <= p.args.N && n + kTile <= p.args.N) {
    if (thread < kTile) turn_piece<Format, T>(p, block, channel, m, n, thread);
    return;
  }
  for (int within = thread; within < kTile * 8; within += each) {
    if (p.pack.transposed) {
      pack_piece<Format, T, true>(p, block, channel, m, n, within);
    } else {
      pack_piece<Format, T, false>(p, block, channel, m, n, within);
    }
  }
}

constexpr int kCoefficients = 8;  // of a sample, loaded at once

// c of a step for a tile of samples, and which channels are not zero there: for the tile (`active`)
// and for every 32 samples (`active_rows`, which the weights' gradient reads).
template <class T>
__device__ __forceinline__ void coefficients(const Prepared& p, std::int64_t task) {
  const Layout& s = p.layout;
  const MakeCoefficients& make = p.coefficients;
  const std::int64_t t = task / make.batch_tiles;
  const std::int64_t tile = task % make.batch_tiles;
  const int local = static_cast<int>(threadIdx.x);
  const std::int64_t b = tile * make.rows + local;
  const bool inside = local < make.rows;
  __shared__ std::uint32_t tile_bits, two_term_bits;
  for (int word = 0; word < s.mask_words; ++word) {
    if (local == 0) tile_bits = two_term_bits = 0;
    __syncthreads();
    std::uint32_t bits = 0, two_bits = 0;  // of this warp's samples
    const int last = min(s.channels, (word + 1) * 32);
    for (int first = word * 32; first < last; first += kCoefficients) {
      // All of them on their way before the first is used.
      float c[kCoefficients];
#pragma unroll
      for (int i = 0; i < kCoefficients; ++i) {
        const bool counts = inside && b < s.B && first + i < last;
        c[i] = counts ? coefficient<T>(p.args, b, t, first + i) : 0.0f;
      }
#pragma unroll
      for (int i = 0; i < kCoefficients; ++i) {
        const int k = first + i;
        if (k >= last) break;
        const std::int64_t at = (t * s.channels + k) * s.padded_b + b;
        if (inside) {
          make.to.c[at] = c[i];
          if (make.tile_c != nullptr) store_tile_c(s, make.tile_c, t, b, k, c[i]);
        }
        bits |= static_cast<std::uint32_t>(__any_sync(~0u, c[i] != 0)) << (k & 31);
        if (make.to.scales == nullptr) continue;
        __nv_bfloat16 term[2];
        split_bf16<2>(c[i], term);
        if (inside) {
          make.to.scales[at] = {pack_bf16(term[0], term[0]), pack_bf16(term[1], term[1])};
        }
        const bool two = __any_sync(~0u, __bfloat162float(term[1]) != 0);
        two_bits |= static_cast<std::uint32_t>(two) << (k & 31);
      }
    }
    if ((local & 31) == 0) {
      atomicOr(&tile_bits, bits);
      atomicOr(&two_term_bits, two_bits);
      if (make.active_rows != nullptr && inside) {
        make.active_rows[(t * (s.padded_b / 32) + b / 32) * s.mask_words + word] = bits;
      }
    }
    __syncthreads();
    if (local == 0) {
      const std::uint32_t all = last - word * 32 == 32 ? ~0u : (1u << (last - word * 32)) - 1;
      make.to.active[task * s.mask_words + word] = make.all_channels ? all : tile_bits;
      if (make.to.scales != nullptr) make.to.two_terms[task * s.mask_words + word] = two_term_bits;
    }
    __syncthreads();
  }
}

// Four columns of the state before a step.
template <int Terms, class T>
__device__ __forceinline__ void state_terms(const Prepared& p, std::int64_t index) {
  const Layout& s = p.layout;
  const std::int64_t quads = s.padded_n / 4;
  const std::int64_t col = index % quads * 4;
  const std::int64_t row = index / quads;  // of [T][padded_b]
  const std::int64_t t = row / s.padded_b;
  const std::int64_t b = row % s.padded_b;
  float v[4];
#pragma unroll
  for (int e = 0; e < 4; ++e) {
    v[e] = b < s.B && col + e < s.N ? state_before<T>(p.args, b, t, col + e) : 0.0f;
  }
  std::uint32_t low[Terms], high[Terms];
  split_pair<Terms>(v[0], v[1], low);
  split_pair<Terms>(v[2], v[3], high);
  const std::int64_t plane = s.T * s.padded_b * s.padded_n;
  std::uint16_t* to = p.states + state_at(s, t, b, static_cast<int>(col));
#pragma unroll
  for (int term = 0; term < Terms; ++term) {
    *reinterpret_cast<uint2*>(to + term * plane) = make_uint2(low[term], high[term]);
  }
}

template <class Format, class T>
__global__ void __launch_bounds__(kThreads) prepare_kernel(const __grid_constant__ Prepared p) {
  std::int64_t block = blockIdx.x;
  if (block < p.weight_blocks) {
    const std::int64_t index = block * kThreads + threadIdx.x;
    if (p.pack.swizzled) {
      pack_blocks<Format, T>(p, block);
    } else if (index >= p.weight_lanes) {
      return;
    } else if (p.pack.transposed) {
      pack_lane<Format, T, true>(p, index);
    } else {
      pack_lane<Format, T, false>(p, index);
    }
    return;
  }
  block -= p.weight_blocks;
  if (block < p.coefficient_blocks) {
    if (block == 0) {
      for (std::int64_t i = threadIdx.x; i < p.clear.count; i += kThreads) {
        p.clear.counters[i] = 0;
      }
      if (p.clear.slice_counters != nullptr && threadIdx.x < 3) {
        p.clear.slice_counters[threadIdx.x] = 0;
      }
    }
    coefficients<T>(p, block);
    return;
  }
  block -= p.coefficient_blocks;
  const std::int64_t index = block * kThreads + threadIdx.x;
  if (index < p.state_quads) state_terms<Format::kStateTerms, T>(p, index);
}

}  // namespace

void run_prepare(const Prepare& prepare, DType dtype, const Launch& to) {
  Prepared p{prepare, {}};
  const Layout& s = p.layout;
  const bool packs = p.pack.to != nullptr;
  p.whole_rows = aligned_weights(p.args, static_cast<std::size_t>(size_of(dtype)), 32);
  if (packs && p.pack.swizzled) {
    p.packed_blocks = weight_bytes(s) / hopper_block_bytes(s.terms);
    // Turning a block takes 64 threads; a few blocks have one of 256 each all the same.
    if (p.pack.transposed && p.whole_rows && p.packed_blocks >= 2048) p.at_once = kThreads / kTile;
    p.weight_blocks = ceil_div(p.packed_blocks, p.at_once);
  } else if (packs) {
    p.weight_lanes = weight_bytes(s) / (16 * s.terms);
    p.weight_blocks = ceil_div(p.weight_lanes, kThreads);
  }
  if (p.coefficients.to.c != nullptr) p.coefficient_blocks = s.T * p.coefficients.batch_tiles;
  if (p.states != nullptr) p.state_quads = s.T * s.padded_b * (s.padded_n / 4);
  const std::int64_t blocks =
      p.weight_blocks + p.coefficient_blocks + ceil_div(p.state_quads, kThreads);
  if (blocks > INT32_MAX) {
    throw NotSupported(
        "[" + std::string(to.op) +
        "] tensors must need fewer than 2^31 blocks of threads to prepare but need " +
        std::to_string(blocks));
  }
  with_format(s.terms, s.f16, [&]<class Format>() {
    visit_floating(dtype, [&]<class T>() {
      constexpr bool kOnlyF16 = Format::kScaled;
      if constexpr (kOnlyF16 ? std::is_same_v<T, float16> : !std::is_same_v<T, double>) {
        prepare_kernel<Format, T><<<static_cast<unsigned>(blocks), kThreads, 0, to.stream>>>(p);
      }
    });
  });
  check_launch(to.op, "preparation of the ring loop");
}

}  // namespace annulus::ring_rnn::cuda::tensor
