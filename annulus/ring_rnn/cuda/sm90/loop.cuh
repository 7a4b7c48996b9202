// The loop over steps for compute capability 9.0: the same work items, the same epilogue as
// cuda/sm80/loop.cuh, another mainloop. Producer warps fetch blocks of weights by bulk copies, from one
// step into the next across the barriers; consumers, groups of four warps with 64 samples each, multiply
// by wgmma with their rows of X in registers or, with one term and s . u_k, in shared
// memory.
#pragma once

#include "annulus/ring_rnn/cuda/launch.cuh"
#include "annulus/ring_rnn/cuda/sm90/weights.cuh"
#include "annulus/ring_rnn/cuda/step.cuh"

namespace annulus::ring_rnn::cuda::tensor {

#if ANNULUS_DEVICE_HOPPER
// A warp's fragments of X: 16 rows, one chunk of m.
template <class Format>
struct WarpRows {
  uint4 x[Format::kTerms][4];

  // Where those of the first chunk are, and how far it is from there to the next chunk.
  static __device__ __forceinline__ const uint4* at(const Layout& s, const GridOperands& operands,
                                                    std::int64_t row16, int chunk, int parity,
                                                    int lane) {
    const std::int64_t wide = s.padded_n / 16;
    const std::int64_t plane = s.padded_b / 16 * wide;
    return reinterpret_cast<const uint4*>(operands.x_fragments) +
           (parity * Format::kTerms * plane + row16 * wide + chunk * 4) * 32 + lane;
  }
  static constexpr int kChunk = 4 * 32;

  // Not through the read-only cache: other blocks write X while this kernel runs.
  __device__ __forceinline__ void load(const Layout& s, const uint4* from) {
    const std::int64_t plane = s.padded_b / 16 * (s.padded_n / 16);
#pragma unroll
    for (int term = 0; term < Format::kTerms; ++term) {
#pragma unroll
      for (int d = 0; d < 4; ++d) x[term][d] = from[(term * plane + d) * 32];
    }
  }
};

template <class Format>
__device__ __forceinline__ void multiply_block(const WarpRows<Format>& f, std::uint32_t operand,
                                               float (&part)[32]) {
  wgmma_fence();
#pragma unroll
  for (int p = 0; p < products_of(Format::kTerms); ++p) {
#pragma unroll
    for (int d = 0; d < 4; ++d) {
      wgmma<typename Format::Element>(
          part, f.x[term_of_x<Format::kTerms>(p)][d],
          k_major(operand + (term_of_v<Format::kTerms>(p) * kHopperPlane >> 4), d), p > 0 || d > 0);
    }
  }
  wgmma_commit();
}

// s of a thread's rows and columns of an item, as add_dots wants it; with one term as bf16, which
// loses nothing.
template <class Format>
struct RowStates {
  float4 quads[8];

  __device__ __forceinline__ float4 quad(int n) const { return quads[n]; }
};
template <>
struct RowStates<Bf16<1>> {
  uint2 words[8];

  __device__ __forceinline__ float4 quad(int n) const { return quad_of(words[n].x, words[n].y); }
};

// Factors of a thread's two rows.
struct RowFactors {
  float upper, lower;
};

// Parts of s . u_k, as add_dots of sm80's loop: rows g and g + 8 of a warp's 16.
template <class Format>
__device__ __forceinline__ void add_dots(float* to, bool first, const RowStates<Format>& states,
                                         const float (&part)[32],
                                         const RowFactors& scale = {1.0f, 1.0f}) {
  float low = 0, high = 0;
#pragma unroll
  for (int n = 0; n < 8; ++n) {
    const float4 v = states.quad(n);
    low = fmaf(part[4 * n + 1], v.y, fmaf(part[4 * n], v.x, low));
    high = fmaf(part[4 * n + 3], v.w, fmaf(part[4 * n + 2], v.z, high));
  }
#pragma unroll
  for (int mask = 1; mask < 4; mask <<= 1) {
    low += __shfl_xor_sync(~0u, low, mask);
    high += __shfl_xor_sync(~0u, high, mask);
  }
  if ((threadIdx.x & 3) != 0) return;
  if constexpr (Format::kScaled) {
    low *= scale.upper;
    high *= scale.lower;
  }
  if (first) {
    to[0] = low;
    to[8] = high;
  } else {
    atomicAdd(to, low);
    atomicAdd(to + 8, high);
  }
}

// Which rows of the work item a consumer thread has.
struct ConsumerThread {
  int lane, warp;
  int local;  // row of the block; the other is 8 below

