// The definition of the ring RNN and of its readout: plain loops in double, forward and backward, in
// the order of the header's equations. Nothing here is fast; everything else is compared with it.

#include <cmath>
#include <cstdint>
#include <numbers>
#include <vector>

#include "annulus/core/tensor.h"
#include "annulus/ring_rnn/ring_rnn.h"

namespace annulus::reference {

namespace {

using Tensor1 = Strided<double, 1>;
using Tensor2 = Strided<double, 2>;
using Tensor3 = Strided<double, 3>;
using Flags = Strided<const std::uint8_t, 2>;  // bool, (B, T)

double rank0(const RingRnnParameter& p) {
  return p.tensor.defined() ? *static_cast<const double*>(p.tensor.data) : p.value;
}

double normal_density(double x) { return std::exp(-0.5 * x * x) / std::sqrt(2 * std::numbers::pi); }
// Phi(x), by erfc so that it does not cancel for x far below 0.
double normal_distribution(double x) { return 0.5 * std::erfc(-x / std::numbers::sqrt2); }
double sigmoid(double x) { return 1 / (1 + std::exp(-x)); }

// F(y). A NaN stays a NaN.
double activate(RingRnnActivation f, double y) {
  switch (f) {
    case RingRnnActivation::kRelu:
      return y > 0 || std::isnan(y) ? y : 0;
    case RingRnnActivation::kGelu:
      return y * normal_distribution(y);
    case RingRnnActivation::kTanh:
      return std::tanh(y);
    case RingRnnActivation::kSilu:
      return y * sigmoid(y);
  }
  return y;
}

// F'(y).
double slope(RingRnnActivation f, double y) {
  switch (f) {
    case RingRnnActivation::kRelu:
      return y > 0 ? 1 : 0;
    case RingRnnActivation::kGelu:
      return normal_distribution(y) + y * normal_density(y);
    case RingRnnActivation::kTanh:
      return 1 / (std::cosh(y) * std::cosh(y));
    case RingRnnActivation::kSilu:
      return sigmoid(y) * (1 + y * (1 - sigmoid(y)));
  }
  return 1;
}

// The inputs of a call, typed, and one step of one sample.
struct Network {
  Network(const RingRnnInputs& in, RingRnnActivation f)
      : A(as_strided<double, 3>(in.A)),
        Wa(as_strided<double, 3>(in.Wa)),
        Wo(as_strided<double, 2>(in.Wo)),
        r0(as_strided<double, 2>(in.r0)),
        J0(rank0(in.J0)),
        J1(rank0(in.J1)),
        B(A.size[0]),
        T(A.size[1]),
        K(A.size[2]),
        N(Wo.size[0]),
        activation(f),
        has_drive(in.drive.defined()),
        has_reset(in.reset.defined()),
        has_mask(in.mask.defined()) {
    const bool per_neuron = in.alpha.tensor.defined() && in.alpha.tensor.rank == 1;
    for (std::int64_t i = 0; i < N; ++i) {
      alpha.push_back(per_neuron ? as_strided<double, 1>(in.alpha.tensor)(i) : rank0(in.alpha));
    }
    reset_state = in.reset_state.defined() ? as_strided<double, 2>(in.reset_state) : r0;
    if (has_drive) drive = as_strided<double, 3>(in.drive);
    if (has_reset) reset = as_strided<const std::uint8_t, 2>(in.reset);
    if (has_mask) mask = as_strided<const std::uint8_t, 2>(in.mask);
  }

  bool is_reset(std::int64_t b, std::int64_t t) const { return has_reset && reset(b, t) != 0; }
  bool is_masked(std::int64_t b, std::int64_t t) const { return has_mask && mask(b, t) == 0; }

