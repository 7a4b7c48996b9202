// The loop over steps for compute capability 9.0: the same cut, the same ends of a step as
// ring_rnn_cuda_loop.cuh, another way to multiply. A warp of its own fetches blocks of weights by
// bulk copies, from one step into the next across the barriers; groups of four warps, 64 samples
// each, multiply by wgmma with their rows of X in registers.
#pragma once

#include "annulus/cuda/hopper.cuh"
#include "annulus/ring_rnn/ring_rnn_cuda_parts.cuh"

namespace annulus::ring::cuda::tensor {

#if ANNULUS_DEVICE_HOPPER
// What a block of weights is; channel -1 says that the product of an item is complete.
struct Announcement {
  int channel, chunk, slot, unused;
};

// Shared memory, front to back. The weights come first: they must be aligned to 1024 bytes.
template <int Terms>
struct HopperShared {
  std::byte* weights;          // [slot][term][64 n][64 m], swizzled
  float* c;                    // [kRing][rows]
  Announcement* announcement;  // [kRing]
  float4* s_tile;              // [8][threads]
  annulus::cuda::SharedBarrier *full, *empty, *resident;

  __device__ HopperShared(std::byte* base, const Shape& s) {
    weights = base + (1024 - (annulus::cuda::shared_address(base) & 1023)) % 1024;
    std::byte* at = weights + s.slots * hopper_block_bytes(Terms);
    c = reinterpret_cast<float*>(at);
    at += kRing * s.rows * sizeof(float);
    announcement = reinterpret_cast<Announcement*>(at);
    at += kRing * sizeof(Announcement);
    full = reinterpret_cast<annulus::cuda::SharedBarrier*>(at);
    empty = full + kRing;
    resident = empty + kRing;
    at += (2 * kRing + 2) * sizeof(annulus::cuda::SharedBarrier);
    s_tile = reinterpret_cast<float4*>(at);
  }
};

// The fetching thread: announces and loads, in the order the multiplying warps go.
template <int Terms, class Direction>
__device__ void fetch_weights(const Loop& loop, const HopperShared<Terms>& shared) {
  const Shape& s = loop.shape;
  constexpr int kBytes = hopper_block_bytes(Terms);
  const std::byte* weights = reinterpret_cast<const std::byte*>(loop.weights);
  const auto c_bytes = static_cast<unsigned>(s.rows * static_cast<int>(sizeof(float)));
  const int each = (s.channels + s.channel_splits - 1) / s.channel_splits;
  if (s.resident) {
    const Place p = place_of(s, blockIdx.x);
    const int mine =
        (s.channels - p.split % s.channel_splits + s.channel_splits - 1) / s.channel_splits;
    shared.resident->arrive_expecting(
        static_cast<unsigned>((p.last_chunk - p.first_chunk) * mine * kBytes));
    for (int chunk = p.first_chunk; chunk < p.last_chunk; ++chunk) {
      for (int i = 0; i < mine; ++i) {
        const int k = p.split % s.channel_splits + i * s.channel_splits;
        annulus::cuda::copy_bulk(
            shared.weights + ((chunk - p.first_chunk) * each + i) * kBytes,
            weights +
                ((static_cast<std::int64_t>(p.tile) * s.chunks + chunk) * s.channels + k) * kBytes,
            kBytes, shared.resident);
      }
    }
  }
  unsigned n = 0;
  const auto claim = [&]() {
    if (n >= kRing) shared.empty[n % kRing].wait((n / kRing - 1) & 1);
    return n++ % kRing;
  };
  for (std::int64_t step = loop.first; step < loop.last; ++step) {
    const std::int64_t time = Direction::kBackward ? loop.last - 1 - (step - loop.first) : step;
    for (std::int64_t item = blockIdx.x; item < s.items(); item += gridDim.x) {
      const Place p = place_of(s, item);
      const std::uint32_t* mask =
          loop.active + (time * s.batch_tiles + p.batch_tile) * s.mask_words;
      const float* c = loop.c + time * s.channels * s.padded_b +
                       static_cast<std::int64_t>(p.batch_tile) * s.rows;
      for (int chunk = p.first_chunk; chunk < p.last_chunk; ++chunk) {
        for (int word = 0; word < s.mask_words; ++word) {
          for (std::uint32_t bits = __ldg(mask + word) & p.channel_pattern; bits != 0;
               bits &= bits - 1) {
            const int k = word * 32 + __ffs(static_cast<int>(bits)) - 1;
            const unsigned r = claim();
            const int slot = s.resident ? (chunk - p.first_chunk) * each + k / s.channel_splits
                                        : static_cast<int>(r);
            shared.announcement[r] = {k, chunk, slot, 0};
            shared.full[r].arrive_expecting(c_bytes +
                                            (s.resident ? 0u : static_cast<unsigned>(kBytes)));
            annulus::cuda::copy_bulk(shared.c + r * s.rows, c + k * s.padded_b, c_bytes,
                                     shared.full + r);
            if (!s.resident) {
              annulus::cuda::copy_bulk(
                  shared.weights + slot * kBytes,
                  weights +
                      ((static_cast<std::int64_t>(p.tile) * s.chunks + chunk) * s.channels + k) *
                          kBytes,
                  kBytes, shared.full + r);
            }
          }
        }
      }
      const unsigned r = claim();
      shared.announcement[r] = {-1, 0, 0, 0};
      shared.full[r].arrive();
    }
  }
}

// A warp's fragments of X: 16 rows, one chunk of m.
template <int Terms>
struct WarpRows {
  uint4 x[Terms][4];

