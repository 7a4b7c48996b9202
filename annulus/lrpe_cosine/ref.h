// The definition of LRPE-cosine and of its rotating form: plain loops, forward and backward, in the order
// of the header's equations. Nothing here is fast; everything else is compared with it.
//
// It is a template over the arithmetic: in double with exact phases (Exact) it is the definition. The
// tests make it in the dtype of a call, which gives the naive program that the numeric policy compares us
// with. An Arithmetic says
//   Number                           what values and sums are in
//   Frequency, frequency(theta)      theta in the form that phases are made from
//   turned(frequency, position)      sin and cos of position * theta
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <utility>
#include <vector>

#include "annulus/core/tensor.h"
#include "annulus/core/values.h"
#include "annulus/lrpe_cosine/lrpe_cosine.h"
#include "annulus/lrpe_cosine/phase.h"
#include "annulus/lrpe_cosine/positions.h"

namespace annulus::lrpe_cosine {

template <class C>
struct SinCos {
  C sin = 0;
  C cos = 1;
};

struct Exact {
  using Number = double;
  struct Frequency {
    double theta;
    Turn step;
  };
  static Frequency frequency(double theta) {
    return {theta, turn_step(std::isfinite(theta) ? theta : 0)};
  }
  static SinCos<double> turned(const Frequency& f, std::int64_t position) {
    if (!std::isfinite(f.theta)) return {f.theta - f.theta, f.theta - f.theta};
    SinCos<double> r;
    sincos_turn(turn_at(f.step, position), r.sin, r.cos);
    return r;
  }
};

// s_j of token t in sequence b; axis counts from 0. Zero for prefix tokens.
inline std::int64_t coordinate(const LrpePositions& p, std::int64_t b, std::int64_t t,
                               std::int64_t axis) {
  if (p.position_ids.defined()) {
    const TensorView& ids = p.position_ids;
    const std::int64_t row = ids.shape[0] == 1 ? 0 : b;
    return integer_at(ids, row * ids.stride[0] + t * ids.stride[1] + axis * ids.stride[2]);
  }
  if (t < p.prefix) return 0;
  std::int64_t s = t - p.prefix;
  for (std::int64_t j = p.shape.axes - 1; j > axis; --j) {
    s /= p.shape.extent[static_cast<std::size_t>(j)];
  }
  s %= p.shape.extent[static_cast<std::size_t>(axis)];
  if (p.shape.axes > 1) return s;
  if (p.offsets.defined()) {
    s = wrapping_add(s, integer_at(p.offsets, b * p.offsets.stride[0]));
  }
  return wrapping_add(s, p.offset);
}

// f over the D features or L tokens of every (b, h), forward and backward. Slices of L x D, dense.
template <class C>
class Activation {
 public:
  Activation(LrpeActivation f, std::int64_t L, std::int64_t D) : f_(f), L_(L), D_(D) {}

  // f(x).
  std::vector<C> forward(const std::vector<C>& x) const {
    std::vector<C> xb = x;
    for (C& v : xb) {
      if (f_ == LrpeActivation::kRelu) v = v < 0 ? 0 : v;
      if (f_ == LrpeActivation::kSigmoid) v = sigmoid(v);
      if (f_ == LrpeActivation::kSilu) v *= sigmoid(v);
    }
    for_each_softmax(xb, [&](C* p, std::int64_t n, std::int64_t step) {
      C high = -INFINITY, sum = 0;
      for (std::int64_t i = 0; i < n; ++i) high = std::max(high, p[i * step]);
      for (std::int64_t i = 0; i < n; ++i) sum += p[i * step] = std::exp(p[i * step] - high);
      for (std::int64_t i = 0; i < n; ++i) p[i * step] /= sum;
    });
    return xb;
  }
  // f'(x) g, or p (g - sum(p g)); xb = f(x).
  std::vector<C> backward(const std::vector<C>& x, const std::vector<C>& xb,
                          std::vector<C> g) const {
    for (std::size_t i = 0; i < x.size(); ++i) {
      if (f_ == LrpeActivation::kRelu) g[i] = x[i] <= 0 ? 0 : g[i];
      if (f_ == LrpeActivation::kSigmoid) g[i] *= xb[i] * (1 - xb[i]);
      if (f_ == LrpeActivation::kSilu) {
        const C s = sigmoid(x[i]);
        g[i] *= s * (1 + x[i] * (1 - s));
      }
    }
    for_each_softmax(g, [&](C* d, std::int64_t n, std::int64_t step) {
      const C* p = xb.data() + (d - g.data());
      C dot = 0;
      for (std::int64_t i = 0; i < n; ++i) dot += p[i * step] * d[i * step];
      for (std::int64_t i = 0; i < n; ++i) d[i * step] = p[i * step] * (d[i * step] - dot);
    });
    return g;
  }

