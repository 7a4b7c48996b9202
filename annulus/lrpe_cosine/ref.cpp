// The definition of LRPE-cosine and of its rotating form: plain loops in double, forward and
// backward, in the order of the header's equations. Nothing here is fast; everything else is
// compared with it.

#include <cmath>
#include <vector>

#include "annulus/core/tensor.h"
#include "annulus/lrpe_cosine/lrpe_cosine.h"
#include "annulus/lrpe_cosine/phase.h"

namespace annulus::reference {

namespace {

using Tensor2 = Strided<double, 2>;
using Tensor4 = Strided<double, 4>;

// s_j of token t in sequence b; axis counts from 0. Zero for prefix tokens.
std::int64_t coordinate(const LrpePositions& p, std::int64_t b, std::int64_t t, std::int64_t axis) {
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
    s = lrpe_cosine::wrapping_add(s, integer_at(p.offsets, b * p.offsets.stride[0]));
  }
  return lrpe_cosine::wrapping_add(s, p.offset);
}

struct SinCos {
  double sin = 0;
  double cos = 1;
};

// sin and cos of phi[h,t,c]. A prefix token has no position, so not even a NaN in theta reaches it.
SinCos phase(const LrpePositions& p, const Tensor2& theta, std::int64_t b, std::int64_t h,
             std::int64_t t, std::int64_t c) {
  if (t < p.prefix) return {};
  const std::int64_t e = theta.size[1];
  const double f = theta(h, c % e);
  if (!std::isfinite(f)) return {f - f, f - f};
  const lrpe_cosine::Turn turn =
      lrpe_cosine::turn_at(lrpe_cosine::turn_step(f), coordinate(p, b, t, c / e));
  SinCos r;
  lrpe_cosine::sincos_turn(turn, r.sin, r.cos);
  return r;
}

// Of whichever sign without an overflow.
double sigmoid(double x) {
  const double e = std::exp(-std::abs(x));
  return (x < 0 ? e : 1) / (1 + e);
}

// Softmax of n values a step apart.
void softmax(const double* x, double* p, std::int64_t n, std::int64_t step) {
  double high = -INFINITY;
  for (std::int64_t i = 0; i < n; ++i) {
    high = std::isnan(x[i * step]) ? x[i * step] : std::fmax(high, x[i * step]);
    if (std::isnan(high)) break;
  }
  double sum = 0;
  for (std::int64_t i = 0; i < n; ++i) sum += p[i * step] = std::exp(x[i * step] - high);
  for (std::int64_t i = 0; i < n; ++i) p[i * step] /= sum;
}

// xb = f(x) of one (b, h) slice, L x D dense.
std::vector<double> activate(const Tensor4& x, std::int64_t b, std::int64_t h, LrpeActivation f) {
  const std::int64_t L = x.size[2];
  const std::int64_t D = x.size[3];
  std::vector<double> raw(static_cast<std::size_t>(L * D));
  std::vector<double> xb(raw.size());
  for (std::int64_t t = 0; t < L; ++t) {
    for (std::int64_t c = 0; c < D; ++c) {
      const double v = x(b, h, t, c);
      const auto i = static_cast<std::size_t>(t * D + c);
      raw[i] = v;
      xb[i] = f == LrpeActivation::kRelu      ? (v > 0 || std::isnan(v) ? v : 0)
              : f == LrpeActivation::kSigmoid ? sigmoid(v)
              : f == LrpeActivation::kSilu    ? v * sigmoid(v)
                                              : v;
    }
  }
  if (f == LrpeActivation::kSoftmaxFeatures) {
    for (std::int64_t t = 0; t < L; ++t) softmax(raw.data() + t * D, xb.data() + t * D, D, 1);
  } else if (f == LrpeActivation::kSoftmaxTokens) {
    for (std::int64_t c = 0; c < D; ++c) softmax(raw.data() + c, xb.data() + c, L, D);
  }
  return xb;
}

// dx = f'(x) g, or p (g - sum(p g)), for one (b, h) slice.
void activation_backward(const Tensor4& x, const std::vector<double>& xb,
                         const std::vector<double>& g, const Tensor4& dx, std::int64_t b,
                         std::int64_t h, LrpeActivation f) {
  const std::int64_t L = dx.size[2];
  const std::int64_t D = dx.size[3];
  auto at = [D](std::int64_t t, std::int64_t c) { return static_cast<std::size_t>(t * D + c); };
  std::vector<double> dot_row(static_cast<std::size_t>(L), 0.0);
  std::vector<double> dot_column(static_cast<std::size_t>(D), 0.0);
  if (f == LrpeActivation::kSoftmaxFeatures || f == LrpeActivation::kSoftmaxTokens) {
    for (std::int64_t t = 0; t < L; ++t) {
      for (std::int64_t c = 0; c < D; ++c) {
        dot_row[static_cast<std::size_t>(t)] += xb[at(t, c)] * g[at(t, c)];
        dot_column[static_cast<std::size_t>(c)] += xb[at(t, c)] * g[at(t, c)];
      }
    }
  }
  for (std::int64_t t = 0; t < L; ++t) {
    for (std::int64_t c = 0; c < D; ++c) {
      const double gi = g[at(t, c)];
      double d = gi;
      if (f == LrpeActivation::kRelu) {
        const double v = x(b, h, t, c);
        d = v > 0 || std::isnan(v) ? gi : 0;
      } else if (f == LrpeActivation::kSigmoid) {
        const double s = xb[at(t, c)];
        d = gi * s * (1 - s);
      } else if (f == LrpeActivation::kSilu) {
        const double v = x(b, h, t, c);
        const double s = sigmoid(v);
        d = gi * s * (1 + v * (1 - s));
      } else if (f == LrpeActivation::kSoftmaxFeatures) {
        d = xb[at(t, c)] * (gi - dot_row[static_cast<std::size_t>(t)]);
      } else if (f == LrpeActivation::kSoftmaxTokens) {
        d = xb[at(t, c)] * (gi - dot_column[static_cast<std::size_t>(c)]);
      }
      dx(b, h, t, c) = d;
    }
  }
}

// dtheta[h, k] accumulates in plain order.
void zero(const Tensor2& t) {
  for (std::int64_t h = 0; h < t.size[0]; ++h) {
    for (std::int64_t k = 0; k < t.size[1]; ++k) t(h, k) = 0;
  }
}

}  // namespace

