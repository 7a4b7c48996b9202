// What happens to rows by themselves, before and after the products: a warp a row (b, t, h), and types at run time.

#include <algorithm>
#include <cstdint>

#include "annulus/attention/cuda/launch.h"
#include "annulus/cuda/check.h"
#include "annulus/cuda/reduce.cuh"
#include "annulus/cuda/rows.cuh"

namespace annulus::attention::cuda {

namespace {

using namespace annulus::cuda;

constexpr int kThreads = 256, kRowsPerBlock = kThreads / 32;

struct Row {
  std::int64_t b, t, h;
  __device__ Row(std::int64_t i, std::int64_t rows, std::int64_t heads)
      : b(i / (rows * heads)), t(i / heads % rows), h(i % heads) {}
};
__device__ __forceinline__ std::int64_t first_row() {
  return static_cast<std::int64_t>(blockIdx.x) * kRowsPerBlock + threadIdx.x / 32;
}
__device__ __forceinline__ std::int64_t row_step() {
  return static_cast<std::int64_t>(gridDim.x) * kRowsPerBlock;
}

__global__ void __launch_bounds__(kThreads) delta_kernel(const __grid_constant__ DeltaArgs a) {
  const int lane = static_cast<int>(threadIdx.x) % 32;
  for (std::int64_t i = first_row(); i < a.B * a.Tq * a.H; i += row_step()) {
    const Row r(i, a.Tq, a.H);
    const std::int64_t at = (r.b * a.H + r.h) * a.Tq + r.t;
    float sum = 0;
    visit_narrow(a.dtype, [&]<class T>() {
      const T* d = a.do_.at<const T>(r.b, r.h) + r.t * a.do_.row;
      if (a.states.acc != nullptr) {
        const float* o = a.states.acc + i * a.Dv;
        for (int c = lane; c < a.Dv; c += 32) {
          sum = fmaf(static_cast<float>(d[c * a.do_.column]), o[c], sum);
        }
      } else {
        const T* o = a.o.at<const T>(r.b, r.h) + r.t * a.o.row;
        for (int c = lane; c < a.Dv; c += 32) {
          sum = fmaf(static_cast<float>(d[c * a.do_.column]),
                     static_cast<float>(o[c * a.o.column]), sum);
        }
      }
    });
    sum = warp_sum(sum);
    if (a.states.acc != nullptr) {
      const float l = a.states.l[at];
      sum = l == 0 ? 0.0f : sum / l;
    }
    if (lane == 0) {
      const float dlse =
          a.dlse.data == nullptr ? 0.0f : a.dlse.at<const float>(r.b, r.h)[r.t * a.dlse.row];
      a.delta[at] = sum - dlse;
    }
  }
}

__global__ void __launch_bounds__(kThreads) finish_kernel(const __grid_constant__ FinishArgs a) {
  const int lane = static_cast<int>(threadIdx.x) % 32;
  for (std::int64_t i = first_row(); i < a.B * a.Tq * a.H; i += row_step()) {
    const Row r(i, a.Tq, a.H);
    const std::int64_t at = (r.b * a.H + r.h) * a.Tq + r.t;
    const float l = a.states.l[at];
    const float factor = l == 0 ? 0.0f : 1.0f / l;
    visit_narrow(a.dtype, [&]<class T>() {
      T* o = a.o.at<T>(r.b, r.h) + r.t * a.o.row;
      for (int c = lane; c < a.Dv; c += 32) {
        o[c * a.o.column] = T(a.states.acc[i * a.Dv + c] * factor);
      }
    });
    if (lane == 0 && a.lse.data != nullptr) {
      constexpr float kLog2 = 0.693147181f;
      a.lse.at<float>(r.b, r.h)[r.t * a.lse.row] =
          l == 0 ? kNoScore : fmaf(a.states.m[at], kLog2, logf(l));
    }
  }
}

__global__ void __launch_bounds__(kThreads) round_kernel(const __grid_constant__ RoundArgs a) {
  const int lane = static_cast<int>(threadIdx.x) % 32;
  for (std::int64_t i = first_row(); i < a.B * a.rows * a.heads; i += row_step()) {
    const Row r(i, a.rows, a.heads);
    visit_narrow(a.dtype, [&]<class T>() {
      T* to = a.to.at<T>(r.b, r.h) + r.t * a.to.row;
      for (int c = lane; c < a.columns; c += 32) {
        to[c * a.to.column] = T(a.from == nullptr ? 0.0f : a.from[i * a.columns + c]);
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
  kernel<<<static_cast<unsigned>(blocks), kThreads, 0, stream>>>(a);
  check_launch(op, name);
}

}  // namespace

void launch_delta(const char* op, const DeltaArgs& a, cudaStream_t stream) {
  launch(op, "delta_kernel", delta_kernel, a, a.B * a.Tq * a.H, stream);
}
void launch_finish(const char* op, const FinishArgs& a, cudaStream_t stream) {
  launch(op, "finish_kernel", finish_kernel, a, a.B * a.Tq * a.H, stream);
}
void launch_round(const char* op, const RoundArgs& a, cudaStream_t stream) {
  launch(op, "round_kernel", round_kernel, a, a.B * a.rows * a.heads, stream);
}
Support kernels_support() { return kernel_support(delta_kernel, build_info().cuda); }

}  // namespace annulus::attention::cuda
