// What happens to rows by themselves, before and after the products: a warp a row (b, t, h), and types at run time.

#include <algorithm>
#include <cstdint>

#include "annulus/attention/cuda/launch.h"
#include "annulus/attention/cuda/mask.cuh"
#include "annulus/cuda/fast_div.h"
#include "annulus/cuda/launch.cuh"
#include "annulus/cuda/math.cuh"
#include "annulus/cuda/reduce.cuh"
#include "annulus/cuda/rows.cuh"

namespace annulus::attention::cuda {

namespace {

using namespace annulus::cuda;

constexpr int kThreads = 256, kRowsPerBlock = kThreads / 32;

struct Row {
  std::int64_t b, t, h;
  __device__ Row(std::int64_t i, std::int64_t rows, std::int64_t heads) {
    if (i < INT32_MAX && rows < INT32_MAX && heads < INT32_MAX) {  // four times fewer instructions
      const auto of = static_cast<std::uint32_t>(i), n = static_cast<std::uint32_t>(rows),
                 m = static_cast<std::uint32_t>(heads), token = of / m;
      h = of - token * m;
      b = token / n;
      t = token - static_cast<std::uint32_t>(b) * n;
      return;
    }
    b = i / (rows * heads);
    t = i / heads % rows;
    h = i % heads;
  }
};
__device__ __forceinline__ std::int64_t first_row() {
  return static_cast<std::int64_t>(blockIdx.x) * kRowsPerBlock + threadIdx.x / 32;
}
__device__ __forceinline__ std::int64_t row_step() {
  return static_cast<std::int64_t>(gridDim.x) * kRowsPerBlock;
}

// Eight lanes a row: a lane has 16 bytes at a time, as a vector where rows allow it. Sums are the same to the bit in any layout.
template <bool kWhole, class T>
__device__ __forceinline__ float dot(const T* a, std::int64_t a_step, const T* b,
                                     std::int64_t b_step, int count) {
  float x[kVectorWidth<T>] = {}, y[kVectorWidth<T>] = {}, sum = 0;
  if constexpr (kWhole) {
    load(a, x);
    load(b, y);
  } else {
#pragma unroll
    for (int i = 0; i < kVectorWidth<T>; ++i) {
      if (i >= count) continue;
      x[i] = static_cast<float>(a[i * a_step]);
      y[i] = static_cast<float>(b[i * b_step]);
    }
  }
#pragma unroll
  for (int i = 0; i < kVectorWidth<T>; ++i) sum = fmaf(x[i], y[i], sum);
  return sum;
}

template <bool kWhole>
__global__ void __launch_bounds__(kThreads) delta_kernel(const __grid_constant__ DeltaArgs a) {
  await_previous_kernel();
  constexpr int kLanes = 8, kEach = 32 / kLanes;
  const int lane = static_cast<int>(threadIdx.x) % kLanes;
  const std::int64_t all = a.B * a.Tq * a.H;
  for (std::int64_t first = first_row() * kEach; first < all; first += row_step() * kEach) {
    const std::int64_t i = first + threadIdx.x % 32 / kLanes;
    const bool there = i < all;
    const Row r(there ? i : 0, a.Tq, a.H);
    float sum = 0;
    visit_narrow(a.dtype, [&]<class T>() {
      const T* d = a.do_.at<const T>(r.b, r.h) + r.t * a.do_.row;
      const T* o = a.o.at<const T>(r.b, r.h) + r.t * a.o.row;
      constexpr int kWidth = kVectorWidth<T>;
      for (int c = lane * kWidth; c < a.Dv; c += kLanes * kWidth) {
        sum += dot<kWhole>(d + c * a.do_.column, a.do_.column, o + c * a.o.column, a.o.column,
                           a.Dv - c);
      }
    });
    sum = warp_sum<kLanes>(sum);
    if (!there) continue;
    if (lane == 0) {
      const float dlse =
          a.dlse.data == nullptr ? 0.0f : a.dlse.at<const float>(r.b, r.h)[r.t * a.dlse.row];
      a.delta[(r.b * a.H + r.h) * a.Tq + r.t] = sum - dlse;
    }
    if (a.clear != nullptr) {
      auto* const row = reinterpret_cast<float4*>(a.clear + i * a.clear_width);
      for (int c = lane; c < a.clear_width / 4; c += kLanes) row[c] = float4{};
    }
  }
}

// Eight lanes a row, as above; a row of blocks for each tensor.
__global__ void __launch_bounds__(kThreads) find_kernel(const __grid_constant__ FiniteArgs a) {
  await_previous_kernel();
  constexpr int kLanes = 8, kEach = 32 / kLanes;
  const FiniteArgs::One& one = a.of[blockIdx.y];
  const std::int64_t all = a.B * one.rows * one.heads;
  bool any = false;
  if (one.flat) {  // nearly always: without a thought where rows begin, and four loads at a time
    const auto* const from = static_cast<const uint4*>(one.tensor.data);
    const std::int64_t vectors = all * one.columns / 8, step = std::int64_t{gridDim.x} * kThreads;
    for (std::int64_t i = std::int64_t{blockIdx.x} * kThreads + threadIdx.x; i < vectors;
         i += 4 * step) {
      uint4 v[4] = {};
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        if (i + j * step < vectors) v[j] = from[i + j * step];
      }
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        any |= a.dtype == DType::kBF16 ? any_not_finite<bfloat16>(v[j])
                                       : any_not_finite<float16>(v[j]);
      }
    }
    if (any) *a.found = 1;
    return;
  }
  for (std::int64_t i = first_row() * kEach + threadIdx.x % 32 / kLanes; i < all;
       i += row_step() * kEach) {
    const Row r(i, one.rows, one.heads);
    const auto* row = one.tensor.at<const std::uint16_t>(r.b, r.h) + r.t * one.tensor.row;
    for (int c = static_cast<int>(threadIdx.x) % kLanes * 8; c < one.columns; c += kLanes * 8) {
      const uint4 v = *reinterpret_cast<const uint4*>(row + c);
      any |= a.dtype == DType::kBF16 ? any_not_finite<bfloat16>(v) : any_not_finite<float16>(v);
    }
  }
  if (any) *a.found = 1;
}