 private:
  // Of whichever sign without an overflow.
  static C sigmoid(C x) {
    const C e = std::exp(-std::abs(x));
    return (x < 0 ? e : 1) / (1 + e);
  }
  // f(first of n values, n, the step between them).
  template <class F>
  void for_each_softmax(std::vector<C>& values, F&& f) const {
    const auto end = static_cast<std::int64_t>(values.size());
    if (f_ == LrpeActivation::kSoftmaxFeatures) {
      for (std::int64_t row = 0; row < end; row += D_) f(values.data() + row, D_, 1);
    } else if (f_ == LrpeActivation::kSoftmaxTokens) {
      for (std::int64_t slice = 0; slice < end; slice += L_ * D_) {
        for (std::int64_t c = 0; c < D_; ++c) f(values.data() + slice + c, L_, D_);
      }
    }
  }

  LrpeActivation f_;
  std::int64_t L_, D_;
};

// What the two forms share: theta, and the phase of every token and column.
template <class Arithmetic>
class Phases {
 public:
  using C = typename Arithmetic::Number;

  // Of so many heads, which share the rows of theta in groups.
  Phases(const TensorView& theta, std::int64_t heads, const LrpePositions& positions)
      : positions_(positions),
        heads_per_row_(
            std::max<std::int64_t>(1, heads / std::max<std::int64_t>(1, theta.shape[0]))),
        E_(theta.shape[1]) {
    for (const C f : load_values<C>(theta)) frequency_.push_back(Arithmetic::frequency(f));
  }
  // f(b, h, t, c, row, phi) for every token of a (B, H, L, .) tensor and its columns that have a phase; row
  // counts (b, h, t). A prefix token has no position, so not even a NaN in theta reaches it.
  template <class F>
  void for_each(const TensorView& x, std::int64_t columns, F&& f) const {
    std::int64_t row = 0;
    for (std::int64_t b = 0; b < x.shape[0]; ++b) {
      for (std::int64_t h = 0; h < x.shape[1]; ++h) {
        for (std::int64_t t = 0; t < x.shape[2]; ++t, ++row) {
          for (std::int64_t c = 0; c < columns; ++c) {
            SinCos<C> phi;
            if (t >= positions_.prefix) {
              phi = Arithmetic::turned(frequency_[theta_at(h, c)], position(b, t, c));
            }
            f(b, h, t, c, row, phi);
          }
        }
      }
    }
  }
  // Adds s times the derivative by the phase. A prefix token has none.
  void add_dtheta(std::vector<C>& dtheta, std::int64_t b, std::int64_t h, std::int64_t t,
                  std::int64_t c, C dphi) const {
    if (dtheta.empty() || t < positions_.prefix) return;
    dtheta[theta_at(h, c)] += static_cast<C>(position(b, t, c)) * dphi;
  }

 private:
  std::size_t theta_at(std::int64_t h, std::int64_t c) const {
    return static_cast<std::size_t>(h / heads_per_row_ * E_ + c % E_);
  }
  std::int64_t position(std::int64_t b, std::int64_t t, std::int64_t c) const {
    return coordinate(positions_, b, t, c / E_);
  }

