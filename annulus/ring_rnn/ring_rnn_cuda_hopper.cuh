// The loop over steps for compute capability 9.0: the same cut, the same ends of a step as
// ring_rnn_cuda_portable.cuh, another way to multiply. A warp of its own fetches blocks of weights by
// bulk copies, from one step into the next across the barriers; groups of four warps, 64 samples
// each, multiply by wgmma with their rows of X in registers.
#pragma once

#include "annulus/cuda/hopper.cuh"
#include "annulus/ring_rnn/ring_rnn_cuda_launch.cuh"
#include "annulus/ring_rnn/ring_rnn_cuda_parts.cuh"

namespace annulus::ring::cuda::tensor {

#if ANNULUS_DEVICE_HOPPER
// What a block of weights is; channel -1 says that the product of an item is complete.
struct Announcement {
  int channel, chunk, slot, ends_chunk;
};

// A place in the ring of announcements, and the parity of its barriers' phase.
struct RingPlace {
  int at = 0;
  unsigned parity = 0;
  __device__ __forceinline__ void next(int ring) {
    if (++at == ring) {
      at = 0;
      parity ^= 1;
    }
  }
};

// Shared memory, front to back. The weights come first: they must be aligned to 1024 bytes.
template <int Terms>
struct HopperShared {
  std::byte* weights;          // [slot][term][64 n][64 m], swizzled
  float* c;                    // [ring][rows]
  Announcement* announcement;  // [ring]
  float4* s_tile;              // [8][threads]
  annulus::cuda::SharedBarrier *full, *empty, *resident;

