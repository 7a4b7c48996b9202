// What the warps of a cluster multiply: where it lies in shared memory, and the products of a warp.
// ring_rnn_cuda_cluster.cuh says how they fit into a step.
#pragma once

#include <cstddef>
#include <cstdint>
#include <type_traits>

#include "annulus/cuda/mma.cuh"
#include "annulus/ring_rnn/ring_rnn_cuda_parts.cuh"

namespace annulus::ring::cuda::tensor {

inline constexpr int kClusterThreads = 512;
inline constexpr int kClusterWarps = kClusterThreads / 32;
inline constexpr int kDepthWarps = kClusterWarps / 2;  // two rows of 16 neurons
inline constexpr int kPitch = kClusterNeurons + 4;  // against bank conflicts: 2 pitches = 8 mod 32

// Channels whose weights a warp keeps in registers, two at a time: 48 registers a thread.
constexpr int held_channels(int terms) { return 12 / terms / 2 * 2; }

// Shared memory, front to back, of one block.
template <int Terms, int Samples>
struct ClusterShared {
  uint4* weights;        // [slot][tile][warp][lane]
  std::uint16_t* x;      // [2][term][depth / 16][sample][16]
  float* c;              // [2][kStagedChannels][sample]
  std::uint8_t* active;  // [2][kStagedChannels]: channels that are not all zero
  float* parts;          // [depth warp][sample][kPitch]
  float* sums;           // [2][block][sample]: of X over a block's neurons
  float* dots;           // [warp][channel][sample]

  __device__ ClusterShared(std::byte* base, const Shape& s) {
    const auto take = [&](std::int64_t bytes) {
      std::byte* p = base;
      base += bytes;
      return p;
    };
    weights = reinterpret_cast<uint4*>(take(s.slots * s.slot_bytes));
    x = reinterpret_cast<std::uint16_t*>(take(4 * Terms * s.padded_n * Samples));
    c = reinterpret_cast<float*>(take(2 * kStagedChannels * Samples * 4));
    parts = reinterpret_cast<float*>(take(kDepthWarps * Samples * kPitch * 4));
    sums = reinterpret_cast<float*>(take(2 * kMostBlocks * Samples * 4));
    active = reinterpret_cast<std::uint8_t*>(take(2 * kStagedChannels));
    dots = reinterpret_cast<float*>(base);
  }
};

#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900

// Sums over the eight lanes of the same q = lane % 4 of four numbers at once: lanes 8 i + q and
// 8 i + 4 + q get the sum of number i.
__device__ __forceinline__ float sum_four(const float (&v)[4], int lane) {
  float two[2];
  const bool upper = (lane & 16) != 0;
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    two[i] = (upper ? v[2 + i] : v[i]) + __shfl_xor_sync(~0u, upper ? v[i] : v[2 + i], 16);
  }
  const bool high = (lane & 8) != 0;
  const float one = (high ? two[1] : two[0]) + __shfl_xor_sync(~0u, high ? two[0] : two[1], 8);
  return one + __shfl_xor_sync(~0u, one, 4);
}

// What the products of a warp need to know.
template <int Terms, int Samples>
class ClusterProducts {
 public:
  static constexpr int kHeld = held_channels(Terms);
  static constexpr int kColumns = Samples / 8;

  __device__ ClusterProducts(const Loop& loop, const ClusterShared<Terms, Samples>& shared,
                             int rank, std::int64_t first_row)
      : loop_(loop),
        shared_(shared),
        first_row_(first_row),
        rank_(rank),
        warp_(static_cast<int>(threadIdx.x) >> 5),
        lane_(static_cast<int>(threadIdx.x) & 31) {
    const Shape& s = loop.shape;
    deep_tiles_ = s.padded_n / 16;
    deep_ = warp_ >> 1;
    neuron_ = rank * kClusterNeurons + (warp_ & 1) * 16 + (lane_ >> 2);
    if (loop.weights == nullptr) {
      visit_narrow(loop.dtype, [&]<class T>() { load_weights<T>(); });
      return;
    }
#pragma unroll
    for (int i = 0; i < kHeld; ++i) {
#pragma unroll
      for (int tile = 0; tile < Terms; ++tile) held_[i][tile] = fetch(i, tile);
    }
    for (int i = kHeld; i < min(s.channels, kHeld + s.slots); ++i) {
#pragma unroll
      for (int tile = 0; tile < Terms; ++tile) *slot(i, tile) = fetch(i, tile);
    }
  }

