// Before the loop, in one launch: the weights as fragments, the coefficients c with the masks of
// channels that are not zero, the states before each step as terms (backward), the barriers' counters.
#include "annulus/cuda/check.h"
#include "annulus/cuda/launch.h"
#include "annulus/ring_rnn/ring_rnn_cuda_tensor.cuh"

#include "annulus/core/checked.h"
#include "annulus/cuda/mma.cuh"
#include "annulus/cuda/vec.cuh"

namespace annulus::ring::cuda::tensor {

namespace {

constexpr int kThreads = 256;

// Row m, column n of V of a channel; zero outside.
template <class T, bool Backward>
__device__ __forceinline__ float weight(const Args& a, int channel, std::int64_t m,
                                        std::int64_t n) {
  const std::int64_t i = Backward ? m : n;
  const std::int64_t j = Backward ? n : m;
  if (i >= a.N || j >= a.N) return 0;
  return channel == 0 ? get<T>(a.Wo, i, j) : get<T>(a.Wa, channel - 1, i, j);
}

// One lane's 16 bytes of every term: see weight_bytes() for the layout.
template <int Terms, class T, bool Backward>
__device__ __forceinline__ void pack_lane(const Prepare& p, std::int64_t index) {
  constexpr int kDeep = depth_of(Terms) / 16;
  const Shape& s = p.shape;
  const int lane = static_cast<int>(index & 31);
  std::int64_t rest = index >> 5;
  const int n16 = static_cast<int>(rest & 3);
  rest >>= 2;
  const int d = static_cast<int>(rest % kDeep);
  const std::int64_t block = rest / kDeep;
  const int channel = static_cast<int>(block % s.channels);
  const std::int64_t where = block / s.channels;
  const std::int64_t m = where % s.chunks * depth_of(Terms) + d * 16 + (lane & 3) * 2;
  const std::int64_t n = where / s.chunks * kTile + n16 * 16 + (lane >> 2);
  std::uint32_t word[4][Terms];
#pragma unroll
  for (int w = 0; w < 4; ++w) {
    const std::int64_t mw = m + (w & 1) * 8;
    const std::int64_t nw = n + (w >> 1) * 8;
    annulus::cuda::split_pair<Terms>(weight<T, Backward>(p.args, channel, mw, nw),
                                     weight<T, Backward>(p.args, channel, mw + 1, nw), word[w]);
  }
  uint4* to = p.weights + (block * Terms * kDeep + d) * 128 + n16 * 32 + lane;
#pragma unroll
  for (int term = 0; term < Terms; ++term) {
    to[term * kDeep * 128] = make_uint4(word[0][term], word[1][term], word[2][term], word[3][term]);
  }
}

template <int Terms>
__device__ __forceinline__ void store_piece(const Prepare& p, std::int64_t block, int n, int piece,
                                            const std::uint32_t (&word)[4][Terms]) {
  uint4* to = p.weights + (block * Terms * kTile + n) * 8 + (piece ^ (n & 7));
#pragma unroll
  for (int term = 0; term < Terms; ++term) {
    to[term * kTile * 8] = make_uint4(word[0][term], word[1][term], word[2][term], word[3][term]);
  }
}

// The same for Hopper: one thread makes 16 bytes, eight rows m of a column, of every term. Threads
// that are neighbours read neighbours: along m forward, along n backward.
template <int Terms, class T, bool Backward>
__device__ __forceinline__ void pack_piece(const Prepare& p, std::int64_t block, int within) {
  const Shape& s = p.shape;
  const int piece = Backward ? within >> 6 : within & 7;
  const int n = Backward ? within & 63 : within >> 3;
  const int channel =
      static_cast<int>(static_cast<unsigned>(block) % static_cast<unsigned>(s.channels));
  const unsigned where = static_cast<unsigned>(block) / static_cast<unsigned>(s.channels);
  const auto chunks = static_cast<unsigned>(s.chunks);
  const std::int64_t m = static_cast<std::int64_t>(where % chunks) * kHopperDepth + piece * 8;
  const std::int64_t column = static_cast<std::int64_t>(where / chunks) * kTile + n;
  std::uint32_t word[4][Terms];
#pragma unroll
  for (int w = 0; w < 4; ++w) {
    annulus::cuda::split_pair<Terms>(weight<T, Backward>(p.args, channel, m + 2 * w, column),
                                     weight<T, Backward>(p.args, channel, m + 2 * w + 1, column),
                                     word[w]);
  }
  store_piece<Terms>(p, block, n, piece, word);
}

// c of a step for a tile of samples, and which channels are not zero there: for the tile (`active`)
// and for every 32 samples (`active_rows`, which the weights' gradient reads).
template <class T>
__device__ __forceinline__ void coefficients(const Prepare& p, std::int64_t task) {
  const Shape& s = p.shape;
  const std::int64_t t = task / s.batch_tiles;
  const std::int64_t tile = task % s.batch_tiles;
  const int local = static_cast<int>(threadIdx.x);
  const std::int64_t b = tile * s.rows + local;
  const bool inside = local < s.rows;
  std::uint32_t bits = 0, row_bits = 0, two_bits = 0;
  for (int k = 0; k < s.channels; ++k) {
    float c = 0;
    if (inside && b < s.B) c = coefficient<T>(p.args, b, t, k);
    const std::int64_t at = (t * s.channels + k) * s.padded_b + b;
    if (inside) p.c[at] = c;
    if (p.scales != nullptr) {
      __nv_bfloat16 term[2];
      annulus::cuda::split_bf16<2>(c, term);
      if (inside) {
        p.scales[at] = {annulus::cuda::pack_bf16(term[0], term[0]),
                        annulus::cuda::pack_bf16(term[1], term[1])};
      }
      const bool two = __syncthreads_or(__bfloat162float(term[1]) != 0) != 0;
      two_bits |= static_cast<std::uint32_t>(two) << (k & 31);
    }
    const bool any = __syncthreads_or(c != 0) != 0;
    const bool any_row = __ballot_sync(~0u, c != 0) != 0;
    bits |= static_cast<std::uint32_t>(any || p.all_channels) << (k & 31);
    row_bits |= static_cast<std::uint32_t>(any_row) << (k & 31);
    if ((k & 31) == 31 || k == s.channels - 1) {
      if (local == 0) p.active[task * s.mask_words + (k >> 5)] = bits;
      if (local == 0 && p.scales != nullptr) p.two_terms[task * s.mask_words + (k >> 5)] = two_bits;
      if (p.active_rows != nullptr && inside && (local & 31) == 0) {
        p.active_rows[(t * (s.padded_b / 32) + b / 32) * s.mask_words + (k >> 5)] = row_bits;
      }
      bits = row_bits = two_bits = 0;
    }
  }
}

// Four columns of the state before a step.
template <int Terms, class T>
__device__ __forceinline__ void state_terms(const Prepare& p, std::int64_t index) {
  const Shape& s = p.shape;
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
  annulus::cuda::split_pair<Terms>(v[0], v[1], low);
  annulus::cuda::split_pair<Terms>(v[2], v[3], high);
  const std::int64_t plane = s.T * s.padded_b * quads;
#pragma unroll
  for (int term = 0; term < Terms; ++term) {
    reinterpret_cast<uint2*>(p.states)[term * plane + row * quads + col / 4] =
        make_uint2(low[term], high[term]);
  }
}

template <int Terms, class T>
__global__ void __launch_bounds__(kThreads) prepare_kernel(const __grid_constant__ Prepare p) {
  std::int64_t block = blockIdx.x;
  if (block < p.weight_blocks) {
    const std::int64_t index = block * kThreads + threadIdx.x;
    if (p.shape.hopper) {
      for (int within = static_cast<int>(threadIdx.x); within < kTile * 8; within += kThreads) {
        if (p.backward) {
          pack_piece<Terms, T, true>(p, block, within);
        } else {
          pack_piece<Terms, T, false>(p, block, within);
        }
      }
    } else if (index >= p.weight_lanes) {
      return;
    } else if (p.backward) {
      pack_lane<Terms, T, true>(p, index);
    } else {
      pack_lane<Terms, T, false>(p, index);
    }
    return;
  }
  block -= p.weight_blocks;
  if (block < p.coefficient_blocks) {
    if (block == 0) {
      for (std::int64_t i = threadIdx.x; i < p.counter_count; i += kThreads) p.counters[i] = 0;
    }
    coefficients<T>(p, block);
    return;
  }
  block -= p.coefficient_blocks;
  const std::int64_t index = block * kThreads + threadIdx.x;
  if (index < p.state_quads) state_terms<Terms, T>(p, index);
}

}  // namespace

void run_prepare(Prepare p, DType dtype, const char* op, cudaStream_t stream) {
  const Shape& s = p.shape;
  if (p.weights != nullptr) p.weight_lanes = weight_bytes(s) / (16 * s.terms);
  p.weight_blocks = s.hopper && p.weights != nullptr ? weight_bytes(s) / hopper_block_bytes(s.terms)
                                                     : ceil_div(p.weight_lanes, kThreads);
  if (p.c != nullptr) p.coefficient_blocks = s.T * s.batch_tiles;
  if (p.states != nullptr) p.state_quads = s.T * s.padded_b * (s.padded_n / 4);
  const std::int64_t blocks =
      p.weight_blocks + p.coefficient_blocks + ceil_div(p.state_quads, kThreads);
  if (blocks > INT32_MAX) {
    throw NotSupported("[" + std::string(op) +
                       "] tensors must need fewer than 2^31 blocks of "
                       "threads to prepare but need " +
                       std::to_string(blocks));
  }
  // Rows that are dense and aligned can be read 16 bytes at a time.
  const auto aligned = [&](const void* data, std::int64_t stride) {
    return reinterpret_cast<std::uintptr_t>(data) % 32 == 0 && stride * size_of(dtype) % 32 == 0;
  };
  const Args& a = p.args;
  p.whole_rows = a.Wo.stride[1] == 1 && aligned(a.Wo.data, a.Wo.stride[0]) &&
                 (a.K == 0 || (a.Wa.stride[2] == 1 && aligned(a.Wa.data, a.Wa.stride[1]) &&
                               aligned(a.Wa.data, a.Wa.stride[0])));
  with_terms(s.terms, [&]<int Terms>() {
    const auto launch = [&]<class T>() {
      prepare_kernel<Terms, T><<<static_cast<unsigned>(blocks), kThreads, 0, stream>>>(p);
    };
    if (dtype == DType::kF16) {
      launch.template operator()<float16>();
    } else if (dtype == DType::kBF16) {
      launch.template operator()<bfloat16>();
    } else {
      launch.template operator()<float>();
    }
  });
  annulus::cuda::check_launch(op, "preparation of the ring loop");
}

}  // namespace annulus::ring::cuda::tensor
