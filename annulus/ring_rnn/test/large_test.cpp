// More than 2^31 elements in one tensor: every index along the way has 64 bits or these fail. The
// reference is taken on samples, or channels, on both sides of where a narrower index would wrap.
#include <gtest/gtest.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <cstdint>
#include <string>
#include <vector>

#include "annulus/ring_rnn/test/calls.h"
#include "testing/large.h"

namespace annulus::testing {
namespace {

class RingRnnLarge : public LargeTest {};
ANNULUS_EACH_DEVICE(RingRnnLarge);

// out (B, T, N) of 2^31 + 2^20 elements: few neurons, many samples. Where there is room for it,
// the backward too.
TEST_P(RingRnnLarge, States) {
  constexpr std::int64_t N = 16, T = 8, B = (1ll << 24) + (1ll << 13);
  const double states = static_cast<double>(B * T * N * 2) / kGiB;
  const std::array<std::int64_t, 3> A_shape = {B, T, 1}, W_shape = {1, N, N}, out_shape = {B, T, N};
  Dense Wo(device(), DType::kBF16, {N, N});
  Wo.normal(3);
  RingRnnOptions options;
  options.activation = RingRnnActivation::kTanh;
  RingRnnInputs in;
  RingRnnOutputs to;
  in.A = contiguous(nullptr, DType::kBF16, A_shape, device());
  in.Wa = contiguous(nullptr, DType::kBF16, W_shape, device());
  in.Wo = Wo.view();
  in.r0 = contiguous(nullptr, DType::kBF16, std::array{B, N}, device());
  in.J0 = -0.01, in.J1 = 0.25, in.alpha = 0.5;
  to.out = contiguous(nullptr, DType::kBF16, out_shape, device());
  const double gib = states * (1 + 1.0 / T + 1.0 / N) +
                     static_cast<double>(ring_rnn_forward_workspace(in, to, options)) / kGiB;
  if (!has_room(gib)) {
    GTEST_SKIP() << no_room(gib);
  }
  RingRnnGradients grad;
  grad.dr0 = in.r0;
  grad.dA = in.A;
  RingRnnOptions kept = options;
  kept.checkpoint = T;
  const double more = states * (1 + 3.0 / T + 1.0 / N) +
                      static_cast<double>(ring_rnn_backward_workspace(in, grad, kept)) / kGiB;
  const bool both = has_room(gib + more);
  if (both) options = kept;
  const Periodic A(device(), B * T, 1, 1), r0(device(), B * N, 1, 2), Wa(device(), N * N, 0.2, 4);
  const Buffer out(device(), static_cast<std::size_t>(B * T * N) * 2);
  const Buffer saved(device(), both ? static_cast<std::size_t>(B * N) * 4 : 0);
  if (both)
    to.saved =
        contiguous(saved.data(), DType::kF32, std::array<std::int64_t, 3>{1, B, N}, device());
  in.A.data = A.data();
  in.Wa.data = Wa.data();
  in.r0.data = r0.data();
  to.out.data = out.data();
  ring_rnn_forward(in, to, options, context_);
  synchronize(device());
  const Periodic dout(device(), both ? B * T * N : 0, 1, 8);
  const Buffer dr0(device(), both ? static_cast<std::size_t>(B * N) * 2 : 0);
  const Buffer dA(device(), both ? static_cast<std::size_t>(B * T) * 2 : 0);
  if (both) {
    TensorView dout_view = to.out;
    dout_view.data = dout.data();
    grad.dr0.data = dr0.data();
    grad.dA.data = dA.data();
    ring_rnn_backward(in, dout_view, {}, to.out, to.saved, grad, options, context_);
    synchronize(device());
  }

  const std::vector<double> Wo_values = Wo.values();
  const std::vector<std::int64_t> windows = {
      0, (1 << 21) - 2, (1 << 22) - 2, (1 << 23) - 2, (1 << 24) - 2, B - 4};
  for (const std::int64_t first : windows) {
    std::vector<double> a, w, s, expected(4 * T * N), Wo_copy = Wo_values;
    for (std::int64_t i = 0; i < 4 * T; ++i) a.push_back(A[first * T + i]);
    for (std::int64_t i = 0; i < 4 * N; ++i) s.push_back(r0[first * N + i]);
    for (std::int64_t i = 0; i < N * N; ++i) w.push_back(Wa[i]);
    RingRnnInputs x = in;
    x.A = contiguous(a.data(), {4, T, 1});
    x.Wa = contiguous(w.data(), {1, N, N});
    x.Wo = contiguous(Wo_copy.data(), {N, N});
    x.r0 = contiguous(s.data(), {4, N});
    RingRnnOutputs y;
    y.out = contiguous(expected.data(), {4, T, N});
    reference::ring_rnn_forward(x, y, options);
    const std::vector<double> ours = held(out, first * T * N, 4 * T * N);
    for (std::size_t i = 0; i < ours.size(); ++i) {
      ASSERT_NEAR(ours[i], expected[i], 0.03) << "sample " << first << ", element " << i;
    }
    if (!both) continue;
    std::vector<double> d(4 * T * N), dr0_expected(4 * N), dA_expected(4 * T);
    for (std::size_t i = 0; i < d.size(); ++i) {
      d[i] = dout[first * T * N + static_cast<std::int64_t>(i)];
    }
    RingRnnGradients g;
    g.dr0 = contiguous(dr0_expected.data(), {4, N});
    g.dA = contiguous(dA_expected.data(), {4, T, 1});
    reference::ring_rnn_backward(x, contiguous(d.data(), {4, T, N}), {}, g, options);
    const std::vector<double> dr0_ours = held(dr0, first * N, 4 * N);
    const std::vector<double> dA_ours = held(dA, first * T, 4 * T);
    for (std::size_t i = 0; i < dr0_ours.size(); ++i) {
      ASSERT_NEAR(dr0_ours[i], dr0_expected[i], 0.06) << "sample " << first << ", dr0 " << i;
    }
    for (std::size_t i = 0; i < dA_ours.size(); ++i) {
      ASSERT_NEAR(dA_ours[i], dA_expected[i], 0.1) << "sample " << first << ", dA " << i;
    }
  }
  if (!both) {
    RecordProperty("backward", "left out: it needs " + std::to_string(more) + " GiB more");
  }
}

// B N N beyond 2^31, where the original's backward wrapped: it held a matrix for every sample.
TEST_P(RingRnnLarge, BatchTimesMatrix) {
  constexpr std::int64_t B = (1ll << 17) + 5, N = 128, T = 1, K = 1;
  RingNetwork n(device(), DType::kF32, B, T, K, N);
  RingRnnOptions options;
  options.activation = RingRnnActivation::kGelu;
  options.precision = Precision::kFp32;
  const RingStates states(n);
  const RingDerivatives d(n);
  run_both(n, n.inputs(), states, d, options, context_);
  const std::vector<double> A = n.A.values(), r0 = n.r0.values(), dout = n.dout.values(),
                            dh_n = n.dh_n.values(), dr0 = d.dr0.values(), dA = d.dA.values(),
                            out = states.out.values();
  RingNetwork part(kCPU, DType::kF64, 4, T, K, N);
  part.Wa.write(n.Wa.values());
  part.Wo.write(n.Wo.values());
  for (const std::size_t first : {std::size_t{0}, std::size_t{1} << 16, (std::size_t{1} << 17) - 2,
                                  static_cast<std::size_t>(B) - 4}) {
    const auto cut = [&](const std::vector<double>& v, std::size_t width) {
      const auto from = v.begin() + static_cast<std::ptrdiff_t>(first * width);
      return std::vector<double>(from, from + static_cast<std::ptrdiff_t>(4 * width));
    };
    part.A.write(cut(A, 1));
    part.r0.write(cut(r0, N));
    part.dout.write(cut(dout, N));
    part.dh_n.write(cut(dh_n, N));
    RingRnnOptions exact = options;
    exact.precision = Precision::kAuto;
    const RingStates s(part);
    const RingDerivatives e(part);
    reference::ring_rnn_forward(part.inputs(), s.outputs(), exact);
    reference::ring_rnn_backward(part.inputs(), part.dout.view(), part.dh_n.view(),
                                 e.gradients(part.inputs()), exact);
    const auto expect_near = [&](const std::vector<double>& ours, const Dense& exact_values,
                                 std::size_t width, const char* what) {
      const std::vector<double> a = cut(ours, width), b = exact_values.values();
      for (std::size_t i = 0; i < b.size(); ++i) {
        ASSERT_NEAR(a[i], b[i], 1e-5 * (1 + std::abs(b[i]))) << what << " of sample " << first;
      }
    };
    expect_near(out, s.out, N, "out");
    expect_near(dr0, e.dr0, N, "dr0");
    expect_near(dA, e.dA, 1, "dA");
  }
}

// Wa (K, N, N) of 2^31 + 2^16 elements. One channel acts on each of a few samples, the last one
// among them; the others cost nothing and must not be mistaken for it.
TEST_P(RingRnnLarge, Weights) {
  constexpr std::int64_t N = 256, K = (1ll << 15) + 1, B = 4;
  RingRnnOptions options;
  options.activation = RingRnnActivation::kTanh;
  Dense A(device(), DType::kBF16, {B, 1, K}), Wo(device(), DType::kBF16, {N, N});
  Dense r0(device(), DType::kBF16, {B, N}), out(device(), DType::kBF16, {B, 1, N});
  RingRnnInputs in;
  RingRnnOutputs to;
  in.A = A.view();
  in.Wa = contiguous(nullptr, DType::kBF16, std::array{K, N, N}, device());
  in.Wo = Wo.view();
  in.r0 = r0.view();
  in.J0 = 0.0, in.J1 = 0.0, in.alpha = 1.0;
  to.out = out.view();
  const double gib = static_cast<double>(K * N * N * 2) / kGiB +
                     static_cast<double>(ring_rnn_forward_workspace(in, to, options)) / kGiB;
  if (!has_room(gib)) {
    GTEST_SKIP() << no_room(gib);
  }
  const Periodic Wa(device(), K * N * N, 1.0 / 16, 5);
  in.Wa.data = Wa.data();
  r0.normal(6);
  Wo.normal(7);
  const std::array<std::int64_t, B> hot = {0, 1ll << 13, (1ll << 14) + 1, K - 1};
  std::vector<double> actions(static_cast<std::size_t>(B * K), 0.0);
  for (std::size_t b = 0; b < B; ++b) {
    actions[b * static_cast<std::size_t>(K) + static_cast<std::size_t>(hot[b])] = 1;
  }
  A.write(actions);
  ring_rnn_forward(in, to, options, context_);
  synchronize(device());
  const std::vector<double> s = r0.values(), ours = out.values();
  for (std::size_t b = 0; b < B; ++b) {
    for (std::int64_t i = 0; i < N; ++i) {
      double y = 0;
      for (std::int64_t j = 0; j < N; ++j) {
        y += Wa[(hot[b] * N + i) * N + j] * s[b * N + static_cast<std::size_t>(j)];
      }
      ASSERT_NEAR(ours[b * N + static_cast<std::size_t>(i)], std::tanh(y), 0.03)
          << "channel " << hot[b] << ", neuron " << i;
    }
  }
}

}  // namespace
}  // namespace annulus::testing
