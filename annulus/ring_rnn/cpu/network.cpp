#include "annulus/ring_rnn/cpu/network.h"

namespace annulus::ring_rnn::cpu {

template <class Real>
void Network<Real>::fill_parameters() {
  J0 = read_parameter<Real>(plan.in.J0);
  for (std::int64_t i = 0; i < ld; ++i) {
    alpha[i] = i < N ? read_parameter<Real>(plan.in.alpha, i) : Real(0);
    keep[i] = i < N ? Real(1) - alpha[i] : Real(0);
  }
}

template <class Real>
void Network<Real>::fill_coefficients(Member& m, bool drop_masked) {
  each(m, T * batch_tiles, 16, [&](std::int64_t unit) {
    fill_coefficients(unit / batch_tiles, unit % batch_tiles, drop_masked);
  });
}

template <class Real>
void Network<Real>::fill_coefficients(std::int64_t t, std::int64_t i, bool drop_masked) {
  const Real J1 = read_parameter<Real>(plan.in.J1);
  Real* c = coefficient + channels(t, i) * tile_rows;
  unsigned char* u = used + channels(t, i);
  std::fill_n(c, (K + 1) * tile_rows, Real(0));
  std::fill_n(u, K + 1, static_cast<unsigned char>(0));
  for (int r = 0; r < count(i); ++r) {
    const std::int64_t b = i * tile.rows + r;
    if (drop_masked && !read_flag(plan.in.mask, b, t, true)) continue;
    if (J1 != Real(0)) u[0] = 1;
    c[r] = J1;
    const Row actions = row_at(plan.in.A, b, t);
    Real run[kRun];
    for (std::int64_t k0 = 0; k0 < K; k0 += kRun) {
      const std::int64_t n = std::min(kRun, K - k0);
      row.load(row_from(actions, k0), n, run);
      for (std::int64_t k = 0; k < n; ++k) {
        if (run[k] == Real(0)) continue;  // a NaN is not zero
        c[(1 + k0 + k) * tile_rows + r] = run[k];
        u[1 + k0 + k] = 1;
      }
    }
  }
  std::int32_t* which = list + (t * batch_tiles + i) * (K + 2);
  which[0] = 0;
  for (std::int64_t k = 0; k <= K; ++k) {
    if (u[k] != 0) which[++which[0]] = static_cast<std::int32_t>(k);
  }
}

template <class Real>
void Network<Real>::fill_any(Member& m) {
  each(m, K + 1, 4, [&](std::int64_t k) {
    any[k] = 0;
    for (std::int64_t i = 0; i < T * batch_tiles && any[k] == 0; ++i) {
      any[k] = used[i * (K + 1) + k];
    }
  });
}

template <class Real>
void Network<Real>::pack_weights(Member& m, bool transposed, const unsigned char* which,
                                 std::byte* to) const {
  // In the order the weights lie in memory.
  each(m, (K + 1) * panels, std::max<std::int64_t>(1, panels / 8), [&](std::int64_t unit) {
    const std::int64_t k = unit / panels;
    if (which == nullptr || which[k] != 0) pack_panel(transposed, k, unit % panels, to);
  });
}

template <class Real>
void Network<Real>::pack_panel(bool transposed, std::int64_t k, std::int64_t panel,
                               std::byte* to) const {
  alignas(64) Real stage[annulus::cpu::kMaxTileCols * kDepth];
  const std::int64_t first = panel * tile.cols;
  const int valid = static_cast<int>(std::min<std::int64_t>(tile.cols, N - first));
  const TensorView& v = k == 0 ? plan.in.Wo : plan.in.Wa;
  const std::int64_t base = k == 0 ? 0 : (k - 1) * v.stride[0];
  const std::int64_t row_step = v.stride[k == 0 ? 0 : 1];
  const std::int64_t column_step = v.stride[k == 0 ? 1 : 2];
  const bool direct = tile.packs(v.dtype) && column_step == 1;
  for (std::int64_t d0 = 0; d0 < N; d0 += kDepth) {
    const std::int64_t depth = std::min(kDepth, N - d0);
    std::byte* panel_to = to + weights_at(panel, d0, k);
    const std::int64_t corner = base + (transposed ? d0 * row_step + first * column_step
                                                   : first * row_step + d0 * column_step);
    annulus::cpu::Matrix x(row_from(v, corner, 1).data, v.dtype, row_step);
    if (!direct) {
      x = {stage, transposed ? tile.cols : kDepth};
      const std::int64_t rows_here = transposed ? depth : valid;
      for (std::int64_t r = 0; r < rows_here; ++r) {
        row.load(row_from(v, corner + r * row_step, column_step), transposed ? valid : depth,
                 stage + r * x.ld);
      }
    }
    if (transposed) {
      tile.pack_columns(Side::kRight, x, nullptr, nullptr, valid, depth, panel_to);
    } else {
      tile.pack_rows(Side::kRight, x, valid, depth, panel_to);
    }
  }
}

template <class Real>
void Network<Real>::pack_left(std::int64_t i, const Real* rows_of_tile) const {
  for (std::int64_t d0 = 0; d0 < N; d0 += kDepth) {
    tile.pack_rows(Side::kLeft, {rows_of_tile + d0, ld}, count(i), std::min(kDepth, N - d0),
                   left + i * left_bytes + tile.panel_bytes(Side::kLeft, d0));
  }
}

template <class Real>
void Network<Real>::multiply(Member& m, std::int64_t t, const std::byte* all_weights, Real* y,
                             const ChannelDots* dots) const {
  // Some parts for each thread, none of more than one panel: all its tiles of samples use the same
  // weights in turn.
  const std::int64_t most =
      std::clamp<std::int64_t>(panels * batch_tiles / (8 * m.size()), 1, batch_tiles);
  m.each(panels * batch_tiles, most, [&](std::int64_t unit, std::int64_t end) {
    while (unit < end) {
      const std::int64_t panel = unit / batch_tiles;
      const std::int64_t first = unit % batch_tiles;
      const std::int64_t last = std::min(batch_tiles, first + end - unit);
      multiply_panel(t, panel, first, last, all_weights, y, dots);
      unit += last - first;
    }
  });
}

template <class Real>
void Network<Real>::multiply_panel(std::int64_t t, std::int64_t panel, std::int64_t first,
                                   std::int64_t last, const std::byte* all_weights, Real* y,
                                   const ChannelDots* dots) const {
  for (std::int64_t d0 = 0; d0 < N; d0 += kDepth) {
    const std::int64_t depth = std::min(kDepth, N - d0);
    const Panel right = {panel, d0, depth, all_weights + weights_at(panel, d0, 0),
                         tile.panel_bytes(Side::kRight, depth)};
    for (std::int64_t i = first; i < last; ++i) multiply_tile(t, i, right, y, dots);
  }
}

template <class Real>
void Network<Real>::multiply_tile(std::int64_t t, std::int64_t i, const Panel& right, Real* y,
                                  const ChannelDots* dots) const {
  constexpr int kFactors = 64;  // at a time
  annulus::cpu::Factor<Real> factors[kFactors];
  const std::int64_t depth = right.depth;
  const std::byte* a = left + i * left_bytes + tile.panel_bytes(Side::kLeft, right.d0);
  const Real* c = coefficient + channels(t, i) * tile_rows;
  const std::int64_t corner = i * tile.rows * ld + right.panel * tile.cols;
  const std::int32_t* which = dots != nullptr ? dots->list : list + (t * batch_tiles + i) * (K + 2);
  bool add = right.d0 > 0;
  for (std::int32_t first = 0; first < which[0]; first += kFactors, add = true) {
    const int n = std::min(kFactors, which[0] - first);
    const std::int32_t* k = which + 1 + first;
    for (int f = 0; f < n; ++f)
      factors[f] = {right.weights + k[f] * right.step, c + k[f] * tile_rows};
    if (dots == nullptr) {
      tile.multiply(a, factors, n, depth, count(i), y + corner, ld, add, nullptr);
      continue;
    }
    alignas(64) Real dot[kFactors * annulus::cpu::kMaxTileRows];
    const annulus::cpu::Dots<Real> asked = {dots->s + corner, ld, dot};
    tile.multiply(a, factors, n, depth, count(i), y + corner, ld, add, &asked);
    for (int f = 0; f < n; ++f) {
      for (int r = 0; r < count(i); ++r) {
        Real& sum = dots->partial[((i * tile.rows + r) * (K + 1) + k[f]) * panels + right.panel];
        sum = dot[f * tile.rows + r] + (right.d0 > 0 ? sum : Real(0));
      }
    }
  }
  for (int r = 0; !add && which[0] == 0 && r < count(i); ++r) {
    std::fill_n(y + corner + r * ld, tile.cols, Real(0));
  }
}

template <class Real>
void Network<Real>::step(std::int64_t b, std::int64_t t, Real added, const TensorView& drive,
                         Real* y) const {
  Real* s = state + b * ld;
  alignas(64) Real run[kRun];
  for (std::int64_t i = 0; i < N; i += kRun) {
    const std::int64_t n = std::min(kRun, N - i);
    if (drive.defined()) {
      row.load(row_from(row_at(drive, b, t), i), n, run);
      std::fill(run + n, run + std::min(kRun, round_up(n, kPad)), Real(0));
    }
    row.step(plan.activation, n, added, drive.defined() ? run : nullptr, alpha + i, keep + i, s + i,
             y + i, live(b, t) ? s + i : nullptr);
  }
  std::fill(s + N, s + ld, Real(0));
}

template struct Network<float>;
template struct Network<double>;

}  // namespace annulus::ring_rnn::cpu
