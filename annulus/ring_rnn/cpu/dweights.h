// dW_k = sum over (b, t) of c_k g s^T, on the CPU: a product of depth B T for each channel.
//
// The depth is split into blocks of steps (some steps of a small batch, a part of one step of a large
// one), at steps that depend on B alone, never on how the steps came to be here: so a checkpointed
// backward sums in the same order. Of a block only the samples with c_k != 0 are gathered, where
// they are few.
#pragma once

#include "annulus/ring_rnn/cpu/network.h"

namespace annulus::ring_rnn::cpu {

template <class Real>
struct WeightGradients {
  static constexpr std::int64_t kRows = 256;  // depth of a block, at most

  const Network<Real>& net;
  bool wanted;
  std::int64_t block_steps;  // steps of a block
  std::int64_t block_parts;  // blocks a step is split into
  std::int64_t tiles;        // of rows of W
  std::int64_t batch;        // channels packed at once
  std::int64_t a_bytes, b_bytes;

  Real* total = nullptr;           // [K + 1][tiles * rows][ld]
  std::byte* a = nullptr;          // [batch][tiles] panels of c g
  std::byte* b = nullptr;          // [batch][panels] panels of s, gathered
  std::byte* b_all = nullptr;      // [panels] panels of s, all samples
  std::int32_t* index = nullptr;   // [K + 2][kRows]; the last list has all samples
  Real* scale = nullptr;           // [K + 1][kRows]
  std::int64_t* length = nullptr;  // [K + 2]
  unsigned char* dense = nullptr;  // [K + 1]: the list is that of all samples

  explicit WeightGradients(const Network<Real>& network)
      : net(network), wanted(network.plan.needs_dweights()) {
    const std::int64_t B = std::max<std::int64_t>(net.B, 1);
    block_steps = std::max<std::int64_t>(1, kRows / B);
    block_parts = ceil_div(B, kRows);
    tiles = ceil_div(net.N, net.tile.rows);
    a_bytes = round_up(net.tile.panel_bytes(Side::kLeft, kRows), 64);
    b_bytes = round_up(net.tile.panel_bytes(Side::kRight, kRows), 64);
    // About what the second cache holds.
    constexpr std::int64_t kCache = 1 << 19;
    batch =
        std::clamp<std::int64_t>(kCache / std::max<std::int64_t>(1, tiles * a_bytes), 1, net.K + 1);
  }

  void lay_out(ScratchLayout& c) {
    if (!wanted) return;
    c(total, (net.K + 1) * tiles * net.tile.rows * net.ld);
    c(a, batch * tiles * a_bytes);
    c(b, batch * net.panels * b_bytes);
    c(b_all, net.panels * b_bytes);
    c(index, (net.K + 2) * kRows);
    c(scale, (net.K + 1) * kRows);
    c(length, net.K + 2);
    c(dense, net.K + 1);
  }

  void clear(Member& m) {
    if (!wanted) return;
    m.each((net.K + 1) * tiles * net.tile.rows, 64, [&](std::int64_t begin, std::int64_t end) {
      std::fill(total + begin * net.ld, total + end * net.ld, Real(0));
    });
  }

  // Adds the blocks that begin in steps [first, last); s and g hold the states and g of steps `base`
  // on, [step][padded_B][ld].
  void add(Member& m, std::int64_t first, std::int64_t last, std::int64_t base, const Real* s,
           const Real* g) {
    if (!wanted || net.B == 0 || net.N == 0) return;
    const std::int64_t lowest = ceil_div(first, block_steps);
    for (std::int64_t block = ceil_div(last, block_steps) - 1; block >= lowest; --block) {
      const std::int64_t t0 = block * block_steps;
      const std::int64_t t1 = std::min(net.T, t0 + block_steps);
      for (std::int64_t part = 0; part < block_parts; ++part) {
        const std::int64_t b0 = part * net.B / block_parts;
        const std::int64_t b1 = (part + 1) * net.B / block_parts;
        const std::int64_t offset = ((t0 - base) * net.padded_B + b0) * net.ld;
        each(m, net.K + 2, 1, [&](std::int64_t k) { list(k, t0, t1, b0, b1); });
        each(m, net.panels, 4, [&](std::int64_t panel) { pack_all(panel, s + offset); });
        for (std::int64_t k0 = 0; k0 <= net.K; k0 += batch) {
          const std::int64_t channels = std::min(net.K + 1 - k0, batch);
          each(m, channels * (tiles + net.panels), 8,
               [&](std::int64_t unit) { pack(k0, unit, s + offset, g + offset); });
          each(m, channels * net.panels * tiles, tiles,
               [&](std::int64_t unit) { multiply(k0, unit); });
        }
      }
    }
  }

