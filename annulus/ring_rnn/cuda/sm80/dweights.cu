// The gradients of the weights, after the backward loop: one deep product for every channel,
//   dV_k[i, j] = sum over (t, b) of (c_k g)[tb, i] s[tb, j]
// written once. A block of threads owns 128 x 128 of one channel and a part of the depth; rows come
// 32 at a time, and 32 rows whose c are all zero are passed over. c is multiplied onto g in f32 on
// the way into shared memory, then split into terms.
#include "annulus/cuda/check.h"
#include "annulus/cuda/mma.cuh"
#include "annulus/ring_rnn/cuda/format.cuh"
#include "annulus/ring_rnn/cuda/tensor.cuh"

namespace annulus::ring_rnn::cuda::tensor {

namespace {

constexpr int kRows = 32;       // of the depth at a time
constexpr int kRowPitch = 136;  // of a row in shared memory: 16 bytes more, against bank conflicts
constexpr int kThreads = 256;

template <int Terms>
constexpr int kBuffer = Terms* kRows* kRowPitch;  // 16-bit numbers

// Walks over the row tiles, of 32 rows, that count for a channel.
struct RowTiles {
  std::int64_t index, last;

  __device__ void skip(const WeightGradients& a, int channel) {
    const Layout& s = a.layout;
    while (index < last &&
           ((__ldg(a.active_rows + index * s.mask_words + (channel >> 5)) >> (channel & 31)) &
            1u) == 0) {
      ++index;
    }
  }
};

template <int Terms>
__global__ void __launch_bounds__(kThreads, Terms == 1 ? 2 : 1)
    dweights_kernel(const __grid_constant__ Sm80WeightGradients a) {
  extern __shared__ __align__(16) std::uint16_t shared_halves[];
  const Layout& s = a.layout;
  const int lane = static_cast<int>(threadIdx.x) & 31;
  const int warp = static_cast<int>(threadIdx.x) >> 5;
  const int warp_m = warp >> 2;  // 64 rows of the tile
  const int warp_n = warp & 3;   // 32 columns
  const int channel = a.first_channel + static_cast<int>(blockIdx.y);
  const std::int64_t i0 = static_cast<std::int64_t>(blockIdx.x / a.sides) * kSide;
  const std::int64_t j0 = static_cast<std::int64_t>(blockIdx.x % a.sides) * kSide;
  const std::int64_t tiles = s.T * (s.padded_b / kRows);
  RowTiles at{tiles * blockIdx.z / gridDim.z, tiles * (blockIdx.z + 1) / gridDim.z};
  at.skip(a, channel);

  const auto g_part = [&](int buffer) { return shared_halves + buffer * 2 * kBuffer<Terms>; };
  const auto s_part = [&](int buffer) { return g_part(buffer) + kBuffer<Terms>; };
  const std::int64_t plane = s.T * s.padded_b * s.padded_n;

  // s: 16 bytes of a row at a time, straight into shared memory.
  const auto load_s = [&](std::int64_t tile, int buffer) {
#pragma unroll
    for (int i = 0; i < Terms * 2; ++i) {
      const int task = i * kThreads + static_cast<int>(threadIdx.x);  // [term][32][16]
      const int term = task >> 9;
      const int row = (task >> 4) & 31;
      const int col = (task & 15) * 8;
      std::uint16_t* to = s_part(buffer) + (term * kRows + row) * kRowPitch + col;
      if (j0 + col < s.padded_n) {
        copy_async_16(to, a.states + term * plane + (tile * kRows + row) * s.padded_n + j0 + col);
      } else {
        *reinterpret_cast<uint4*>(to) = make_uint4(0, 0, 0, 0);
      }
    }
    copy_async_commit();
  };
  float4 g[4];
  float c[4];
  const auto load_g = [&](std::int64_t tile) {
    const std::int64_t row = tile * kRows + warp;
    const std::int64_t t = row / s.padded_b;
    const std::int64_t b = row % s.padded_b;
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const std::int64_t col = i0 + lane * 4;
      g[i] = col < s.padded_n
                 ? *reinterpret_cast<const float4*>(a.g + (row + i * 8) * s.padded_n + col)
                 : make_float4(0, 0, 0, 0);
      c[i] = __ldg(a.c + (t * s.channels + channel) * s.padded_b + b + i * 8);
    }
  };
  const auto store_g = [&](int buffer) {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      std::uint32_t low[Terms], high[Terms];
      split_pair<Terms>(c[i] * g[i].x, c[i] * g[i].y, low);
      split_pair<Terms>(c[i] * g[i].z, c[i] * g[i].w, high);
#pragma unroll
      for (int term = 0; term < Terms; ++term) {
        std::uint16_t* to = g_part(buffer) + (term * kRows + warp + i * 8) * kRowPitch + lane * 4;
        *reinterpret_cast<uint2*>(to) = make_uint2(low[term], high[term]);
      }
    }
  };

