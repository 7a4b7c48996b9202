// What lies in the shared memory of a block of a cluster, and how c of a step comes there.
// cuda/cluster/loop.cuh says how they fit into a step.
#pragma once

#include <cstdint>

#include "annulus/cuda/mma.cuh"
#include "annulus/cuda/pipeline.cuh"
#include "annulus/ring_rnn/cuda/tensor.cuh"

namespace annulus::ring_rnn::cuda::tensor {

// Shared memory of one block. The weights that a thread does not hold lie behind it:
// [channel][term][warp][lane].
template <int Terms, int Samples>
struct alignas(16) ClusterShared {
  std::uint16_t x[2][Terms][most_cluster_neurons(Terms) * Samples];  // [depth / 16][sample][16]
  // f32; with one term the pairs {high, high} of all samples, those of a lane side by side, and behind
  // them the pairs of low terms.
  std::uint32_t c[2][kStagedChannels][factor_words(Terms) * Samples];
  float parts[part_buffers(Terms)][kDepthWarps][Samples][kPitch];
  float4 sums[2][Samples];                    // of X, over the neurons of each block
  SharedBarrier arrived[2];                   // X and its sums
  std::uint8_t channels[2][kStagedChannels];  // what there is to know of them: kCounts, kTwoTerms

  __device__ uint4* weights() { return reinterpret_cast<uint4*>(this + 1); }
};
static_assert(sizeof(ClusterShared<1, 8>) == cluster_shared_bytes(1, 8) &&
              sizeof(ClusterShared<2, 16>) == cluster_shared_bytes(2, 16) &&
              sizeof(ClusterShared<3, 16>) == cluster_shared_bytes(3, 16));
// A channel's c are not all zero; one of them is no bf16.
enum : std::uint8_t { kCounts = 1, kTwoTerms = 2 };

#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900

// c of the staged channels on its way to shared memory, `kEach` numbers a thread: from A, or where it
// was prepared. What is asked for stays bits until it is stored, after the products of a step: nobody
// waits for it.
template <int Terms, int Samples, bool Backward>
class Factors {
 public:
  __device__ Factors(const Pass& loop, std::int64_t first_row)
      : loop_(loop),
        sample_(static_cast<int>(threadIdx.x) % Samples),
        channel_(static_cast<int>(threadIdx.x) / Samples),
        row_(first_row + sample_) {
    if constexpr (Backward) {
      base_ = channel_ * loop.layout.padded_b + row_;
    } else {  // channel 0 is not in A
      base_ = offset<float>(loop.args.A, row_, 0, channel_ - 1);
      visit_narrow(loop.dtype, [&]<class T>() { J1_ = get<T>(loop.args.J1); });
    }
  }

  // Asks for c of a step, from channel `first` on.
  __device__ __forceinline__ void load(std::int64_t time, int first) {
    const Layout& s = loop_.layout;
    const Ref<3>& A = loop_.args.A;
    counts_ = Backward || (row_ < s.B && live(loop_.args, row_, time));
    const std::int64_t pitch = Backward ? s.padded_b : A.stride[2];
    const std::int64_t at =
        base_ + first * pitch + time * (Backward ? s.channels * pitch : A.stride[1]);
    const void* const from = Backward ? static_cast<const void*>(loop_.coefficients.c) : A.data;
#pragma unroll
    for (int i = 0; i < kEach; ++i) {
      bits_[i] = 0;
      const int k = first + channel_ + i * kApart;
      if (counts_ && k < s.channels && (Backward || k > 0)) {
        bits_[i] = load_bits(from, at + i * kApart * pitch, type() == DType::kF32);
      }
    }
  }

  // Stores it. Is there anything unusual: a channel that does not count, or c with two terms? (That of
  // Wo may have them: it is no tensor.)
  __device__ __forceinline__ bool store(ClusterShared<Terms, Samples>& shared, int parity,
                                        int first) const {
    const int channels = loop_.layout.channels - first;
    const int lane = static_cast<int>(threadIdx.x) & 31;
    bool unusual = false;
#pragma unroll
    for (int i = 0; i < kEach; ++i) {
      if (i * kApart >= channels) break;
      const int staged = channel_ + i * kApart;
      const bool own = !Backward && first + staged == 0;
      const float c = own ? (counts_ ? J1_ : 0.0f) : number_of(type(), bits_[i]);
      bool two = false;
      std::uint32_t* const to = shared.c[parity][staged];
      if constexpr (Terms == 1) {
        __nv_bfloat16 term[2];
        split_bf16<2>(c, term);
        const int at = sample_ % 8 * (Samples / 8) + sample_ / 8;
        to[at] = pack_bf16(term[0], term[0]);
        to[Samples + at] = pack_bf16(term[1], term[1]);
        two = __bfloat162float(term[1]) != 0;
      } else {
        to[sample_] = __float_as_uint(c);
      }
      // Over the samples of the channel, which are neighbouring lanes.
      constexpr unsigned kMine = (1u << Samples) - 1;
      const bool any = (__ballot_sync(~0u, c != 0) >> (lane & ~(Samples - 1)) & kMine) != 0;
      const bool any_two =
          Terms == 1 && (__ballot_sync(~0u, two) >> (lane & ~(Samples - 1)) & kMine) != 0;
      if (sample_ == 0) {
        shared.channels[parity][staged] =
            static_cast<std::uint8_t>((any ? kCounts : 0) | (any_two ? kTwoTerms : 0));
      }
      unusual |= staged < channels && (!any || (any_two && first + staged > 0));
    }
    return unusual;
  }

 private:
  static constexpr int kEach = kStagedChannels * Samples / kClusterThreads;
  static constexpr int kApart = kClusterThreads / Samples;  // channels between a thread's numbers

  __device__ DType type() const { return Backward ? DType::kF32 : loop_.dtype; }

  const Pass& loop_;
  int sample_, channel_;
  std::int64_t row_, base_;
  float J1_ = 0;
  std::uint32_t bits_[kEach] = {};
  bool counts_ = false;
};
#endif  // 9.0

}  // namespace annulus::ring_rnn::cuda::tensor