  std::vector<double> first_state(std::int64_t b) const {
    std::vector<double> r(static_cast<std::size_t>(N));
    for (std::int64_t i = 0; i < N; ++i) r[static_cast<std::size_t>(i)] = r0(b, i);
    return r;
  }
  // s: the state a step starts from.
  std::vector<double> start(std::int64_t b, std::int64_t t, std::vector<double> r) const {
    if (!is_reset(b, t)) return r;
    for (std::int64_t i = 0; i < N; ++i) r[static_cast<std::size_t>(i)] = reset_state(b, i);
    return r;
  }
  std::vector<double> y_of(std::int64_t b, std::int64_t t, const std::vector<double>& s) const {
    double sum = 0;
    for (const double v : s) sum += v;
    std::vector<double> y(s.size());
    for (std::int64_t i = 0; i < N; ++i) {
      double own = 0;
      for (std::int64_t j = 0; j < N; ++j) own += Wo(i, j) * s[static_cast<std::size_t>(j)];
      double total = J0 * sum + J1 * own;
      for (std::int64_t k = 0; k < K; ++k) {
        double z = 0;
        for (std::int64_t j = 0; j < N; ++j) z += Wa(k, i, j) * s[static_cast<std::size_t>(j)];
        total += A(b, t, k) * z;
      }
      if (has_drive) total += drive(b, t, i);
      y[static_cast<std::size_t>(i)] = total;
    }
    return y;
  }
  std::vector<double> next(std::int64_t b, std::int64_t t, const std::vector<double>& s,
                           const std::vector<double>& y) const {
    std::vector<double> r = s;
    if (is_masked(b, t)) return r;
    for (std::size_t i = 0; i < r.size(); ++i) {
      r[i] = (1 - alpha[i]) * s[i] + alpha[i] * activate(activation, y[i]);
    }
    return r;
  }

