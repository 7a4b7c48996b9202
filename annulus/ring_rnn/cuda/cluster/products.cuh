// What the warps of a cluster multiply. cuda/cluster/loop.cuh says how it fits into a step.
#pragma once

#include <cstdint>
#include <type_traits>

#include "annulus/cuda/mma.cuh"
#include "annulus/ring_rnn/cuda/cluster/shared.cuh"
#include "annulus/ring_rnn/cuda/step.cuh"

namespace annulus::ring_rnn::cuda::tensor {

#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900

// What the products of a warp need to know.
template <int Terms, int Samples>
class ClusterProducts {
 public:
  static constexpr int kHeld = held_channels(Terms);
  static constexpr int kColumns = Samples / 8;
  // With one term the tensor cores add the channels up: two sums by turns, so that none waits for the
  // product before.
  static constexpr int kSums = Terms == 1 ? 2 : 1;

  __device__ ClusterProducts(const Pass& loop, const ClusterTiling& tiling,
                             ClusterShared<Terms, Samples>& shared, int rank)
      : loop_(loop),
        shared_(shared),
        tiling_(tiling),
        warp_(static_cast<int>(threadIdx.x) >> 5),
        lane_(static_cast<int>(threadIdx.x) & 31) {
    const Layout& s = loop.layout;
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
    for (int i = kHeld; i < min(s.channels, shared_last()); ++i) {
#pragma unroll
      for (int tile = 0; tile < Terms; ++tile) *kept(i, tile) = fetch(i, tile);
    }
  }

  // Adds the channels from `first` on that are staged and count. Usual: all of them do, and no c has two
  // terms but perhaps that of Wo.
  __device__ void add(bool usual, int parity, int first) {
    const Layout& s = loop_.layout;
    const int last = min(s.channels, first + kStagedChannels);
    load_x(parity);
    const std::uint32_t* const c = shared_.c[parity][0] - first * (factor_words(Terms) * Samples);
    std::uint64_t count = 0, two_terms = 0;  // bits of channels
    usual = usual && (first > 0 || last >= kHeld);
    if (!usual) {
#pragma unroll
      for (int i = 0; i < kStagedChannels; i += 32) {
        const unsigned what = first + i + lane_ < last ? shared_.channels[parity][i + lane_] : 0u;
        count |= std::uint64_t{__ballot_sync(~0u, (what & kCounts) != 0)} << i;
        two_terms |= std::uint64_t{__ballot_sync(~0u, (what & kTwoTerms) != 0)} << i;
      }
    }
    const auto has = [&](std::uint64_t bits, int i) { return (bits >> (i - first) & 1) != 0; };
    const auto has_two = [&](int i) {
      return usual ? i == 0 && (shared_.channels[parity][0] & kTwoTerms) != 0 : has(two_terms, i);
    };
    // Channel i, or i and i + 1. Ask whether they count, and whether c has two terms.
    const auto pair = [&]<bool Ask, bool AskTerms, int Count>(int i, auto&& tile_of) {
      const auto counts = [&](int h) { return !Ask || (i + h < last && has(count, i + h)); };
      if constexpr (Terms == 1) {
#pragma unroll
        for (int h = 0; h < Count; ++h) {
          if (!counts(h)) continue;
          uint2 x[kColumns];
          scale(c + (i + h) * 2 * Samples, AskTerms && has_two(i + h), x);
          const uint4 w = tile_of(h, 0);
#pragma unroll
          for (int j = 0; j < kColumns; ++j) mma<bfloat16>(sum_[h][j], w, x[j].x, x[j].y);
        }
      } else {
        // Both products before the first sum, which would wait for its product.
        float part[Count][kColumns][4];
#pragma unroll
        for (int h = 0; h < Count; ++h) {
          if (counts(h)) multiply([&](int tile) { return tile_of(h, tile); }, part[h]);
        }
#pragma unroll
        for (int h = 0; h < Count; ++h) {
          if (!counts(h)) continue;
#pragma unroll
          for (int j = 0; j < kColumns; ++j) {
            const float2 by =
                *reinterpret_cast<const float2*>(c + (i + h) * Samples + j * 8 + (lane_ & 3) * 2);
#pragma unroll
            for (int e = 0; e < 4; ++e) {
              sum_[0][j][e] = fmaf((e & 1) ? by.y : by.x, part[h][j][e], sum_[0][j][e]);
            }
          }
        }
      }
    };
    const auto held = [&]<bool Ask>() {
#pragma unroll
      for (int i = 0; i < kHeld; i += 2) {
        const auto tile_of = [&](int h, int tile) { return held_[i + h][tile]; };
        if (i == 0) {
          pair.template operator()<Ask, true, 2>(i, tile_of);
        } else {
          pair.template operator()<Ask, Ask, 2>(i, tile_of);
        }
      }
    };
    int i = first;
    if (first == 0) {
      if (usual) {
        held.template operator()<false>();
      } else {
        held.template operator()<true>();
      }
      i = kHeld;
    }
    const int in_shared = min(last, shared_last());
    if (usual) {
      const auto tile_of = [&](int h, int tile) { return *kept(i + h, tile); };
#pragma unroll 2
      for (; i + 1 < in_shared; i += 2) pair.template operator()<false, false, 2>(i, tile_of);
      if (i + 1 == last && last == in_shared) {  // or the channels after it would change their sums
        pair.template operator()<false, false, 1>(i, tile_of);
        ++i;
      }
      usual = false;  // of what is left: all count
      count = ~std::uint64_t{0};
    }
    for (; i < last; i += 2) {
      pair.template operator()<true, true, 2>(i, [&](int h, int tile) {
        return i + h < shared_last() ? *kept(i + h, tile) : fetch(i + h, tile);
      });
    }
  }