// ---- The rows of layers

// Half a warp a row (b, t, h): lane i asks whether layer i has the token, and where.
constexpr int kHalf = 16;
static_assert(Dilated::kMost <= kHalf);

// Both halves of a warp go on until the later one is done, as they exchange numbers.
struct HalfRow {
  bool there;
  Row row;
  __device__ HalfRow(std::int64_t i, std::int64_t all, std::int64_t rows, std::int64_t heads)
      : there(i < all), row(there ? i : 0, rows, heads) {}
};
template <class F>
__device__ __forceinline__ void for_each_half_row(std::int64_t B, std::int64_t rows,
                                                  std::int64_t heads, F&& f) {
  const std::int64_t all = B * rows * heads;
  for (std::int64_t first = first_row() * 2; first < all; first += row_step() * 2) {
    f(HalfRow(first + threadIdx.x / kHalf % 2, all, rows, heads));
  }
}
// Among the rows of all heads, of which head_rows is the first of the head; negative: layer `i` does not have token t.
__device__ __forceinline__ std::int64_t layer_row(const Dilated& p, const LayerRows& rows,
                                                  const LayerDivisors& by, int i,
                                                  std::int64_t head_rows, std::int64_t query_head,
                                                  std::int64_t t) {
  if (p.tokens >= INT32_MAX) {
    const std::int64_t own = rows.token(p, i, query_head, t);
    return own < 0 ? -1 : head_rows + own;
  }
  const auto token = static_cast<std::uint32_t>(t), h = static_cast<std::uint32_t>(query_head);
  const std::uint32_t segment = by.length[i].divide(token),
                      within = token - segment * by.length[i].divisor;
  const std::uint32_t step = by.rate[i].divide(within);
  const std::uint32_t offset = p.offsets == DilatedOffsets::kMod
                                   ? h - by.rate[i].divide(h) * by.rate[i].divisor
                                   : by.heads[i].divide(h);
  if (within - step * by.rate[i].divisor != offset) return -1;
  return head_rows + rows.first[i] + static_cast<std::int64_t>(segment) * by.rows[i] + step;
}