void lrpe_cosine_forward(const TensorView& x_view, const TensorView& theta_view,
                         const TensorView& y_view, const LrpeCosineOptions& options) {
  const auto x = as_strided<double, 4>(x_view);
  const auto theta = as_strided<double, 2>(theta_view);
  const auto y = as_strided<double, 4>(y_view);
  const auto [B, H, L, D] = std::array{x.size[0], x.size[1], x.size[2], x.size[3]};
  for (std::int64_t b = 0; b < B; ++b) {
    for (std::int64_t h = 0; h < H; ++h) {
      const std::vector<double> xb = activate(x, b, h, options.activation);
      for (std::int64_t t = 0; t < L; ++t) {
        for (std::int64_t c = 0; c < D; ++c) {
          const SinCos phi = phase(options, theta, b, h, t, c);
          const double v = xb[static_cast<std::size_t>(t * D + c)];
          y(b, h, t, c) = v * phi.cos;
          y(b, h, t, D + c) = v * phi.sin;
        }
      }
    }
  }
}

void lrpe_cosine_backward(const TensorView& dy_view, const TensorView& x_view,
                          const TensorView& theta_view, const TensorView& dx_view,
                          const TensorView& dtheta_view, const LrpeCosineOptions& options) {
  const auto dy = as_strided<double, 4>(dy_view);
  const auto theta = as_strided<double, 2>(theta_view);
  const auto [B, H, L, D] = std::array{dy.size[0], dy.size[1], dy.size[2], dy.size[3] / 2};
  const std::int64_t E = theta.size[1];
  if (dtheta_view.defined()) zero(as_strided<double, 2>(dtheta_view));
  for (std::int64_t b = 0; b < B; ++b) {
    for (std::int64_t h = 0; h < H; ++h) {
      Strided<double, 4> x;
      std::vector<double> xb;
      if (x_view.defined()) {
        x = as_strided<double, 4>(x_view);
        xb = activate(x, b, h, options.activation);
      }
      std::vector<double> g(static_cast<std::size_t>(L * D));
      for (std::int64_t t = 0; t < L; ++t) {
        for (std::int64_t c = 0; c < D; ++c) {
          const SinCos phi = phase(options, theta, b, h, t, c);
          const double dc = dy(b, h, t, c);
          const double ds = dy(b, h, t, D + c);
          const auto i = static_cast<std::size_t>(t * D + c);
          g[i] = dc * phi.cos + ds * phi.sin;
          if (dtheta_view.defined() && t >= options.prefix) {
            const auto s = static_cast<double>(coordinate(options, b, t, c / E));
            as_strided<double, 2>(dtheta_view)(h, c % E) +=
                s * xb[i] * (ds * phi.cos - dc * phi.sin);
          }
        }
      }
      if (dx_view.defined()) {
        activation_backward(x, xb, g, as_strided<double, 4>(dx_view), b, h, options.activation);
      }
    }
  }
}