  __device__ ConsumerThread() {
    lane = static_cast<int>(threadIdx.x) & 31;
    warp = static_cast<int>(threadIdx.x) >> 5;
    local = warp * 16 + (lane >> 2);
  }
};

__device__ __forceinline__ void store_partial(const GridOperands& operands, int rows,
                                              const ConsumerThread& who, std::int64_t item,
                                              const float (&acc)[32]) {
  float* to = operands.partial + item * rows * kTile +
              static_cast<std::int64_t>(who.local) * kTile + (who.lane & 3) * 2;
#pragma unroll
  for (int i = 0; i < 8; ++i) {
    *reinterpret_cast<float2*>(to + i * 8) = make_float2(acc[4 * i], acc[4 * i + 1]);
    *reinterpret_cast<float2*>(to + 8 * kTile + i * 8) =
        make_float2(acc[4 * i + 2], acc[4 * i + 3]);
  }
}

// c of the two rows of a thread: channel `i` of those that the group has.
template <class Format>
__device__ __forceinline__ RowFactors row_factors(const HopperShared<Format>& shared,
                                                  const Sm90Tiling& s, const ConsumerThread& who,
                                                  int i) {
  const float* c = reinterpret_cast<const float*>(shared.c) + i * s.rows + who.local;
  return {c[0], c[8]};
}

__device__ __forceinline__ void add_scaled(const RowFactors& c, const float (&part)[32],
                                           float (&acc)[32]) {
#pragma unroll
  for (int i = 0; i < 32; ++i) acc[i] = fmaf((i & 2) ? c.lower : c.upper, part[i], acc[i]);
}

template <class Format>
__device__ __forceinline__ RowStates<Format> load_states(const BackwardPass& loop, int rows,
                                                         const ConsumerThread& who,
                                                         std::int64_t time, const WorkItem& p) {
  const std::int64_t row = static_cast<std::int64_t>(p.batch_tile) * rows + who.local;
  const int col = p.tile * kTile + (who.lane & 3) * 2;
  RowStates<Format> states;
  if constexpr (Format::kFactorsOnX) {
    // As state_words() would find them; the pieces of eight columns are swapped by the row's position.
    const Layout& s = loop.layout;
    const auto word = [&](std::int64_t r, int i) {
      const int k = row_tile_position(static_cast<int>(r) & (kRowTile - 1));
      return __ldg(reinterpret_cast<const std::uint32_t*>(
          loop.states + time * s.padded_b * s.padded_n + row_tile_block(s, r, p.tile * kTile) +
          k * kTile + (i ^ (k & 7)) * 8 + (who.lane & 3) * 2));
    };
#pragma unroll
    for (int i = 0; i < 8; ++i) states.words[i] = make_uint2(word(row, i), word(row + 8, i));
  } else {
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      states.quads[i] =
          state_quad<Format::kStateTerms>(loop.layout, loop.states, time, row, col + i * 8);
    }
  }
  return states;
}

