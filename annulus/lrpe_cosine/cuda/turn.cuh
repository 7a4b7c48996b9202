// What the CUDA kernels that turn have in common: their modes, and what is done with V columns of one token of
// one sequence.
#pragma once

#include <cstdint>

#include "annulus/lrpe_cosine/cuda/arguments.cuh"

namespace annulus::lrpe_cosine::cuda {

// What a thread does with its columns: x -> (x cos, x sin); (dy1, dy2) -> g; or a rotation.
enum class Mode { kSpread, kGather, kRotate };
// What it reads for that, beside a first vector.
template <Mode kMode>
inline constexpr bool kReadsSecond = kMode != Mode::kSpread;
template <Mode kMode, Act kAct>
inline constexpr bool kReadsX = (kMode == Mode::kGather) && (kAct != Act::kNone);

template <Mode kMode>
__device__ __forceinline__ const Operand& source(const SideArgs& s, bool backward) {
  return kMode == Mode::kGather || backward ? s.dy : s.x;
}
template <Mode kMode>
__device__ __forceinline__ const Operand& target(const SideArgs& s, bool backward) {
  return kMode == Mode::kGather || backward ? s.dx : s.y;
}

// Turns V columns, already read (second and x where the mode reads them), and writes them at `to`. `row` and
// `column` index the statistics.
template <class T, int V, Mode kMode, Act kAct>
__device__ __forceinline__ void turn_columns(LrpeActivation activation, const SoftmaxStats& stats,
                                             std::int64_t row, std::int64_t column,
                                             const device::SinCos<compute_t<T>, V>& phase,
                                             compute_t<T> sign, const Vec<T, V>& first,
                                             const Vec<T, V>& second, const Vec<T, V>& x_vector,
                                             const Operand& out, std::int64_t to) {
  using Real = compute_t<T>;
  Real u[V];
  Real w[V];
  Real r1[V];
  Real r2[V];
  unpack(first, u);
  if constexpr (kReadsSecond<kMode>) unpack(second, w);
  if constexpr (kMode == Mode::kRotate) {
    device::rotate_tile(u, w, phase, sign, r1, r2);
  } else if constexpr (kMode == Mode::kSpread) {
    if constexpr (kAct != Act::kNone) activate_tile<T, kAct>(activation, stats, u, row, column, u);
    device::cosine_tile(u, phase, r1, r2);
  } else {
    device::cosine_tile_backward(u, w, phase, r1);
    if constexpr (kAct != Act::kNone) {
      Real x[V];
      unpack(x_vector, x);
      activate_tile_backward<T, kAct>(activation, stats, x, row, column, r1);
    }
  }
  store<V>(r1, static_cast<T*>(out.first) + to);
  if constexpr (kMode != Mode::kGather) store<V>(r2, static_cast<T*>(out.second) + to);
}

// f.operator()<Mode, Act>() of a call.
template <class F>
void visit_turn(const Plan& plan, bool backward, F&& f) {
  if (plan.rotate) return f.template operator()<Mode::kRotate, Act::kNone>();
  visit_activation(plan.activation, [&]<Act kAct>() {
    if (backward) {
      f.template operator()<Mode::kGather, kAct>();
    } else {
      f.template operator()<Mode::kSpread, kAct>();
    }
  });
}

// One sequence, offsets of each, or position_ids: cuda/walk.cuh.
template <class T, int V>
void launch_walk(const Plan& plan, Args args, cudaStream_t stream);

}  // namespace annulus::lrpe_cosine::cuda
