// The definition of the ring RNN and of its readout: plain loops, forward and backward, in the order of
// the header's equations. Nothing here is fast; everything else is compared with it.
//
// It is a template over the arithmetic. ref.cpp makes it in double: the definition. The tests make it in
// the dtype of a call, which gives the naive program that the numeric policy compares us with. An
// Arithmetic says
//   Number                          what values and sums are in
//   Operand, operand(v)             what a factor of a matrix product is rounded to
//   add_product(sum, a, b)          adds the product of two operands
//   normal_distribution(y)          Phi, for gelu
//   tanh_slope(y)
//   direction(i, N)                 cos and sin of 2 pi i / N
#pragma once

#include <cmath>
#include <cstdint>
#include <numbers>
#include <utility>
#include <vector>

#include "annulus/core/tensor.h"
#include "annulus/core/values.h"
#include "annulus/ring_rnn/ring_rnn.h"

namespace annulus::ring_rnn {

template <class C>
struct Direction {
  C cos, sin;
};

// The population vector of a state.
template <class Arithmetic>
struct Population {
  using C = typename Arithmetic::Number;

  static std::vector<Direction<C>> directions(std::int64_t N) {
    std::vector<Direction<C>> all;
    for (std::int64_t i = 0; i < N; ++i) all.push_back(Arithmetic::direction(i, N));
    return all;
  }
  Population(const std::vector<Direction<C>>& directions, const C* r) {
    for (std::size_t i = 0; i < directions.size(); ++i) {
      X += r[i] * directions[i].cos;
      Y += r[i] * directions[i].sin;
    }
  }
  C amplitude() const { return std::hypot(X, Y); }
  // At amplitude 0 there is no angle; 0 stands for it.
  C angle() const { return X == 0 && Y == 0 ? 0 : std::atan2(Y, X); }

  C X = 0, Y = 0;
};

template <class Arithmetic>
class Definition {
 public:
  using C = typename Arithmetic::Number;
  using Vector = std::vector<C>;

  Definition(const RingRnnInputs& in, const RingRnnOptions& options)
      : options_(options),
        B(in.A.shape[0]),
        T(in.A.shape[1]),
        K(in.A.shape[2]),
        N(in.Wo.shape[0]),
        A_(load_values<C>(in.A)),
        r0_(load_values<C>(in.r0)),
        drive_(load_values<C>(in.drive)),
        reset_(load_values<C>(in.reset)),
        mask_(load_values<C>(in.mask)),
        reset_state_(load_values<C>(in.reset_state.defined() ? in.reset_state : in.r0)),
        own_reset_state_(in.reset_state.defined()),
        J0_(number(in.J0)),
        J1_(number(in.J1)),
        alpha_(in.alpha.tensor.defined() ? load_values<C>(in.alpha.tensor)
                                         : Vector{static_cast<C>(in.alpha.value)}) {
    if (alpha_.size() == 1) alpha_.resize(at(N), alpha_[0]);
    Vector all = load_values<C>(in.Wo);  // channel 0 is J1 with Wo
    const Vector Wa = load_values<C>(in.Wa);
    all.insert(all.end(), Wa.begin(), Wa.end());
    for (std::int64_t k = 0; k <= K; ++k) {
      W_.emplace_back(all.begin() + k * N * N, N);
    }
  }

  void forward(const RingRnnOutputs& outputs) const {
    Vector out, h_n, angle, amplitude, saved(at(outputs.saved.numel()));
    const auto directions = Population<Arithmetic>::directions(outputs.angle.defined() ? N : 0);
    for (std::int64_t b = 0; b < B; ++b) {
      const Sample m = run(b);
      for (const Vector& r : m.r) {
        out.insert(out.end(), r.begin(), r.end());
        const Population<Arithmetic> p(directions, r.data());
        angle.push_back(p.angle());
        amplitude.push_back(p.amplitude());
      }
      const Vector last = m.r.empty() ? row(r0_, b) : m.r.back();
      h_n.insert(h_n.end(), last.begin(), last.end());
      if (!saved.empty()) save(m, b, saved);
    }
    store_values(outputs.out, out);
    store_values(outputs.h_n, h_n);
    store_values(outputs.angle, angle);
    store_values(outputs.amplitude, amplitude);
    store_values(outputs.saved, saved);
  }