  // s of the step, by which dots multiplies: loaded ahead.
  __device__ void load_states(std::int64_t time) {
#pragma unroll
    for (int j = 0; j < kColumns; ++j) {
#pragma unroll
      for (int e = 0; e < 4; ++e) states_[j][e] = 0;
#pragma unroll
      for (int term = Terms - 1; term >= 0; --term) {
        const Shape& s = loop_.shape;
        const std::int64_t row = first_row_ + j * 8 + (lane_ & 3) * 2;
        const std::uint16_t* plane = loop_.states + term * s.T * s.padded_b * s.padded_n;
#pragma unroll
        for (int e = 0; e < 4; ++e) {
          const std::uint32_t bits =
              __ldg(plane + state_at(s, time, row + (e & 1), neuron_ + (e >> 1) * 8));
          states_[j][e] += __uint_as_float(bits << 16);
        }
      }
    }
  }

  // Adds the channels from `first` on that are staged, and leaves the parts of their dots, for which no
  // channel is left out.
  template <bool Dots>
  __device__ void add(const float* c, std::uint64_t active, int parity, int first) {
    const Shape& s = loop_.shape;
    const int last = min(s.channels, first + kStagedChannels);
    const std::uint64_t everyone = ~std::uint64_t{0} >> (kStagedChannels - (last - first));
    const std::uint64_t mask = Dots ? everyone : active;
    const bool all = mask == everyone;
    load_x(parity);
    c += (lane_ & 3) * 2 - first * Samples;
    const auto pair = [&]<bool Ask>(int i, auto&& tile_of) {
      [[maybe_unused]] float d[kColumns][4] = {};
      const auto counts = [&](int h) {
        return !Ask || (i + h < last && (mask >> (i + h - first) & 1) != 0);
      };
      // Both products before the first sum, which would wait for its product.
      float part[2][kColumns][4];
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        if (counts(h)) multiply([&](int tile) { return tile_of(h, tile); }, part[h]);
      }
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        if (!counts(h)) continue;
#pragma unroll
        for (int j = 0; j < kColumns; ++j) {
          const float2 by = *reinterpret_cast<const float2*>(c + (i + h) * Samples + j * 8);
          const float(&v)[4] = part[h][j];
#pragma unroll
          for (int e = 0; e < 4; ++e) {
            sum_[j][e] = fmaf((e & 1) ? by.y : by.x, v[e], sum_[j][e]);
          }
          if constexpr (Dots) {
            d[j][2 * h] = fmaf(v[2], states_[j][2], v[0] * states_[j][0]);
            d[j][2 * h + 1] = fmaf(v[3], states_[j][3], v[1] * states_[j][1]);
          }
        }
      }
      if constexpr (Dots) {
        const int which = lane_ >> 3;
#pragma unroll
        for (int j = 0; j < kColumns; ++j) {
          const float total = sum_four(d[j], lane_);
          if ((lane_ & 4) == 0 && i + which / 2 < last) {
            dots_at(warp_, i + which / 2 - first, j * 8 + (lane_ & 3) * 2 + which % 2) = total;
          }
        }
      }
    };
    const auto held = [&]<bool Ask>() {
#pragma unroll
      for (int i = 0; i < kHeld; i += 2) {
        pair.template operator()<Ask>(i, [&](int h, int tile) { return held_[i + h][tile]; });
      }
    };
    int i = first;
    if (first == 0) {
      // Nobody asks channel by channel where all are at work, as they mostly are.
      if (all && last >= kHeld) {
        held.template operator()<false>();
      } else {
        held.template operator()<true>();
      }
      i = kHeld;
    }
    const auto kept = [&](int h, int tile) { return *slot(i + h, tile); };
    const int in_slots = min(last, kHeld + s.slots);
    if (all) {
#pragma unroll 2
      for (; i + 1 < in_slots; i += 2) pair.template operator()<false>(i, kept);
    }
    for (; i < last; i += 2) {
      pair.template operator()<true>(i, [&](int h, int tile) {
        return i + h < kHeld + s.slots ? *slot(i + h, tile) : fetch(i + h, tile);
      });
    }
  }

  // Leaves the sums of this warp where `total` finds them, and begins new ones.
  __device__ void store() {
#pragma unroll
    for (int j = 0; j < kColumns; ++j) {
#pragma unroll
      for (int e = 0; e < 4; ++e) {
        const int sample = j * 8 + (lane_ & 3) * 2 + (e & 1);
        shared_.parts[((warp_ >> 1) * Samples + sample) * kPitch + (warp_ & 1) * 16 + (lane_ >> 2) +
                      (e >> 1) * 8] = sum_[j][e];
        sum_[j][e] = 0;
      }
    }
  }
  __device__ float total(int sample, int neuron) const {
    float sum = 0;
#pragma unroll
    for (int i = 0; i < kDepthWarps; ++i) {
      sum += shared_.parts[(i * Samples + sample) * kPitch + neuron];
    }
    return sum;
  }

  // Adds up the warps' parts of s . u_k of the staged channels and writes them.
  __device__ void store_dots(std::int64_t time, int first, int thread, int threads) const {
    const Shape& s = loop_.shape;
    const int staged = min(s.channels - first, kStagedChannels);
    const std::int64_t slots = static_cast<std::int64_t>(s.tiles) * s.dot_parts;
    for (int i = thread; i < staged * Samples; i += threads) {
      const int channel = i / Samples;
      const int sample = i % Samples;
      float sum = 0;
#pragma unroll
      for (int w = 0; w < kClusterWarps; ++w) sum += dots_at(w, channel, sample);
      loop_.dots[((time * slots + rank_) * s.channels + first + channel) * s.padded_b + first_row_ +
                 sample] = sum;
    }
  }

 private:
  __device__ float& dots_at(int warp, int channel, int sample) const {
    const int staged = min(loop_.shape.channels, kStagedChannels);
    return shared_.dots[(warp * staged + channel) * Samples + sample];
  }
  __device__ uint4* slot(int i, int tile) const {
    return shared_.weights + (((i - kHeld) * Terms + tile) * kClusterWarps + warp_) * 32 + lane_;
  }

  // Forward: the weights as the call has them; there is room for all of them. bf16 in whole, aligned
  // rows are fragments already, and all loads are on their way at once.
  template <class T>
  __device__ __forceinline__ void load_weights() {
    const Args& a = loop_.args;
    const int m = deep_ * 16 + (lane_ & 3) * 4;
    if constexpr (Terms == 1 && std::is_same_v<T, bfloat16>) {
      const auto aligned = [](const void* data, std::int64_t stride) {
        return reinterpret_cast<std::uintptr_t>(data) % 8 == 0 && stride % 4 == 0;
      };
      const bool whole = a.N == loop_.shape.padded_n && a.Wo.stride[1] == 1 &&
                         aligned(a.Wo.data, a.Wo.stride[0]) &&
                         (a.K == 0 || (a.Wa.stride[2] == 1 && aligned(a.Wa.data, a.Wa.stride[1]) &&
                                       a.Wa.stride[0] % 4 == 0));
      if (whole) {
        const bool deep = deep_ < deep_tiles_;
        const T* const own = static_cast<const T*>(a.Wo.data) + neuron_ * a.Wo.stride[0] + m;
        const T* const others = static_cast<const T*>(a.Wa.data) + neuron_ * a.Wa.stride[1] + m;
        const auto read = [&](int i) {
          if (!deep || i >= loop_.shape.channels) return make_uint4(0, 0, 0, 0);
          const T* from = i == 0 ? own : others + (i - 1) * a.Wa.stride[0];
          const std::int64_t below = 8 * (i == 0 ? a.Wo.stride[0] : a.Wa.stride[1]);
          const uint2 low = __ldg(reinterpret_cast<const uint2*>(from));
          const uint2 high = __ldg(reinterpret_cast<const uint2*>(from + below));
          return make_uint4(low.x, high.x, low.y, high.y);
        };
#pragma unroll
        for (int i = 0; i < kHeld; ++i) held_[i][0] = read(i);
#pragma unroll 4
        for (int i = kHeld; i < loop_.shape.channels; ++i) *slot(i, 0) = read(i);
        return;
      }
    }
    // A few channels at a time, all of them on their way before the first is used.
    constexpr int kAtOnce = Terms == 1 ? 4 : 2;
    static_assert(kHeld % kAtOnce == 0);
    const int count = deep_ < deep_tiles_ ? columns_of<4>(a.N, m) : 0;
    float v[kAtOnce][2][4];
    const auto load = [&](int i, float(&rows)[2][4]) {
      const bool own = i == 0;
      const T* from = own ? static_cast<const T*>(a.Wo.data)
                          : static_cast<const T*>(a.Wa.data) + (i - 1) * a.Wa.stride[0];
      const std::int64_t stride_n = own ? a.Wo.stride[0] : a.Wa.stride[1];
      const std::int64_t stride_m = own ? a.Wo.stride[1] : a.Wa.stride[2];
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const std::int64_t n = neuron_ + half * 8;
        load_row(from + n * stride_n + m * stride_m, stride_m,
                 i < loop_.shape.channels && n < a.N ? count : 0, rows[half]);
      }
    };
    const auto tile = [](const float(&rows)[2][4], uint4(&to)[Terms]) {
      std::uint32_t word[2][2][Terms];
#pragma unroll
      for (int half = 0; half < 2; ++half) {
#pragma unroll
        for (int pair = 0; pair < 2; ++pair) {
          annulus::cuda::split_pair<Terms>(rows[half][2 * pair], rows[half][2 * pair + 1],
                                           word[half][pair]);
        }
      }
#pragma unroll
      for (int term = 0; term < Terms; ++term) {
        to[term] =
            make_uint4(word[0][0][term], word[1][0][term], word[0][1][term], word[1][1][term]);
      }
    };
