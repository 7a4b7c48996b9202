// More than 2^31 elements in one tensor: every index along the way has 64 bits or these fail. The
// reference is taken on samples, or channels, on both sides of where a narrower index would wrap.
#include <gtest/gtest.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <cstdint>
#include <fstream>
#include <string>
#include <vector>

#include "annulus/ring_rnn/ring_rnn.h"
#include "testing/dense.h"

namespace annulus::testing {
namespace {

constexpr double kGiB = 1024.0 * 1024.0 * 1024.0;

double free_gib(Device device) {
  if (device.type == DeviceType::kCUDA) {
    return static_cast<double>(cuda::free_bytes(device.index)) / kGiB;
  }
  std::ifstream meminfo("/proc/meminfo");
  for (std::string word; meminfo >> word;) {
    double kib = 0;
    if (word == "MemAvailable:" && meminfo >> kib) return kib / 1024 / 1024;
  }
  return 0;
}

// bf16 memory whose element i is block[i mod block's size]; that size is odd, so an index that lost
// its upper bits finds another value.
class Periodic {
 public:
  Periodic(Device device, std::int64_t count, double size, std::uint64_t seed)
      : block_(1000003), buffer_(device, static_cast<std::size_t>(count) * sizeof(bfloat16)) {
    Rng rng(seed);
    for (bfloat16& v : block_) v = bfloat16(static_cast<float>(size * rng.normal()));
    const std::size_t bytes = block_.size() * sizeof(bfloat16);
    for (std::size_t at = 0; at < buffer_.bytes(); at += bytes) {
      copy_bytes(static_cast<std::byte*>(buffer_.data()) + at, device, block_.data(), kCPU,
                 std::min(bytes, buffer_.bytes() - at));
    }
  }
  double operator[](std::int64_t i) const {
    return static_cast<double>(
        static_cast<float>(block_[static_cast<std::size_t>(i) % block_.size()]));
  }
  void* data() const { return buffer_.data(); }

 private:
  std::vector<bfloat16> block_;
  Buffer buffer_;
};

std::vector<double> held(const Buffer& buffer, std::int64_t first, std::int64_t count) {
  std::vector<bfloat16> host(static_cast<std::size_t>(count));
  copy_bytes(host.data(), kCPU, static_cast<const bfloat16*>(buffer.data()) + first,
             buffer.device(), host.size() * sizeof(bfloat16));
  std::vector<double> v;
  for (const bfloat16 h : host) v.push_back(static_cast<double>(static_cast<float>(h)));
  return v;
}

class RingRnnLarge : public EachDevice {
 protected:
  void SetUp() override {
    EachDevice::SetUp();
#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
    GTEST_SKIP() << "2^31 elements under a sanitizer take minutes";
#endif
  }
  // Leaves a tenth and two GiB to everybody else.
  bool has_room(double gib) const { return free_gib(device()) > 1.1 * gib + 2; }

  Context context_;
};
ANNULUS_EACH_DEVICE(RingRnnLarge);

// out (B, T, N) of 2^31 + 2^20 elements: few neurons, many samples.
TEST_P(RingRnnLarge, States) {
  constexpr std::int64_t N = 16, T = 8, B = (1ll << 24) + (1ll << 13);
  const double states = static_cast<double>(B * T * N * 2) / kGiB;
  const std::array<std::int64_t, 3> A_shape = {B, T, 1}, W_shape = {1, N, N}, out_shape = {B, T, N};
  Dense Wo(device(), DType::kBF16, {N, N});
  Wo.normal(3);
  RingRnnOptions options;
  options.activation = RingActivation::kTanh;
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
    GTEST_SKIP() << "needs " << gib << " GiB of " << to_string(device()) << " memory, "
                 << free_gib(device()) << " are free";
  }
  const Periodic A(device(), B * T, 1, 1), r0(device(), B * N, 1, 2), Wa(device(), N * N, 0.2, 4);
  const Buffer out(device(), static_cast<std::size_t>(B * T * N) * 2);
  in.A.data = A.data();
  in.Wa.data = Wa.data();
  in.r0.data = r0.data();
  to.out.data = out.data();
  ring_rnn_forward(in, to, options, context_);
  synchronize(device());

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
  }
}

// Wa (K, N, N) of 2^31 + 2^16 elements. One channel acts on each of a few samples, the last one
// among them; the others cost nothing and must not be mistaken for it.
TEST_P(RingRnnLarge, Weights) {
  constexpr std::int64_t N = 256, K = (1ll << 15) + 1, B = 4;
  RingRnnOptions options;
  options.activation = RingActivation::kTanh;
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
    GTEST_SKIP() << "needs " << gib << " GiB of " << to_string(device()) << " memory, "
                 << free_gib(device()) << " are free";
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