  void backward(const TensorView& dout_view, const TensorView& dh_n_view,
                const RingRnnGradients& gradients) const {
    const Vector dout = load_values<C>(dout_view), dh_n = load_values<C>(dh_n_view);
    Vector dA(at(B * T * K)), dr0(at(B * N)), dreset(at(B * N)), ddrive(at(B * T * N));
    Vector dW(at((K + 1) * N * N)), dalpha(at(N));
    C dJ0 = 0, dJ1 = 0;
    for (std::int64_t b = 0; b < B; ++b) {
      const Sample m = run(b);
      Vector l = dh_n.empty() ? Vector(at(N)) : row(dh_n, b);  // dL/dr after step t
      for (std::int64_t t = T - 1; t >= 0; --t) {
        for (std::int64_t i = 0; !dout.empty() && i < N; ++i) l[at(i)] += dout[step(b, t, i)];
        if (!is_masked(b, t)) {
          const Vector &s = m.s[at(t)], &y = m.y[at(t)];
          Vector g(at(N)), ds(at(N));
          C sum_g = 0, sum_s = 0;
          for (std::size_t i = 0; i < g.size(); ++i) {
            g[i] = alpha_[i] * slope(y[i]) * l[i];
            sum_g += g[i];
            sum_s += s[i];
            dalpha[i] += l[i] * (activate(y[i]) - s[i]);
            ddrive[step(b, t, 0) + i] = g[i];
          }
          dJ0 += sum_g * sum_s;
          for (std::size_t j = 0; j < g.size(); ++j) ds[j] = (1 - alpha_[j]) * l[j] + J0_ * sum_g;
          for (std::int64_t k = 0; k <= K; ++k) {
            const Vector u = W_[at(k)].transposed_times(g);
            C with_s = 0;
            for (std::size_t j = 0; j < u.size(); ++j) {
              ds[j] += channel(b, t, k) * u[j];
              with_s += s[j] * u[j];
            }
            (k == 0 ? dJ1 : dA[at((b * T + t) * K + k - 1)]) += with_s;
            if ((k == 0 ? gradients.dWo : gradients.dWa).defined()) {
              add_outer(scaled(g, channel(b, t, k)), s, dW.data() + k * N * N);
            }
          }
          l = ds;
        }
        if (is_reset(b, t)) {  // the state before the step went nowhere
          for (std::size_t i = 0; i < l.size(); ++i) {
            (own_reset_state_ ? dreset : dr0)[at(b * N) + i] += l[i];
            l[i] = 0;
          }
        }
      }
      for (std::size_t i = 0; i < l.size(); ++i) dr0[at(b * N) + i] += l[i];
    }
    if (gradients.dalpha.rank == 0) {
      C sum = 0;
      for (const C d : dalpha) sum += d;
      dalpha = {sum};
    }
    store_values(gradients.dA, dA);
    store_values(gradients.dWo, Vector(dW.begin(), dW.begin() + N * N));
    store_values(gradients.dWa, Vector(dW.begin() + N * N, dW.end()));
    store_values(gradients.dr0, dr0);
    store_values(gradients.dJ0, Vector{dJ0});
    store_values(gradients.dJ1, Vector{dJ1});
    store_values(gradients.dalpha, dalpha);
    store_values(gradients.ddrive, ddrive);
    store_values(gradients.dreset_state, dreset);
  }

 private:
  using Operand = typename Arithmetic::Operand;

  static std::size_t at(std::int64_t i) { return static_cast<std::size_t>(i); }
  static std::vector<Operand> operands(const Vector& x) {
    std::vector<Operand> all;
    for (const C v : x) all.push_back(Arithmetic::operand(v));
    return all;
  }
  static Vector scaled(Vector x, C factor) {
    for (C& v : x) v *= factor;
    return x;
  }

