// The naive program the numeric policy compares us with: float(position) * theta and std::cos.
#include <cmath>
#include <vector>

#include "annulus/core/dispatch.h"
#include "annulus/lrpe_cosine/test/cases.h"

namespace annulus::testing {

namespace {

template <class C>
std::vector<C> load(const TensorView& v) {
  std::vector<C> values(v.defined() ? static_cast<std::size_t>(v.numel()) : 0);
  if (values.empty()) return values;
  visit_floating(v.dtype, [&]<class T>() {
    const T* data = static_cast<const T*>(v.data);
    for (std::size_t i = 0; i < values.size(); ++i) {
      values[i] = static_cast<C>(static_cast<compute_t<T>>(data[i]));
    }
  });
  return values;
}

template <class C>
void store(const TensorView& v, const std::vector<C>& values) {
  if (!v.defined()) return;
  visit_floating(v.dtype, [&]<class T>() {
    T* data = static_cast<T*>(v.data);
    for (std::size_t i = 0; i < values.size(); ++i) {
      data[i] = static_cast<T>(static_cast<compute_t<T>>(values[i]));
    }
  });
}

std::size_t at(std::int64_t i) { return static_cast<std::size_t>(i); }

template <class C>
struct Naive {
  const LrpeProblem& p;
  std::vector<C> theta;
  LrpePositions positions;
  std::int64_t L;
  bool rotate;

  std::int64_t position(std::int64_t b, std::int64_t t, std::int64_t axis) const {
    if (p.ids != LrpeProblem::Ids::kNone) {  // dense, as every tensor here
      const std::int64_t row = p.ids == LrpeProblem::Ids::kShared ? 0 : b;
      return integer_at(positions.position_ids, (row * L + t) * p.shape.axes + axis);
    }
    std::int64_t s = t - p.prefix;
    for (int j = p.shape.axes - 1; j > axis; --j) s /= p.shape.extent[at(j)];
    s %= p.shape.extent[at(axis)];
    if (p.shape.axes > 1) return s;
    s += p.offset;
    return positions.offsets.defined() ? s + integer_at(positions.offsets, b) : s;
  }
  C phase(std::int64_t b, std::int64_t h, std::int64_t t, std::int64_t c) const {
    if (t < p.prefix) return 0;
    return static_cast<C>(position(b, t, c / p.E)) * theta[at(h * p.E + c % p.E)];
  }
  std::int64_t index(std::int64_t b, std::int64_t h, std::int64_t t, std::int64_t c,
                     std::int64_t width) const {
    return ((b * p.H + h) * L + t) * width + c;
  }
  // Columns of pair c.
  std::int64_t first(std::int64_t c) const {
    return p.form == LrpeProblem::Form::kRotateInterleaved ? 2 * c : c;
  }
  std::int64_t second(std::int64_t c) const {
    return p.form == LrpeProblem::Form::kRotateInterleaved ? 2 * c + 1 : c + p.D / 2;
  }

  static C sigmoid(C v) { return 1 / (1 + std::exp(-v)); }

  std::vector<C> activate(const std::vector<C>& x) const {
    std::vector<C> xb = x;
    const auto soft = [&](std::int64_t start, std::int64_t n, std::int64_t step) {
      C high = -INFINITY, sum = 0;
      for (std::int64_t i = 0; i < n; ++i) high = std::max(high, x[at(start + i * step)]);
      for (std::int64_t i = 0; i < n; ++i) {
        sum += xb[at(start + i * step)] = std::exp(x[at(start + i * step)] - high);
      }
      for (std::int64_t i = 0; i < n; ++i) xb[at(start + i * step)] /= sum;
    };
    switch (p.activation) {
      case LrpeActivation::kNone:
        break;
      case LrpeActivation::kRelu:
        for (C& v : xb) v = v < 0 ? 0 : v;
        break;
      case LrpeActivation::kSigmoid:
        for (C& v : xb) v = sigmoid(v);
        break;
      case LrpeActivation::kSilu:
        for (C& v : xb) v *= sigmoid(v);
        break;
      case LrpeActivation::kSoftmaxFeatures:
        for (std::int64_t row = 0; row < p.B * p.H * L; ++row) soft(row * p.D, p.D, 1);
        break;
      case LrpeActivation::kSoftmaxTokens:
        for (std::int64_t g = 0; g < p.B * p.H; ++g) {
          for (std::int64_t c = 0; c < p.D; ++c) soft(g * L * p.D + c, L, p.D);
        }
        break;
    }
    return xb;
  }

