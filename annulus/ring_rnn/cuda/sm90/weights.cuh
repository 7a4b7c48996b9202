// The pipeline of weights of sm90's loop: what lies where in shared memory, the producer warps that fetch
// it, and the consumer's side.
//
// Both sides walk through the blocks of weights in the same order and so exchange nothing about them:
// a work item's channels in groups of at most 32; of a group its chunks of m, `kDeep` at a time; of those
// the channels that are not zero. A stage holds the blocks of one turn: two channels or,
// where kDeep is 2, two chunks of a channel; with more terms one block. What both must know of a
// group, which channels it has, comes with c of all of them ahead of its blocks.
#pragma once

#include "annulus/cuda/pipeline.cuh"
#include "annulus/cuda/tma.cuh"
#include "annulus/cuda/wgmma.cuh"
#include "annulus/ring_rnn/cuda/step.cuh"

namespace annulus::ring_rnn::cuda::tensor {

template <class Format>
inline constexpr int kStageBlocks = hopper_stage_blocks(Format::kFactorsOnX);

#if ANNULUS_DEVICE_HOPPER
// Chunks whose products with a channel are added up before c comes in.
template <class Format, class Direction>
constexpr int kDeep = Format::kFactorsOnX&& Direction::kDots ? kGroupChunks : 1;

// The channels of a group that are not zero, as bits from its first channel on; and which of those, in
// this order, have a c that is no bf16.
struct alignas(8) ChannelGroup {
  std::uint32_t channels, two_terms;
};

// Shared memory, front to back. The weights come first: they must be aligned to 1024 bytes.
template <class Format>
struct HopperShared {
  static constexpr int kBytes = hopper_block_bytes(Format::kTerms);

  std::byte* weights;   // [block][term][64 n][64 m], swizzled
  std::byte* x;         // [buffer][rows / 64][chunk of the turn][64 rows][64 m], swizzled
  std::byte* c;         // [channel of the group][rows]: float, or Scale
  ChannelGroup* group;  // the one that is multiplied
  int* begun;           // steps; by atomics
  Pipeline stages;      // of weights
  Pipeline groups;      // of `c` and `group`: a single stage
  SharedBarrier* resident;

  __device__ HopperShared(std::byte* base, const Sm90Tiling& s, int channels) {
    weights = base + (1024 - (shared_address(base) & 1023)) % 1024;
    x = weights + s.weight_blocks * kBytes;
    c = x + s.x_buffers * x_buffer_bytes(s.rows);
    std::byte* const at = c + min(kGroupChannels, channels) * s.rows * s.factor_bytes;
    group = reinterpret_cast<ChannelGroup*>(at);
    begun = reinterpret_cast<int*>(at + 8);
    stages = Pipeline(at + 16, s.stages);
    groups = Pipeline(stages.end(s.stages), 1);
    resident = static_cast<SharedBarrier*>(groups.end(1));
  }
  // The low word of what wgmma needs to find a block: addresses count in 16 bytes.
  __device__ __forceinline__ std::uint32_t operand(int block) const {
    return k_major_low(weights) + static_cast<std::uint32_t>(block * (kBytes / 16));
  }
};

// Where a block of weights lies if all of them stay.
__device__ __forceinline__ int resident_block(const Sm90Tiling& s, const WorkItem& p, int chunk,
                                              int channel) {
  return (chunk - p.first_chunk) * s.resident_channels + (channel >> s.channel_split_bits);
}

// The blocks of weights of a tile and chunk, channel 0 first.
template <class Format>
__device__ __forceinline__ const std::byte* blocks_of(const Pass& loop, const Sm90Tiling& s,
                                                      const WorkItem& p, int chunk) {
  return reinterpret_cast<const std::byte*>(loop.weights) +
         (static_cast<std::int64_t>(p.tile) * s.chunks + chunk) * loop.layout.channels *
             HopperShared<Format>::kBytes;
}

template <class Format>
__device__ void fetch_resident(const Pass& loop, const Sm90Tiling& s,
                               const HopperShared<Format>& shared) {
  const int channels = loop.layout.channels;
  constexpr int kBytes = HopperShared<Format>::kBytes;
  const WorkItem p = work_item(s, blockIdx.x);
  const int first = p.split % s.channel_splits;
  const int mine = (channels - first + s.channel_splits - 1) / s.channel_splits;
  shared.resident->arrive_expecting(
      static_cast<unsigned>((p.last_chunk - p.first_chunk) * mine * kBytes));
  for (int chunk = p.first_chunk; chunk < p.last_chunk; ++chunk) {
    for (int k = first; k < channels; k += s.channel_splits) {
      copy_bulk(shared.weights + resident_block(s, p, chunk, k) * kBytes,
                blocks_of<Format>(loop, s, p, chunk) + k * kBytes, kBytes, shared.resident);
    }
  }
}

// The producer warps, one thread each, to which the stages go by turns; c of a group is the first one's.
// No more than there are stages: a thread must not come to a stage before the others have been through it once, since barriers tell odd from even rounds only.
template <class Format, class Direction>
class Producer {
 public:
  using Loop = Sm90Loop<Direction>;
  __device__ Producer(const Loop& loop, const HopperShared<Format>& shared, int producer)
      : loop_(loop), s_(loop.tiling), shared_(shared), producer_(producer) {}

