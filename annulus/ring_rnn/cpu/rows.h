// What the files of the CPU backend share: a plan's parameters and flags, and the work on rows of a
// state, compiled for each instruction set in cpu/rows.cpp.
#pragma once

#include <cmath>
#include <cstdint>

#include "annulus/cpu/rows.h"
#include "annulus/ring_rnn/plan.h"

namespace annulus::ring_rnn::cpu {

using annulus::cpu::read_element;
using annulus::cpu::Row;
using annulus::cpu::row_at;
using annulus::cpu::row_from;
using annulus::cpu::write_element;

template <class Real>
Real read_parameter(const RingRnnParameter& p, std::int64_t i = 0) {
  if (!p.tensor.defined()) return static_cast<Real>(p.value);
  return read_element<Real>(p.tensor, p.tensor.rank == 1 ? i * p.tensor.stride[0] : 0);
}

// reset or mask at (b, t); `missing` where the tensor was left out.
inline bool read_flag(const TensorView& v, std::int64_t b, std::int64_t t, bool missing) {
  if (!v.defined()) return missing;
  // Through a byte: a torch bool may hold any bits that are not zero.
  return static_cast<const unsigned char*>(v.data)[b * v.stride[0] + t * v.stride[1]] != 0;
}

// Rows of Real are worked on in runs of at most this many elements, whole vectors at a time: such
// rows are padded to kPad elements. What a function leaves in the padding is not defined.
inline constexpr std::int64_t kRun = 512;
inline constexpr std::int64_t kPad = 32;

template <class Real>
struct StateRows : annulus::cpu::Rows<Real> {
  // y = y + constant + drive (none: 0);  r = keep s + alpha F(y), where r is not nullptr.
  void (*step)(RingRnnActivation f, std::int64_t n, Real constant, const Real* drive,
               const Real* alpha, const Real* keep, const Real* s, Real* y, Real* r);
  // g = alpha F'(y) l;  moment = l (F(y) - s), where asked for;  l = keep l.
  void (*back)(RingRnnActivation f, std::int64_t n, const Real* alpha, const Real* keep,
               const Real* y, const Real* s, Real* l, Real* g, Real* moment);
};

template <class Real>
const StateRows<Real>& state_rows();
template <>
const StateRows<float>& state_rows<float>();
template <>
const StateRows<double>& state_rows<double>();

// The population vector of states of n neurons, neuron after neuron: `fill` makes the cosines and
// sines of a run of neurons, `add` takes a row's run of them in.
struct Population {
  double x[4] = {}, y[4] = {};

  static void fill(std::int64_t first, std::int64_t count, std::int64_t n, double* cosine,
                   double* sine);
  template <class Real>
  void add(const Real* r, std::int64_t count, const double* cosine, const double* sine) {
    std::int64_t i = 0;
    for (; i + 4 <= count; i += 4) {
      for (int k = 0; k < 4; ++k) {
        x[k] += static_cast<double>(r[i + k]) * cosine[i + k];
        y[k] += static_cast<double>(r[i + k]) * sine[i + k];
      }
    }
    for (int k = 0; i < count; ++i, ++k) {
      x[k] += static_cast<double>(r[i]) * cosine[i];
      y[k] += static_cast<double>(r[i]) * sine[i];
    }
  }
  double X() const { return (x[0] + x[1]) + (x[2] + x[3]); }
  double Y() const { return (y[0] + y[1]) + (y[2] + y[3]); }
  // At amplitude 0 there is no angle; 0 stands for it.
  double angle() const { return X() == 0 && Y() == 0 ? 0 : std::atan2(Y(), X()); }
  double amplitude() const { return std::hypot(X(), Y()); }
};

}  // namespace annulus::ring_rnn::cpu
