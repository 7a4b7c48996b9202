// The loop over steps for networks of at most 128 neurons (64 with three terms) on compute capability
// 9.0: samples do not depend on each other, and all weights fit into a few multiprocessors, so nobody
// waits for the grid.
//
// A cluster of blocks owns 8 or 16 samples for all steps; a block of it owns 32 neurons, and its
// weights stay where they are used: in the registers of its 16 warps, then in shared memory, the rest
// in L2. A step is
//   products   a warp multiplies 16 neurons x 16 of the depth of every channel by the samples
//              (mma.sync with the weights as left operand), and adds them up scaled by c in f32;
//   sum        over the warps of the depth, through shared memory, in fixed order;
//   end        one thread an element, whose state never leaves its register;
//   exchange   the new X into the shared memory of all blocks of the cluster, and their barrier.
// A sample's numbers depend neither on how many samples share its cluster nor on K.
#pragma once

#include <algorithm>

#include "annulus/core/checked.h"
#include "annulus/cuda/check.h"
#include "annulus/cuda/cluster.cuh"
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

// X of the next step, of one sample and a block's neurons, one a lane: into every block of the
// cluster.
template <int Terms, int Samples>
__device__ __forceinline__ void exchange(const Shape& s,
                                         const ClusterShared<Terms, Samples>& shared, int rank,
                                         int sample, int parity, float v) {
  const int lane = static_cast<int>(threadIdx.x) & 31;
  __nv_bfloat16 term[Terms];
  annulus::cuda::split_bf16<Terms>(v, term);
  const int deep = rank * (kClusterNeurons / 16) + lane / 16;
#pragma unroll
  for (int i = 0; i < Terms; ++i) {
    // Four neighbours' numbers in each of their lanes; each lane serves another block.
    const unsigned own = __bfloat16_as_ushort(term[i]);
    const unsigned other = __shfl_xor_sync(~0u, own, 1);
    const unsigned pair = (lane & 1) ? other | own << 16 : own | other << 16;
    const unsigned pair_other = __shfl_xor_sync(~0u, pair, 2);
    const uint2 four = (lane & 2) ? make_uint2(pair_other, pair) : make_uint2(pair, pair_other);
    const std::uint32_t at =
        annulus::cuda::shared_address(shared.x + (parity * Terms + i) * s.padded_n * Samples +
                                      (deep * Samples + sample) * 16 + lane % 16 / 4 * 4);
    for (int block = lane & 3; block < s.cluster; block += 4) {
      annulus::cuda::store_in_block(annulus::cuda::address_in_block(at, block), four);
    }
  }
  const float sum = annulus::cuda::warp_sum(v);
  if (lane < s.cluster) {
    const std::uint32_t at = annulus::cuda::shared_address(
        shared.sums + (parity * kMostBlocks + rank) * Samples + sample);
    annulus::cuda::store_in_block(annulus::cuda::address_in_block(at, lane), sum);
  }
}

template <int Samples>
__device__ __forceinline__ float row_total(const Shape& s, const float* sums, int sample,
                                           int parity) {
  float sum = 0;
#pragma unroll
  for (int block = 0; block < kMostBlocks; ++block) {
    if (block < s.cluster) sum += sums[(parity * kMostBlocks + block) * Samples + sample];
  }
  return sum;
}
#endif  // 9.0

