// How the multiplying warps of Hopper's loop get their weights: what lies where in shared memory, and
// the warps that announce and fetch it.
#pragma once

#include "annulus/cuda/hopper.cuh"
#include "annulus/ring_rnn/ring_rnn_cuda_parts.cuh"

namespace annulus::ring::cuda::tensor {

#if ANNULUS_DEVICE_HOPPER
// What a block of weights is; channel -1 says that the product of an item is complete.
struct alignas(16) Announcement {
  int channel, chunk;
  std::uint32_t operand;  // low word of what wgmma needs to find it
  std::uint32_t flags;
};
// kEndsChannel: the last chunk of its group, and c comes with it. kEndsGroup: the last channel, too.
inline constexpr std::uint32_t kEndsChannel = 1, kEndsGroup = 2, kTwoTerms = 4;

// Chunks whose products with a channel are added up before c comes in.
template <int Terms, class Direction>
constexpr int kDeepGroup = Terms == 1 && Direction::kDots ? kGroupChunks : 1;

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
  std::byte* x;                // [buffer][rows / 64][chunk of the group][64 rows][64 m], swizzled
  std::byte* c;                // [ring][rows]: float, or Scale
  Announcement* announcement;  // [ring]
  float4* s_tile;              // [8][threads]
  annulus::cuda::SharedBarrier *full, *empty, *resident;

  __device__ HopperShared(std::byte* base, const Shape& s) {
    weights = base + (1024 - (annulus::cuda::shared_address(base) & 1023)) % 1024;
    x = weights + s.slots * hopper_block_bytes(Terms);
    std::byte* at = x + s.x_buffers * x_buffer_bytes(s.rows);
    c = at;
    at += s.ring * s.rows * s.scale_bytes;
    announcement = reinterpret_cast<Announcement*>(at);
    at += s.ring * static_cast<int>(sizeof(Announcement));
    full = reinterpret_cast<annulus::cuda::SharedBarrier*>(at);
    empty = full + s.ring;
    resident = empty + s.ring;
    at += (2 * s.ring + 2) * static_cast<int>(sizeof(annulus::cuda::SharedBarrier));
    s_tile = reinterpret_cast<float4*>(at);
  }
};