namespace {

// Columns of pair c.
struct PairColumns {
  std::int64_t first, second;
};
PairColumns pair_columns(std::int64_t c, std::int64_t D, bool interleaved) {
  return interleaved ? PairColumns{2 * c, 2 * c + 1} : PairColumns{c, c + D / 2};
}

}  // namespace

void lrpe_rotate_forward(const TensorView& x_view, const TensorView& theta_view,
                         const TensorView& y_view, const LrpeRotateOptions& options) {
  const auto x = as_strided<double, 4>(x_view);
  const auto theta = as_strided<double, 2>(theta_view);
  const auto y = as_strided<double, 4>(y_view);
  const auto [B, H, L, D] = std::array{x.size[0], x.size[1], x.size[2], x.size[3]};
  for (std::int64_t b = 0; b < B; ++b) {
    for (std::int64_t h = 0; h < H; ++h) {
      for (std::int64_t t = 0; t < L; ++t) {
        for (std::int64_t c = 0; c < D / 2; ++c) {
          const SinCos phi = phase(options, theta, b, h, t, c);
          const auto [i, j] = pair_columns(c, D, options.interleaved);
          const double x1 = x(b, h, t, i);
          const double x2 = x(b, h, t, j);
          y(b, h, t, i) = x1 * phi.cos - x2 * phi.sin;
          y(b, h, t, j) = x1 * phi.sin + x2 * phi.cos;
        }
      }
    }
  }
}

void lrpe_rotate_backward(const TensorView& dy_view, const TensorView& x_view,
                          const TensorView& theta_view, const TensorView& dx_view,
                          const TensorView& dtheta_view, const LrpeRotateOptions& options) {
  const auto dy = as_strided<double, 4>(dy_view);
  const auto theta = as_strided<double, 2>(theta_view);
  const auto [B, H, L, D] = std::array{dy.size[0], dy.size[1], dy.size[2], dy.size[3]};
  const std::int64_t E = theta.size[1];
  if (dtheta_view.defined()) zero(as_strided<double, 2>(dtheta_view));
  for (std::int64_t b = 0; b < B; ++b) {
    for (std::int64_t h = 0; h < H; ++h) {
      for (std::int64_t t = 0; t < L; ++t) {
        for (std::int64_t c = 0; c < D / 2; ++c) {
          const SinCos phi = phase(options, theta, b, h, t, c);
          const auto [i, j] = pair_columns(c, D, options.interleaved);
          const double d1 = dy(b, h, t, i);
          const double d2 = dy(b, h, t, j);
          const double g1 = d1 * phi.cos + d2 * phi.sin;
          const double g2 = d2 * phi.cos - d1 * phi.sin;
          if (dtheta_view.defined() && t >= options.prefix) {
            // d/dphi (y1, y2) = (-y2, y1), and <dy, (-y2, y1)> = <R^T dy, (-x2, x1)>.
            const auto x = as_strided<double, 4>(x_view);
            const auto s = static_cast<double>(coordinate(options, b, t, c / E));
            as_strided<double, 2>(dtheta_view)(h, c % E) +=
                s * (x(b, h, t, i) * g2 - x(b, h, t, j) * g1);
          }
          if (dx_view.defined()) {
            const auto dx = as_strided<double, 4>(dx_view);
            dx(b, h, t, i) = g1;
            dx(b, h, t, j) = g2;
          }
        }
      }
    }
  }
}

}  // namespace annulus::reference