// Blocks of threads have a head at a time, so that what finding a row needs of it is found once. A thread has 16 columns of a
// row, in four vectors that lie as far apart as the row has threads, and asks for all it reads of two layers at once.
// (Of 8192 tokens in three layers, 37 MB, this takes 18 us on an H200. Threads that find (b, t, h) in their number take 32
// with four columns each and 20 with 16. Without this pass, the branch that has every token in a launch of its own whose rows end
// with adding the states of the others, LongNet's forward of 8192 tokens took 0.149 ms instead of 0.133: loads at the end of a
// tile wait for memory and nothing hides it, and what they need of registers makes all forwards up to 14 % slower.)
constexpr int kMergeVectors = 4;
ANNULUS_HD int merge_threads(int columns) {  // of a row
  return static_cast<int>(tiles_of(LayerRows::pitch(columns), 4 * kMergeVectors));
}
__global__ void __launch_bounds__(kThreads, 2) merge_kernel(const __grid_constant__ MergeArgs a) {
  await_previous_kernel();
  constexpr int kVectors = kMergeVectors, kAtOnce = 2;
  const int pitch = static_cast<int>(LayerRows::pitch(a.columns)),
            threads = merge_threads(a.columns), rows = kThreads / threads;
  const int own_row = static_cast<int>(threadIdx.x) / threads,
            own = static_cast<int>(threadIdx.x) - own_row * threads;
  if (own_row >= rows) return;
  const int parts = a.parts > 0 ? a.parts : a.pattern.branches;
  const bool states = a.from.m != nullptr;
  const auto column = [&](int vector) { return (own + vector * threads) * 4; };
  for (std::int64_t head = blockIdx.y; head < a.B * a.heads; head += gridDim.y) {
    const std::int64_t b = head / a.heads, h = head - b * a.heads;
    const std::int64_t query_head = h * a.group + a.first_head, head_rows = head * a.rows.count;
    for (std::int64_t t = std::int64_t{blockIdx.x} * rows + own_row; t < a.tokens;
         t += std::int64_t{gridDim.x} * rows) {
      float v[kVectors][4] = {}, high = kNoScore, sum = 0;
      if (a.before != nullptr) {
        const float* const before = a.before + ((b * a.tokens + t) * a.heads + h) * a.columns;
#pragma unroll
        for (int k = 0; k < kVectors; ++k) {
#pragma unroll
          for (int e = 0; e < 4; ++e) {
            if (column(k) + e < a.columns) v[k][e] = before[column(k) + e];
          }
        }
      }
      for (int first = 0; first < parts; first += kAtOnce) {
        float x[kAtOnce][kVectors][4] = {}, m[kAtOnce], l[kAtOnce];
#pragma unroll
        for (int j = 0; j < kAtOnce; ++j) {
          const int part = first + j;
          std::int64_t row = -1;
          if (part < parts) {
            row = a.parts > 0
                      ? (part * a.B * a.heads + head) * a.tokens + t
                      : layer_row(a.pattern, a.rows, a.divisors, part, head_rows, query_head, t);
          }
          m[j] = kNoScore, l[j] = 0;
          if (row < 0) continue;
          if (states) m[j] = a.from.m[row], l[j] = a.from.l[row];
          const float* const from = a.from.acc + row * pitch;
#pragma unroll
          for (int k = 0; k < kVectors; ++k) {
            if (column(k) < pitch) load<4>(from + column(k), x[j][k]);
          }
        }
#pragma unroll
        for (int j = 0; j < kAtOnce; ++j) {
          float before = 1, here = 1;
          if (states) {
            if (l[j] == 0) continue;
            const float larger = fmaxf(high, m[j]), origin = origin_of(larger);
            before = exp2_fast(high - origin);
            here = exp2_fast(m[j] - origin);
            sum = fmaf(l[j], here, sum * before);
            high = larger;
          }
#pragma unroll
          for (int k = 0; k < kVectors; ++k) {
#pragma unroll
            for (int e = 0; e < 4; ++e) v[k][e] = fmaf(x[j][k][e], here, v[k][e] * before);
          }
        }
      }
      const float factor = !states ? 1.0f : sum == 0 ? 0.0f : 1.0f / sum;
      if (states && own == 0 && a.lse.data != nullptr) {
        constexpr float kLog2 = 0.693147181f;
        a.lse.at<float>(b, h)[t * a.lse.row] = sum == 0 ? kNoScore : fmaf(high, kLog2, logf(sum));
      }
      visit_narrow(a.dtype, [&]<class T>() {
        T* to = a.to.at<T>(b, h) + t * a.to.row;
#pragma unroll
        for (int k = 0; k < kVectors; ++k) {
          const float out[4] = {v[k][0] * factor, v[k][1] * factor, v[k][2] * factor,
                                v[k][3] * factor};
          if (a.to.whole) {
            if (column(k) < a.columns) store<4>(out, to + column(k));
            continue;
          }
#pragma unroll
          for (int e = 0; e < 4; ++e) {
            if (column(k) + e < a.columns) to[(column(k) + e) * a.to.column] = T(out[e]);
          }
        }
      });
    }
  }
}

