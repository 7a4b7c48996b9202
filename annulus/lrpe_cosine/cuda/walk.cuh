// Turning where a phase serves one sequence only, or tokens say where they are: a batch of one, offsets or
// position_ids of each sequence, packed sequences.
//
// Nothing is shared over the batch then, so a thread goes through several tokens instead: what is made once is the
// table of steps and the addresses, and the next token's load and position are on their way while this one's phases
// are made. Whole numbers are what takes the time: 30 instructions a phase, most of them at half rate.
//
// 12 sequences of 4096 tokens with positions of their own, bf16, forward / backward in ms on an H200, where moving the
// bytes takes 0.11: 0.183 / 0.188; one token a thread 0.257 / 0.252, four 0.192 / 0.199; 100 registers instead of 72
// 0.193 / 0.208. With position_ids read in turn_kernel its plain forward would take 0.1255 instead of 0.1186.
//
// Compiled a few widths a file (types_*.cu, walk_narrow.cu): the kernel has seven forms for each, and all of
// them in one file took three minutes.
#pragma once

#include "annulus/cuda/check.h"
#include "annulus/lrpe_cosine/cuda/turn.cuh"

namespace annulus::lrpe_cosine::cuda {

constexpr int kWalkThreads = 128;
template <class T>
inline constexpr int kWalkBlocks = std::is_same_v<T, double> ? 4 : 7;
constexpr std::int64_t kMostTokens = 8;

// Thread (x, y) of a block: V columns from V (x + i blockDim.x) on, of tokens_per_thread tokens that are blockDim.y apart, of
// batch_per_thread sequences.
template <class T, int V, Mode kMode, Act kAct>
__global__ void __launch_bounds__(kWalkThreads, kWalkBlocks<T>)
    walk_kernel(const __grid_constant__ Args a) {
  using Real = compute_t<T>;
  extern __shared__ __align__(16) unsigned char shared[];
  const int width = static_cast<int>(blockDim.x) * V;  // columns a block takes at a time
  StepTable<T> table(shared, width);

  const Place p = find_place(a);
  const SideArgs& side = a.side[p.side];
  const Operand& in = source<kMode>(side, a.backward);
  const Operand& out = target<kMode>(side, a.backward);
  if (out.first == nullptr) return;  // of q and k, only one gradient was asked for
  const int apart = static_cast<int>(blockDim.y);
  const std::int64_t t_begin =
      static_cast<std::int64_t>(p.tile) * apart * a.tokens_per_thread + threadIdx.y;
  const std::int64_t most = (a.L - t_begin + apart - 1) / apart;
  const int tokens = most < a.tokens_per_thread ? static_cast<int>(most) : a.tokens_per_thread;
  const std::int64_t b_begin = static_cast<std::int64_t>(p.group) * a.batch_per_thread;
  const std::int64_t b_left = a.B - b_begin;
  const int sequences = b_left < a.batch_per_thread ? static_cast<int>(b_left) : a.batch_per_thread;
  const Real sign = a.backward ? Real(-1) : Real(1);
  const std::int64_t first_sequence = b_begin * a.heads + p.flat_head;  // in the statistics

  for (int first_column = 0; first_column < a.C; first_column += width) {
    const int slot = static_cast<int>(threadIdx.x) * V;
    const int column = first_column + slot;
    const bool mine = tokens > 0 && column < a.C;
    Vec<T, V> next_first, next_second, next_x;
    auto fetch_next = [&](std::int64_t from, std::int64_t from_x) {
      next_first = fetch<V>(static_cast<const T*>(in.first) + from);
      if constexpr (kReadsSecond<kMode>) {
        next_second = fetch<V>(static_cast<const T*>(in.second) + from);
      }
      if constexpr (kReadsX<kMode, kAct>) {
        next_x = fetch<V>(static_cast<const T*>(side.x.first) + from_x);
      }
    };
    // Of the token's first sequence.
    std::int64_t i_in = element(in, b_begin, p.head, t_begin, column);
    std::int64_t i_out = element(out, b_begin, p.head, t_begin, column);
    std::int64_t i_x = element(side.x, b_begin, p.head, t_begin, column);
    std::int64_t t = t_begin;
    std::int64_t s[device::kAxes] = {};
    if (mine) {  // in flight while the table is made
      fetch_next(i_in, i_x);
      if (t >= a.positions.prefix) find_position(a, b_begin, t, s);
    }
    if (first_column > 0) __syncthreads();  // all have read the table before it is made anew
    const bool suspect = table.fill(a, p.theta_row, first_column, width);
    if (!mine) continue;

#pragma unroll 1
    for (int token = 0; token < tokens; ++token) {
      std::int64_t from = i_in;
      std::int64_t from_x = i_x;
      std::int64_t to = i_out;
      std::int64_t row = first_sequence * a.L + t;
      std::int64_t stat_column = first_sequence * a.C + column;
      i_in += apart * in.stride[2];
      i_x += apart * side.x.stride[2];
      i_out += apart * out.stride[2];
      device::SinCos<Real, V> phase;
      if (t >= a.positions.prefix) {
        make_phases<T, V>(a, table, slot, s, column, suspect, phase);
      } else {
        phase.set_zero_phase();
      }
      t += apart;
      const bool more = token + 1 < tokens;
      if (more && t >= a.positions.prefix) find_position(a, b_begin, t, s);
#pragma unroll 1
      for (int b = 0; b < sequences; ++b) {
        const Vec<T, V> first = next_first, second = next_second, x = next_x;
        from += in.stride[0];
        from_x += side.x.stride[0];
        const bool last = b + 1 == sequences;
        if (!last || more) fetch_next(last ? i_in : from, last ? i_x : from_x);
        turn_columns<T, V, kMode, kAct>(a.activation, a.stats, row, stat_column, phase, sign, first,
                                        second, x, out, to);
        to += out.stride[0];
        row += a.heads * a.L;
        stat_column += static_cast<std::int64_t>(a.heads) * a.C;
      }
    }
  }
}

template <class T, int V>
void launch_walk(const Plan& plan, Args a, cudaStream_t stream) {
  visit_turn(plan, a.backward, [&]<Mode kMode, Act kAct>() {
    const std::int64_t lanes = plan.C / V;
    const auto lanes_x = static_cast<int>(std::min<std::int64_t>(lanes, kWalkThreads));
    const dim3 shape(static_cast<unsigned>(lanes_x), static_cast<unsigned>(kWalkThreads / lanes_x));
    const std::int64_t items = plan.B * plan.heads() * plan.L * lanes;
    a.batch_per_thread = plan.own_positions() ? 1 : batch_per_thread(items, plan.B);
    // As many tokens as leave two threads for every one the GPU runs at a time; sequences that share a phase do
    // instead of them.
    constexpr std::int64_t kEnoughThreads = 240 * 1024;
    const std::int64_t most = std::max<std::int64_t>(1, kMostTokens / a.batch_per_thread);
    a.tokens_per_thread = static_cast<std::int32_t>(
        std::clamp<std::int64_t>(items / a.batch_per_thread / kEnoughThreads, 1, most));
    const std::int64_t tile = static_cast<std::int64_t>(shape.y) * a.tokens_per_thread;
    const unsigned blocks = number_blocks(plan, ceil_div(plan.L, tile), a.batch_per_thread, a);
    walk_kernel<T, V, kMode, kAct><<<blocks, shape, StepTable<T>::bytes(lanes_x * V), stream>>>(a);
    check_launch(plan.op, "walk_kernel");
  });
}

}  // namespace annulus::lrpe_cosine::cuda