  __device__ void run() {
    if (s_.resident && producer_ == 0) fetch_resident<Format>(loop_, s_, shared_);
    if (s_.resident && producer_ != 0) return;
    for (std::int64_t step = loop_.first; step < loop_.last; ++step) {
      const std::int64_t time = loop_.time(step);
      for (std::int64_t item = blockIdx.x; item < s_.items(); item += gridDim.x) {
        const WorkItem p = work_item(s_, item);
        for (int first = 0; first < loop_.layout.channels; first += kGroupChannels) {
          fetch_group(time, p, first);
        }
      }
    }
  }

 private:
  static constexpr int kBytes = HopperShared<Format>::kBytes;

  __device__ __forceinline__ void fetch_group(std::int64_t time, const WorkItem& p, int first) {
    const std::int64_t masks =
        (time * s_.batch_tiles + p.batch_tile) * loop_.layout.mask_words + first / kGroupChannels;
    const auto part = [&](const std::uint32_t* bits) {
      return __ldg(bits + masks) & p.channel_pattern;
    };
    const std::uint32_t channels = part(loop_.coefficients.active);
    if (producer_ == 0) {
      std::uint32_t ranked = 0;
      if (loop_.coefficients.two_terms != nullptr) {
        const std::uint32_t two_terms = part(loop_.coefficients.two_terms);
        int rank = 0;
        for (std::uint32_t rest = channels; rest != 0; rest &= rest - 1, ++rank) {
          if ((two_terms & rest & (0u - rest)) != 0) ranked |= 1u << rank;
        }
      }
      fetch_c(time, p, first, {channels, ranked});
    }
    if (s_.resident) return;
    constexpr int kStep = kDeep<Format, Direction>;
    const std::int64_t pitch = std::int64_t{loop_.layout.channels} * kBytes;  // from chunk to chunk
    const std::byte* blocks =
        blocks_of<Format>(loop_, s_, p, p.first_chunk) + std::int64_t{first} * kBytes;
    for (int chunk = p.first_chunk; chunk < p.last_chunk; chunk += kStep) {
      for (std::uint32_t rest = channels; rest != 0; rest &= rest - 1) {
        const int at = (__ffs(static_cast<int>(rest)) - 1) * kBytes;
        std::int64_t second = 0;  // bytes further on; 0: there is none
        if constexpr (kStep > 1) {
          if (chunk + 1 < p.last_chunk) second = pitch;
        } else if constexpr (kStageBlocks<Format> > 1) {
          const std::uint32_t after = rest & (rest - 1);
          if (after != 0) {
            second = (__ffs(static_cast<int>(after)) - 1) * kBytes - at;
            rest = after;
          }
        }
        fetch_stage(blocks + at, second);
      }
      blocks += kStep * pitch;
    }
  }

  __device__ __forceinline__ void fetch_c(std::int64_t time, const WorkItem& p, int first,
                                          ChannelGroup group) {
    shared_.groups.acquire(group_);
    group_.next(1);
    *shared_.group = group;
    const auto row = static_cast<unsigned>(s_.rows * s_.factor_bytes);
    shared_.groups.full->arrive_expecting(row * static_cast<unsigned>(__popc(group.channels)));
    const std::byte* from =
        reinterpret_cast<const std::byte*>(s_.factor_bytes == kPairFactorBytes
                                               ? static_cast<const void*>(loop_.coefficients.scales)
                                               : static_cast<const void*>(loop_.coefficients.c)) +
        ((time * loop_.layout.channels + first) * loop_.layout.padded_b +
         static_cast<std::int64_t>(p.batch_tile) * s_.rows) *
            s_.factor_bytes;
    std::byte* to = shared_.c;
    for (std::uint32_t rest = group.channels; rest != 0; rest &= rest - 1) {
      copy_bulk(
          to, from + (__ffs(static_cast<int>(rest)) - 1) * loop_.layout.padded_b * s_.factor_bytes,
          row, shared_.groups.full);
      to += row;
    }
  }

  // One block, or two.
  __device__ __forceinline__ void fetch_stage(const std::byte* block, std::int64_t second) {
    const bool mine = turn_ == producer_;
    turn_ = (turn_ + 1) % kProducers;
    if (mine) {
      std::byte* to = shared_.weights + stage_.at * (kStageBlocks<Format> * kBytes);
      SharedBarrier* full = shared_.stages.full + stage_.at;
      shared_.stages.acquire(stage_);
      full->arrive_expecting(static_cast<unsigned>(second == 0 ? kBytes : 2 * kBytes));
      const bool at_once = second == kBytes;
      // Each is read by one block of threads, once a step: L2 is for what blocks write for each other.
      // (N 2048, K 16: 3 to 5 % faster; N 1024, whose weights L2 could hold: no slower.)
      const std::uint64_t policy = read_once();
      copy_bulk(to, block, static_cast<unsigned>(at_once ? 2 * kBytes : kBytes), full, policy);
      if (second > kBytes) {
        copy_bulk(to + kBytes, block + second, kBytes, full, policy);
      }
    }
    stage_.next(s_.stages);
  }