  void activation_backward(const std::vector<C>& x, const std::vector<C>& xb,
                           std::vector<C>& g) const {
    const auto soft = [&](std::int64_t start, std::int64_t n, std::int64_t step) {
      C dot = 0;
      for (std::int64_t i = 0; i < n; ++i)
        dot += xb[at(start + i * step)] * g[at(start + i * step)];
      for (std::int64_t i = 0; i < n; ++i) {
        g[at(start + i * step)] = xb[at(start + i * step)] * (g[at(start + i * step)] - dot);
      }
    };
    if (p.activation == LrpeActivation::kSoftmaxFeatures) {
      for (std::int64_t row = 0; row < p.B * p.H * L; ++row) soft(row * p.D, p.D, 1);
    } else if (p.activation == LrpeActivation::kSoftmaxTokens) {
      for (std::int64_t gr = 0; gr < p.B * p.H; ++gr) {
        for (std::int64_t c = 0; c < p.D; ++c) soft(gr * L * p.D + c, L, p.D);
      }
    } else if (p.activation != LrpeActivation::kNone) {
      for (std::size_t i = 0; i < g.size(); ++i) {
        const C s = sigmoid(x[i]);
        g[i] *= p.activation == LrpeActivation::kRelu      ? (x[i] > 0 ? C(1) : C(0))
                : p.activation == LrpeActivation::kSigmoid ? s * (1 - s)
                                                           : s * (1 + x[i] * (1 - s));
      }
    }
  }

  template <class F>
  void for_each(std::int64_t columns, F&& f) const {
    for (std::int64_t b = 0; b < p.B; ++b) {
      for (std::int64_t h = 0; h < p.H; ++h) {
        for (std::int64_t t = 0; t < L; ++t) {
          for (std::int64_t c = 0; c < columns; ++c) {
            const C phi = phase(b, h, t, c);
            f(b, h, t, c, std::sin(phi), std::cos(phi));
          }
        }
      }
    }
  }

  std::vector<C> forward(const std::vector<C>& x) const {
    if (rotate) {
      std::vector<C> y(x.size());
      for_each(p.D / 2, [&](auto b, auto h, auto t, auto c, C sin, C cos) {
        const C x1 = x[at(index(b, h, t, first(c), p.D))];
        const C x2 = x[at(index(b, h, t, second(c), p.D))];
        y[at(index(b, h, t, first(c), p.D))] = x1 * cos - x2 * sin;
        y[at(index(b, h, t, second(c), p.D))] = x1 * sin + x2 * cos;
      });
      return y;
    }
    const std::vector<C> xb = activate(x);
    std::vector<C> y(2 * x.size());
    for_each(p.D, [&](auto b, auto h, auto t, auto c, C sin, C cos) {
      const C v = xb[at(index(b, h, t, c, p.D))];
      y[at(index(b, h, t, c, 2 * p.D))] = v * cos;
      y[at(index(b, h, t, p.D + c, 2 * p.D))] = v * sin;
    });
    return y;
  }

  void backward(const std::vector<C>& dy, const std::vector<C>& x, std::vector<C>& dx,
                std::vector<C>& dtheta) const {
    dx.assign(at(p.B * p.H * L * p.D), 0);
    dtheta.assign(at(p.H * p.E), 0);
    const std::vector<C> xb = rotate || x.empty() ? x : activate(x);
    for_each(rotate ? p.D / 2 : p.D, [&](auto b, auto h, auto t, auto c, C sin, C cos) {
      C turning = 0;  // d loss / d phi
      if (rotate) {
        const auto i = at(index(b, h, t, first(c), p.D));
        const auto j = at(index(b, h, t, second(c), p.D));
        dx[i] = dy[i] * cos + dy[j] * sin;
        dx[j] = dy[j] * cos - dy[i] * sin;
        if (!x.empty()) turning = x[i] * dx[j] - x[j] * dx[i];
      } else {
        const C dc = dy[at(index(b, h, t, c, 2 * p.D))];
        const C ds = dy[at(index(b, h, t, p.D + c, 2 * p.D))];
        const auto i = at(index(b, h, t, c, p.D));
        dx[i] = dc * cos + ds * sin;
        if (!x.empty()) turning = xb[i] * (ds * cos - dc * sin);
      }
      if (t >= p.prefix) {
        dtheta[at(h * p.E + c % p.E)] += static_cast<C>(position(b, t, c / p.E)) * turning;
      }
    });
    if (!rotate) activation_backward(x, xb, dx);
  }
};

template <class F>
void with_naive(const LrpeProblem& p, const TensorView& theta, const LrpePositions& positions,
                std::int64_t tokens, F&& f) {
  const bool rotate =
      p.form == LrpeProblem::Form::kRotateHalves || p.form == LrpeProblem::Form::kRotateInterleaved;
  visit_bool(p.dtype == DType::kF64, [&]<bool Double>() {
    using C = std::conditional_t<Double, double, float>;
    f.template operator()<C>(Naive<C>{p, load<C>(theta), positions, tokens, rotate});
  });
}

}  // namespace

void lrpe_baseline_forward(const LrpeProblem& p, const TensorView& x, const TensorView& theta,
                           const LrpePositions& positions, const TensorView& y) {
  with_naive(p, theta, positions, x.shape[2],
             [&]<class C>(const Naive<C>& naive) { store(y, naive.forward(load<C>(x))); });
}

void lrpe_baseline_backward(const LrpeProblem& p, const TensorView& dy, const TensorView& x,
                            const TensorView& theta, const LrpePositions& positions,
                            const TensorView& dx, const TensorView& dtheta) {
  with_naive(p, theta, positions, dy.shape[2], [&]<class C>(const Naive<C>& naive) {
    std::vector<C> dx_values, dtheta_values;
    naive.backward(load<C>(dy), load<C>(x), dx_values, dtheta_values);
    store(dx, dx_values);
    store(dtheta, dtheta_values);
  });
}

}  // namespace annulus::testing