// The product of an item with c applied to it channel by channel, in f32: the tensor cores multiply
// one channel's block while c and s are applied to the one before. (Bits are those of one at a time.)
template <class Format, class Direction>
__device__ void multiply_then_scale(const Sm90Loop<Direction>& loop,
                                    const HopperShared<Format>& shared, std::int64_t time,
                                    int parity, std::int64_t item, Consumer<Format>& consumer) {
  const Sm90Tiling& s = loop.tiling;
  const Layout& layout = loop.layout;
  const ConsumerThread who;
  const WorkItem p = uniform(work_item(s, item));
  const std::int64_t first_row = static_cast<std::int64_t>(p.batch_tile) * s.rows;
  [[maybe_unused]] RowStates<Format> states;
  if constexpr (Direction::kDots) states = load_states<Format>(loop, s.rows, who, time, p);
  float acc[32] = {};
  WarpRows<Format> f;
  const std::int64_t row16 = (first_row + who.warp * 16) / 16;
  for (int first = 0; first < layout.channels; first += kGroupChannels) {
    const uint4* x = f.at(layout, loop, row16, p.first_chunk, parity, who.lane);
    f.load(layout, x);
    const ChannelGroup group = consumer.enter_group();
    for (int chunk = p.first_chunk; chunk < p.last_chunk && group.channels != 0; ++chunk) {
      std::uint32_t rest = group.channels;
      int i = 0;
      RowFactors scale{1.0f, 1.0f};  // of this chunk of X; here before the first product is
      if constexpr (Format::kScaled) {
        const float* from =
            loop.x_scales +
            (static_cast<std::int64_t>(parity) * s.tiles + chunk) * layout.padded_b + first_row +
            who.local;
        scale = {from[0], from[8]};
      }
      // A block on its way through the tensor cores.
      struct Block {
        int channel, stage;
        RowFactors c;
      };
      const auto begin = [&](float(&part)[32]) {
        const int k = first + __ffs(static_cast<int>(rest)) - 1;
        rest &= rest - 1;
        consumer.wait(s.resident);
        multiply_block<Format>(f, consumer.operand(p, 0, chunk, k), part);
        return Block{k, consumer.next(s.resident), row_factors(shared, s, who, i++)};
      };
      const auto finish = [&](const Block& block, float(&part)[32]) {
        if constexpr (Format::kScaled) {
          add_scaled({block.c.upper * scale.upper, block.c.lower * scale.lower}, part, acc);
        } else {
          add_scaled(block.c, part, acc);
        }
        if constexpr (Direction::kDots) {
          add_dots<Format>(dots_of<1>(loop, s, time, p, 0, block.channel) + first_row + who.local,
                           chunk == p.first_chunk, states, part, scale);
        }
      };
      // The last of a chunk: then its rows of X can make room for the next one's.
      const auto finish_last = [&](const Block& block, float(&part)[32]) {
        wgmma_wait<0>();
        consumer.release(block.stage, s.resident);
        if (chunk + 1 < p.last_chunk) f.load(layout, x += f.kChunk);
        finish(block, part);
      };
      float even[32], odd[32];
      Block a = begin(even);
      while (true) {
        if (rest == 0) {
          finish_last(a, even);
          break;
        }
        const Block b = begin(odd);
        wgmma_wait<1>();
        consumer.release(a.stage, s.resident);
        finish(a, even);
        if (rest == 0) {
          finish_last(b, odd);
          break;
        }
        a = begin(even);
        wgmma_wait<1>();
        consumer.release(b.stage, s.resident);
        finish(b, odd);
      }
    }
    consumer.leave_group();
  }
  store_partial(loop, s.rows, who, item, acc);
}

// A group of four warps' own rows of X, a few chunks of it at a time, in shared memory.
class GroupRows {
 public:
  __device__ GroupRows(const Layout& layout, const std::uint16_t* x_rows, const Sm90Tiling& tiling,
                       const HopperShared<Bf16<1>>& shared, const ConsumerThread& who,
                       std::int64_t first_row, const WorkItem& p, int parity)
      : layout_(layout),
        tiling_(tiling),
        group_(who.warp >> 2),
        thread_(static_cast<int>(threadIdx.x) & 127),
        last_(p.last_chunk) {
    x_ = shared.x + group_ * kGroupBytes;
    from_ = x_rows + (parity * layout.padded_b + first_row + group_ * 64) * layout.padded_n;
  }

  // Begins to load the chunks from `chunk` on, as many as make a group. Past the last chunk nothing
  // is loaded, but it counts as a load all the same.
  __device__ void load(int chunk, int buffer) const {
    for (int i = 0; i < min(kGroupChunks, last_ - chunk); ++i) {
#pragma unroll
      for (int piece = thread_; piece < 64 * 8; piece += 128) {
        const int row = piece >> 3;
        const int k = piece & 7;
        copy_async_16(at(buffer) + i * kHopperPlane + row * 128 + ((k ^ (row & 7)) << 4),
                      from_ + static_cast<std::int64_t>(row) * layout_.padded_n +
                          (chunk + i) * kHopperDepth + k * 8);
      }
    }
    copy_async_commit();
  }
  // Until at most `Loads` of the loads are on their way.
  template <int Loads>
  __device__ void wait() const {
    copy_async_wait<Loads>();
    fence_shared_writes();
    sync();
  }
  // All four warps are done with what they have read.
  __device__ void sync() const { sync_threads(2 + group_, 128); }
  __device__ std::uint32_t operand(int buffer, int chunk) const {
    return k_major_low(at(buffer) + chunk * kHopperPlane);
  }