template <int Terms, int Samples, class Element>
__global__ void __launch_bounds__(kClusterThreads, 1)
    cluster_kernel(const __grid_constant__ Loop loop) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  extern __shared__ uint4 shared_words[];
  const Shape& s = loop.shape;
  const ClusterShared<Terms, Samples> shared(reinterpret_cast<std::byte*>(shared_words), s);
  const int rank = annulus::cuda::cluster_rank();
  const int thread = static_cast<int>(threadIdx.x);
  const int warp = thread >> 5;
  const int lane = thread & 31;
  const std::int64_t first_row = static_cast<std::int64_t>(blockIdx.x / s.cluster) * Samples;
  const bool has_element = warp < Samples;
  const bool dots = Element::kBackward && loop.dots != nullptr;

  // Blocks of the cluster may not be written to before they run.
  annulus::cuda::cluster_arrive();
  ClusterProducts<Terms, Samples> products(loop, shared, rank, first_row);
  const auto time_of = [&](std::int64_t step) {
    return Element::kBackward ? loop.last - 1 - (step - loop.first) : step;
  };
  // c of a step: numbers `thread`, `thread` + 512, ... of the staged channels. The forward reads them
  // where the call has them: it needs nothing prepared.
  constexpr int kEach = kStagedChannels * Samples / kClusterThreads;
  struct Staged {
    float c[kEach];
  };
  constexpr int kApart = kClusterThreads / Samples;  // channels between a thread's numbers
  const std::int64_t c_row = first_row + thread % Samples;
  [[maybe_unused]] float J1 = 0;
  if constexpr (!Element::kBackward) {
    visit_narrow(loop.dtype, [&]<class T>() { J1 = get<T>(loop.args.J1); });
  }
  const auto load_staged = [&](std::int64_t time, int first) {
    Staged staged = {};
    const int channel = first + thread / Samples;
    if constexpr (Element::kBackward) {
      const float* from = loop.c + (time * s.channels + channel) * s.padded_b + c_row;
#pragma unroll
      for (int i = 0; i < kEach; ++i) {
        if (channel + i * kApart < s.channels) staged.c[i] = __ldg(from + i * kApart * s.padded_b);
      }
    } else if (c_row < s.B && live(loop.args, c_row, time)) {  // as coefficient()
      const Ref<3>& A = loop.args.A;
      const std::int64_t at = offset<float>(A, c_row, time, channel - 1);
      visit_narrow(loop.dtype, [&]<class T>() {
#pragma unroll
        for (int i = 0; i < kEach; ++i) {
          const int k = channel + i * kApart;
          if (k >= s.channels) break;
          staged.c[i] = k == 0 ? J1
                               : static_cast<float>(
                                     static_cast<const T*>(A.data)[at + i * kApart * A.stride[2]]);
        }
      });
    }
    return staged;
  };
  const auto store_staged = [&](int parity, const Staged& staged) {
#pragma unroll
    for (int i = 0; i < kEach; ++i) {
      shared.c[parity * kStagedChannels * Samples + thread + i * kClusterThreads] = staged.c[i];
      const unsigned any = __ballot_sync(~0u, staged.c[i] != 0) >> lane;
      if (lane % Samples == 0) {
        shared.active[parity * kStagedChannels + thread / Samples + i * kApart] =
            (any & ((1u << Samples) - 1)) != 0;
      }
    }
  };

  store_staged(0, load_staged(time_of(loop.first), 0));
  Element element(loop, first_row + warp, rank * kClusterNeurons + lane, rank);
  const float v = has_element ? element.begin(loop) : 0.0f;
  if (dots) products.load_states(time_of(loop.first));
  annulus::cuda::cluster_wait();
  if (has_element) exchange<Terms, Samples>(s, shared, rank, warp, 0, v);
  annulus::cuda::cluster_arrive();
  annulus::cuda::cluster_wait();

  // What a step needs besides X is loaded while the cluster meets before it, and what is staged for
  // it lies in shared memory one step later.
  Staged staged = {};
  const auto load_ahead = [&](std::int64_t step) {
    if (step >= loop.last) return;
    if (has_element) element.load(loop, time_of(step));
    if (step + 1 < loop.last) staged = load_staged(time_of(step + 1), 0);
  };
  load_ahead(loop.first);
  for (std::int64_t step = loop.first; step < loop.last; ++step) {
    const std::int64_t time = time_of(step);
    const int parity = static_cast<int>(step - loop.first) & 1;
    const bool more = step + 1 < loop.last;
    const auto add = [&](int first) {
      const float* c = shared.c + parity * kStagedChannels * Samples;
      if (dots) {
        products.template add<true>(c, 0, parity, first);
        return;
      }
      std::uint64_t active = 0;
#pragma unroll
      for (int i = 0; i < kStagedChannels; i += 32) {
        const bool mine = shared.active[parity * kStagedChannels + i + lane] != 0;
        active |= static_cast<std::uint64_t>(__ballot_sync(~0u, mine)) << i;
      }
      products.template add<false>(c, active, parity, first);
    };
    add(0);
    int first = 0;
    while (first + kStagedChannels < s.channels) {  // more than are staged: one part after another
      __syncthreads();
      if (dots) products.store_dots(time, first, thread, kClusterThreads);
      first += kStagedChannels;
      store_staged(parity, load_staged(time, first));
      __syncthreads();
      add(first);
    }
    products.store();
    if (more) store_staged(parity ^ 1, staged);
    __syncthreads();
    if (dots && more) products.load_states(time_of(step + 1));
    if (has_element) {
      const float next = element.finish(loop, time, products.total(warp, lane),
                                        row_total<Samples>(s, shared.sums, warp, parity));
      exchange<Terms, Samples>(s, shared, rank, warp, parity ^ 1, next);
    }
    if (dots) {
      // By the warps that have no element, where there are such.
      constexpr int kIdle = Samples < kClusterWarps ? Samples * 32 : 0;
      if (thread >= kIdle) {
        products.store_dots(time, first, thread - kIdle, kClusterThreads - kIdle);
      }
    }
    // Tried on an H200: stores to global memory after arriving, 1-4 % slower in the one run it had.
    annulus::cuda::cluster_arrive();
    load_ahead(step + 1);
    annulus::cuda::cluster_wait();
  }
  if (has_element) element.end(loop);