__global__ void __launch_bounds__(kThreads)
    layer_delta_kernel(const __grid_constant__ LayerDeltaArgs a) {
  await_previous_kernel();
  const int lane = static_cast<int>(threadIdx.x) % kHalf;
  const std::int64_t pitch = LayerRows::pitch(a.Dv);
  for_each_half_row(a.B, a.Tq, a.H, [&](const HalfRow& at) {
    const Row& r = at.row;
    const std::int64_t own = at.there && lane < a.pattern.branches
                                 ? layer_row(a.pattern, a.rows, a.divisors, lane,
                                             (r.b * a.H + r.h) * a.rows.count, r.h, r.t)
                                 : -1;
    const float dlse = at.there && a.dlse.data != nullptr
                           ? a.dlse.at<const float>(r.b, r.h)[r.t * a.dlse.row]
                           : 0.0f;
    for (int i = 0; i < a.pattern.branches; ++i) {
      const std::int64_t row = __shfl_sync(~0u, own, i, kHalf);
      float sum = 0;
      if (row >= 0) {
        visit_narrow(a.dtype, [&]<class T>() {
          const T* d = a.do_.at<const T>(r.b, r.h) + r.t * a.do_.row;
          for (int c = lane; c < a.Dv; c += kHalf) {
            sum = fmaf(static_cast<float>(d[c * a.do_.column]), a.states.acc[row * pitch + c], sum);
          }
        });
      }
      sum = warp_sum<kHalf>(sum);
      if (row >= 0 && lane == 0) {
        const float l = a.states.l[row];
        a.delta[row] = (l == 0 ? 0.0f : sum / l) - dlse;
      }
    }
  });
}