  const Loop& loop_;
  const Sm90Tiling& s_;
  const HopperShared<Format>& shared_;
  int producer_;
  int turn_ = 0;
  PipelineStage stage_ = Pipeline::producer();
  PipelineStage group_ = Pipeline::producer();
};

using annulus::cuda::uniform;
__device__ __forceinline__ WorkItem uniform(WorkItem p) {
  p.first_chunk = uniform(p.first_chunk);
  p.last_chunk = uniform(p.last_chunk);
  return p;
}

// A warp that, while the others multiply, sees to it that what the epilogue reads has come from memory
// to L2, and s of the next step, too: nothing of it depends on the step before. It goes by the
// steps that have begun, and nobody waits for it.
template <class Format, class Direction>
__device__ void prefetch_epilogue(const Sm90Loop<Direction>& loop,
                                  const HopperShared<Format>& shared) {
  const Sm90Tiling& s = loop.tiling;
  [[maybe_unused]] const Layout& layout = loop.layout;
  const int lane = static_cast<int>(threadIdx.x) & 31;
  for (std::int64_t step = loop.first; step < loop.last; ++step) {
    const std::int64_t time = loop.time(step);
    if (lane == 0) {
      while (atomicAdd(shared.begun, 0) <= step - loop.first) __nanosleep(256);
    }
    __syncwarp();
    for (std::int64_t item = blockIdx.x; item < s.items(); item += gridDim.x) {
      const WorkItem p = work_item(s, item);
      const std::int64_t first_row = static_cast<std::int64_t>(p.batch_tile) * s.rows;
      if constexpr (Direction::kDots) {
        const int row_tiles = s.rows / kRowTile;
        for (int i = lane; time > loop.first && i < row_tiles * Format::kStateTerms; i += 32) {
          const std::int64_t plane = layout.T * layout.padded_b * layout.padded_n;
          const std::int64_t row = first_row + i % row_tiles * kRowTile;
          prefetch_bulk(loop.states + i / row_tiles * plane +
                            (time - 1) * layout.padded_b * layout.padded_n +
                            row_tile_block(layout, row, p.tile * kTile),
                        kRowTileBytes);
        }
      }
      // Two lanes a row, half of its columns each.
      const RowShare share(s, p);
      for (int r = share.first + (lane >> 1); r < share.last; r += 16) {
        Direction::prefetch(loop, time, first_row + r, p.tile * kTile + (lane & 1) * (kTile / 2));
      }
    }
  }
}

// The other side: a consumer warp's view of groups and stages.
template <class Format>
class Consumer {
 public:
  __device__ Consumer(const Sm90Tiling& s, const HopperShared<Format>& shared)
      : s_(s), shared_(shared) {}

  __device__ __forceinline__ ChannelGroup enter_group() {
    shared_.groups.wait(group_);
    group_.next(1);
    stage_.at = uniform(stage_.at);
    stage_.parity = uniform(stage_.parity);
    const ChannelGroup group = *shared_.group;
    return {uniform(group.channels), uniform(group.two_terms)};
  }
  // The warp needs nothing of the group any more. Every lane says so for itself: compute-sanitizer does
  // not know that one speaks for all after __syncwarp, which is no instruction where warps stay together.
  __device__ __forceinline__ void leave_group() const { shared_.groups.release(0); }

  // `resident`: the blocks of weights all stay in shared memory, and there is no stage to wait for.
  __device__ __forceinline__ void wait(bool resident) const {
    if (!resident) shared_.stages.wait(stage_);
  }
  // Block i of the stage that has been waited for ...
  __device__ __forceinline__ std::uint32_t operand(int i) const {
    return shared_.operand(stage_.at * kStageBlocks<Format> + i);
  }
  // ... which is (chunk, channel) and may be resident.
  __device__ __forceinline__ std::uint32_t operand(const WorkItem& p, int i, int chunk,
                                                   int channel) const {
    return s_.resident ? shared_.operand(resident_block(s_, p, chunk, channel)) : operand(i);
  }
  // Goes on to the next stage; release() takes what this returns once the blocks have been read.
  __device__ __forceinline__ int next(bool resident) {
    const int at = stage_.at;
    if (!resident) stage_.next(s_.stages);
    return at;
  }
  __device__ __forceinline__ void release(int stage, bool resident) const {
    if (!resident) shared_.stages.release_by_warp(stage);
  }

 private:
  const Sm90Tiling& s_;
  const HopperShared<Format>& shared_;
  PipelineStage stage_, group_;
};
#endif  // ANNULUS_DEVICE_HOPPER

}  // namespace annulus::ring_rnn::cuda::tensor
