// The loop over steps for compute capability 9.0: the same cut, the same ends of a step as
// ring_rnn_cuda_portable.cuh, another way to multiply. A warp of its own fetches blocks of weights by
// bulk copies, from one step into the next across the barriers; groups of four warps, 64 samples
// each, multiply by wgmma with their rows of X in registers or, with one term and s . u_k, in shared
// memory.
#pragma once

#include "annulus/ring_rnn/ring_rnn_cuda_hopper_fetch.cuh"
#include "annulus/ring_rnn/ring_rnn_cuda_launch.cuh"
#include "annulus/ring_rnn/ring_rnn_cuda_parts.cuh"

namespace annulus::ring::cuda::tensor {

#if ANNULUS_DEVICE_HOPPER
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

// A factor on pairs of bf16: the sum of two bf16, the second of which is often zero.
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

template <int Terms>
__device__ __forceinline__ void multiply_block(const WarpRows<Terms>& f, std::uint32_t operand,
                                               float (&part)[32]) {
  annulus::cuda::wgmma_fence();
#pragma unroll
  for (int p = 0; p < products_of(Terms); ++p) {
#pragma unroll
    for (int d = 0; d < 4; ++d) {
      annulus::cuda::wgmma_64x64(
          part, f.x[term_of_x<Terms>(p)][d],
          annulus::cuda::swizzled_operand(operand + (term_of_v<Terms>(p) * kHopperPlane >> 4), d),
          p > 0 || d > 0);
    }
  }
  annulus::cuda::wgmma_commit();
}

// Parts of s . u_k, as add_dots of the portable loop: rows g and g + 8 of a warp's 16.
template <int Terms>
__device__ __forceinline__ void add_dots(const Loop& loop, std::int64_t time, const Place& place,
                                         std::int64_t row, int channel, bool first,
                                         const float4* s_tile, int threads,
                                         const float (&part)[32]) {
  float low = 0, high = 0;
  uint4 words = {};
#pragma unroll
  for (int n = 0; n < 8; ++n) {
    float4 v;
    if constexpr (Terms == 1) {
      // As bf16, which loses nothing: half the traffic of shared memory, which is what limits here.
      if (n % 2 == 0) {
        words =
            reinterpret_cast<const uint4*>(s_tile)[n / 2 * threads + static_cast<int>(threadIdx.x)];
      }
      v = n % 2 == 0 ? quad_of(words.x, words.y) : quad_of(words.z, words.w);
    } else {
      v = s_tile[n * threads + static_cast<int>(threadIdx.x)];
    }
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

// The next announcement, and c of the two rows of this thread where it comes with c.
template <class C>
struct Stage {
  Announcement what;
  C c0, c1;
  int at;

  template <int Terms>
  static __device__ __forceinline__ Stage next(const HopperShared<Terms>& shared, const Shape& s,
                                               const Multiplier& who, RingPlace& ring) {
    Stage stage;
    stage.at = ring.at;
    shared.full[stage.at].wait(ring.parity);
    ring.next(s.ring);
    stage.what = shared.announcement[stage.at];
    const C* c = reinterpret_cast<const C*>(shared.c) + stage.at * s.rows + who.local;
    stage.c0 = c[0];
    stage.c1 = c[8];
    return stage;
  }
  // The warp is done with its block of weights.
  template <int Terms>
  __device__ __forceinline__ void release(const HopperShared<Terms>& shared,
                                          const Multiplier& who) const {
    __syncwarp();
    if (who.lane == 0) shared.empty[at].arrive();
  }
};

// s of the rows and columns of an item, for add_dots. Only the thread that wrote a place reads it.
template <int Terms>
__device__ __forceinline__ void load_s_tile(const Loop& loop, const HopperShared<Terms>& shared,
                                            const Multiplier& who, std::int64_t time,
                                            const Place& p) {
  const std::int64_t row = static_cast<std::int64_t>(p.batch_tile) * loop.shape.rows + who.local;
  const int col = p.tile * kTile + (who.lane & 3) * 2;
  for (int i = 0; i < 8; i += Terms == 1 ? 2 : 1) {
    if constexpr (Terms == 1) {
      const uint2 even = state_words(loop, time, row, col + i * 8, 0);
      const uint2 odd = state_words(loop, time, row, col + i * 8 + 8, 0);
      reinterpret_cast<uint4*>(shared.s_tile)[i / 2 * who.threads + static_cast<int>(threadIdx.x)] =
          make_uint4(even.x, even.y, odd.x, odd.y);
    } else {
      shared.s_tile[i * who.threads + static_cast<int>(threadIdx.x)] =
          state_quad<Terms>(loop, time, row, col + i * 8);
    }
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
  if constexpr (Direction::kDots) load_s_tile<Terms>(loop, shared, who, time, p);
  float acc[32] = {};
  WarpRows<Terms> f;
  const std::int64_t row16 = (first_row + who.warp * 16) / 16;
  f.load(loop, row16, p.first_chunk, parity, who.lane);
  auto now = Stage<float>::next(shared, s, who, ring);
  while (now.what.channel >= 0) {
    float part[32];
    multiply_block<Terms>(f, now.what.operand, part);
    const auto then = Stage<float>::next(shared, s, who, ring);  // while the tensor cores work
    annulus::cuda::wgmma_wait<0>();
    now.release(shared, who);
    if ((now.what.flags & kEndsGroup) && now.what.chunk + 1 < p.last_chunk) {
      f.load(loop, row16, now.what.chunk + 1, parity, who.lane);
    }
#pragma unroll
    for (int i = 0; i < 32; ++i) acc[i] = fmaf((i & 2) ? now.c1 : now.c0, part[i], acc[i]);
    if constexpr (Direction::kDots) {
      add_dots<Terms>(loop, time, p, first_row + who.local, now.what.channel,
                      now.what.chunk == p.first_chunk, shared.s_tile, who.threads, part);
    }
    now = then;
  }
  now.release(shared, who);
  store_partial(loop, who, item, acc);
}

// A group of four warps' own rows of X, a few chunks of it at a time, in shared memory.
class GroupRows {
 public:
  __device__ GroupRows(const Loop& loop, const HopperShared<1>& shared, const Multiplier& who,
                       std::int64_t first_row, const Place& p, int parity)
      : s_(loop.shape),
        group_(who.warp >> 2),
        thread_(static_cast<int>(threadIdx.x) & 127),
        last_(p.last_chunk) {
    x_ = shared.x + group_ * kGroupBytes;
    from_ = reinterpret_cast<const std::uint16_t*>(loop.operand) +
            (parity * s_.padded_b + first_row + group_ * 64) * s_.padded_n;
  }

  // Begins to load the chunks from `chunk` on, as many as make a group. Past the last chunk nothing
  // is loaded, but it counts as a load all the same.
  __device__ void load(int chunk, int buffer) const {
    for (int i = 0; i < min(kGroupChunks, last_ - chunk); ++i) {
#pragma unroll
      for (int piece = thread_; piece < 64 * 8; piece += 128) {
        const int row = piece >> 3;
        const int k = piece & 7;
        annulus::cuda::copy_async_16(
            at(buffer) + i * kHopperPlane + row * 128 + ((k ^ (row & 7)) << 4),
            from_ + static_cast<std::int64_t>(row) * s_.padded_n + (chunk + i) * kHopperDepth +
                k * 8);
      }
    }
    annulus::cuda::copy_async_commit();
  }
  // Until at most `Loads` of the loads are on their way.
  template <int Loads>
  __device__ void wait() const {
    annulus::cuda::copy_async_wait<Loads>();
    annulus::cuda::fence_shared_writes();
    sync();
  }
  // All four warps are done with what they have read.
  __device__ void sync() const { annulus::cuda::sync_threads(2 + group_, 128); }
  __device__ std::uint32_t operand(int buffer, int chunk) const {
    return annulus::cuda::swizzled_operand_low(at(buffer) + chunk * kHopperPlane);
  }

 private:
  static constexpr int kGroupBytes = x_buffer_bytes(64);
  __device__ std::byte* at(int buffer) const { return x_ + buffer * (s_.rows / 64) * kGroupBytes; }

  const Shape& s_;
  int group_, thread_, last_;
  std::byte* x_;
  const std::uint16_t* from_;
};

// The same with one term, and with s . u_k: both operands lie in shared memory, and the products of
// several chunks are added up by the tensor cores before c and s come in, which is what takes longest.
__device__ __forceinline__ void multiply_groups(const Loop& loop, const HopperShared<1>& shared,
                                                std::int64_t time, int parity, std::int64_t item,
                                                RingPlace& ring) {
  const Shape& s = loop.shape;
  const Multiplier who(s);
  const Place p = place_of(s, item);
  const std::int64_t first_row = static_cast<std::int64_t>(p.batch_tile) * s.rows;
  const GroupRows x(loop, shared, who, first_row, p, parity);
  x.load(p.first_chunk, 0);
  if (s.x_buffers > 1) x.load(p.first_chunk + kGroupChunks, 1);
  load_s_tile<1>(loop, shared, who, time, p);
  float acc[32] = {};
  auto now = Stage<float>::next(shared, s, who, ring);
  int buffer = 0;
  for (int chunk = p.first_chunk; chunk < p.last_chunk; chunk += kGroupChunks) {
    if (s.x_buffers > 1) {
      x.wait<1>();
    } else {
      x.wait<0>();
    }
    const std::uint32_t low = x.operand(buffer, 0), high = x.operand(buffer, 1);
    while (now.what.channel >= 0 && now.what.chunk < chunk + kGroupChunks) {
      float part[32];
      const auto multiply = [&](std::uint32_t rows, std::uint32_t weights, bool add) {
        annulus::cuda::wgmma_fence();
#pragma unroll
        for (int d = 0; d < 4; ++d) {
          annulus::cuda::wgmma_64x64(part, annulus::cuda::swizzled_operand(rows, d),
                                     annulus::cuda::swizzled_operand(weights, d), add || d > 0);
        }
        annulus::cuda::wgmma_commit();
      };
      multiply(low, now.what.operand, false);
      auto then = Stage<float>::next(shared, s, who, ring);  // while the tensor cores work
      if (!(now.what.flags & kEndsChannel)) {
        multiply(high, then.what.operand, true);
        const auto after = Stage<float>::next(shared, s, who, ring);
        annulus::cuda::wgmma_wait<1>();
        now.release(shared, who);
        now = then;
        then = after;
      }
      annulus::cuda::wgmma_wait<0>();
      now.release(shared, who);
#pragma unroll
      for (int i = 0; i < 32; ++i) acc[i] = fmaf((i & 2) ? now.c1 : now.c0, part[i], acc[i]);
      add_dots<1>(loop, time, p, first_row + who.local, now.what.channel, chunk == p.first_chunk,
                  shared.s_tile, who.threads, part);
      now = then;
    }
    if (s.x_buffers > 1) {
      x.sync();
      x.load(chunk + 2 * kGroupChunks, buffer);
      buffer ^= 1;
    }
  }
  now.release(shared, who);
  store_partial(loop, who, item, acc);
}

// The product of an item with c applied to the rows of X, which are bf16 all the same. What limits
// here is the number of instructions a block of weights takes besides its four wgmma: c comes ready
// as pairs of bf16, with a second term only where c is no bf16 itself.
// Tried on an H200 (B 256, T 20, K 16, N 2048), where a block takes 890 cycles and wgmma alone would
// take 512: two blocks of weights on their way at once, 1 % faster (N 1024: 2 % slower); two tiles a
// block of threads, wgmma with 128 columns, 19 % slower, with twice the parts of the sum; both operands
// in shared memory, 7 % slower; X of the next chunk in registers ahead, 5 % (N 1024: 11 %) slower;
// without the copies of weights, 5 % faster.
__device__ __forceinline__ void scale_then_multiply(const Loop& loop, const HopperShared<1>& shared,
                                                    int parity, std::int64_t item,
                                                    RingPlace& ring) {
  const Shape& s = loop.shape;
  const Multiplier who(s);
  const Place p = place_of(s, item);
  const std::int64_t first_row = static_cast<std::int64_t>(p.batch_tile) * s.rows;
  const std::int64_t row16 = (first_row + who.warp * 16) / 16;
  float acc[32] = {};
  WarpRows<1> f;
  f.load(loop, row16, p.first_chunk, parity, who.lane);
  auto now = Stage<Scale>::next(shared, s, who, ring);
  while (now.what.channel >= 0) {
    uint4 scaled[4];
    if (now.what.flags & kTwoTerms) {
#pragma unroll
      for (int d = 0; d < 4; ++d) {
        const uint4& x = f.x[0][d];
        scaled[d] = make_uint4(scaled_pair(x.x, now.c0), scaled_pair(x.y, now.c1),
                               scaled_pair(x.z, now.c0), scaled_pair(x.w, now.c1));
      }
    } else {
#pragma unroll
      for (int d = 0; d < 4; ++d) {
        const uint4& x = f.x[0][d];
        scaled[d] = make_uint4(scaled_pair(x.x, now.c0.high), scaled_pair(x.y, now.c1.high),
                               scaled_pair(x.z, now.c0.high), scaled_pair(x.w, now.c1.high));
      }
    }
    annulus::cuda::wgmma_fence();
#pragma unroll
    for (int d = 0; d < 4; ++d) {
      annulus::cuda::wgmma_64x64(acc, scaled[d],
                                 annulus::cuda::swizzled_operand(now.what.operand, d), true);
    }
    annulus::cuda::wgmma_commit();
    if ((now.what.flags & kEndsGroup) && now.what.chunk + 1 < p.last_chunk) {
      f.load(loop, row16, now.what.chunk + 1, parity, who.lane);
    }
    const auto then = Stage<Scale>::next(shared, s, who, ring);  // while the tensor cores work
    annulus::cuda::wgmma_wait<0>();
    now.release(shared, who);
    now = then;
  }
  now.release(shared, who);
  store_partial(loop, who, item, acc);
}

template <int Terms, class Direction>
__device__ void multiply_items(const Loop& loop, const HopperShared<Terms>& shared,
                               std::int64_t time, int parity, RingPlace& ring) {
  const Shape& s = loop.shape;
  for (std::int64_t item = blockIdx.x; item < s.items(); item += gridDim.x) {
    if constexpr (Terms == 1 && Direction::kDots) {
      multiply_groups(loop, shared, time, parity, item, ring);
    } else if constexpr (Terms == 1) {
      scale_then_multiply(loop, shared, parity, item, ring);
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
    const int beyond = static_cast<int>(threadIdx.x) - threads;
    if ((loop.phases & kMultiply) && (beyond & 31) == 0) {
      fetch_weights<Terms, Direction>(loop, shared, beyond >> 5);
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
    if (loop.phases & kFinish) {
      Finish<Terms, Direction> finish(loop, time, parity, threads / 32);
      if (loop.together) meeting.tile();
      finish.run();
    }
    if (loop.together && step + 1 < loop.last) meeting.samples();
  }
#else
  __trap();  // not built for this GPU: better than to return with nothing done
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
