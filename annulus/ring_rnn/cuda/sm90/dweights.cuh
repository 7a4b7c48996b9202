// The gradients of the weights for compute capability 9.0: work items, what lies where in shared memory,
// and the producer. cuda/sm90/dweights.cu has the consumers.
#pragma once

#include <cstddef>
#include <cstdint>

#include "annulus/cuda/pipeline.cuh"
#include "annulus/cuda/tma.cuh"
#include "annulus/cuda/wgmma.cuh"
#include "annulus/ring_rnn/cuda/sm90/row_tiles.cuh"
#include "annulus/ring_rnn/cuda/tensor.cuh"

namespace annulus::ring_rnn::cuda::tensor::dweights {

inline constexpr int kRows = kRowTile;  // of a stage
inline constexpr int kTileI = kTile;    // one wgmma

// What depends on the number of terms. The accumulators take what registers there are.
template <int Terms>
struct Config {
  static constexpr bool kNarrow = Terms == 1;  // g is bf16 in shared memory
  static constexpr int kGroups = 2;            // of four warps that multiply
  // Channels of a group. With more terms than one, a third of the accumulators are sums of few rows:
  // see add_item().
  static constexpr int kEach = Terms == 1 ? 3 : 2;
  static constexpr int kChannels = kGroups * kEach;
  static_assert(hopper_dweights_groups(Terms, kChannels) == 1 &&
                hopper_dweights_groups(Terms, kChannels + 1) == 2);
  static constexpr int kStages = Terms == 1 ? 12 : Terms == 2 ? 8 : 6;
  static constexpr int kThreads = kGroups * 128 + 128;  // one group more: a thread of it fetches

  static constexpr int kBlock = kRowTileBytes;  // bytes: 64 j
  static constexpr int kPlane = 2 * kBlock;     // 128 j
  static constexpr int kStates = Terms * kPlane;
  static constexpr int kG = kRows * kTileI * (kNarrow ? 2 : 4);
  static constexpr int kC = kChannels * kRowTileFactorBytes;
  static constexpr int kZeros = Terms == 1 ? kStates : 0;
  // 32 bytes a stage for the barriers and what it holds.
  static constexpr int kSharedBytes = kZeros + kStages * (kStates + kG + kC + 32);
};

// A work item: which tile, channels and row tiles. Channels change fastest and tiles
// go in bands: the blocks that run at the same time read the same few columns of g and s, at about
// the same depth, so that memory delivers them once and L2 the rest. The channels of a tile begin at
// another offset for each tile, or a block might get the same, perhaps fuller, set every time.
struct Item {
  int i0, j0;
  int first_channel, channels;
  int split;
  unsigned first, last;  // row tiles: fewer than 2^32, or g would have more than 2^45 bytes
};

template <int Terms>
__host__ __device__ inline int channel_groups(const WeightGradients& a) {
  return static_cast<int>(hopper_dweights_groups(Terms, a.last_channel - a.first_channel));
}

template <int Terms>
__host__ __device__ inline std::int64_t items_of(const WeightGradients& a) {
  return static_cast<std::int64_t>(a.layout.padded_n / kTileI) * a.sides *
         channel_groups<Terms>(a) * a.depth_splits;
}

#if ANNULUS_DEVICE_HOPPER

inline constexpr int kTileJ = 128;    // two blocks of 64, as wgmma's 128-byte rows want them
inline constexpr unsigned kBand = 8;  // tiles along i that run side by side
// Of 168 a thread at the start. 192 are accumulators: the compiler has no room for wgmma with fewer
// than 232, and with 240 it spills nothing.
inline constexpr int kConsumerRegisters = 240, kProducerRegisters = 24;

template <int Terms>
__device__ Item item_of(const WeightGradients& a, unsigned index) {
  const Layout& s = a.layout;
  const auto groups = static_cast<unsigned>(channel_groups<Terms>(a));
  const auto tall = static_cast<unsigned>(s.padded_n / kTileI);
  const auto wide = static_cast<unsigned>(a.sides);
  const unsigned item_tile = index / groups;
  const unsigned group = (index + item_tile) % groups;
  const unsigned tile = item_tile % (tall * wide);
  const unsigned split = item_tile / (tall * wide);
  const unsigned band = tile / (kBand * wide);
  const unsigned within = tile % (kBand * wide);
  const unsigned height = min(kBand, tall - band * kBand);
  Item item;
  item.i0 = static_cast<int>(band * kBand + within % height) * kTileI;
  item.j0 = static_cast<int>(within / height) * kTileJ;
  // As even as can be; in 64 bits, since K may have 18.
  const auto channels = static_cast<std::uint64_t>(a.last_channel - a.first_channel);
  const auto begin = static_cast<int>(channels * group / groups);
  item.first_channel = a.first_channel + begin;
  item.channels = static_cast<int>(channels * (group + 1) / groups) - begin;
  item.split = static_cast<int>(split);
  const std::int64_t row_tiles = s.T * (s.padded_b / kRows);
  item.first = static_cast<unsigned>(row_tiles * split / a.depth_splits);
  item.last = static_cast<unsigned>(row_tiles * (split + 1) / a.depth_splits);
  return item;
}

// Shared memory, front to back. The states come first: they must be aligned to 1024 bytes.
template <int Terms>
struct Shared {
  using C = Config<Terms>;
  std::byte* states;    // [stage][term][64 j block][32 rows][64 j], swizzled: MN-major
  std::byte* zeros;     // a stage of it
  std::byte* g;         // [stage][32 rows][64 i], swizzled
  std::byte* c;         // [stage][channel]: see store_tile_c()
  std::uint32_t* bits;  // [stage]: which of the item's channels are not all zero; none: its end
  Pipeline ring;