  Tensor3 A, Wa;
  Tensor2 Wo, r0, reset_state;
  Tensor3 drive;
  Flags reset, mask;
  double J0, J1;
  std::vector<double> alpha;  // one a neuron
  std::int64_t B, T, K, N;
  RingRnnActivation activation;
  bool has_drive, has_reset, has_mask;
};

// cos and sin of 2 pi i / N, exact at the quarter turns: the angle is brought into the first eighth
// of the circle in whole numbers before it is rounded.
struct Direction {
  double cos, sin;
};
Direction direction(std::int64_t i, std::int64_t N) {
  // i / N = quarter / 4 + rest / (4 N) with -N / 2 <= rest <= N / 2.
  const std::int64_t quarter = (8 * i + N) / (2 * N);
  const double angle =
      std::numbers::pi / 2 * static_cast<double>(4 * i - quarter * N) / static_cast<double>(N);
  const double c = std::cos(angle), s = std::sin(angle);
  switch (quarter % 4) {
    case 0:
      return {c, s};
    case 1:
      return {-s, c};
    case 2:
      return {-c, -s};
    default:
      return {s, -c};
  }
}

struct Population {
  double X = 0, Y = 0;
  double amplitude() const { return std::hypot(X, Y); }
  // At amplitude 0 there is no angle; 0 stands for it.
  double angle() const { return X == 0 && Y == 0 ? 0 : std::atan2(Y, X); }
};

template <class State>
Population population(std::int64_t N, State&& r) {
  Population p;
  for (std::int64_t i = 0; i < N; ++i) {
    const Direction d = direction(i, N);
    p.X += r(i) * d.cos;
    p.Y += r(i) * d.sin;
  }
  return p;
}

void fill_zero(const TensorView& v) {
  if (!v.defined()) return;
  std::array<std::int64_t, kMaxRank> index{};
  const std::int64_t count = v.numel();
  for (std::int64_t n = 0; n < count; ++n) {
    std::int64_t rest = n, offset = 0;
    for (int d = v.rank - 1; d >= 0; --d) {
      const auto k = static_cast<std::size_t>(d);
      index[k] = rest % v.shape[k];
      rest /= v.shape[k];
      offset += index[k] * v.stride[k];
    }
    static_cast<double*>(v.data)[offset] = 0;
  }
}

}  // namespace

void ring_rnn_forward(const RingRnnInputs& inputs, const RingRnnOutputs& outputs,
                      const RingRnnOptions& options) {
  const Network net(inputs, options.activation);
  const auto out = as_strided<double, 3>(outputs.out);
  for (std::int64_t b = 0; b < net.B; ++b) {
    std::vector<double> r = net.first_state(b);
    for (std::int64_t t = 0; t < net.T; ++t) {
      const std::vector<double> s = net.start(b, t, r);
      const std::vector<double> y = net.y_of(b, t, s);
      if (outputs.saved.defined()) {
        const auto saved = as_strided<double, 3>(outputs.saved);
        const std::int64_t every = options.checkpoint;
        for (std::int64_t i = 0; i < net.N; ++i) {
          const auto k = static_cast<std::size_t>(i);
          if (every == 0) saved(t, b, i) = y[k];
          if (every > 0 && t % every == 0) saved(t / every, b, i) = r[k];
        }
      }
      r = net.next(b, t, s, y);
      for (std::int64_t i = 0; i < net.N; ++i) out(b, t, i) = r[static_cast<std::size_t>(i)];
      if (outputs.angle.defined()) {
        const Population p =
            population(net.N, [&](std::int64_t i) { return r[static_cast<std::size_t>(i)]; });
        as_strided<double, 2>(outputs.angle)(b, t) = p.angle();
        as_strided<double, 2>(outputs.amplitude)(b, t) = p.amplitude();
      }
    }
    if (outputs.h_n.defined()) {
      const auto h_n = as_strided<double, 2>(outputs.h_n);
      for (std::int64_t i = 0; i < net.N; ++i) h_n(b, i) = r[static_cast<std::size_t>(i)];
    }
  }
}

void ring_rnn_backward(const RingRnnInputs& inputs, const TensorView& dout, const TensorView& dh_n,
                       const RingRnnGradients& gradients, const RingRnnOptions& options) {
  const Network net(inputs, options.activation);
  const auto& g = gradients;
  for (const TensorView* v :
       {&g.dA, &g.dWa, &g.dWo, &g.dr0, &g.dJ0, &g.dJ1, &g.dalpha, &g.ddrive, &g.dreset_state}) {
    fill_zero(*v);
  }
  // Where the state of a reset came from.
  const TensorView dreset = inputs.reset_state.defined() ? g.dreset_state : g.dr0;
  const auto add = [](const TensorView& scalar, double v) {
    if (scalar.defined()) *static_cast<double*>(scalar.data) += v;
  };
  const auto at = [](std::int64_t i) { return static_cast<std::size_t>(i); };

  for (std::int64_t b = 0; b < net.B; ++b) {
    std::vector<std::vector<double>> s(at(net.T)), y(at(net.T));
    std::vector<double> r = net.first_state(b);
    for (std::int64_t t = 0; t < net.T; ++t) {
      s[at(t)] = net.start(b, t, r);
      y[at(t)] = net.y_of(b, t, s[at(t)]);
      r = net.next(b, t, s[at(t)], y[at(t)]);
    }

    std::vector<double> l(at(net.N), 0.0);  // dL/dr after step t
    if (dh_n.defined()) {
      for (std::int64_t i = 0; i < net.N; ++i) l[at(i)] = as_strided<double, 2>(dh_n)(b, i);
    }
    for (std::int64_t t = net.T - 1; t >= 0; --t) {
      if (dout.defined()) {
        for (std::int64_t i = 0; i < net.N; ++i) l[at(i)] += as_strided<double, 3>(dout)(b, t, i);
      }
      if (!net.is_masked(b, t)) {
        const std::vector<double>& st = s[at(t)];
        const std::vector<double>& yt = y[at(t)];
        std::vector<double> gt(at(net.N)), ds(at(net.N));
        double sum_g = 0, sum_s = 0;
        for (std::size_t i = 0; i < gt.size(); ++i) {
          gt[i] = net.alpha[i] * slope(net.activation, yt[i]) * l[i];
          sum_g += gt[i];
          sum_s += st[i];
        }
        if (g.ddrive.defined()) {
          for (std::int64_t i = 0; i < net.N; ++i) {
            as_strided<double, 3>(g.ddrive)(b, t, i) = gt[at(i)];
          }
        }
        if (g.dalpha.defined()) {
          const bool per_neuron = g.dalpha.rank == 1;
          for (std::size_t i = 0; i < gt.size(); ++i) {
            const double d = l[i] * (activate(net.activation, yt[i]) - st[i]);
            if (per_neuron) {
              as_strided<double, 1>(g.dalpha)(static_cast<std::int64_t>(i)) += d;
            } else {
              add(g.dalpha, d);
            }
          }
        }
        add(g.dJ0, sum_g * sum_s);
        for (std::int64_t j = 0; j < net.N; ++j) {
          double u0 = 0;
          for (std::int64_t i = 0; i < net.N; ++i) u0 += net.Wo(i, j) * gt[at(i)];
          ds[at(j)] = (1 - net.alpha[at(j)]) * l[at(j)] + net.J0 * sum_g + net.J1 * u0;
          add(g.dJ1, st[at(j)] * u0);
          for (std::int64_t k = 0; k < net.K; ++k) {
            double u = 0;
            for (std::int64_t i = 0; i < net.N; ++i) u += net.Wa(k, i, j) * gt[at(i)];
            ds[at(j)] += net.A(b, t, k) * u;
            if (g.dA.defined()) as_strided<double, 3>(g.dA)(b, t, k) += st[at(j)] * u;
          }
        }
        for (std::int64_t i = 0; i < net.N; ++i) {
          for (std::int64_t j = 0; j < net.N; ++j) {
            const double outer = gt[at(i)] * st[at(j)];
            if (g.dWo.defined()) as_strided<double, 2>(g.dWo)(i, j) += net.J1 * outer;
            if (!g.dWa.defined()) continue;
            for (std::int64_t k = 0; k < net.K; ++k) {
              as_strided<double, 3>(g.dWa)(k, i, j) += net.A(b, t, k) * outer;
            }
          }
        }
        l = ds;
      }
      if (net.is_reset(b, t)) {  // the state before the step went nowhere
        for (std::int64_t i = 0; i < net.N; ++i) {
          if (dreset.defined()) as_strided<double, 2>(dreset)(b, i) += l[at(i)];
          l[at(i)] = 0;
        }
      }
    }
    if (g.dr0.defined()) {
      for (std::int64_t i = 0; i < net.N; ++i) as_strided<double, 2>(g.dr0)(b, i) += l[at(i)];
    }
  }
}

void ring_readout_forward(const TensorView& states_view, const TensorView& angle_view,
                          const TensorView& amplitude_view) {
  const auto states = as_strided<double, 3>(states_view);
  const auto angle = as_strided<double, 2>(angle_view);
  const auto amplitude = as_strided<double, 2>(amplitude_view);
  for (std::int64_t b = 0; b < states.size[0]; ++b) {
    for (std::int64_t t = 0; t < states.size[1]; ++t) {
      const Population p =
          population(states.size[2], [&](std::int64_t i) { return states(b, t, i); });
      angle(b, t) = p.angle();
      amplitude(b, t) = p.amplitude();
    }
  }
}

// d angle = (X dY - Y dX) / a^2,  d amplitude = (X dX + Y dY) / a.
void ring_readout_backward(const TensorView& states_view, const TensorView& dangle,
                           const TensorView& damplitude, const TensorView& dstates_view) {
  const auto states = as_strided<double, 3>(states_view);
  const auto dstates = as_strided<double, 3>(dstates_view);
  const std::int64_t N = states.size[2];
  for (std::int64_t b = 0; b < states.size[0]; ++b) {
    for (std::int64_t t = 0; t < states.size[1]; ++t) {
      const Population p = population(N, [&](std::int64_t i) { return states(b, t, i); });
      const double a = p.amplitude();
      double dX = 0, dY = 0;
      if (a != 0 && dangle.defined()) {
        const double d = as_strided<double, 2>(dangle)(b, t);
        dX -= d * (p.Y / a) / a;
        dY += d * (p.X / a) / a;
      }
      if (a != 0 && damplitude.defined()) {
        const double d = as_strided<double, 2>(damplitude)(b, t);
        dX += d * (p.X / a);
        dY += d * (p.Y / a);
      }
      for (std::int64_t i = 0; i < N; ++i) {
        const Direction e = direction(i, N);
        dstates(b, t, i) = dX * e.cos + dY * e.sin;
      }
    }
  }
}

}  // namespace annulus::reference
