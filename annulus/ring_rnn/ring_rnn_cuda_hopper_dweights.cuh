// The gradients of the weights for compute capability 9.0: how the work is cut, what lies where in
// shared memory, and the group of warps that fetches. ring_rnn_cuda_hopper_dweights.cu multiplies.
#pragma once

#include <cstddef>
#include <cstdint>

#include "annulus/cuda/hopper.cuh"
#include "annulus/ring_rnn/ring_rnn_cuda_tensor.cuh"

namespace annulus::ring::cuda::tensor::dweights {

inline constexpr int kRows = 32;       // of a stretch: two steps of 16
inline constexpr int kTileI = 64;      // one wgmma
inline constexpr int kFetching = 128;  // threads that fetch

// What depends on the number of terms. The accumulators take what registers there are.
template <int Terms>
struct Cut {
  static constexpr bool kNarrow = Terms == 1;       // g is bf16 in shared memory
  static constexpr int kGroups = 2;                 // of four warps that multiply
  static constexpr int kEach = Terms == 3 ? 2 : 3;  // channels of a group
  static constexpr int kChannels = kGroups * kEach;
  static_assert(hopper_dweights_groups(Terms, kChannels) == 1 &&
                hopper_dweights_groups(Terms, kChannels + 1) == 2);
  static constexpr int kStages = Terms == 1 ? 12 : Terms == 2 ? 8 : 6;
  static constexpr int kThreads = kGroups * 128 + kFetching;

  static constexpr int kBlock = kRows * 128;  // bytes: 64 j
  static constexpr int kPlane = 2 * kBlock;   // 128 j
  static constexpr int kStates = Terms * kPlane;
  static constexpr int kG = kRows * kTileI * (kNarrow ? 2 : 4);
  static constexpr int kC = kChannels * kRows * 4;
  static constexpr int kZeros = Terms == 3 ? 0 : kStates;
  // 32 bytes a stage for the barriers and what it holds.
  static constexpr int kSharedBytes = kZeros + kStages * (kStates + kG + kC + 32);
};

// Which tile, channels and stretches a block of threads works on. Channels change fastest and tiles
// go in bands: the blocks that run at the same time read the same few columns of g and s, at about
// the same depth, so that memory delivers them once and L2 the rest. The channels of a tile begin at
// another place for each tile, or a block might meet the same, perhaps fuller, set every time.
struct Item {
  int i0, j0;
  int first_channel, channels;
  int split;
  unsigned first, last;  // stretches: fewer than 2^32, or g would have more than 2^45 bytes
};

template <int Terms>
__host__ __device__ inline int channel_groups(const WeightGradients& a) {
  return static_cast<int>(hopper_dweights_groups(Terms, a.last_channel - a.first_channel));
}

template <int Terms>
__host__ __device__ inline std::int64_t items_of(const WeightGradients& a) {
  return static_cast<std::int64_t>(a.shape.padded_n / kTileI) * a.sides * channel_groups<Terms>(a) *
         a.depth_splits;
}

#if ANNULUS_DEVICE_HOPPER

inline constexpr int kTileJ = 128;    // two blocks of 64, as wgmma's 128-byte rows want them
inline constexpr unsigned kBand = 8;  // tiles along i that run side by side
// Of 168 a thread at the start. 192 are accumulators (with three terms, a third of them sums of the
// last 16 rows): the compiler has no room for wgmma with fewer than 232, nor fetch() with fewer than
// 40.
inline constexpr int kMultiplyRegisters = 232, kFetchRegisters = 40;
// Channels whose left operands are made, and multiplied, together.
template <int Terms>
constexpr int kBatch = Terms == 1 ? 3 : 1;

template <int Terms>
__device__ Item item_of(const WeightGradients& a, unsigned index) {
  const Shape& s = a.shape;
  const auto groups = static_cast<unsigned>(channel_groups<Terms>(a));
  const auto tall = static_cast<unsigned>(s.padded_n / kTileI);
  const auto wide = static_cast<unsigned>(a.sides);
  const unsigned place = index / groups;
  const unsigned group = (index + place) % groups;
  const unsigned tile = place % (tall * wide);
  const unsigned split = place / (tall * wide);
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
  const std::int64_t stretches = s.T * (s.padded_b / kRows);
  item.first = static_cast<unsigned>(stretches * split / a.depth_splits);
  item.last = static_cast<unsigned>(stretches * (split + 1) / a.depth_splits);
  return item;
}

// Shared memory, front to back. The states come first: they must be aligned to 1024 bytes.
template <int Terms>
struct Shared {
  using C = Cut<Terms>;
  std::byte* states;    // [stage][term][64 j block][32 rows][64 j], swizzled: see row_operand()
  std::byte* zeros;     // a stage of it
  std::byte* g;         // [stage][32 rows][64 i], swizzled
  float* c;             // [stage][channel][32 rows]
  std::uint32_t* bits;  // [stage]: which of the item's channels are not all zero; none: its end
  annulus::cuda::SharedBarrier *full, *empty;

  __device__ explicit Shared(std::byte* base) {
    states = base;
    zeros = states + C::kStages * C::kStates;
    g = zeros + C::kZeros;
    c = reinterpret_cast<float*>(g + C::kStages * C::kG);
    full = reinterpret_cast<annulus::cuda::SharedBarrier*>(c + C::kStages * C::kC / 4);
    empty = full + C::kStages;
    bits = reinterpret_cast<std::uint32_t*>(empty + C::kStages);
  }
};

// A stage, and the parity of its barriers' phase.
template <int Stages>
struct RingPlace {
  int at = 0;
  unsigned parity = 0;
  __device__ __forceinline__ void next() {
    if (++at == Stages) {
      at = 0;
      parity ^= 1;
    }
  }
};

// Walks over the stretches in which some channel of an item is not zero.
struct Walk {
  unsigned index, last;
  std::uint32_t bits;  // of `index`; zero at the end