#else
  __trap();  // not built for this GPU: better than to return with nothing done
#endif
}

// Are all weights of a cluster in registers and shared memory? A forward then needs nothing prepared.
inline bool holds_all_weights(const Shape& s) {
  return s.cluster > 0 && s.channels <= held_channels(s.terms) + s.slots;
}

// Networks whose weights a cluster holds at K = 16. K itself has no say. Tried on an H200: 256 neurons
// in clusters of 8 with one term, 0.244 ms for B 256, K 16, T 20, where the loop for all sizes takes
// 0.188 even with two terms; more terms in clusters, with a part of the weights in L2, take 1.7 to 8
// times as long as that loop.
inline bool runs_in_clusters(const Shape& s) {
  return s.padded_n <= kClusterNeurons * kMostBlocks && s.padded_n * s.terms <= 256;
}

// Clusters of so many blocks, each alone on its multiprocessor, that this GPU runs at once: fewer than
// there are multiprocessors for, since a cluster may not cross the borders of their groups.
int clusters_at_once(int cluster, std::size_t shared, const char* op);

// How many samples a cluster takes, and what of the weights lies in shared memory.
inline void fit_cluster(Shape& s, bool dots, std::size_t shared, const char* op) {
  s.cluster = s.padded_n / kClusterNeurons;
  s.row_parts = s.cluster;
  s.dot_parts = kTile / kClusterNeurons;
  // Half as many samples make a step shorter, if all clusters still run at once.
  s.samples = s.padded_b / 8 <= clusters_at_once(s.cluster, shared, op) ? 8 : 16;
  s.threads = kClusterThreads;
  s.slot_bytes = s.terms * kClusterThreads * static_cast<int>(sizeof(uint4));
  std::size_t beside =
      static_cast<std::size_t>(4 * s.terms * s.padded_n * s.samples) +
      sizeof(float) *
          static_cast<std::size_t>(s.samples *
                                   (2 * kStagedChannels + kDepthWarps * kPitch + 2 * kMostBlocks)) +
      2 * kStagedChannels;
  if (dots) {
    beside +=
        sizeof(float) *
        static_cast<std::size_t>(kClusterWarps * std::min(s.channels, kStagedChannels) * s.samples);
  }
  const int room = static_cast<int>((shared - beside) / static_cast<std::size_t>(s.slot_bytes));
  s.slots = std::clamp(s.channels - held_channels(s.terms), 0, room);
  s.shared_bytes = beside + static_cast<std::size_t>(s.slots * s.slot_bytes);
  s.most_shared_bytes = shared;
}

template <class Element>
void launch_cluster(const Loop& loop, const char* op, cudaStream_t stream) {
  const Shape& s = loop.shape;
  with_terms(s.terms, [&]<int Terms>() {
    auto* const kernel =
        s.samples == 8 ? cluster_kernel<Terms, 8, Element> : cluster_kernel<Terms, 16, Element>;
    cudaLaunchAttribute attribute;
    const cudaLaunchConfig_t config = annulus::cuda::cluster_launch(
        static_cast<unsigned>(s.grid), kClusterThreads, static_cast<unsigned>(s.cluster),
        s.shared_bytes, stream, attribute);
    // Always the most: it is the function's, and another thread may be about to launch it, too.
    annulus::cuda::throw_on_error(
        cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize,
                             static_cast<int>(s.most_shared_bytes)),
        op, "shared memory of the ring loop in clusters");
    annulus::cuda::throw_on_error(cudaLaunchKernelEx(&config, kernel, loop), op,
                                  "launch of the ring loop in clusters");
  });
}

}  // namespace annulus::ring::cuda::tensor