  // Leaves the sums of this warp where `total` finds them, and begins new ones.
  __device__ void store(int parity) {
#pragma unroll
    for (int j = 0; j < kColumns; ++j) {
#pragma unroll
      for (int e = 0; e < 4; ++e) {
        const int sample = j * 8 + (lane_ & 3) * 2 + (e & 1);
        shared_.parts[parity % part_buffers(Terms)][warp_ >> 1][sample]
                     [(warp_ & 1) * 16 + (lane_ >> 2) + (e >> 1) * 8] =
            kSums == 2 ? sum_[0][j][e] + sum_[kSums - 1][j][e] : sum_[0][j][e];
#pragma unroll
        for (int h = 0; h < kSums; ++h) sum_[h][j][e] = 0;
      }
    }
  }
  __device__ float total(int sample, int neuron, int parity) const {
    float sum = 0;
#pragma unroll
    for (int i = 0; i < kDepthWarps; ++i) {
      sum += shared_.parts[parity % part_buffers(Terms)][i][sample][neuron];
    }
    return sum;
  }

 private:
  // Channels from here on are fetched from L2.
  __device__ int shared_last() const { return kHeld + tiling_.shared_channels; }
  __device__ uint4* kept(int i, int tile) const {
    return shared_.weights() + (((i - kHeld) * Terms + tile) * kClusterWarps + warp_) * 32 + lane_;
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
      const bool whole = a.N == loop_.layout.padded_n && a.Wo.stride[1] == 1 &&
                         aligned(a.Wo.data, a.Wo.stride[0]) &&
                         (a.K == 0 || (a.Wa.stride[2] == 1 && aligned(a.Wa.data, a.Wa.stride[1]) &&
                                       a.Wa.stride[0] % 4 == 0));
      if (whole) {
        const bool deep = deep_ < deep_tiles_;
        const T* const own = static_cast<const T*>(a.Wo.data) + neuron_ * a.Wo.stride[0] + m;
        const T* const others = static_cast<const T*>(a.Wa.data) + neuron_ * a.Wa.stride[1] + m;
        const auto read = [&](int i) {
          if (!deep || i >= loop_.layout.channels) return make_uint4(0, 0, 0, 0);
          const T* from = i == 0 ? own : others + (i - 1) * a.Wa.stride[0];
          const std::int64_t below = 8 * (i == 0 ? a.Wo.stride[0] : a.Wa.stride[1]);
          const uint2 low = __ldg(reinterpret_cast<const uint2*>(from));
          const uint2 high = __ldg(reinterpret_cast<const uint2*>(from + below));
          return make_uint4(low.x, high.x, low.y, high.y);
        };
#pragma unroll
        for (int i = 0; i < kHeld; ++i) held_[i][0] = read(i);
#pragma unroll 4
        for (int i = kHeld; i < loop_.layout.channels; ++i) *kept(i, 0) = read(i);
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
                 i < loop_.layout.channels && n < a.N ? count : 0, rows[half]);
      }
    };
    const auto tile = [](const float(&rows)[2][4], uint4(&to)[Terms]) {
      std::uint32_t word[2][2][Terms];
#pragma unroll
      for (int half = 0; half < 2; ++half) {
#pragma unroll
        for (int pair = 0; pair < 2; ++pair) {
          split_pair<Terms>(rows[half][2 * pair], rows[half][2 * pair + 1], word[half][pair]);
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
    for (int first = kHeld; first < loop_.layout.channels; first += kAtOnce) {
#pragma unroll
      for (int i = 0; i < kAtOnce; ++i) load(first + i, v[i]);
#pragma unroll
      for (int i = 0; i < kAtOnce; ++i) {
        if (first + i >= loop_.layout.channels) break;
        uint4 terms[Terms];
        tile(v[i], terms);
#pragma unroll
        for (int term = 0; term < Terms; ++term) *kept(first + i, term) = terms[term];
      }
    }
  }

  // A tile of channel i, as left operand. The depth is taken in another order
  // than mma.cuh has it, so that a lane's four numbers of a row lie together: 4 q, ..., 4 q + 3.
  __device__ uint4 fetch(int i, int tile) const {
    const Layout& s = loop_.layout;
    if (i >= s.channels || deep_ >= deep_tiles_) return make_uint4(0, 0, 0, 0);
    const int m = deep_ * 16 + (lane_ & 3) * 4;
    const std::int64_t block =
        (static_cast<std::int64_t>(neuron_ / kTile) * s.tiles + m / kHopperDepth) * s.channels + i;
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
#pragma unroll
    for (int term = 0; term < Terms; ++term) {
#pragma unroll
      for (int j = 0; j < kColumns; ++j) {
        const std::uint16_t* at = shared_.x[parity][term] +
                                  (deep_ * Samples + j * 8 + (lane_ >> 2)) * 16 + (lane_ & 3) * 4;
        x_[term][j] = deep_ < deep_tiles_ ? *reinterpret_cast<const uint2*>(at) : make_uint2(0, 0);
      }
    }
  }

  // X times c of a channel, as right operand.
  __device__ __forceinline__ void scale(const std::uint32_t* c, bool two_terms,
                                        uint2 (&x)[kColumns]) const {
    std::uint32_t high[kColumns], low[kColumns];
    load_factors(c, high);
    if (two_terms) load_factors(c + Samples, low);
#pragma unroll
    for (int j = 0; j < kColumns; ++j) {
      const uint2 v = x_[0][j];
      if (two_terms) {
        const Scale by{high[j], low[j]};
        x[j] = make_uint2(scaled_pair(v.x, by), scaled_pair(v.y, by));
      } else {
        x[j] = make_uint2(scaled_pair(v.x, high[j]), scaled_pair(v.y, high[j]));
      }
    }
  }
  __device__ __forceinline__ void load_factors(const std::uint32_t* from,
                                               std::uint32_t (&to)[kColumns]) const {
    from += (lane_ >> 2) * kColumns;
    if constexpr (kColumns == 2) {
      const uint2 v = *reinterpret_cast<const uint2*>(from);
      to[0] = v.x;
      to[1] = v.y;
    } else {
      to[0] = *from;
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
          mma_first<bfloat16>(part[j], w, x.x, x.y);
        } else {
          mma<bfloat16>(part[j], w, x.x, x.y);
        }
      }
    }
  }

  const Pass& loop_;
  ClusterShared<Terms, Samples>& shared_;
  const ClusterTiling& tiling_;
  int warp_, lane_;
  int deep_tiles_, deep_;
  int neuron_;  // of row lane / 4 of the tile
  uint4 held_[kHeld][Terms];
  uint2 x_[Terms][kColumns];
  float sum_[kSums][kColumns][4] = {};
};
#endif  // 9.0

}  // namespace annulus::ring_rnn::cuda::tensor
