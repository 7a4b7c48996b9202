// One call's recurrent network on the CPU, in the form its threads share: weights and states packed
// into panels, the coefficients c = (J1, A_t) of every tile of samples, and the product of a step.
//
// A step is two phases of a team: work on the rows of a state (an item is a tile of samples), then
// the product (an item is a tile of the result). Every number is made from its own operands in an
// order fixed by N and K alone, so no bit depends on the number of threads; a channel whose
// coefficients are zero for a tile of samples is left out of its sums.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>

#include "annulus/core/checked.h"
#include "annulus/core/scratch.h"
#include "annulus/cpu/parallel.h"
#include "annulus/cpu/tile.h"
#include "annulus/ring_rnn/cpu/rows.h"

namespace annulus::ring_rnn::cpu {

using annulus::cpu::Member;
using annulus::cpu::Side;

// f(item) for every item, spread over the team in parts of at most `most`.
template <class F>
void each(Member& m, std::int64_t items, std::int64_t most, F&& f) {
  m.each(items, most, [&](std::int64_t begin, std::int64_t end) {
    for (std::int64_t item = begin; item < end; ++item) f(item);
  });
}

template <class Real>
struct Network {
  // A product is split along its depth, so that panels of both operands stay in the first cache.
  static constexpr std::int64_t kDepth = 256;

  const Plan& plan;
  const annulus::cpu::Tiles<Real>& tile;
  const StateRows<Real>& row;
  std::int64_t B, T, K, N;
  std::int64_t batch_tiles, panels;  // of samples, of neurons
  std::int64_t padded_B, ld;         // rows and row length of a state
  std::int64_t tile_rows;            // coefficients of a channel for a tile of samples
  std::int64_t panel_bytes, left_bytes;
  Real J0;

  Real* alpha = nullptr;          // [ld]
  Real* keep = nullptr;           // [ld], 1 - alpha
  Real* coefficient = nullptr;    // [T][batch_tiles][K + 1][tile_rows]
  unsigned char* used = nullptr;  // [T][batch_tiles][K + 1]: some coefficient is not zero
  unsigned char* any = nullptr;   // [K + 1]: in some step, for some tile
  std::int32_t* list = nullptr;   // [T][batch_tiles][K + 2]: how many are used, then which
  std::byte* left = nullptr;      // [batch_tiles] panels of the operand of this step
  Real* state = nullptr;          // [padded_B][ld]
  Real* constant = nullptr;       // [padded_B], J0 sum(s)

  explicit Network(const Plan& p)
      : plan(p),
        tile(annulus::cpu::tiles<Real>(p.precision)),
        row(state_rows<Real>()),
        B(p.B),
        T(p.T),
        K(p.K),
        N(p.N),
        batch_tiles(ceil_div(p.B, tile.rows)),
        panels(ceil_div(p.N, tile.cols)),
        // Of the last tile as much as a product touches: few samples are not made a tile of 32.
        padded_B(p.B / tile.rows * tile.rows + tile.touched_rows(p.B % tile.rows)),
        ld(round_up(p.N, std::max<std::int64_t>(kPad, tile.cols))),
        tile_rows(std::min<std::int64_t>(tile.rows, padded_B)),
        panel_bytes(tile.panel_bytes(Side::kRight, p.N)),
        left_bytes(round_up(tile.panel_bytes(Side::kLeft, p.N), 64)),
        J0(0) {}

  // How many of `threads` (0 = all) are worth their barriers: one for every 2^18 products of a step,
  // which take as long as some phases cost (8 us, 1 us each). No result depends on it.
  int team(int threads) const {
    const double products =
        static_cast<double>(B) * static_cast<double>(K + 1) * static_cast<double>(N * N);
    const double most = std::max(1.0, products / (1 << 18));
    return static_cast<int>(
        std::min(most, static_cast<double>(annulus::cpu::resolve_threads(threads))));
  }

  std::int64_t weight_bytes() const { return (K + 1) * panels * panel_bytes; }

  void lay_out(ScratchLayout& c) {
    c(alpha, ld);
    c(keep, ld);
    c(coefficient, T * batch_tiles * (K + 1) * tile_rows);
    c(used, T * batch_tiles * (K + 1));
    c(any, K + 1);
    c(list, T * batch_tiles * (K + 2));
    c(left, batch_tiles * left_bytes);
    c(state, padded_B * ld);
    c(constant, padded_B);
  }