  float acc[4][4][4] = {};
  int buffer = 0;
  if (at.index < at.last) {
    load_s(at.index, 0);
    load_g(at.index);
    store_g(0);
  }
  while (at.index < at.last) {
    copy_async_wait<0>();
    __syncthreads();  // this buffer is full, and the other no longer read
    ++at.index;
    at.skip(a, channel);
    const bool more = at.index < at.last;
    if (more) {
      load_s(at.index, buffer ^ 1);
      load_g(at.index);
    }
    const std::uint16_t* gs = g_part(buffer);
    const std::uint16_t* ss = s_part(buffer);
#pragma unroll
    for (int d = 0; d < kRows / 16; ++d) {
      uint4 v[Terms][2];
#pragma unroll
      for (int term = 0; term < Terms; ++term) {
#pragma unroll
        for (int h = 0; h < 2; ++h) {
          const int k = d * 16 + ((lane >> 3) & 1) * 8 + (lane & 7);
          const int n = warp_n * 32 + h * 16 + (lane >> 4) * 8;
          v[term][h] = ldmatrix_transposed(ss + (term * kRows + k) * kRowPitch + n);
        }
      }
#pragma unroll
      for (int m = 0; m < 4; ++m) {
        uint4 x[Terms];
#pragma unroll
        for (int term = 0; term < Terms; ++term) {
          const int k = d * 16 + (lane >> 4) * 8 + (lane & 7);
          const int col = warp_m * 64 + m * 16 + ((lane >> 3) & 1) * 8;
          x[term] = ldmatrix_transposed(gs + (term * kRows + k) * kRowPitch + col);
        }
        // The tensor core truncates a sum where it should round it: with more terms than one it adds no
        // more than these 16 rows, and the registers add the rest (see cuda/sm90/dweights.cu).
#pragma unroll
        for (int h = 0; h < 2; ++h) {
          float part[2][4] = {};
          float(&left)[4] = Terms > 1 ? part[0] : acc[m][2 * h];
          float(&right)[4] = Terms > 1 ? part[1] : acc[m][2 * h + 1];
#pragma unroll
          for (int p = 0; p < products_of(Terms); ++p) {
            const uint4& xp = x[term_of_x<Terms>(p)];
            const uint4& vp = v[term_of_v<Terms>(p)][h];
            mma<bfloat16>(left, xp, vp.x, vp.y);
            mma<bfloat16>(right, xp, vp.z, vp.w);
          }
          if constexpr (Terms > 1) {
#pragma unroll
            for (int e = 0; e < 4; ++e) {
              acc[m][2 * h][e] += part[0][e];
              acc[m][2 * h + 1][e] += part[1][e];
            }
          }
        }
      }
    }
    if (more) store_g(buffer ^ 1);
    buffer ^= 1;
  }

  const std::int64_t part =
      (static_cast<std::int64_t>(blockIdx.z) * s.channels + channel) * a.sides * kSide;
#pragma unroll
  for (int m = 0; m < 4; ++m) {
#pragma unroll
    for (int n = 0; n < 4; ++n) {
#pragma unroll
      for (int e = 0; e < 4; ++e) {
        const std::int64_t i = i0 + warp_m * 64 + m * 16 + (e >> 1) * 8 + (lane >> 2);
        const std::int64_t j = j0 + warp_n * 32 + n * 8 + (lane & 3) * 2 + (e & 1);
        if (gridDim.z > 1) {
          a.parts[(part + i) * a.sides * kSide + j] = acc[m][n][e];
        } else {
          put_weight_gradient(a, channel, i, j, acc[m][n][e]);
        }
      }
    }
  }
}

}  // namespace

void run_dweights(const Sm80WeightGradients& a, const Launch& launch) {
  const int channels = a.last_channel - a.first_channel;
  if (channels <= 0) return;
  with_terms(a.layout.state_terms, [&]<int Terms>() {
    const std::size_t bytes = 4 * kBuffer<Terms> * sizeof(std::uint16_t);
    allow_shared(launch.op, "shared memory of the weights' gradient", dweights_kernel<Terms>,
                 bytes);
    const dim3 grid(static_cast<unsigned>(a.sides * a.sides), static_cast<unsigned>(channels),
                    static_cast<unsigned>(a.depth_splits));
    dweights_kernel<Terms><<<grid, kThreads, bytes, launch.stream>>>(a);
  });
  check_launch(launch.op, "gradient of the ring's weights");
}

}  // namespace annulus::ring_rnn::cuda::tensor