  // Not through the read-only cache: other blocks write X while this kernel runs.
  __device__ __forceinline__ void load(const Loop& loop, std::int64_t row16, int chunk, int parity,
                                       int lane) {
    const Shape& s = loop.shape;
    const std::int64_t wide = s.padded_n / 16;
    const std::int64_t plane = s.padded_b / 16 * wide;
    const uint4* base = reinterpret_cast<const uint4*>(loop.operand) +
                        (parity * Terms * plane + row16 * wide + chunk * 4) * 32 + lane;
#pragma unroll
    for (int term = 0; term < Terms; ++term) {
#pragma unroll
      for (int d = 0; d < 4; ++d) x[term][d] = base[(term * plane + d) * 32];
    }
  }
};

template <int Terms>
__device__ __forceinline__ void multiply_block(const WarpRows<Terms>& f, const std::byte* block,
                                               float (&part)[32]) {
  annulus::cuda::wgmma_fence();
#pragma unroll
  for (int p = 0; p < products_of(Terms); ++p) {
#pragma unroll
    for (int d = 0; d < 4; ++d) {
      annulus::cuda::wgmma_64x64(
          part, f.x[term_of_x<Terms>(p)][d],
          annulus::cuda::swizzled_operand(block + term_of_v<Terms>(p) * kHopperPlane, d),
          p > 0 || d > 0);
    }
  }
  annulus::cuda::wgmma_commit();
}

// Parts of s . u_k, as add_dots of the portable loop: rows g and g + 8 of a warp's 16.
__device__ __forceinline__ void add_dots(const Loop& loop, std::int64_t time, const Place& place,
                                         std::int64_t row, int channel, bool first,
                                         const float4* s_tile, int threads,
                                         const float (&part)[32]) {
  float low = 0, high = 0;
#pragma unroll
  for (int n = 0; n < 8; ++n) {
    const float4 v = s_tile[n * threads + static_cast<int>(threadIdx.x)];
    low = fmaf(part[4 * n + 1], v.y, fmaf(part[4 * n], v.x, low));
    high = fmaf(part[4 * n + 3], v.w, fmaf(part[4 * n + 2], v.z, high));
  }
#pragma unroll
  for (int mask = 1; mask < 4; mask <<= 1) {
    low += __shfl_xor_sync(~0u, low, mask);
    high += __shfl_xor_sync(~0u, high, mask);
  }
  if ((threadIdx.x & 3) != 0) return;
  float* to = dots_of(loop, time, place, 0, channel) + row;
  if (first) {
    to[0] = low;
    to[8] = high;
  } else {
    atomicAdd(to, low);
    atomicAdd(to + 8, high);
  }
}

template <int Terms, class Direction>
__device__ void multiply_items(const Loop& loop, const HopperShared<Terms>& shared,
                               std::int64_t time, int parity, unsigned& n) {
  const Shape& s = loop.shape;
  const int threads = s.rows * 2;
  const int lane = static_cast<int>(threadIdx.x) & 31;
  const int warp = static_cast<int>(threadIdx.x) >> 5;
  const int local = warp * 16 + (lane >> 2);  // row of the block; the other is 8 below
  for (std::int64_t item = blockIdx.x; item < s.items(); item += gridDim.x) {
    const Place p = place_of(s, item);
    const std::int64_t first_row = static_cast<std::int64_t>(p.batch_tile) * s.rows;
    if constexpr (Direction::kDots) {
      // Only the thread that wrote a place of the tile reads it.
      for (int i = 0; i < 8; ++i) {
        shared.s_tile[i * threads + static_cast<int>(threadIdx.x)] = state_quad<Terms>(
            loop, time, first_row + local, p.tile * kTile + i * 8 + (lane & 3) * 2);
      }
    }
    float acc[32] = {};
    WarpRows<Terms> f;
    const std::int64_t row16 = (first_row + warp * 16) / 16;
    int chunk = -1;
    while (true) {
      const unsigned r = n % kRing;
      shared.full[r].wait((n / kRing) & 1);
      ++n;
      const Announcement now = shared.announcement[r];
      if (now.channel < 0) {
        if (lane == 0) shared.empty[r].arrive();
        break;
      }
      if (now.chunk != chunk) {
        chunk = now.chunk;
        f.load(loop, row16, chunk, parity, lane);
      }
      const float c0 = shared.c[r * s.rows + local];
      const float c1 = shared.c[r * s.rows + local + 8];
      float part[32];
      multiply_block<Terms>(f, shared.weights + now.slot * hopper_block_bytes(Terms), part);
      annulus::cuda::wgmma_wait<0>();
      __syncwarp();
      if (lane == 0) shared.empty[r].arrive();
#pragma unroll
      for (int i = 0; i < 32; ++i) acc[i] = fmaf((i & 2) ? c1 : c0, part[i], acc[i]);
      if constexpr (Direction::kDots) {
        add_dots(loop, time, p, first_row + local, now.channel, chunk == p.first_chunk,
                 shared.s_tile, threads, part);
      }
    }
    float* to = loop.partial + item * s.rows * kTile + static_cast<std::int64_t>(local) * kTile +
                (lane & 3) * 2;
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      *reinterpret_cast<float2*>(to + i * 8) = make_float2(acc[4 * i], acc[4 * i + 1]);
      *reinterpret_cast<float2*>(to + 8 * kTile + i * 8) =
          make_float2(acc[4 * i + 2], acc[4 * i + 3]);
    }
  }
}
#endif  // ANNULUS_DEVICE_HOPPER