#pragma unroll
    for (int first = 0; first < kHeld; first += kAtOnce) {
#pragma unroll
      for (int i = 0; i < kAtOnce; ++i) load(first + i, v[i]);
#pragma unroll
      for (int i = 0; i < kAtOnce; ++i) tile(v[i], held_[first + i]);
    }
    for (int first = kHeld; first < loop_.shape.channels; first += kAtOnce) {
#pragma unroll
      for (int i = 0; i < kAtOnce; ++i) load(first + i, v[i]);
#pragma unroll
      for (int i = 0; i < kAtOnce; ++i) {
        if (first + i >= loop_.shape.channels) break;
        uint4 terms[Terms];
        tile(v[i], terms);
#pragma unroll
        for (int term = 0; term < Terms; ++term) *slot(first + i, term) = terms[term];
      }
    }
  }

  // A tile of channel i, as left operand. The depth is taken in another order
  // than mma.cuh has it, so that a lane's four numbers of a row lie together: 4 q, ..., 4 q + 3.
  __device__ uint4 fetch(int i, int tile) const {
    const Shape& s = loop_.shape;
    if (i >= s.channels || deep_ >= deep_tiles_) return make_uint4(0, 0, 0, 0);
    const int m = deep_ * 16 + (lane_ & 3) * 4;
    const std::int64_t block =
        (static_cast<std::int64_t>(neuron_ / kTile) * s.chunks + m / kHopperDepth) * s.channels + i;
    const int row = neuron_ % kTile;
    const int piece = m % kHopperDepth / 8 ^ row % 8;
    const std::byte* at = reinterpret_cast<const std::byte*>(loop_.weights) +
                          block * hopper_block_bytes(Terms) + tile * kHopperPlane + row * 128 +
                          piece * 16 + m % 8 * 2;
    const uint2 low = __ldg(reinterpret_cast<const uint2*>(at));
    const uint2 high = __ldg(reinterpret_cast<const uint2*>(at + 8 * 128));
    return make_uint4(low.x, high.x, low.y, high.y);
  }

  __device__ void load_x(int parity) {
    const Shape& s = loop_.shape;
#pragma unroll
    for (int term = 0; term < Terms; ++term) {
#pragma unroll
      for (int j = 0; j < kColumns; ++j) {
        const std::uint16_t* at = shared_.x + ((parity * Terms + term) * s.padded_n * Samples) +
                                  (deep_ * Samples + j * 8 + (lane_ >> 2)) * 16 + (lane_ & 3) * 4;
        x_[term][j] = deep_ < deep_tiles_ ? *reinterpret_cast<const uint2*>(at) : make_uint2(0, 0);
      }
    }
  }

  template <class TileOf>
  __device__ __forceinline__ void multiply(TileOf&& tile_of, float (&part)[kColumns][4]) const {
#pragma unroll
    for (int p = 0; p < products_of(Terms); ++p) {
      const uint4 w = tile_of(term_of_v<Terms>(p));
#pragma unroll
      for (int j = 0; j < kColumns; ++j) {
        const uint2 x = x_[term_of_x<Terms>(p)][j];
        if (p == 0) {
          annulus::cuda::mma_bf16_first(part[j], w, x.x, x.y);
        } else {
          annulus::cuda::mma_bf16(part[j], w, x.x, x.y);
        }
      }
    }
  }

  const Loop& loop_;
  const ClusterShared<Terms, Samples>& shared_;
  std::int64_t first_row_;
  int rank_, warp_, lane_;
  int deep_tiles_, deep_;
  int neuron_;  // of row lane / 4 of the tile
  uint4 held_[kHeld][Terms];
  uint2 x_[Terms][kColumns];
  float states_[kColumns][4];
  float sum_[kColumns][4] = {};
};
#endif  // 9.0

}  // namespace annulus::ring::cuda::tensor