  // One N x N matrix. Both products run over the elements of their result first, so that a compiler can
  // take several at once; every sum still has the order of its index.
  class Matrix {
   public:
    Matrix(typename Vector::const_iterator first, std::int64_t N)
        : n_(at(N)), rows_(operands(Vector(first, first + N * N))), columns_(rows_.size()) {
      for (std::size_t i = 0; i < n_; ++i) {
        for (std::size_t j = 0; j < n_; ++j) columns_[j * n_ + i] = rows_[i * n_ + j];
      }
    }
    Vector times(const Vector& x) const { return sum_of(columns_, x); }
    Vector transposed_times(const Vector& x) const { return sum_of(rows_, x); }

   private:
    // The sum of vectors of the matrix, x_j of the j-th.
    Vector sum_of(const std::vector<Operand>& vectors, const Vector& x) const {
      Vector sum(n_);
      for (std::size_t j = 0; j < n_; ++j) {
        const Operand factor = Arithmetic::operand(x[j]);
        for (std::size_t i = 0; i < n_; ++i) {
          Arithmetic::add_product(sum[i], vectors[j * n_ + i], factor);
        }
      }
      return sum;
    }
    std::size_t n_;
    std::vector<Operand> rows_, columns_;
  };

  // dW += g s^T.
  static void add_outer(const Vector& g, const Vector& s, C* dW) {
    const std::vector<Operand> left = operands(g), right = operands(s);
    for (std::size_t i = 0; i < left.size(); ++i) {
      for (std::size_t j = 0; j < right.size(); ++j) {
        Arithmetic::add_product(dW[i * right.size() + j], left[i], right[j]);
      }
    }
  }

  static C number(const RingRnnParameter& p) {
    return p.tensor.defined() ? load_values<C>(p.tensor)[0] : static_cast<C>(p.value);
  }
  std::size_t step(std::int64_t b, std::int64_t t, std::int64_t i) const {
    return at((b * T + t) * N + i);
  }
  Vector row(const Vector& x, std::int64_t b) const {
    return Vector(x.begin() + b * N, x.begin() + (b + 1) * N);
  }
  C channel(std::int64_t b, std::int64_t t, std::int64_t k) const {
    return k == 0 ? J1_ : A_[at((b * T + t) * K + k - 1)];
  }
  bool is_reset(std::int64_t b, std::int64_t t) const {
    return !reset_.empty() && reset_[at(b * T + t)] != 0;
  }
  bool is_masked(std::int64_t b, std::int64_t t) const {
    return !mask_.empty() && mask_[at(b * T + t)] == 0;
  }

  // All steps of one sample: the state each starts from, y, and the state after it.
  struct Sample {
    std::vector<Vector> s, y, r;
  };
  Sample run(std::int64_t b) const {
    Sample m;
    Vector r = row(r0_, b);
    for (std::int64_t t = 0; t < T; ++t) {
      if (is_reset(b, t)) r = row(reset_state_, b);
      m.s.push_back(r);
      C sum = 0;
      for (const C v : r) sum += v;
      Vector y(at(N), J0_ * sum);
      for (std::int64_t k = 0; k <= K; ++k) {
        const Vector z = W_[at(k)].times(scaled(r, channel(b, t, k)));
        for (std::size_t i = 0; i < y.size(); ++i) y[i] += z[i];
      }
      for (std::int64_t i = 0; !drive_.empty() && i < N; ++i) y[at(i)] += drive_[step(b, t, i)];
      for (std::size_t i = 0; !is_masked(b, t) && i < r.size(); ++i) {
        r[i] = (1 - alpha_[i]) * r[i] + alpha_[i] * activate(y[i]);
      }
      m.y.push_back(std::move(y));
      m.r.push_back(r);
    }
    return m;
  }
  // y of every step, or the state before every s-th; (steps, B, N).
  void save(const Sample& m, std::int64_t b, Vector& saved) const {
    const std::int64_t every = options_.checkpoint;
    for (std::int64_t t = 0; t < T; t += every == 0 ? 1 : every) {
      const Vector& v = every == 0 ? m.y[at(t)] : t == 0 ? row(r0_, b) : m.r[at(t - 1)];
      const std::int64_t to = every == 0 ? t : t / every;
      std::copy(v.begin(), v.end(), saved.begin() + (to * B + b) * N);
    }
  }