  int count(std::int64_t i) const {
    return static_cast<int>(std::min<std::int64_t>(tile.rows, B - i * tile.rows));
  }
  std::int64_t channels(std::int64_t t, std::int64_t i) const {
    return (t * batch_tiles + i) * (K + 1);
  }
  // Where W_k is within all weights, for a panel of neurons, from depth d0 (a multiple of kDepth) on:
  // the channels of a panel lie together, as a tile of the result reads them.
  std::int64_t weights_at(std::int64_t panel, std::int64_t d0, std::int64_t k) const {
    return panel * (K + 1) * panel_bytes + (K + 1) * tile.panel_bytes(Side::kRight, d0) +
           k * tile.panel_bytes(Side::kRight, std::min(kDepth, N - d0));
  }

  void fill_parameters();
  // Coefficients of all steps, zero for masked samples where `drop_masked`; then `any` of them.
  void fill_coefficients(Member& m, bool drop_masked);
  void fill_any(Member& m);
  // W (or its transpose) as panels; only the channels in `which`, or all.
  void pack_weights(Member& m, bool transposed, const unsigned char* which, std::byte* to) const;
  void pack_left(std::int64_t i, const Real* rows_of_tile) const;
  // Asks a product for s . z_k beside sum_k c_k z_k.
  struct ChannelDots {
    const std::int32_t* list;  // [K + 2]: how many channels, then which, used or not
    const Real* s;             // [padded_B][ld]
    Real* partial;             // [padded_B][K + 1][panels], to be summed over panels
  };
  // y[b] = sum_k c_k z_k with z_k = s W_k^T for all samples of step t, from `left`.
  void multiply(Member& m, std::int64_t t, const std::byte* all_weights, Real* y,
                const ChannelDots* dots = nullptr) const;
  // The same for a panel of neurons and the tiles of samples first .. last - 1, by the caller alone.
  void multiply_panel(std::int64_t t, std::int64_t panel, std::int64_t first, std::int64_t last,
                      const std::byte* all_weights, Real* y,
                      const ChannelDots* dots = nullptr) const;
  // f(b) for every sample, the tiles of samples spread over the team; then g(i) for every tile.
  template <class F, class G>
  void each_sample(Member& m, F&& f, G&& g) const {
    each(m, batch_tiles, 1, [&](std::int64_t i) {
      for (std::int64_t b = i * tile.rows; b < i * tile.rows + count(i); ++b) f(b);
      g(i);
    });
  }
  void load_state(const TensorView& v, std::int64_t b, Real* to) const {
    row.load(row_at(v, b), N, to);
    std::fill(to + N, to + ld, Real(0));
  }

  bool live(std::int64_t b, std::int64_t t) const { return read_flag(plan.in.mask, b, t, true); }
  bool is_reset(std::int64_t b, std::int64_t t) const {
    return read_flag(plan.in.reset, b, t, false);
  }
  void reset_where_asked(std::int64_t b, std::int64_t t) const {
    if (!is_reset(b, t)) return;
    load_state(plan.in.reset_state.defined() ? plan.in.reset_state : plan.in.r0, b, state + b * ld);
  }
  // Adds its constant and drive (if there is one) to y, and takes the state of a live sample through
  // the step.
  void step(std::int64_t b, std::int64_t t, Real added, const TensorView& drive, Real* y) const;

 private:
  void fill_coefficients(std::int64_t t, std::int64_t i, bool drop_masked);
  void pack_panel(bool transposed, std::int64_t k, std::int64_t panel, std::byte* to) const;
  // A panel of neurons, from depth d0 on: its weights, those of a channel `step` bytes apart.
  struct Panel {
    std::int64_t panel, d0, depth;
    const std::byte* weights;
    std::int64_t step;
  };
  void multiply_tile(std::int64_t t, std::int64_t i, const Panel& right, Real* y,
                     const ChannelDots* dots) const;
};

// f.operator()<Real>() with what the arithmetic of a call is in.
template <class F>
decltype(auto) visit_real(const Plan& plan, F&& f) {
  return plan.dtype == DType::kF64 ? f.template operator()<double>()
                                   : f.template operator()<float>();
}

extern template struct Network<float>;
extern template struct Network<double>;

}  // namespace annulus::ring_rnn::cpu