// As above.
template <bool kWhole>
__global__ void __launch_bounds__(kThreads) round_kernel(const __grid_constant__ RoundArgs a) {
  await_previous_kernel();
  constexpr int kLanes = kWhole ? 8 : 32, kEach = 32 / kLanes;
  const int lane = static_cast<int>(threadIdx.x) % kLanes;
  const std::int64_t all = a.B * a.rows * a.heads;
  for (std::int64_t first = first_row() * kEach; first < all; first += row_step() * kEach) {
    const std::int64_t i = first + threadIdx.x % 32 / kLanes;
    if (i >= all) continue;
    const Row r(i, a.rows, a.heads);
    const float* const from = a.from == nullptr ? nullptr : a.from + i * a.pitch;
    visit_narrow(a.dtype, [&]<class T>() {
      T* to = a.to.at<T>(r.b, r.h) + r.t * a.to.row;
      if constexpr (kWhole) {
        constexpr int kWidth = kVectorWidth<T>;
        for (int c = lane * kWidth; c < a.columns; c += kLanes * kWidth) {
          float v[kWidth] = {};
          if (from != nullptr) load(from + c, v);
          store(v, to + c);
        }
      } else {
        for (int c = lane; c < a.columns; c += kLanes) {
          to[c * a.to.column] = T(from == nullptr ? 0.0f : from[c]);
        }
      }
    });
  }
}

template <class Args>
void launch(const char* op, const char* name, void (*kernel)(Args), const Args& a,
            std::int64_t rows, cudaStream_t stream) {
  if (rows == 0) return;
  // More rows than that a warp takes one after the other.
  const std::int64_t blocks =
      std::min<std::int64_t>(tiles_of(rows, kRowsPerBlock), std::int64_t{1} << 20);
  launch_kernel(op, name, kernel, static_cast<unsigned>(blocks), kThreads, 0, stream, a);
}

}  // namespace

void launch_delta(const char* op, const DeltaArgs& a, cudaStream_t stream) {
  const std::int64_t rows = a.B * a.Tq * a.H;
  if (a.o.whole && a.do_.whole) {
    launch(op, "delta_kernel", delta_kernel<true>, a, tiles_of(rows, 4), stream);
  } else {
    launch(op, "delta_kernel", delta_kernel<false>, a, tiles_of(rows, 4), stream);
  }
}
void launch_find_not_finite(const char* op, const FiniteArgs& a, cudaStream_t stream) {
  std::int64_t rows = 0;
  for (const FiniteArgs::One& one : a.of) rows = std::max(rows, a.B * one.rows * one.heads);
  if (rows == 0) return;
  const std::int64_t blocks = tiles_of(tiles_of(rows, 4), kRowsPerBlock);
  const dim3 grid(static_cast<unsigned>(std::min<std::int64_t>(blocks, 1024)), 3);
  launch_kernel(op, "find_kernel", find_kernel, grid, kThreads, 0, stream, a);
}
void launch_layer_delta(const char* op, const LayerDeltaArgs& a, cudaStream_t stream) {
  launch(op, "layer_delta_kernel", layer_delta_kernel, a, tiles_of(a.B * a.Tq * a.H, 2), stream);
}
void launch_merge(const char* op, const MergeArgs& a, cudaStream_t stream) {
  if (a.B * a.tokens * a.heads == 0 || a.columns == 0) return;
  // Not more blocks than a few a multiprocessor: what a thread finds out first is for several rows.
  constexpr std::int64_t kMostBlocks = 512;
  const std::int64_t heads = std::min<std::int64_t>(a.B * a.heads, kMostBlocks);
  const std::int64_t tiles =
      std::min(tiles_of(a.tokens, kThreads / merge_threads(a.columns)), kMostBlocks / heads);
  const dim3 grid(static_cast<unsigned>(tiles), static_cast<unsigned>(heads));
  launch_kernel(op, "merge_kernel", merge_kernel, grid, kThreads, 0, stream, a);
}
void launch_round(const char* op, const RoundArgs& a, cudaStream_t stream) {
  const std::int64_t rows = a.B * a.rows * a.heads;
  if (a.to.whole) {
    launch(op, "round_kernel", round_kernel<true>, a, tiles_of(rows, 4), stream);
  } else {
    launch(op, "round_kernel", round_kernel<false>, a, rows, stream);
  }
}
Support kernels_support() { return kernel_support(delta_kernel<false>, build_info().cuda); }

}  // namespace annulus::attention::cuda