 private:
  static constexpr int kGroupBytes = x_buffer_bytes(64);
  __device__ std::byte* at(int buffer) const {
    return x_ + buffer * (tiling_.rows / 64) * kGroupBytes;
  }

  const Layout& layout_;
  const Sm90Tiling& tiling_;
  int group_, thread_, last_;
  std::byte* x_;
  const std::uint16_t* from_;
};

// The same with one term, and with s . u_k: both operands lie in shared memory, and the products of
// two chunks are added up by the tensor cores before c and s come in, which is what takes longest.
template <class Direction>
__device__ __forceinline__ void multiply_groups(const Sm90Loop<Direction>& loop,
                                                const HopperShared<Bf16<1>>& shared,
                                                std::int64_t time, int parity, std::int64_t item,
                                                Consumer<Bf16<1>>& consumer) {
  const Sm90Tiling& s = loop.tiling;
  const Layout& layout = loop.layout;
  const ConsumerThread who;
  const WorkItem p = uniform(work_item(s, item));
  const std::int64_t first_row = static_cast<std::int64_t>(p.batch_tile) * s.rows;
  const GroupRows x(layout, loop.x_rows, s, shared, who, first_row, p, parity);
  const RowStates<Bf16<1>> states = load_states<Bf16<1>>(loop, s.rows, who, time, p);
  float* const dots = dots_of<1>(loop, s, time, p, 0, 0) + first_row + who.local;
  float acc[32] = {};
  for (int first = 0; first < layout.channels; first += kGroupChannels) {
    if (first == 0 || s.x_buffers > 1) x.load(p.first_chunk, 0);
    if (s.x_buffers > 1) x.load(p.first_chunk + kGroupChunks, 1);
    const ChannelGroup group = consumer.enter_group();
    if (group.channels != 0) consumer.wait(s.resident);
    int buffer = 0;
    for (int chunk = p.first_chunk; chunk < p.last_chunk; chunk += kGroupChunks) {
      if (s.x_buffers > 1) {
        x.wait<1>();
      } else {
        x.wait<0>();
      }
      const std::uint32_t rows[kGroupChunks] = {uniform(x.operand(buffer, 0)),
                                                uniform(x.operand(buffer, 1))};
      const bool two = chunk + 1 < p.last_chunk;
      const bool last = chunk + kGroupChunks >= p.last_chunk;
      int i = 0;
      for (std::uint32_t rest = group.channels; rest != 0; rest &= rest - 1, ++i) {
        const int k = first + __ffs(static_cast<int>(rest)) - 1;
        float part[32];
        const auto multiply = [&](int at, bool add) {
          const std::uint32_t weights = consumer.operand(p, at, chunk + at, k);
          wgmma_fence();
#pragma unroll
          for (int d = 0; d < 4; ++d) {
            wgmma<bfloat16>(part, k_major(rows[at], d), k_major(weights, d), add || d > 0);
          }
          wgmma_commit();
        };
        multiply(0, false);
        if (two) multiply(1, true);
        const RowFactors c = row_factors(shared, s, who, i);  // while the tensor cores work
        const int stage = consumer.next(s.resident);
        if (!last || (rest & (rest - 1)) != 0) consumer.wait(s.resident);
        wgmma_wait<0>();
        consumer.release(stage, s.resident);
        add_scaled(c, part, acc);
        add_dots<Bf16<1>>(dots + k * layout.padded_b, chunk == p.first_chunk, states, part);
      }
      if (s.x_buffers > 1) {
        x.sync();
        x.load(chunk + 2 * kGroupChunks, buffer);
        buffer ^= 1;
      }
    }
    consumer.leave_group();
  }
  if (s.x_buffers == 1) x.sync();  // before the next item's rows come
  store_partial(loop, s.rows, who, item, acc);
}

