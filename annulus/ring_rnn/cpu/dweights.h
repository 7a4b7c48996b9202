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

  explicit WeightGradients(const Network<Real>& network);

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

  void clear(Member& m);
  // Adds the blocks that begin in steps [first, last); s and g hold the states and g of steps `base`
  // on, [step][padded_B][ld].
  void add(Member& m, std::int64_t first, std::int64_t last, std::int64_t base, const Real* s,
           const Real* g);
  void store(Member& m) const;

 private:
  bool asked(std::int64_t k) const {
    return (k == 0 ? net.plan.grad.dWo : net.plan.grad.dWa).defined();
  }
  void list(std::int64_t k, std::int64_t t0, std::int64_t t1, std::int64_t b0, std::int64_t b1);
  // Of channels k0 on: unit = (channel - k0) (tiles + panels) + tile or panel to pack, and
  // unit = ((channel - k0) panels + panel) tiles + tile to multiply.
  void pack(std::int64_t k0, std::int64_t unit, const Real* s, const Real* g);
  void pack_all(std::int64_t panel, const Real* s);
  void multiply(std::int64_t k0, std::int64_t unit);
};

extern template struct WeightGradients<float>;
extern template struct WeightGradients<double>;

}  // namespace annulus::ring_rnn::cpu