  __device__ HopperShared(std::byte* base, const Shape& s) {
    weights = base + (1024 - (annulus::cuda::shared_address(base) & 1023)) % 1024;
    std::byte* at = weights + s.slots * hopper_block_bytes(Terms);
    c = reinterpret_cast<float*>(at);
    at += s.ring * s.rows * static_cast<int>(sizeof(float));
    announcement = reinterpret_cast<Announcement*>(at);
    at += s.ring * static_cast<int>(sizeof(Announcement));
    full = reinterpret_cast<annulus::cuda::SharedBarrier*>(at);
    empty = full + s.ring;
    resident = empty + s.ring;
    at += (2 * s.ring + 2) * static_cast<int>(sizeof(annulus::cuda::SharedBarrier));
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
  RingPlace place;
  place.parity = 1;  // a fresh barrier counts as past its phase 1: the first round waits for nobody
  const auto claim = [&]() {
    const int r = place.at;
    shared.empty[r].wait(place.parity);
    place.next(s.ring);
    return r;
  };
  for (std::int64_t step = loop.first; step < loop.last; ++step) {
    const std::int64_t time = Direction::kBackward ? loop.last - 1 - (step - loop.first) : step;
    for (std::int64_t item = blockIdx.x; item < s.items(); item += gridDim.x) {
      const Place p = place_of(s, item);
      const std::uint32_t* mask =
          loop.active + (time * s.batch_tiles + p.batch_tile) * s.mask_words;
      const float* c = loop.c + time * s.channels * s.padded_b +
                       static_cast<std::int64_t>(p.batch_tile) * s.rows;
      int last = -1;  // active channel
      for (int word = 0; word < s.mask_words; ++word) {
        const std::uint32_t bits = __ldg(mask + word) & p.channel_pattern;
        if (bits != 0) last = word * 32 + 31 - __clz(static_cast<int>(bits));
      }
      for (int chunk = p.first_chunk; chunk < p.last_chunk; ++chunk) {
        for (int word = 0; word < s.mask_words; ++word) {
          for (std::uint32_t bits = __ldg(mask + word) & p.channel_pattern; bits != 0;
               bits &= bits - 1) {
            const int k = word * 32 + __ffs(static_cast<int>(bits)) - 1;
            const int r = claim();
            const int slot = s.resident ? (chunk - p.first_chunk) * each + k / s.channel_splits : r;
            shared.announcement[r] = {k, chunk, slot, k == last ? 1 : 0};
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
      const int r = claim();
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

// A factor in f32 on pairs of bf16.
struct Scale {
  __nv_bfloat162 high, low;
  __device__ __forceinline__ explicit Scale(float c) {
    const __nv_bfloat16 h = __float2bfloat16_rn(c);
    high = __bfloat162bfloat162(h);
    const float rest = c - __bfloat162float(h);
    low = __bfloat162bfloat162(__float2bfloat16_rn(isfinite(rest) ? rest : 0.0f));
  }
  __device__ __forceinline__ std::uint32_t operator()(std::uint32_t pair) const {
    const auto v = *reinterpret_cast<const __nv_bfloat162*>(&pair);
    const __nv_bfloat162 scaled = __hfma2(v, high, __hmul2(v, low));
    return *reinterpret_cast<const std::uint32_t*>(&scaled);
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

// What a multiplying thread knows of its place.
struct Multiplier {
  int lane, warp, threads;
  int local;  // row of the block; the other is 8 below

  __device__ explicit Multiplier(const Shape& s) {
    lane = static_cast<int>(threadIdx.x) & 31;
    warp = static_cast<int>(threadIdx.x) >> 5;
    threads = s.rows * 2;
    local = warp * 16 + (lane >> 2);
  }
};

__device__ __forceinline__ void store_partial(const Loop& loop, const Multiplier& who,
                                              std::int64_t item, const float (&acc)[32]) {
  float* to = loop.partial + item * loop.shape.rows * kTile +
              static_cast<std::int64_t>(who.local) * kTile + (who.lane & 3) * 2;
#pragma unroll
  for (int i = 0; i < 8; ++i) {
    *reinterpret_cast<float2*>(to + i * 8) = make_float2(acc[4 * i], acc[4 * i + 1]);
    *reinterpret_cast<float2*>(to + 8 * kTile + i * 8) =
        make_float2(acc[4 * i + 2], acc[4 * i + 3]);
  }
}

// The product of an item with c applied to it channel by channel, in f32.
template <int Terms, class Direction>
__device__ void multiply_then_scale(const Loop& loop, const HopperShared<Terms>& shared,
                                    std::int64_t time, int parity, std::int64_t item,
                                    RingPlace& ring) {
  const Shape& s = loop.shape;
  const Multiplier who(s);
  const Place p = place_of(s, item);
  const std::int64_t first_row = static_cast<std::int64_t>(p.batch_tile) * s.rows;
  if constexpr (Direction::kDots) {
    // Only the thread that wrote a place of the tile reads it.
    for (int i = 0; i < 8; ++i) {
      shared.s_tile[i * who.threads + static_cast<int>(threadIdx.x)] = state_quad<Terms>(
          loop, time, first_row + who.local, p.tile * kTile + i * 8 + (who.lane & 3) * 2);
    }
  }
  float acc[32] = {};
  WarpRows<Terms> f;
  const std::int64_t row16 = (first_row + who.warp * 16) / 16;
  f.load(loop, row16, p.first_chunk, parity, who.lane);
  while (true) {
    const int r = ring.at;
    shared.full[r].wait(ring.parity);
    ring.next(s.ring);
    const Announcement now = shared.announcement[r];
    if (now.channel < 0) {
      __syncwarp();
      if (who.lane == 0) shared.empty[r].arrive();
      break;
    }
    const float c0 = shared.c[r * s.rows + who.local];
    const float c1 = shared.c[r * s.rows + who.local + 8];
    float part[32];
    multiply_block<Terms>(f, shared.weights + now.slot * hopper_block_bytes(Terms), part);
    annulus::cuda::wgmma_wait<0>();
    __syncwarp();
    if (who.lane == 0) shared.empty[r].arrive();
    if (now.ends_chunk && now.chunk + 1 < p.last_chunk) {
      f.load(loop, row16, now.chunk + 1, parity, who.lane);
    }
#pragma unroll
    for (int i = 0; i < 32; ++i) acc[i] = fmaf((i & 2) ? c1 : c0, part[i], acc[i]);
    if constexpr (Direction::kDots) {
      add_dots(loop, time, p, first_row + who.local, now.channel, now.chunk == p.first_chunk,
               shared.s_tile, who.threads, part);
    }
  }
  store_partial(loop, who, item, acc);
}

// The product of an item with c applied to the rows of X, which are bf16 all the same: nothing waits
// between two channels, and the tensor cores always have the next one at hand. c counts with 16
// bits, as a sum of two bf16.
template <class Direction>
__device__ void scale_then_multiply(const Loop& loop, const HopperShared<1>& shared, int parity,
                                    std::int64_t item, RingPlace& ring) {
  const Shape& s = loop.shape;
  const Multiplier who(s);
  const Place p = place_of(s, item);
  const std::int64_t first_row = static_cast<std::int64_t>(p.batch_tile) * s.rows;
  const std::int64_t row16 = (first_row + who.warp * 16) / 16;
  float acc[32] = {};
  WarpRows<1> f;
  f.load(loop, row16, p.first_chunk, parity, who.lane);
  int before = -1;  // the place in the ring whose product is on its way
  // One block of weights; false at the end. The scaled rows of two blocks are in use at a time.
  const auto multiply = [&](uint4(&scaled)[4]) {
    const int r = ring.at;
    shared.full[r].wait(ring.parity);
    ring.next(s.ring);
    const Announcement now = shared.announcement[r];
    if (now.channel < 0) {
      annulus::cuda::wgmma_wait<0>();
      __syncwarp();
      if (who.lane == 0) {
        if (before >= 0) shared.empty[before].arrive();
        shared.empty[r].arrive();
      }
      return false;
    }
    const Scale c0(shared.c[r * s.rows + who.local]);
    const Scale c1(shared.c[r * s.rows + who.local + 8]);
#pragma unroll
    for (int d = 0; d < 4; ++d) {
      scaled[d].x = c0(f.x[0][d].x);
      scaled[d].y = c1(f.x[0][d].y);
      scaled[d].z = c0(f.x[0][d].z);
      scaled[d].w = c1(f.x[0][d].w);
    }
    const std::byte* block = shared.weights + now.slot * hopper_block_bytes(1);
    annulus::cuda::wgmma_fence();
#pragma unroll
    for (int d = 0; d < 4; ++d) {
      annulus::cuda::wgmma_64x64(acc, scaled[d], annulus::cuda::swizzled_operand(block, d), true);
    }
    annulus::cuda::wgmma_commit();
    if (now.ends_chunk && now.chunk + 1 < p.last_chunk) {
      f.load(loop, row16, now.chunk + 1, parity, who.lane);
    }
    annulus::cuda::wgmma_wait<1>();
    __syncwarp();
    if (who.lane == 0 && before >= 0) shared.empty[before].arrive();
    before = r;
    return true;
  };
  uint4 even[4], odd[4];
  while (multiply(even) && multiply(odd)) {
  }
  store_partial(loop, who, item, acc);
}

template <int Terms, class Direction>
__device__ void multiply_items(const Loop& loop, const HopperShared<Terms>& shared,
                               std::int64_t time, int parity, RingPlace& ring) {
  const Shape& s = loop.shape;
  for (std::int64_t item = blockIdx.x; item < s.items(); item += gridDim.x) {
    if constexpr (Terms == 1 && !Direction::kDots) {
      scale_then_multiply<Direction>(loop, shared, parity, item, ring);
    } else {
      multiply_then_scale<Terms, Direction>(loop, shared, time, parity, item, ring);
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
    for (int i = 0; i < s.ring; ++i) {
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
  RingPlace ring;
  for (std::int64_t step = loop.first; step < loop.last; ++step) {
    const std::int64_t time = Direction::kBackward ? loop.last - 1 - (step - loop.first) : step;
    const int parity = Direction::parity(loop, time);
    if (loop.phases & kMultiply) {
      multiply_items<Terms, Direction>(loop, shared, time, parity, ring);
    }
    if (loop.together) meeting.tile();
    if (loop.phases & kFinish) finish_items<Terms, Direction>(loop, time, parity, threads / 32);
    if (loop.together && step + 1 < loop.last) meeting.samples();
  }
#endif
}

template <class Direction>
void launch_hopper(const Loop& loop, const char* op, cudaStream_t stream) {
  with_terms(loop.shape.terms, [&]<int Terms>() {
    if constexpr (Terms == 1) {
      if (loop.shape.rows > 128) {
        return launch_loop(hopper_kernel<1, 4, Direction>, loop, op, stream);
      }
    }
    launch_loop(hopper_kernel<Terms, 2, Direction>, loop, op, stream);
  });
}

}  // namespace annulus::ring::cuda::tensor