// Groups: of four warps that multiply, at most; one more fetches. It needs few registers and leaves
// them to the others: 112 each with four groups, 240 with two.
template <int Terms, int Groups, class Direction>
__global__ void __launch_bounds__((Groups + 1) * 128, 1)
    hopper_kernel(const __grid_constant__ Loop loop) {
#if ANNULUS_DEVICE_HOPPER
  extern __shared__ uint4 shared_words[];
  const Shape& s = loop.shape;
  const HopperShared<Terms> shared(reinterpret_cast<std::byte*>(shared_words), s);
  const int threads = s.rows * 2;  // that multiply
  if (threadIdx.x == 0) {
    for (int i = 0; i < kRing; ++i) {
      shared.full[i].init(1);
      shared.empty[i].init(static_cast<unsigned>(threads / 32));
    }
    shared.resident->init(1);
    annulus::cuda::fence_barriers();
  }
  __syncthreads();
  if (static_cast<int>(threadIdx.x) >= threads) {
    annulus::cuda::give_registers<24>();
    if ((loop.phases & kMultiply) && static_cast<int>(threadIdx.x) == threads) {
      fetch_weights<Terms, Direction>(loop, shared);
    }
    return;
  }
  annulus::cuda::take_registers<Groups == 4 ? 112 : 240>();
  const auto sync = [&] { annulus::cuda::sync_threads(1, threads); };
  Meeting<decltype(sync)> meeting(loop, sync);
  if (loop.phases & kBegin) {
    begin_items<Terms, Direction>(loop, threads / 32);
  }
  if (loop.together) meeting.samples();
  if (s.resident && (loop.phases & kMultiply)) shared.resident->wait(0);
  unsigned n = 0;
  for (std::int64_t step = loop.first; step < loop.last; ++step) {
    const std::int64_t time = Direction::kBackward ? loop.last - 1 - (step - loop.first) : step;
    const int parity = Direction::parity(loop, time);
    if (loop.phases & kMultiply) {
      multiply_items<Terms, Direction>(loop, shared, time, parity, n);
    }
    if (loop.together) meeting.tile();
    if (loop.phases & kFinish) finish_items<Terms, Direction>(loop, time, parity, threads / 32);
    if (loop.together && step + 1 < loop.last) meeting.samples();
  }
#endif
}

}  // namespace annulus::ring::cuda::tensor