  const LrpePositions positions_;
  std::int64_t heads_per_row_, E_;
  std::vector<typename Arithmetic::Frequency> frequency_;
};

template <class Arithmetic>
void define_forward(const TensorView& x, const TensorView& theta, const TensorView& y_view,
                    const LrpeCosineOptions& options) {
  using C = typename Arithmetic::Number;
  const std::int64_t L = x.shape[2], D = x.shape[3];
  const std::vector<C> xb = Activation<C>(options.activation, L, D).forward(load_values<C>(x));
  std::vector<C> y(2 * xb.size());
  Phases<Arithmetic>(theta, x.shape[1], positions_of(options))
      .for_each(x, D, [&](auto, auto, auto, auto c, auto row, const SinCos<C>& phi) {
        const C v = xb[static_cast<std::size_t>(row * D + c)];
        const auto cos_at = static_cast<std::size_t>(row * 2 * D + c);
        y[cos_at] = v * phi.cos;
        y[cos_at + static_cast<std::size_t>(D)] = v * phi.sin;
      });
  store_values(y_view, y);
}

// x may be left out where nothing needs it.
template <class Arithmetic>
void define_backward(const TensorView& dy_view, const TensorView& x_view, const TensorView& theta,
                     const TensorView& dx, const TensorView& dtheta_view,
                     const LrpeCosineOptions& options) {
  using C = typename Arithmetic::Number;
  const std::int64_t L = dy_view.shape[2], D = dy_view.shape[3] / 2;
  const Activation<C> activation(options.activation, L, D);
  const std::vector<C> dy = load_values<C>(dy_view), x = load_values<C>(x_view);
  const std::vector<C> xb = activation.forward(x);
  std::vector<C> g(dy.size() / 2), dtheta(static_cast<std::size_t>(dtheta_view.numel()));
  const Phases<Arithmetic> phases(theta, dy_view.shape[1], positions_of(options));
  phases.for_each(dy_view, D, [&](auto b, auto h, auto t, auto c, auto row, const SinCos<C>& phi) {
    const auto i = static_cast<std::size_t>(row * D + c);
    const C dc = dy[static_cast<std::size_t>(row * 2 * D + c)];
    const C ds = dy[static_cast<std::size_t>(row * 2 * D + D + c)];
    g[i] = dc * phi.cos + ds * phi.sin;
    if (!xb.empty()) {
      phases.add_dtheta(dtheta, b, h, t, c, xb[i] * (ds * phi.cos - dc * phi.sin));
    }
  });
  store_values(dtheta_view, dtheta);
  if (dx.defined()) store_values(dx, activation.backward(x, xb, std::move(g)));
}

// The columns of a row of D that turn: R pairs, the c-th of them at at(row, c).
struct Pairs {
  std::int64_t D, R;
  bool interleaved;

  Pairs(const TensorView& x, const TensorView& theta, const LrpeRotateOptions& options)
      : D(x.shape[3]), interleaved(options.interleaved) {
    const TensorView& ids = options.position_ids;
    R = std::min((ids.defined() ? ids.shape[2] : options.shape.axes) * theta.shape[1], D / 2);
  }
  struct Columns {
    std::size_t first, second;
  };
  Columns at(std::int64_t row, std::int64_t c) const {
    const std::int64_t first = row * D + (interleaved ? 2 * c : c);
    return {static_cast<std::size_t>(first),
            static_cast<std::size_t>(first + (interleaved ? 1 : R))};
  }
};

template <class Arithmetic>
void define_forward(const TensorView& x_view, const TensorView& theta, const TensorView& y_view,
                    const LrpeRotateOptions& options) {
  using C = typename Arithmetic::Number;
  const Pairs pairs(x_view, theta, options);
  const std::vector<C> x = load_values<C>(x_view);
  std::vector<C> y = x;  // what no pair has passes through
  Phases<Arithmetic>(theta, x_view.shape[1], positions_of(options))
      .for_each(x_view, pairs.R, [&](auto, auto, auto, auto c, auto row, const SinCos<C>& phi) {
        const auto [i, j] = pairs.at(row, c);
        y[i] = x[i] * phi.cos - x[j] * phi.sin;
        y[j] = x[i] * phi.sin + x[j] * phi.cos;
      });
  store_values(y_view, y);
}

template <class Arithmetic>
void define_backward(const TensorView& dy_view, const TensorView& x_view, const TensorView& theta,
                     const TensorView& dx_view, const TensorView& dtheta_view,
                     const LrpeRotateOptions& options) {
  using C = typename Arithmetic::Number;
  const Pairs pairs(dy_view, theta, options);
  const std::vector<C> dy = load_values<C>(dy_view), x = load_values<C>(x_view);
  std::vector<C> dx = dy, dtheta(static_cast<std::size_t>(dtheta_view.numel()));
  const Phases<Arithmetic> phases(theta, dy_view.shape[1], positions_of(options));
  phases.for_each(dy_view, pairs.R,
                  [&](auto b, auto h, auto t, auto c, auto row, const SinCos<C>& phi) {
                    const auto [i, j] = pairs.at(row, c);
                    dx[i] = dy[i] * phi.cos + dy[j] * phi.sin;
                    dx[j] = dy[j] * phi.cos - dy[i] * phi.sin;
                    // d/dphi (y1, y2) = (-y2, y1), and <dy, (-y2, y1)> = <R^T dy, (-x2, x1)>.
                    if (!x.empty())
                      phases.add_dtheta(dtheta, b, h, t, c, x[i] * dx[j] - x[j] * dx[i]);
                  });
  store_values(dtheta_view, dtheta);
  store_values(dx_view, dx);
}

}  // namespace annulus::lrpe_cosine