  __device__ __forceinline__ void skip(const WeightGradients& a, const Item& item) {
    const std::int64_t words = a.shape.mask_words;
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

// The fetching group: every thread takes a 16-byte column of every eighth row.
//
// Rows of a step of 16 lie in shared memory in the order of the fragments' k: row 4q + 2h + e at
// 2q + 8h + e. A thread's four k are then four neighbouring rows, whose c are one load.
template <int Terms>
__device__ void fetch(const WeightGradients& a, const Shared<Terms>& shared) {
  using C = Cut<Terms>;
  const Shape& s = a.shape;
  const int thread = static_cast<int>(threadIdx.x) - C::kGroups * 128;
  const int column = thread & 15;
  const int row0 = thread >> 4;
  // Where this thread's first row lies; the i-th of the four is 8 i rows on, see the lambdas.
  const int place = (row0 >> 2) * 2 + (row0 & 1) + ((row0 >> 1) & 1) * 8;
  const int s_place = (column >> 3) * C::kBlock + place * 128 + ((column & 7) ^ (place & 7)) * 16;
  // f32: pieces are swapped so that the four rows that half a warp reads lie in different banks.
  const int g_place = C::kNarrow
                          ? place * 128 + ((column >> 1) ^ (place & 7)) * 16 + (column & 1) * 8
                          : row0 * 256 + (column ^ ((row0 >> 2) * 2)) * 16;
  // Eight rows on is position + 4, which flips bit 2 of the swapped piece.
  const auto row_of_128 = [](int first, int i) {
    return (first ^ ((i & 1) * 64)) + (i & 1) * 512 + (i >> 1) * 2048;
  };
  const auto row_of_256 = [](int first, int i) { return (first ^ ((i & 1) * 64)) + i * 2048; };
  const std::int64_t plane = s.T * s.padded_b * s.padded_n;
  const auto items = static_cast<unsigned>(items_of<Terms>(a));
  RingPlace<C::kStages> ring;
  ring.parity = 1;  // a fresh barrier counts as past its phase 1: the first round waits for nobody

  // One term: g is on its way through registers, one stretch ahead of the rest. More would need
  // registers that the multiplying groups have.
  float4 g[C::kNarrow ? 4 : 1];
  for (unsigned index = blockIdx.x; index < items; index += gridDim.x) {
    const Item item = item_of<Terms>(a, index);
    Walk walk{item.first, item.last, 0};
    walk.skip(a, item);
    unsigned stretch;
    std::uint32_t bits;
    const auto row_in = [&](auto* matrix, int first_column) {
      return matrix + (static_cast<std::int64_t>(stretch) * kRows + row0) * s.padded_n +
             first_column;
    };
    const auto begin = [&] {
      stretch = walk.index;
      bits = walk.bits;
      if (bits == 0) return;
      if constexpr (C::kNarrow) {
        const float* from = row_in(a.g, item.i0 + column * 4);
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          g[i] = __ldg(reinterpret_cast<const float4*>(from));
          from += 8 * s.padded_n;
        }
      }
      ++walk.index;
      walk.skip(a, item);  // for the next, while this one's rows are on their way
    };
    const auto finish = [&](int at) {
      // Columns j beyond the padded state are left as they are: they reach no other column of the
      // result, and nobody reads theirs.
      if (item.j0 + column * 8 < s.padded_n) {
        const std::uint16_t* from = row_in(a.states, item.j0 + column * 8);
#pragma unroll
        for (int term = 0; term < Terms; ++term) {
          const std::uint16_t* row = from;
#pragma unroll
          for (int i = 0; i < 4; ++i) {
            annulus::cuda::copy_async_16(
                shared.states + at * C::kStates + term * C::kPlane + row_of_128(s_place, i), row);
            row += 8 * s.padded_n;
          }
          from += plane;
        }
      }
      if (thread < item.channels * (kRows / 4)) {
        const auto blocks = static_cast<unsigned>(s.padded_b / kRows);
        const std::int64_t time = stretch / blocks;
        const std::int64_t b = stretch % blocks * kRows;
        const int channel = thread >> 3;
        annulus::cuda::copy_async_16(
            shared.c + at * (C::kC / 4) + thread * 4,
            a.c + (time * s.channels + item.first_channel + channel) * s.padded_b + b +
                (thread & 7) * 4);
      }
      std::byte* to = shared.g + at * C::kG;
      if constexpr (C::kNarrow) {
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          std::uint32_t low[1], high[1];
          annulus::cuda::split_pair<1>(g[i].x, g[i].y, low);
          annulus::cuda::split_pair<1>(g[i].z, g[i].w, high);
          *reinterpret_cast<uint2*>(to + row_of_128(g_place, i)) = make_uint2(low[0], high[0]);
        }
      } else {
        const float* from = row_in(a.g, item.i0 + column * 4);
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          annulus::cuda::copy_async_16(to + row_of_256(g_place, i), from);
          from += 8 * s.padded_n;
        }
      }
    };
    begin();
    while (true) {
      shared.empty[ring.at].wait(ring.parity);
      if (bits != 0) finish(ring.at);
      if (thread == 0) shared.bits[ring.at] = bits;
      // Twice: what is copied, when it is there, and what this thread wrote itself.
      shared.full[ring.at].arrive_after_copies();
      shared.full[ring.at].arrive();
      ring.next();
      if (bits == 0) break;
      begin();
    }
  }
}
#endif  // ANNULUS_DEVICE_HOPPER

}  // namespace annulus::ring::cuda::tensor::dweights
