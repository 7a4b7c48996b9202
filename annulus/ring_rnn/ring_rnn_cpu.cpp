// Ring RNN on the CPU: one sample after the other in plain loops.

#include <algorithm>
#include <type_traits>

#include "annulus/core/context.h"
#include "annulus/cpu/parallel.h"
#include "annulus/ring_rnn/ring_rnn_cpu.h"

namespace annulus::ring::cpu {

namespace {

// An operand of a matrix product in the plan's precision.
template <class Real>
Real operand(const Plan& plan, Real x) {
  if constexpr (std::is_same_v<Real, float>) {
    if (plan.precision == RingPrecision::kBf16) return static_cast<float>(bfloat16(x));
  }
  return x;
}

template <class Real>
std::int64_t weight_count(const Plan& plan) {
  return (plan.K + 1) * plan.N * plan.N;
}

// W[k][i][j], Wo first.
template <class Real>
void copy_weights(const Plan& plan, Real* w, int threads) {
  const std::int64_t N = plan.N;
  annulus::cpu::parallel_for((plan.K + 1) * N, threads, [&](std::int64_t row) {
    const std::int64_t k = row / N;
    const std::int64_t i = row % N;
    const TensorView& v = k == 0 ? plan.in.Wo : plan.in.Wa;
    const std::int64_t base = k == 0 ? i * v.stride[0] : (k - 1) * v.stride[0] + i * v.stride[1];
    const std::int64_t step = k == 0 ? v.stride[1] : v.stride[2];
    for (std::int64_t j = 0; j < N; ++j) {
      w[row * N + j] = operand(plan, read_element<Real>(v, base + j * step));
    }
  });
}

template <class Real>
Real channel(const Plan& plan, std::int64_t b, std::int64_t t, std::int64_t k) {
  if (k == 0) return read_parameter<Real>(plan.in.J1);
  const TensorView& A = plan.in.A;
  return read_element<Real>(A, b * A.stride[0] + t * A.stride[1] + (k - 1) * A.stride[2]);
}

template <class Real>
void load_state(const TensorView& v, std::int64_t b, std::int64_t n, Real* s) {
  for (std::int64_t i = 0; i < n; ++i) {
    s[i] = read_element<Real>(v, b * v.stride[0] + i * v.stride[1]);
  }
}

// y of one sample from its state s; `rounded` is scratch.
template <class Real>
void drive_of_step(const Plan& plan, const Real* w, std::int64_t b, std::int64_t t, const Real* s,
                   Real* rounded, Real* y) {
  const std::int64_t N = plan.N;
  Real sum = 0;
  for (std::int64_t j = 0; j < N; ++j) {
    sum += s[j];
    rounded[j] = operand(plan, s[j]);
  }
  const Real constant = read_parameter<Real>(plan.in.J0) * sum;
  std::fill_n(y, N, Real(0));
  for (std::int64_t k = 0; k <= plan.K; ++k) {
    const Real c = channel<Real>(plan, b, t, k);
    if (c == Real(0)) continue;
    for (std::int64_t i = 0; i < N; ++i) {
      Real z = 0;
      const Real* row = w + (k * N + i) * N;
      for (std::int64_t j = 0; j < N; ++j) z += row[j] * rounded[j];
      y[i] += c * z;
    }
  }
  for (std::int64_t i = 0; i < N; ++i) {
    y[i] += constant;
    if (plan.in.drive.defined()) {
      const TensorView& d = plan.in.drive;
      y[i] += read_element<Real>(d, b * d.stride[0] + t * d.stride[1] + i * d.stride[2]);
    }
  }
}

template <class Real>
void leak(const Plan& plan, const Real* y, Real* s) {
  for (std::int64_t i = 0; i < plan.N; ++i) {
    const Real a = read_parameter<Real>(plan.in.alpha, i);
    s[i] = (Real(1) - a) * s[i] + a * activate(plan.activation, y[i]);
  }
}

template <class Real>
void reset_state_of(const Plan& plan, std::int64_t b, Real* s) {
  load_state(plan.in.reset_state.defined() ? plan.in.reset_state : plan.in.r0, b, plan.N, s);
}

template <class Real>
void read_out(const Real* s, std::int64_t n, double& x, double& y) {
  x = y = 0;
  for (std::int64_t i = 0; i < n; ++i) {
    const double phase = 6.283185307179586476925 * static_cast<double>(i) / static_cast<double>(n);
    x += static_cast<double>(s[i]) * std::cos(phase);
    y += static_cast<double>(s[i]) * std::sin(phase);
  }
}

template <class Real>
std::size_t forward_bytes(const Plan& plan) {
  if (plan.B == 0) return 0;
  std::size_t bytes = 0;
  if (!plan.in.packed.defined()) {
    bytes += Workspace::piece(static_cast<std::size_t>(weight_count<Real>(plan)) * sizeof(Real));
  }
  return bytes + Workspace::piece(static_cast<std::size_t>(plan.B * 3 * plan.N) * sizeof(Real));
}

template <class Real>
void forward_as(const Plan& plan, Context& context) {
  if (plan.B == 0) return;
  const std::int64_t N = plan.N;
  Workspace workspace(context, plan.op, plan.device, forward_bytes<Real>(plan));
  Real* w = nullptr;
  if (plan.in.packed.defined()) {
    w = static_cast<Real*>(plan.in.packed.data);
  } else {
    w = workspace.take<Real>(weight_count<Real>(plan));
    copy_weights(plan, w, context.threads);
  }
  Real* rows = workspace.take<Real>(plan.B * 3 * N);
  annulus::cpu::parallel_for(plan.B, context.threads, [&](std::int64_t b) {
    Real* s = rows + b * 3 * N;
    Real* rounded = s + N;
    Real* y = s + 2 * N;
    load_state(plan.in.r0, b, N, s);
    for (std::int64_t t = 0; t < plan.T; ++t) {
      const TensorView& saved = plan.out.saved;
      if (saved.defined() && plan.checkpoint > 0 && t % plan.checkpoint == 0) {
        for (std::int64_t i = 0; i < N; ++i) {
          write_element(
              saved,
              t / plan.checkpoint * saved.stride[0] + b * saved.stride[1] + i * saved.stride[2],
              s[i]);
        }
      }
      if (read_flag(plan.in.reset, b, t, false)) reset_state_of(plan, b, s);
      drive_of_step(plan, w, b, t, s, rounded, y);
      if (saved.defined() && plan.checkpoint == 0) {
        for (std::int64_t i = 0; i < N; ++i) {
          write_element(saved, t * saved.stride[0] + b * saved.stride[1] + i * saved.stride[2],
                        y[i]);
        }
      }
      if (read_flag(plan.in.mask, b, t, true)) leak(plan, y, s);
      const TensorView& out = plan.out.out;
      for (std::int64_t i = 0; i < N; ++i) {
        write_element(out, b * out.stride[0] + t * out.stride[1] + i * out.stride[2], s[i]);
      }
      if (plan.out.angle.defined()) {
        double X = 0, Y = 0;
        read_out(s, N, X, Y);
        const TensorView& angle = plan.out.angle;
        const TensorView& amplitude = plan.out.amplitude;
        write_element(angle, b * angle.stride[0] + t * angle.stride[1],
                      X == 0 && Y == 0 ? 0.0 : std::atan2(Y, X));
        write_element(amplitude, b * amplitude.stride[0] + t * amplitude.stride[1],
                      std::sqrt(X * X + Y * Y));
      }
    }
    if (plan.out.h_n.defined()) {
      const TensorView& h = plan.out.h_n;
      for (std::int64_t i = 0; i < N; ++i) {
        write_element(h, b * h.stride[0] + i * h.stride[1], s[i]);
      }
    }
  });
}

template <class Real>
std::size_t backward_bytes(const Plan& plan) {
  const std::int64_t N = plan.N;
  const auto piece = [](std::int64_t n, std::size_t size) {
    return Workspace::piece(static_cast<std::size_t>(n) * size);
  };
  return piece(weight_count<Real>(plan), sizeof(Real)) +
         3 * piece(plan.T * plan.B * N, sizeof(Real)) + piece(plan.B * 4 * N, sizeof(Real)) +
         piece(plan.B * (2 + N), sizeof(double));
}

template <class Real>
void backward_as(const Plan& plan, Context& context) {
  const std::int64_t N = plan.N, B = plan.B, T = plan.T, K = plan.K;
  Workspace workspace(context, plan.op, plan.device, backward_bytes<Real>(plan));
  Real* w = workspace.take<Real>(weight_count<Real>(plan));
  Real* all_y = workspace.take<Real>(T * B * N);
  Real* all_s = workspace.take<Real>(T * B * N);
  Real* all_g = workspace.take<Real>(T * B * N);
  Real* rows = workspace.take<Real>(B * 4 * N);
  double* sums = workspace.take<double>(B * (2 + N));
  copy_weights(plan, w, context.threads);
  const RingRnnGradients& grad = plan.grad;
  annulus::cpu::parallel_for(B, context.threads, [&](std::int64_t b) {
    Real* s = rows + b * 4 * N;
    Real* rounded = s + N;
    Real* l = s + 2 * N;
    Real* u = s + 3 * N;
    double* sum = sums + b * (2 + N);
    std::fill_n(sum, 2 + N, 0.0);
    const auto at = [&](Real* base, std::int64_t t) { return base + (t * B + b) * N; };
    load_state(plan.in.r0, b, N, s);
    for (std::int64_t t = 0; t < T; ++t) {
      const TensorView& saved = plan.out.saved;
      const auto load_saved = [&](std::int64_t row, Real* to) {
        for (std::int64_t i = 0; i < N; ++i) {
          to[i] = read_element<Real>(
              saved, row * saved.stride[0] + b * saved.stride[1] + i * saved.stride[2]);
        }
      };
      if (plan.checkpoint > 0 && t % plan.checkpoint == 0) load_saved(t / plan.checkpoint, s);
      if (read_flag(plan.in.reset, b, t, false)) reset_state_of(plan, b, s);
      std::copy_n(s, N, at(all_s, t));
      if (plan.checkpoint > 0) {
        drive_of_step(plan, w, b, t, s, rounded, at(all_y, t));
      } else {
        load_saved(t, at(all_y, t));
      }
      if (read_flag(plan.in.mask, b, t, true)) leak(plan, at(all_y, t), s);
    }
    for (std::int64_t i = 0; i < N; ++i) {
      const TensorView& d = plan.dh_n;
      l[i] = d.defined() ? read_element<Real>(d, b * d.stride[0] + i * d.stride[1]) : Real(0);
    }
    // s now holds the gradient of the state resets go to.
    std::fill_n(s, N, Real(0));
    for (std::int64_t t = T - 1; t >= 0; --t) {
      const Real* st = at(all_s, t);
      const Real* y = at(all_y, t);
      Real* g = at(all_g, t);
      Real sum_g = 0, sum_s = 0;
      const bool live = read_flag(plan.in.mask, b, t, true);
      for (std::int64_t i = 0; i < N; ++i) {
        const TensorView& d = plan.dout;
        if (d.defined()) {
          l[i] += read_element<Real>(d, b * d.stride[0] + t * d.stride[1] + i * d.stride[2]);
        }
        const Real a = read_parameter<Real>(plan.in.alpha, i);
        g[i] = live ? a * activate_slope(plan.activation, y[i]) * l[i] : Real(0);
        if (live)
          sum[2 + i] += static_cast<double>(l[i] * (activate(plan.activation, y[i]) - st[i]));
        sum_g += g[i];
        sum_s += st[i];
        rounded[i] = operand(plan, g[i]);
        if (grad.ddrive.defined()) {
          const TensorView& dd = grad.ddrive;
          write_element(dd, b * dd.stride[0] + t * dd.stride[1] + i * dd.stride[2], g[i]);
        }
      }
      sum[0] += static_cast<double>(sum_g) * static_cast<double>(sum_s);
      if (live) {
        const Real constant = read_parameter<Real>(plan.in.J0) * sum_g;
        for (std::int64_t i = 0; i < N; ++i) {
          l[i] = (Real(1) - read_parameter<Real>(plan.in.alpha, i)) * l[i] + constant;
        }
      }
      for (std::int64_t k = 0; k <= K; ++k) {
        const Real c = channel<Real>(plan, b, t, k);
        std::fill_n(u, N, Real(0));
        for (std::int64_t i = 0; live && i < N; ++i) {
          const Real* row = w + (k * N + i) * N;
          for (std::int64_t j = 0; j < N; ++j) u[j] += row[j] * rounded[i];
        }
        Real dot = 0;
        for (std::int64_t j = 0; j < N; ++j) {
          if (live) l[j] += c * u[j];
          dot += st[j] * u[j];
        }
        if (k == 0) {
          sum[1] += static_cast<double>(dot);
        } else if (grad.dA.defined()) {
          const TensorView& d = grad.dA;
          write_element(d, b * d.stride[0] + t * d.stride[1] + (k - 1) * d.stride[2], dot);
        }
      }
      if (read_flag(plan.in.reset, b, t, false)) {
        for (std::int64_t i = 0; i < N; ++i) {
          s[i] += l[i];
          l[i] = 0;
        }
      }
    }
    const bool own = plan.in.reset_state.defined();
    for (std::int64_t i = 0; i < N; ++i) {
      if (grad.dr0.defined()) {
        write_element(grad.dr0, b * grad.dr0.stride[0] + i * grad.dr0.stride[1],
                      own ? l[i] : l[i] + s[i]);
      }
      if (grad.dreset_state.defined()) {
        const TensorView& d = grad.dreset_state;
        write_element(d, b * d.stride[0] + i * d.stride[1], s[i]);
      }
    }
  });
  if (plan.needs_dweights()) {
    annulus::cpu::parallel_for((K + 1) * N, context.threads, [&](std::int64_t row) {
      const std::int64_t k = row / N;
      const std::int64_t i = row % N;
      const TensorView& v = k == 0 ? grad.dWo : grad.dWa;
      if (!v.defined()) return;
      for (std::int64_t j = 0; j < N; ++j) {
        double total = 0;
        for (std::int64_t t = T - 1; t >= 0; --t) {
          for (std::int64_t b = 0; b < B; ++b) {
            const Real c = channel<Real>(plan, b, t, k);
            const std::int64_t at = (t * B + b) * N;
            total += static_cast<double>(operand(plan, c * all_g[at + i])) *
                     static_cast<double>(operand(plan, all_s[at + j]));
          }
        }
        const std::int64_t offset = k == 0
                                        ? i * v.stride[0] + j * v.stride[1]
                                        : (k - 1) * v.stride[0] + i * v.stride[1] + j * v.stride[2];
        write_element(v, offset, total);
      }
    });
  }
  const auto total = [&](std::int64_t column) {
    double x = 0;
    for (std::int64_t b = 0; b < B; ++b) x += sums[b * (2 + N) + column];
    return x;
  };
  if (grad.dJ0.defined()) write_element(grad.dJ0, 0, total(0));
  if (grad.dJ1.defined()) write_element(grad.dJ1, 0, total(1));
  if (grad.dalpha.defined()) {
    double all = 0;
    for (std::int64_t i = 0; i < N; ++i) {
      const double own = total(2 + i);
      all += own;
      if (plan.alpha_per_neuron()) write_element(grad.dalpha, i * grad.dalpha.stride[0], own);
    }
    if (!plan.alpha_per_neuron()) write_element(grad.dalpha, 0, all);
  }
}

}  // namespace

void forward(const Plan& plan, Context& context) {
  plan.dtype == DType::kF64 ? forward_as<double>(plan, context) : forward_as<float>(plan, context);
}
void backward(const Plan& plan, Context& context) {
  plan.dtype == DType::kF64 ? backward_as<double>(plan, context)
                            : backward_as<float>(plan, context);
}
std::size_t forward_workspace(const Plan& plan) {
  return plan.dtype == DType::kF64 ? forward_bytes<double>(plan) : forward_bytes<float>(plan);
}
std::size_t backward_workspace(const Plan& plan) {
  return plan.dtype == DType::kF64 ? backward_bytes<double>(plan) : backward_bytes<float>(plan);
}
std::size_t pack_bytes(const Plan& plan) {
  const auto count = static_cast<std::size_t>(weight_count<float>(plan));
  return count * (plan.dtype == DType::kF64 ? 8 : 4);
}
void pack(const Plan& plan, Context& context) {
  if (plan.dtype == DType::kF64) {
    copy_weights(plan, static_cast<double*>(plan.in.packed.data), context.threads);
  } else {
    copy_weights(plan, static_cast<float*>(plan.in.packed.data), context.threads);
  }
}

const char* why_not(RingPrecision precision) {
  return precision == RingPrecision::kTf32 ? "the CPU has no tf32" : "";
}

}  // namespace annulus::ring::cpu
