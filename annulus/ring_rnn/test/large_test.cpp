// More than 2^31 elements in one tensor: every index along the way has 64 bits or these fail. The
// reference is taken on samples, or channels, on both sides of where a narrower index would wrap.
#include <gtest/gtest.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <cstdint>
#include <string>
#include <vector>

#include "annulus/ring_rnn/test/live.h"
#include "testing/memory/large.h"

namespace annulus::testing {
namespace {

class RingRnnLarge : public LargeTest {};
ANNULUS_EACH_DEVICE(RingRnnLarge);

Vector range(const Periodic& from, std::int64_t first, std::int64_t count) {
  std::vector<double> v;
  for (std::int64_t i = first; i < first + count; ++i) v.push_back(from[i]);
  return vector_of(v);
}

// out (B, T, N) of 2^31 + 2^20 elements: few neurons, many samples. Where there is room for it,
// the backward too.
TEST_P(RingRnnLarge, States) {
  constexpr std::int64_t N = 16, T = 8, B = (1ll << 24) + (1ll << 13);
  const double states = static_cast<double>(B * T * N * 2) / kGiB;
  const std::array<std::int64_t, 3> A_shape = {B, T, 1}, W_shape = {1, N, N}, out_shape = {B, T, N};
  Dense Wo(device(), DType::kBF16, {N, N});
  Wo.normal(3);
  RingRnnOptions options{.activation = RingRnnActivation::kTanh};
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
    to.saved = contiguous(saved.data(), DType::kF32, std::array{std::int64_t{1}, B, N}, device());
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

  // Four samples at a time, those whose numbers are around powers of two among them.
  RingRnnProblem p = plain(live(DType::kBF16, 4, T, 1, N));
  p.activation = RingRnnActivation::kTanh;
  p.J0 = -0.01, p.J1 = 0.25, p.alpha = 0.5;
  p.dh_n = false;
  const Case part = ring_rnn_case(p);
  Tensors t = draw(part);
  t["Wa"] = range(Wa, 0, N * N);
  t["Wo"] = vector_of(Wo.values());
  for (const std::int64_t first : std::vector<std::int64_t>{0, (1 << 21) - 2, (1 << 22) - 2,
                                                            (1 << 23) - 2, (1 << 24) - 2, B - 4}) {
    t["A"] = range(A, first * T, 4 * T);
    t["r0"] = range(r0, first * N, 4 * N);
    t["dout"] = range(dout, first * T * N, 4 * T * N);
    const Tensors exact = define(part, t);
    const auto expect_near = [&](const Buffer& ours, std::int64_t width, const char* name,
                                 double limit) {
      const std::vector<double> a = held(ours, first * width, 4 * width);
      const Vector& b = exact.at(name);
      for (std::size_t i = 0; i < b.size(); ++i) {
        ASSERT_NEAR(a[i], b[i], limit) << name << " of sample " << first << ", element " << i;
      }
    };
    expect_near(out, T * N, "out", 0.03);
    if (!both) continue;
    expect_near(dr0, N, "dr0", 0.06);
    expect_near(dA, T, "dA", 0.1);
  }
  if (!both) {
    RecordProperty("backward", "left out: it needs " + std::to_string(more) + " GiB more");
  }
}

// B N N beyond 2^31, where the original's backward wrapped: it held a matrix for every sample.
TEST_P(RingRnnLarge, BatchTimesMatrix) {
  constexpr std::int64_t B = (1ll << 17) + 5, N = 128;
  RingRnnProblem p = plain(live(DType::kF32, B, 1, 1, N));
  p.activation = RingRnnActivation::kGelu;
  p.precision = Precision::kFp32;
  const Tensors all = run(ring_rnn_case(p), device(), context_, draw(ring_rnn_case(p)));
  p.B = 4;
  for (const std::size_t first : {std::size_t{0}, std::size_t{1} << 16, (std::size_t{1} << 17) - 2,
                                  static_cast<std::size_t>(B) - 4}) {
    const auto cut = [&](const char* name) {
      const std::size_t width = all.at(name).size() / B;
      return Vector(all.at(name)[std::slice(first * width, 4 * width, 1)]);
    };
    Tensors t = {{"Wa", all.at("Wa")}, {"Wo", all.at("Wo")}};
    for (const char* name : {"A", "r0", "dout", "dh_n"}) t[name] = cut(name);
    t = define(ring_rnn_case(p), t);
    for (const char* name : {"out", "dr0", "dA"}) {
      const Vector ours = cut(name), &exact = t[name];
      for (std::size_t i = 0; i < exact.size(); ++i) {
        ASSERT_NEAR(ours[i], exact[i], 1e-5 * (1 + std::abs(exact[i])))
            << name << " of sample " << first;
      }
    }
  }
}

// Wa (K, N, N) of 2^31 + 2^16 elements. One channel acts on each of a few samples, the last one
// among them; the others cost nothing and must not be mistaken for it.
TEST_P(RingRnnLarge, Weights) {
  constexpr std::int64_t N = 256, K = (1ll << 15) + 1, B = 4;
  RingRnnOptions options{.activation = RingRnnActivation::kTanh};
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