  static C sigmoid(C y) { return 1 / (1 + std::exp(-y)); }
  // F(y). A NaN stays a NaN.
  C activate(C y) const {
    switch (options_.activation) {
      case RingRnnActivation::kRelu:
        return y < 0 ? 0 : y;
      case RingRnnActivation::kGelu:
        return y * Arithmetic::normal_distribution(y);
      case RingRnnActivation::kTanh:
        return std::tanh(y);
      case RingRnnActivation::kSilu:
        return y * sigmoid(y);
    }
    return y;
  }
  // F'(y).
  C slope(C y) const {
    switch (options_.activation) {
      case RingRnnActivation::kRelu:
        return y > 0 ? 1 : 0;
      case RingRnnActivation::kGelu:
        return Arithmetic::normal_distribution(y) +
               y * std::exp(C(-0.5) * y * y) / std::sqrt(2 * std::numbers::pi_v<C>);
      case RingRnnActivation::kTanh:
        return Arithmetic::tanh_slope(y);
      case RingRnnActivation::kSilu:
        return sigmoid(y) * (1 + y * (1 - sigmoid(y)));
    }
    return 1;
  }

  RingRnnOptions options_;
  std::int64_t B, T, K, N;
  Vector A_, r0_, drive_, reset_, mask_, reset_state_;  // empty: not given
  bool own_reset_state_;
  C J0_, J1_;
  Vector alpha_;  // one a neuron
  std::vector<Matrix> W_;
};

template <class Arithmetic>
void define_readout_forward(const TensorView& states, const TensorView& angle,
                            const TensorView& amplitude) {
  using C = typename Arithmetic::Number;
  const std::int64_t N = states.shape[2];
  const auto directions = Population<Arithmetic>::directions(N);
  const std::vector<C> r = load_values<C>(states);
  std::vector<C> angles, amplitudes;
  for (std::int64_t row = 0; row < states.shape[0] * states.shape[1]; ++row) {
    const Population<Arithmetic> p(directions, r.data() + row * N);
    angles.push_back(p.angle());
    amplitudes.push_back(p.amplitude());
  }
  store_values(angle, angles);
  store_values(amplitude, amplitudes);
}

// d angle = (X dY - Y dX) / a^2,  d amplitude = (X dX + Y dY) / a.
template <class Arithmetic>
void define_readout_backward(const TensorView& states, const TensorView& dangle_view,
                             const TensorView& damplitude_view, const TensorView& dstates_view) {
  using C = typename Arithmetic::Number;
  const std::int64_t N = states.shape[2];
  const auto directions = Population<Arithmetic>::directions(N);
  const std::vector<C> r = load_values<C>(states), dangle = load_values<C>(dangle_view),
                       damplitude = load_values<C>(damplitude_view);
  std::vector<C> dstates;
  for (std::int64_t row = 0; row < states.shape[0] * states.shape[1]; ++row) {
    const auto at = static_cast<std::size_t>(row);
    const Population<Arithmetic> p(directions, r.data() + row * N);
    const C a = p.amplitude();
    C dX = 0, dY = 0;
    if (a != 0 && !dangle.empty()) {
      dX -= dangle[at] * (p.Y / a) / a;
      dY += dangle[at] * (p.X / a) / a;
    }
    if (a != 0 && !damplitude.empty()) {
      dX += damplitude[at] * (p.X / a);
      dY += damplitude[at] * (p.Y / a);
    }
    for (const Direction<C>& e : directions) dstates.push_back(dX * e.cos + dY * e.sin);
  }
  store_values(dstates_view, dstates);
}

}  // namespace annulus::ring_rnn
