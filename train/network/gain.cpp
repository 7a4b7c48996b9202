#include "train/network/gain.h"

#include <algorithm>
#include <cmath>

#include "annulus/cpu/parallel.h"
#include "train/task.h"

namespace annulus::train {
namespace {

std::size_t size(std::int64_t n) { return static_cast<std::size_t>(n); }

// The four parameters by name, and one step's way through the network, in double.
struct Pass {
  explicit Pass(std::span<const Parameter> p)
      : W1(p[0].value),
        b1(p[1].value),
        W2(p[2].value),
        b2(p[3].value),
        h(b1.size()),
        g(b2.size()) {}

  void run(double now, double before) {
    f[0] = now / kFastest;
    f[1] = before / kFastest;
    for (std::size_t j = 0; j < h.size(); ++j) {
      h[j] = std::tanh(W1[2 * j] * f[0] + W1[2 * j + 1] * f[1] + b1[j]);
    }
    for (std::size_t o = 0; o < g.size(); ++o) {
      double sum = b2[o];
      for (std::size_t j = 0; j < h.size(); ++j) sum += W2[o * h.size() + j] * h[j];
      g[o] = sum;
    }
  }

  std::span<const float> W1, b1, W2, b2;
  double f[2] = {};
  std::vector<double> h, g;
};

}  // namespace

std::vector<NamedShape> gain_shapes(std::int64_t hidden, std::int64_t K) {
  return {{"gain.W1", {hidden, 2}},
          {"gain.b1", {hidden}},
          {"gain.W2", {2 * K, hidden}},
          {"gain.b2", {2 * K}}};
}

std::vector<Parameter> gain_network(std::int64_t hidden, std::int64_t K, Rng rng) {
  std::vector<Parameter> p;
  for (auto& [name, shape] : gain_shapes(hidden, K)) p.emplace_back(name, shape);
  for (float& w : p[0].value) w = static_cast<float>(rng.normal());
  for (float& b : p[1].value) b = static_cast<float>(rng.uniform(-1, 1));
  std::fill_n(p[3].value.begin(), K, 1.0f);
  return p;
}

void gain_forward(std::span<const Parameter> p, std::span<const float> velocity,
                  std::span<const float> plain, std::int64_t B, std::int64_t T, std::span<float> A,
                  int threads) {
  const std::size_t K = p[3].value.size() / 2;
  cpu::parallel_for(B, threads, [&](std::int64_t b) {
    Pass pass(p);
    for (std::int64_t t = 0; t < T; ++t) {
      const std::size_t at = size(b * T + t);
      pass.run(velocity[at], t > 0 ? velocity[at - 1] : 0.0f);
      for (std::size_t k = 0; k < K; ++k) {
        const double before = t > 0 ? plain[(at - 1) * K + k] : 0.0f;
        A[at * K + k] = static_cast<float>(pass.g[k] * plain[at * K + k] + pass.g[K + k] * before);
      }
    }
  });
}

void gain_backward(std::span<Parameter> p, std::span<const float> velocity,
                   std::span<const float> plain, std::int64_t B, std::int64_t T,
                   std::span<const float> dA, int threads) {
  const std::size_t K = p[3].value.size() / 2, H = p[1].value.size();
  const std::size_t count = H * 2 + H + 2 * K * H + 2 * K;
  // One row of sums a sequence, added up in order: no bit depends on the number of threads.
  std::vector<double> sums(size(B) * count, 0.0);
  cpu::parallel_for(B, threads, [&](std::int64_t b) {
    Pass pass(p);
    double* dW1 = sums.data() + size(b) * count;
    double* db1 = dW1 + 2 * H;
    double* dW2 = db1 + H;
    double* db2 = dW2 + 2 * K * H;
    std::vector<double> dh(H);
    for (std::int64_t t = 0; t < T; ++t) {
      const std::size_t at = size(b * T + t);
      pass.run(velocity[at], t > 0 ? velocity[at - 1] : 0.0f);
      dh.assign(H, 0.0);
      for (std::size_t o = 0; o < 2 * K; ++o) {
        const std::size_t k = o % K;
        const double action = o < K ? plain[at * K + k] : (t > 0 ? plain[(at - 1) * K + k] : 0.0f);
        const double dg = dA[at * K + k] * action;
        if (dg == 0) continue;
        db2[o] += dg;
        for (std::size_t j = 0; j < H; ++j) {
          dW2[o * H + j] += dg * pass.h[j];
          dh[j] += dg * pass.W2[o * H + j];
        }
      }
      for (std::size_t j = 0; j < H; ++j) {
        const double d = dh[j] * (1 - pass.h[j] * pass.h[j]);
        dW1[2 * j] += d * pass.f[0];
        dW1[2 * j + 1] += d * pass.f[1];
        db1[j] += d;
      }
    }
  });
  std::size_t at = 0;
  for (Parameter& parameter : p) {
    for (std::size_t i = 0; i < parameter.gradient.size(); ++i, ++at) {
      double sum = 0;
      for (std::int64_t b = 0; b < B; ++b) sum += sums[size(b) * count + at];
      parameter.gradient[i] = static_cast<float>(sum);
    }
  }
}

std::vector<double> gains_at(std::span<const Parameter> p, double now, double before) {
  Pass pass(p);
  pass.run(now, before);
  return pass.g;
}

}  // namespace annulus::train