// X of a channel: scaled by c of the thread's two rows.
__device__ __forceinline__ void scale(const WarpRows<Bf16<1>>& f, const Scale* c, bool two_terms,
                                      uint4 (&scaled)[4]) {
  const Scale upper = c[0], lower = c[8];
  if (two_terms) {
#pragma unroll
    for (int d = 0; d < 4; ++d) {
      const uint4& x = f.x[0][d];
      scaled[d] = make_uint4(scaled_pair(x.x, upper), scaled_pair(x.y, lower),
                             scaled_pair(x.z, upper), scaled_pair(x.w, lower));
    }
  } else {
#pragma unroll
    for (int d = 0; d < 4; ++d) {
      const uint4& x = f.x[0][d];
      scaled[d] = make_uint4(scaled_pair(x.x, upper.high), scaled_pair(x.y, lower.high),
                             scaled_pair(x.z, upper.high), scaled_pair(x.w, lower.high));
    }
  }
}

// The product of an item with c applied to the rows of X, which are bf16 all the same: c comes ready
// as pairs of bf16, with a second term only where c is no bf16 itself. What limits here is how many
// instructions a warp needs from one wgmma to the next: 165 a pair of blocks made it 840 cycles a block,
// 127 make it 565 (H200, N 1024, K 16). In a loop with nothing beside, where 512 is the least, this way
// takes 517, both operands in shared memory 598, and 128 samples x 128 columns with the weights
// multicast to two blocks of threads 990 to 1210.
template <bool Resident>
__device__ __forceinline__ void scale_then_multiply(const Layout& layout, const Sm90Tiling& s,
                                                    const GridOperands& operands,
                                                    const HopperShared<Bf16<1>>& shared, int parity,
                                                    std::int64_t item,
                                                    Consumer<Bf16<1>>& consumer) {
  const ConsumerThread who;
  const WorkItem p = uniform(work_item(s, item));
  const std::int64_t first_row = static_cast<std::int64_t>(p.batch_tile) * s.rows;
  const Scale* const c_first = reinterpret_cast<const Scale*>(shared.c) + who.local;
  float acc[32] = {};
  WarpRows<Bf16<1>> f;
  const auto multiply = [&](const uint4(&scaled)[4], std::uint32_t weights) {
    wgmma_fence();
#pragma unroll
    for (int d = 0; d < 4; ++d) {
      wgmma<bfloat16>(acc, scaled[d], k_major(weights, d), true);
    }
    wgmma_commit();
  };
  for (int first = 0; first < layout.channels; first += kGroupChannels) {
    const uint4* x =
        f.at(layout, operands, (first_row + who.warp * 16) / 16, p.first_chunk, parity, who.lane);
    f.load(layout, x);
    const ChannelGroup group = consumer.enter_group();
    const int count = __popc(group.channels);
    if (count > 0) consumer.wait(Resident);
    for (int chunk = p.first_chunk; chunk < p.last_chunk; ++chunk) {
      const Scale* c = c_first;
      std::uint32_t two_terms = group.two_terms;
      std::uint32_t rest = group.channels;
      const auto weights_of = [&](int i) {
        if constexpr (!Resident) return consumer.operand(i);
        const int k = first + __ffs(static_cast<int>(rest)) - 1;
        rest &= rest - 1;
        return shared.operand(resident_block(s, p, chunk, k));
      };
      for (int left = count; left > 0; left -= 2) {
        uint4 one[4], other[4];
        scale(f, c, (two_terms & 1) != 0, one);
        multiply(one, weights_of(0));
        if (left > 1) {
          scale(f, c + s.rows, (two_terms & 2) != 0, other);  // while the tensor cores work
          multiply(other, weights_of(1));
        }
        c += 2 * s.rows;
        two_terms >>= 2;
        const int stage = consumer.next(Resident);
        const bool ends_chunk = left <= 2;
        if (ends_chunk && chunk + 1 < p.last_chunk) f.load(layout, x += f.kChunk);
        if (!ends_chunk || chunk + 1 < p.last_chunk) consumer.wait(Resident);
        wgmma_wait<0>();
        consumer.release(stage, Resident);
      }
    }
    consumer.leave_group();
  }
  store_partial(operands, s.rows, who, item, acc);
}