// The fetching warps, one thread each: announce and load, in the order the multiplying warps go. One
// thread is too slow (a block of weights is multiplied in about 500 cycles), so warp i of the four
// takes every fourth block.
inline constexpr int kFetchers = 4;
template <int Terms, class Direction>
__device__ void fetch_weights(const Loop& loop, const HopperShared<Terms>& shared, int fetcher) {
  const Shape& s = loop.shape;
  constexpr int kBytes = hopper_block_bytes(Terms);
  const std::byte* weights = reinterpret_cast<const std::byte*>(loop.weights);
  const auto c_bytes = static_cast<unsigned>(s.rows * s.scale_bytes);
  const std::byte* scales =
      reinterpret_cast<const std::byte*>(s.scale_bytes == 8 ? static_cast<const void*>(loop.scales)
                                                            : static_cast<const void*>(loop.c));
  const int each = (s.channels + s.channel_splits - 1) / s.channel_splits;
  if (s.resident && fetcher == 0) {
    const Place p = place_of(s, blockIdx.x);
    const int first = p.split % s.channel_splits;
    const int mine = (s.channels - first + s.channel_splits - 1) / s.channel_splits;
    shared.resident->arrive_expecting(
        static_cast<unsigned>((p.last_chunk - p.first_chunk) * mine * kBytes));
    for (int chunk = p.first_chunk; chunk < p.last_chunk; ++chunk) {
      for (int i = 0; i < mine; ++i) {
        const std::int64_t block =
            (static_cast<std::int64_t>(p.tile) * s.chunks + chunk) * s.channels + first +
            i * s.channel_splits;
        annulus::cuda::copy_bulk(shared.weights + ((chunk - p.first_chunk) * each + i) * kBytes,
                                 weights + block * kBytes, kBytes, shared.resident);
      }
    }
  }
  RingPlace place;
  place.parity = 1;  // a fresh barrier counts as past its phase 1: the first round waits for nobody
  unsigned turn = 0;
  // Calls f(place in the ring) if it is this fetcher's turn.
  const auto claim = [&](auto&& f) {
    if (turn % kFetchers == static_cast<unsigned>(fetcher)) {
      shared.empty[place.at].wait(place.parity);
      f(place.at);
    }
    ++turn;
    place.next(s.ring);
  };
  for (std::int64_t step = loop.first; step < loop.last; ++step) {
    const std::int64_t time = Direction::kBackward ? loop.last - 1 - (step - loop.first) : step;
    for (std::int64_t item = blockIdx.x; item < s.items(); item += gridDim.x) {
      const Place p = place_of(s, item);
      const std::uint32_t* mask =
          loop.active + (time * s.batch_tiles + p.batch_tile) * s.mask_words;
      const std::byte* c = scales + (time * s.channels * s.padded_b +
                                     static_cast<std::int64_t>(p.batch_tile) * s.rows) *
                                        s.scale_bytes;
      const std::uint32_t* two_terms =
          loop.two_terms == nullptr
              ? nullptr
              : loop.two_terms + (time * s.batch_tiles + p.batch_tile) * s.mask_words;
      int last = -1;  // active channel
      for (int word = 0; word < s.mask_words; ++word) {
        const std::uint32_t bits = __ldg(mask + word) & p.channel_pattern;
        if (bits != 0) last = word * 32 + 31 - __clz(static_cast<int>(bits));
      }
      for (int group = p.first_chunk; group < p.last_chunk; group += kDeepGroup<Terms, Direction>) {
        const int end = min(group + kDeepGroup<Terms, Direction>, p.last_chunk);
        for (int word = 0; word < s.mask_words; ++word) {
          for (std::uint32_t bits = __ldg(mask + word) & p.channel_pattern; bits != 0;
               bits &= bits - 1) {
            const int k = word * 32 + __ffs(static_cast<int>(bits)) - 1;
            for (int chunk = group; chunk < end; ++chunk) {
              claim([&](int r) {
                const int slot =
                    s.resident ? (chunk - p.first_chunk) * each + k / s.channel_splits : r;
                std::uint32_t flags = 0;
                if (chunk == end - 1) flags = k == last ? kEndsChannel | kEndsGroup : kEndsChannel;
                if (two_terms != nullptr && ((__ldg(two_terms + word) >> (k & 31)) & 1u) != 0) {
                  flags |= kTwoTerms;
                }
                shared.announcement[r] = {
                    k, chunk, annulus::cuda::swizzled_operand_low(shared.weights + slot * kBytes),
                    flags};
                shared.full[r].arrive_expecting((flags != 0 ? c_bytes : 0u) +
                                                (s.resident ? 0u : static_cast<unsigned>(kBytes)));
                if (!s.resident) {
                  const std::int64_t block =
                      (static_cast<std::int64_t>(p.tile) * s.chunks + chunk) * s.channels + k;
                  annulus::cuda::copy_bulk(shared.weights + slot * kBytes, weights + block * kBytes,
                                           kBytes, shared.full + r);
                }
                if (flags != 0) {
                  annulus::cuda::copy_bulk(shared.c + r * static_cast<int>(c_bytes),
                                           c + k * s.padded_b * s.scale_bytes, c_bytes,
                                           shared.full + r);
                }
              });
            }
          }
        }
      }
      claim([&](int r) {
        shared.announcement[r] = {-1, 0, 0, 0};
        shared.full[r].arrive();
      });
    }
  }
}
#endif  // ANNULUS_DEVICE_HOPPER

}  // namespace annulus::ring::cuda::tensor