  void store(Member& m) const {
    if (!wanted) return;
    each(m, (net.K + 1) * net.N, 32, [&](std::int64_t unit) {
      const std::int64_t k = unit / net.N;
      const std::int64_t i = unit % net.N;
      if (!asked(k)) return;
      const Real* from = total + (k * tiles * net.tile.rows + i) * net.ld;
      net.row.store(from, net.N,
                    k == 0 ? row_at(net.plan.grad.dWo, i) : row_at(net.plan.grad.dWa, k - 1, i));
    });
  }

 private:
  bool asked(std::int64_t k) const {
    return (k == 0 ? net.plan.grad.dWo : net.plan.grad.dWa).defined();
  }

  // The samples of a block that count for channel k; k = K + 1: all.
  void list(std::int64_t k, std::int64_t t0, std::int64_t t1, std::int64_t b0, std::int64_t b1) {
    const bool all = k == net.K + 1;
    const int rows = net.tile.rows;
    std::int32_t* to = index + k * kRows;
    Real* factor = all ? nullptr : scale + k * kRows;
    const auto coefficient = [&](std::int64_t t, std::int64_t b) {
      return net.coefficient[(net.channels(t, b / rows) + k) * net.tile_rows + b % rows];
    };
    std::int64_t live = 0;
    for (std::int64_t t = t0; !all && t < t1; ++t) {
      for (std::int64_t b = b0; b < b1; ++b) live += coefficient(t, b) != Real(0) ? 1 : 0;
    }
    // Three quarters: then the zeros cost less than packing the states again.
    const bool whole = all || 4 * live >= 3 * (t1 - t0) * (b1 - b0);
    std::int64_t n = 0;
    for (std::int64_t t = t0; t < t1; ++t) {
      for (std::int64_t b = b0; b < b1; ++b) {
        const Real c = all ? Real(1) : coefficient(t, b);
        if (!whole && c == Real(0)) continue;
        if (!all) factor[n] = c;
        to[n++] = static_cast<std::int32_t>((t - t0) * net.padded_B + b - b0);
      }
    }
    length[k] = !all && live == 0 ? 0 : n;
    if (!all) dense[k] = whole ? 1 : 0;
  }

  // Of channels k0 on: unit = (channel - k0) (tiles + panels) + tile or panel to pack, and
  // unit = ((channel - k0) panels + panel) tiles + tile to multiply.
  void pack(std::int64_t k0, std::int64_t unit, const Real* s, const Real* g) {
    const auto& tile = net.tile;
    const std::int64_t k = k0 + unit / (tiles + net.panels);
    const std::int64_t i = unit % (tiles + net.panels);
    if (!asked(k) || length[k] == 0) return;
    const auto valid = [&](std::int64_t first, int most) {
      return static_cast<int>(std::min<std::int64_t>(most, net.N - first));
    };
    if (i < tiles) {
      const std::int64_t first = i * tile.rows;
      tile.pack_columns(Side::kLeft, {g + first, net.ld}, index + k * kRows, scale + k * kRows,
                        valid(first, tile.rows), length[k], a + ((k - k0) * tiles + i) * a_bytes);
    } else if (dense[k] == 0) {
      const std::int64_t first = (i - tiles) * tile.cols;
      tile.pack_columns(Side::kRight, {s + first, net.ld}, index + k * kRows, nullptr,
                        valid(first, tile.cols), length[k],
                        b + ((k - k0) * net.panels + i - tiles) * b_bytes);
    }
  }

  void pack_all(std::int64_t panel, const Real* s) {
    const std::int64_t first = panel * net.tile.cols;
    net.tile.pack_columns(Side::kRight, {s + first, net.ld}, index + (net.K + 1) * kRows, nullptr,
                          static_cast<int>(std::min<std::int64_t>(net.tile.cols, net.N - first)),
                          length[net.K + 1], b_all + panel * b_bytes);
  }

  void multiply(std::int64_t k0, std::int64_t unit) {
    const auto& tile = net.tile;
    const std::int64_t k = k0 + unit / (net.panels * tiles);
    const std::int64_t p = unit / tiles % net.panels;
    const std::int64_t i = unit % tiles;
    if (!asked(k) || length[k] == 0) return;
    const annulus::cpu::Factor<Real> right = {
        dense[k] != 0 ? b_all + p * b_bytes : b + ((k - k0) * net.panels + p) * b_bytes, nullptr};
    tile.multiply(a + ((k - k0) * tiles + i) * a_bytes, &right, 1, length[k], tile.rows,
                  total + (k * tiles + i) * tile.rows * net.ld + p * tile.cols, net.ld, true,
                  nullptr);
  }
};

}  // namespace annulus::ring_rnn::cpu