template <class Format, class Direction>
__device__ void multiply_items(const Sm90Loop<Direction>& loop, const HopperShared<Format>& shared,
                               std::int64_t time, int parity, Consumer<Format>& consumer) {
  const Sm90Tiling& s = loop.tiling;
  for (std::int64_t item = blockIdx.x; item < s.items(); item += gridDim.x) {
    if constexpr (Format::kFactorsOnX && Direction::kDots) {
      multiply_groups<Direction>(loop, shared, time, parity, item, consumer);
    } else if constexpr (Format::kFactorsOnX) {
      if (s.resident) {
        scale_then_multiply<true>(loop.layout, s, loop, shared, parity, item, consumer);
      } else {
        scale_then_multiply<false>(loop.layout, s, loop, shared, parity, item, consumer);
      }
    } else {
      multiply_then_scale<Format, Direction>(loop, shared, time, parity, item, consumer);
    }
  }
}
#endif  // ANNULUS_DEVICE_HOPPER

// Groups: of four consumer warps, at most; one more has the producers. It needs few registers and leaves
// them to the others: 112 each with four groups, 232 with two.
template <class Format, int Groups, class Direction>
__global__ void __launch_bounds__((Groups + 1) * 128, 1)
    sm90_kernel(const __grid_constant__ Sm90Loop<Direction> loop) {
#if ANNULUS_DEVICE_HOPPER
  extern __shared__ uint4 shared_words[];
  const Sm90Tiling& s = loop.tiling;
  const HopperShared<Format> shared(reinterpret_cast<std::byte*>(shared_words), s,
                                    loop.layout.channels);
  const int threads = s.rows * 2;  // consumers
  if (threadIdx.x == 0) {
    shared.stages.init(s.stages, 1, static_cast<unsigned>(threads / 32));
    shared.groups.init(1, 1, static_cast<unsigned>(threads));
    shared.resident->init(1);
    *shared.begun = 0;
    fence_barriers();
  }
  __syncthreads();
  const int warp = uniform_warp();
  if (warp * 32 >= threads) {
    give_registers<Groups == 4 ? 32 : 40>();
    const int producer = warp - threads / 32;
    if ((loop.phases & kMultiply) && (threadIdx.x & 31) == 0 && producer < kProducers) {
      Producer<Format, Direction>(loop, shared, producer).run();
    }
    if (loop.together && producer == kProducers) prefetch_epilogue<Format, Direction>(loop, shared);
    return;
  }
  take_registers<Groups == 4 ? 112 : 232>();
  const auto sync = [&] { sync_threads(1, threads); };
  StepBarriers<decltype(sync)> barriers(s, loop.counters, sync);
  if (loop.phases & kBegin) {
    begin_items<Format, Direction>(loop, threads / 32);
  }
  if (loop.together) barriers.samples();
  if (s.resident && (loop.phases & kMultiply)) shared.resident->wait(0);
  Consumer<Format> consumer(s, shared);
  for (std::int64_t step = loop.first; step < loop.last; ++step) {
    const std::int64_t time = loop.time(step);
    const int parity = loop.parity(time);
    if (threadIdx.x == 0) atomicExch(shared.begun, static_cast<int>(step - loop.first) + 1);
    if (loop.phases & kMultiply) {
      multiply_items<Format, Direction>(loop, shared, time, parity, consumer);
    }
    if (loop.phases & kFinish) {
      Epilogue<Format, Direction, Sm90Loop<Direction>> epilogue(loop, time, parity, threads / 32);
      if (loop.together) barriers.tile();
      epilogue.run();
    }
    if (loop.together && step + 1 < loop.last) barriers.samples();
  }
#else
  __trap();  // not built for this GPU: better than to return with nothing done
#endif
}

template <class Direction>
void run_loop(const Sm90Loop<Direction>& loop, const Launch& launch) {
  with_format(loop.layout.terms, loop.layout.f16, [&]<class Format>() {
    if constexpr (Format::kFactorsOnX) {
      if (loop.tiling.rows > 128) {
        return launch_loop(sm90_kernel<Format, 4, Direction>, loop, launch);
      }
    }
    launch_loop(sm90_kernel<Format, 2, Direction>, loop, launch);
  });
}

}  // namespace annulus::ring_rnn::cuda::tensor