  __device__ explicit Shared(std::byte* base) {
    states = base;
    zeros = states + C::kStages * C::kStates;
    g = zeros + C::kZeros;
    c = g + C::kStages * C::kG;
    ring = Pipeline(c + C::kStages * C::kC, C::kStages);
    bits = static_cast<std::uint32_t*>(ring.end(C::kStages));
  }
};

// Walks over the row tiles in which some channel of an item is not zero.
struct Walk {
  unsigned index, last;
  std::uint32_t bits;  // of `index`; zero at the end

  __device__ __forceinline__ void skip(const WeightGradients& a, const Item& item) {
    const std::int64_t words = a.layout.mask_words;
    const int word = item.first_channel >> 5;
    const int shift = item.first_channel & 31;
    const bool second = shift + item.channels > 32;
    for (bits = 0; index < last; ++index) {
      const std::uint32_t* mask = a.active_rows + index * words + word;
      const std::uint32_t high = second ? __ldg(mask + 1) : 0;
      bits = __funnelshift_r(__ldg(mask), high, static_cast<unsigned>(shift)) &
             ((1u << item.channels) - 1);
      if (bits != 0) return;
    }
  }
};

// The producer, one thread: three bulk copies a row tile, or more with more terms.
template <int Terms>
__device__ void produce(const Sm90WeightGradients& a, const Shared<Terms>& shared) {
  using C = Config<Terms>;
  const Layout& s = a.layout;
  const std::int64_t blocks = s.padded_n / kTile;
  const std::int64_t plane = s.T * (s.padded_b / kRows) * blocks;  // blocks of a term of s
  const auto items = static_cast<unsigned>(items_of<Terms>(a));
  const Pipeline& ring = shared.ring;
  PipelineStage to = ring.producer();
  for (unsigned index = blockIdx.x; index < items; index += a.blocks) {
    const Item item = item_of<Terms>(a, index);
    // Columns j beyond the padded state are left as they are: they reach no other column of the
    // result, and nobody reads theirs.
    const auto s_bytes = static_cast<unsigned>(
        min(blocks - item.j0 / kTile, std::int64_t{kTileJ / kTile}) * C::kBlock);
    const auto c_bytes = static_cast<unsigned>(item.channels * kRowTileFactorBytes);
    const std::byte* states =
        reinterpret_cast<const std::byte*>(a.states) + item.j0 / kTile * C::kBlock;
    const std::byte* g = a.g + item.i0 / kTile * C::kG;
    const std::byte* c =
        reinterpret_cast<const std::byte*>(a.tile_c) + item.first_channel * kRowTileFactorBytes;
    Walk walk{item.first, item.last, 0};
    walk.skip(a, item);
    while (true) {
      const std::uint32_t bits = walk.bits;
      const std::int64_t row_tile = walk.index;
      const int at = to.at;
      SharedBarrier* full = ring.full + at;
      ring.acquire(to);
      to.next(C::kStages);
      shared.bits[at] = bits;
      if (bits == 0) {
        full->arrive();
        break;
      }
      full->arrive_expecting(Terms * s_bytes + C::kG + c_bytes);
#pragma unroll
      for (int term = 0; term < Terms; ++term) {
        copy_bulk(shared.states + at * C::kStates + term * C::kPlane,
                  states + (term * plane + row_tile * blocks) * C::kBlock, s_bytes, full);
      }
      copy_bulk(shared.g + at * C::kG, g + row_tile * blocks * C::kG, C::kG, full);
      copy_bulk(shared.c + at * C::kC, c + row_tile * s.channels * kRowTileFactorBytes, c_bytes,
                full);
      ++walk.index;
      walk.skip(a, item);
    }
  }
}
#endif  // ANNULUS_DEVICE_HOPPER

}  // namespace annulus::ring_rnn::cuda::tensor::dweights
