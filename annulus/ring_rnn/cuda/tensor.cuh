// The tensor-core path of ring RNN: its entry points, its launches, and small pieces the kernels share.
//
// A block of threads multiplies X by each V_k on its own and scales the product by c in f32 before
// adding it up, so c is never rounded, and the products u_k that dA needs exist on the way. (Hopper's
// loop with one term and without dA scales X by c, as the sum of two bf16, instead. Small networks have
// kernels of their own: cluster/loop.cuh.) tiling.h says how the work is divided.
//
// Operands are sums of 1, 2 or 3 bf16 terms (bf16, bf16x3, bf16x6) or f16: format.cuh. X and V lie in memory as the
// fragments of mma.cuh want them, so that a lane's words are 16 neighbouring bytes: no shuffling
// through shared memory, no bank conflicts.
#pragma once

#include <cuda_bf16.h>
#include <cstddef>
#include <cstdint>

#include "annulus/core/context.h"
#include "annulus/cuda/rows.cuh"
#include "annulus/ring_rnn/cuda/operands.cuh"
#include "annulus/ring_rnn/plan.h"

namespace annulus::ring_rnn::cuda::tensor {

// The path as the driver of the backend calls it. Sizes are at least 1 and dtype is not f64.
int terms_of(Precision precision);  // 0: not a precision of this path
std::size_t forward_workspace(const Plan& plan);
std::size_t backward_workspace(const Plan& plan);
std::size_t pack_bytes(const Plan& plan);
void forward(const Plan& plan, Context& context);
void backward(const Plan& plan, Context& context);
void pack(const Plan& plan, Context& context);

// The launches. Nothing waits.
struct Launch {
  const char* op;
  cudaStream_t stream;
};
void run_prepare(const Prepare& prepare, DType dtype, const Launch& launch);
// The loops on a grid, compiled a direction a file: each takes half a minute.
template <class Direction>
void run_loop(const Sm80Loop<Direction>& loop, const Launch& launch);
template <class Direction>
void run_loop(const Sm90Loop<Direction>& loop, const Launch& launch);
// ... and in clusters.
void run_forward(const ForwardPass& pass, const ClusterTiling& tiling, const Launch& launch);
void run_backward(const BackwardPass& pass, const ClusterTiling& tiling, const Launch& launch);
void run_dweights(const Sm80WeightGradients& gradients, const Launch& launch);
void run_dweights(Sm90WeightGradients gradients, int multiprocessors, const Launch& launch);
void run_readout(const Readout& readout, const Launch& launch);
void run_gather(const Gather& gather, const Launch& launch);

// Clusters of so many blocks, each alone on its multiprocessor, that the current device runs at once.
int clusters_at_once(int blocks, std::size_t shared, const char* op);

// ---- pieces

// A pair of bf16 times c.
__device__ __forceinline__ std::uint32_t scaled_pair(std::uint32_t pair, std::uint32_t c) {
  const __nv_bfloat162 v = __hmul2(*reinterpret_cast<const __nv_bfloat162*>(&pair),
                                   *reinterpret_cast<const __nv_bfloat162*>(&c));
  return *reinterpret_cast<const std::uint32_t*>(&v);
}
__device__ __forceinline__ std::uint32_t scaled_pair(std::uint32_t pair, const Scale& c) {
  const auto x = *reinterpret_cast<const __nv_bfloat162*>(&pair);
  const __nv_bfloat162 v = __hfma2(x, *reinterpret_cast<const __nv_bfloat162*>(&c.high),
                                   __hmul2(x, *reinterpret_cast<const __nv_bfloat162*>(&c.low)));
  return *reinterpret_cast<const std::uint32_t*>(&v);
}

// Where a pair of columns (col even) of a row of X lies, in words.
__device__ __forceinline__ std::int64_t operand_word(std::int64_t row, int col, int padded_n) {
  const std::int64_t tile = (row >> 4) * (padded_n >> 4) + (col >> 4);
  return tile * 128 + (((row & 7) << 2) + ((col & 7) >> 1)) * 4 + ((row >> 3) & 1) +
         (((col >> 3) & 1) << 1);
}

__device__ __forceinline__ void put_weight_gradient(const WeightGradients& w, int channel,
                                                    std::int64_t i, std::int64_t j, float v) {
  const Args& a = w.args;
  if (i >= a.N || j >= a.N) return;
  visit_narrow(w.dtype, [&]<class T>() {
    if (channel == 0) {
      put<T>(a.dWo, v, i, j);
    } else {
      put<T>(a.dWa, v, channel - 1, i, j);
    }
  });
}

// The products of terms that count (products_of() many), smallest first so that the large ones do not
// swallow them: which term of X and which of V the i-th takes.
template <int Terms>
__host__ __device__ constexpr int term_of_x(int i) {
  return Terms == 1 ? 0 : Terms == 2 ? (i == 0 ? 1 : 0) : (i == 1 ? 2 : i == 0 || i == 3 ? 1 : 0);
}
template <int Terms>
__host__ __device__ constexpr int term_of_v(int i) {
  return Terms == 1 ? 0 : Terms == 2 ? (i == 1 ? 1 : 0) : (i == 2 ? 2 : i == 0 || i == 4 ? 1 : 0);
}

}  // namespace annulus::ring_rnn::cuda::tensor
