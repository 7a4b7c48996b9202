// The naive program the numeric policy compares us with: the header's equations as loops, sums in
// f32, the operands of every matrix product rounded as the precision says.
#include <cmath>
#include <cstdint>
#include <numbers>
#include <type_traits>
#include <vector>

#include "annulus/core/dispatch.h"
#include "annulus/ring_rnn/test/cases.h"

namespace annulus::testing {

namespace {

std::size_t at(std::int64_t i) { return static_cast<std::size_t>(i); }

template <class C>
std::vector<C> load(const TensorView& v) {
  std::vector<C> values(v.defined() ? at(v.numel()) : 0);
  if (values.empty()) return values;
  if (v.dtype == DType::kBool) {
    const auto* data = static_cast<const std::uint8_t*>(v.data);
    for (std::size_t i = 0; i < values.size(); ++i) values[i] = static_cast<C>(data[i] != 0);
    return values;
  }
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

float round_tf32(float x) {
  if (!std::isfinite(x)) return x;
  std::uint32_t bits = std::bit_cast<std::uint32_t>(x);
  bits += 0xfffu + (bits >> 13 & 1u);  // to nearest even at bit 13
  return std::bit_cast<float>(bits & ~0x1fffu);
}

// Values as operands of a product: the part that counts first, and what bf16x3 adds to it.
template <class C>
struct Operand {
  std::vector<C> high, low;

  Operand(std::vector<C> x, Precision precision) : high(std::move(x)) {
    if constexpr (std::is_same_v<C, float>) {
      const PrecisionFacts& facts = facts_of(precision);
      if (facts.terms == 3) return;  // as exact as f32: the naive program has f32
      if (facts.terms == 2) low.resize(high.size());
      for (std::size_t i = 0; i < high.size(); ++i) {
        const float whole = high[i];
        if (precision == Precision::kTf32) high[i] = round_tf32(whole);
        if (facts.element == DType::kF16) high[i] = static_cast<float>(float16(whole));
        if (facts.element == DType::kBF16) high[i] = static_cast<float>(bfloat16(whole));
        if (facts.terms == 2) low[i] = static_cast<float>(bfloat16(whole - high[i]));
      }
    }
  }
};

// sum of a[i0 + n step_a] b[j0 + n step_b], one product after the other.
template <class C>
C dot(const Operand<C>& a, std::int64_t i0, std::int64_t step_a, const Operand<C>& b,
      std::int64_t j0, std::int64_t step_b, std::int64_t count) {
  C sum = 0;
  for (std::int64_t n = 0; n < count; ++n) {
    const std::size_t i = at(i0 + n * step_a), j = at(j0 + n * step_b);
    sum += a.high[i] * b.high[j];
    if (!a.low.empty()) {
      sum += a.high[i] * b.low[j];
      sum += a.low[i] * b.high[j];
    }
  }
  return sum;
}

template <class C>
C sigmoid(C v) {
  return 1 / (1 + std::exp(-v));
}

template <class C>
struct Naive {
  Naive(const RingRnnInputs& in, const RingRnnOptions& o)
      : options(o),
        B(in.A.shape[0]),
        T(in.A.shape[1]),
        K(in.A.shape[2]),
        N(in.Wo.shape[0]),
        A(load<C>(in.A)),
        r0(load<C>(in.r0)),
        drive(load<C>(in.drive)),
        reset(load<C>(in.reset)),
        mask(load<C>(in.mask)),
        reset_state(load<C>(in.reset_state.defined() ? in.reset_state : in.r0)),
        has_reset(in.reset.defined()),
        has_mask(in.mask.defined()),
        has_drive(in.drive.defined()),
        J0(number(in.J0)),
        J1(number(in.J1)),
        alpha(in.alpha.tensor.defined() ? load<C>(in.alpha.tensor)
                                        : std::vector<C>{static_cast<C>(in.alpha.value)}) {
    if (alpha.size() == 1) alpha.resize(at(N), alpha[0]);
    W.reserve(at(K + 1));
    W.emplace_back(load<C>(in.Wo), o.precision);
    const std::vector<C> all = load<C>(in.Wa);
    for (std::int64_t k = 0; k < K; ++k) {
      const auto first = all.begin() + k * N * N;
      W.emplace_back(std::vector<C>(first, first + N * N), o.precision);
    }
  }
  static C number(const RingRnnParameter& p) {
    return p.tensor.defined() ? load<C>(p.tensor)[0] : static_cast<C>(p.value);
  }

  // Channel 0 is J1 with Wo.
  C channel(std::int64_t b, std::int64_t t, std::int64_t k) const {
    return k == 0 ? J1 : A[at((b * T + t) * K + k - 1)];
  }
  bool masked(std::int64_t b, std::int64_t t) const { return has_mask && mask[at(b * T + t)] == 0; }
  bool was_reset(std::int64_t b, std::int64_t t) const {
    return has_reset && reset[at(b * T + t)] != 0;
  }

  C activate(C y) const {
    switch (options.activation) {
      case RingRnnActivation::kRelu:
        return y < 0 ? 0 : y;
      case RingRnnActivation::kGelu:
        return C(0.5) * y * (1 + std::erf(y / std::numbers::sqrt2_v<C>));
      case RingRnnActivation::kTanh:
        return std::tanh(y);
      case RingRnnActivation::kSilu:
        return y * sigmoid(y);
    }
    return y;
  }
  C slope(C y) const {
    switch (options.activation) {
      case RingRnnActivation::kRelu:
        return y > 0 ? 1 : 0;
      case RingRnnActivation::kGelu:
        return C(0.5) * (1 + std::erf(y / std::numbers::sqrt2_v<C>)) +
               y * std::exp(C(-0.5) * y * y) / std::sqrt(2 * std::numbers::pi_v<C>);
      case RingRnnActivation::kTanh:
        return 1 - std::tanh(y) * std::tanh(y);
      case RingRnnActivation::kSilu:
        return sigmoid(y) * (1 + y * (1 - sigmoid(y)));
    }
    return 1;
  }

  // All steps of one sample: s, y and the state after each.
  struct Sample {
    std::vector<std::vector<C>> s, y, r;
  };
  Sample run(std::int64_t b) const {
    Sample m;
    std::vector<C> r(r0.begin() + b * N, r0.begin() + (b + 1) * N);
    for (std::int64_t t = 0; t < T; ++t) {
      if (was_reset(b, t)) {
        r.assign(reset_state.begin() + b * N, reset_state.begin() + (b + 1) * N);
      }
      m.s.push_back(r);
      C sum = 0;
      for (const C v : r) sum += v;
      std::vector<C> y(at(N), J0 * sum);
      for (std::int64_t k = 0; k <= K; ++k) {
        std::vector<C> scaled = r;
        for (C& v : scaled) v *= channel(b, t, k);
        const Operand<C> x(std::move(scaled), options.precision);
        for (std::int64_t i = 0; i < N; ++i) y[at(i)] += dot(W[at(k)], i * N, 1, x, 0, 1, N);
      }
      for (std::int64_t i = 0; has_drive && i < N; ++i) y[at(i)] += drive[at((b * T + t) * N + i)];
      for (std::size_t i = 0; !masked(b, t) && i < r.size(); ++i) {
        r[i] = (1 - alpha[i]) * r[i] + alpha[i] * activate(y[i]);
      }
      m.y.push_back(std::move(y));
      m.r.push_back(r);
    }
    return m;
  }

  void forward(const RingRnnOutputs& o) const {
    std::vector<C> out, h_n, angle, amplitude;
    for (std::int64_t b = 0; b < B; ++b) {
      const Sample m = run(b);
      for (const std::vector<C>& r : m.r) {
        out.insert(out.end(), r.begin(), r.end());
        C X = 0, Y = 0;
        for (std::int64_t i = 0; i < N; ++i) {
          const C phase = 2 * std::numbers::pi_v<C> * static_cast<C>(i) / static_cast<C>(N);
          X += r[at(i)] * std::cos(phase);
          Y += r[at(i)] * std::sin(phase);
        }
        angle.push_back(std::atan2(Y, X));
        amplitude.push_back(std::sqrt(X * X + Y * Y));
      }
      const auto first = r0.begin() + b * N;
      h_n.insert(h_n.end(), T > 0 ? m.r.back().begin() : first,
                 T > 0 ? m.r.back().end() : first + N);
    }
    store(o.out, out);
    store(o.h_n, h_n);
    store(o.angle, angle);
    store(o.amplitude, amplitude);
  }

  void backward(const TensorView& dout_view, const TensorView& dh_n_view, bool own_reset_state,
                const RingRnnGradients& grad) const {
    const std::vector<C> dout = load<C>(dout_view), dh_n = load<C>(dh_n_view);
    std::vector<C> dA(at(B * T * K)), dWa(at(K * N * N)), dWo(at(N * N)), dr0(at(B * N));
    std::vector<C> dreset(at(B * N)), ddrive(at(B * T * N)), dalpha(at(N)), dJ0(1), dJ1(1);
    // Rows of the deep products: all samples and steps.
    std::vector<C> all_g, all_s;
    std::vector<std::vector<C>> all_c(at(K + 1));
    for (std::int64_t b = 0; b < B; ++b) {
      const Sample m = run(b);
      std::vector<C> l(at(N), 0);
      if (!dh_n.empty()) l.assign(dh_n.begin() + b * N, dh_n.begin() + (b + 1) * N);
      for (std::int64_t t = T; t-- > 0;) {
        for (std::int64_t i = 0; !dout.empty() && i < N; ++i) {
          l[at(i)] += dout[at((b * T + t) * N + i)];
        }
        if (!masked(b, t)) {
          const std::vector<C>&s = m.s[at(t)], &y = m.y[at(t)];
          std::vector<C> g(at(N)), ds(at(N));
          C sum_g = 0, sum_s = 0;
          for (std::size_t i = 0; i < g.size(); ++i) {
            g[i] = alpha[i] * slope(y[i]) * l[i];
            sum_g += g[i];
            sum_s += s[i];
            dalpha[i] += l[i] * (activate(y[i]) - s[i]);
            ddrive[at((b * T + t) * N) + i] = g[i];
          }
          dJ0[0] += sum_g * sum_s;
          for (std::size_t j = 0; j < g.size(); ++j) ds[j] = (1 - alpha[j]) * l[j] + J0 * sum_g;
          const Operand<C> x(g, options.precision);
          for (std::int64_t k = 0; k <= K; ++k) {
            C with_s = 0;
            for (std::int64_t j = 0; j < N; ++j) {
              const C u = dot(W[at(k)], j, N, x, 0, 1, N);
              ds[at(j)] += channel(b, t, k) * u;
              with_s += s[at(j)] * u;
            }
            (k == 0 ? dJ1[0] : dA[at((b * T + t) * K + k - 1)]) += with_s;
            all_c[at(k)].push_back(channel(b, t, k));
          }
          all_g.insert(all_g.end(), g.begin(), g.end());
          all_s.insert(all_s.end(), s.begin(), s.end());
          l = ds;
        }
        if (was_reset(b, t)) {
          for (std::size_t i = 0; i < l.size(); ++i) {
            (own_reset_state ? dreset : dr0)[at(b * N) + i] += l[i];
            l[i] = 0;
          }
        }
      }
      for (std::size_t i = 0; i < l.size(); ++i) dr0[at(b * N) + i] += l[i];
    }
    const Operand<C> s(all_s, options.precision);
    for (std::int64_t k = 0; k <= K; ++k) {
      if (!(k == 0 ? grad.dWo : grad.dWa).defined()) continue;
      std::vector<C> scaled = all_g;
      for (std::size_t n = 0; n < scaled.size(); ++n) scaled[n] *= all_c[at(k)][n / at(N)];
      const Operand<C> cg(std::move(scaled), options.precision);
      const auto depth = static_cast<std::int64_t>(all_c[at(k)].size());
      for (std::int64_t i = 0; i < N; ++i) {
        for (std::int64_t j = 0; j < N; ++j) {
          const C sum = dot(cg, i, N, s, j, N, depth);
          (k == 0 ? dWo[at(i * N + j)] : dWa[at(((k - 1) * N + i) * N + j)]) = sum;
        }
      }
    }
    if (grad.dalpha.defined() && grad.dalpha.rank == 0) {
      C sum = 0;
      for (const C d : dalpha) sum += d;
      dalpha = {sum};
    }
    store(grad.dA, dA);
    store(grad.dWa, dWa);
    store(grad.dWo, dWo);
    store(grad.dr0, dr0);
    store(grad.dJ0, dJ0);
    store(grad.dJ1, dJ1);
    store(grad.dalpha, dalpha);
    store(grad.ddrive, ddrive);
    store(grad.dreset_state, dreset);
  }

  RingRnnOptions options;
  std::int64_t B, T, K, N;
  std::vector<C> A, r0, drive, reset, mask, reset_state;
  bool has_reset, has_mask, has_drive;
  C J0, J1;
  std::vector<C> alpha;  // one a neuron
  std::vector<Operand<C>> W;
};

template <class F>
void with_naive(const RingRnnInputs& in, const RingRnnOptions& options, F&& f) {
  visit_bool(in.A.dtype == DType::kF64, [&]<bool Double>() {
    f(Naive<std::conditional_t<Double, double, float>>(in, options));
  });
}

}  // namespace

void ring_rnn_baseline_forward(const RingRnnInputs& in, const RingRnnOutputs& out,
                               const RingRnnOptions& options) {
  with_naive(in, options, [&](const auto& naive) { naive.forward(out); });
}

void ring_rnn_baseline_backward(const RingRnnInputs& in, const TensorView& dout,
                                const TensorView& dh_n, const RingRnnGradients& gradients,
                                const RingRnnOptions& options) {
  with_naive(in, options, [&](const auto& naive) {
    naive.backward(dout, dh_n, in.reset_state.defined(), gradients);
  });
}

}  // namespace annulus::testing
