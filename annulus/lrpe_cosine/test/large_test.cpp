// More than 2^31 elements in one tensor: every index along the way has 64 bits or these fail. The
// reference is taken on windows of tokens around the powers of two that a narrower index would wrap
// at, and at the end.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <string>
#include <vector>

#include "annulus/lrpe_cosine/lrpe_cosine.h"
#include "testing/limits.h"
#include "testing/memory/large.h"

namespace annulus::testing {
namespace {

constexpr std::int64_t kD = 128;
// One sequence of 2^31 + 1408 elements: the offset of a token alone is beyond 32 bits.
constexpr std::int64_t kTokens = (1ll << 24) + 11;
constexpr std::int64_t kWindow = 96;

// A tensor (1, 1, tokens, columns).
class PeriodicTokens : public Periodic {
 public:
  PeriodicTokens(Device device, std::int64_t columns, std::uint64_t seed)
      : Periodic(device, kTokens * columns, 1, seed), columns_(columns) {}
  TensorView view() const { return tokens(0, kTokens); }
  TensorView tokens(std::int64_t first, std::int64_t count) const {
    return contiguous(static_cast<bfloat16*>(data()) + first * columns_, {1, 1, count, columns_},
                      buffer().device());
  }
  std::vector<double> filled(std::int64_t first, std::int64_t count) const {
    std::vector<double> v;
    for (std::int64_t i = 0; i < count * columns_; ++i) v.push_back((*this)[first * columns_ + i]);
    return v;
  }
  std::vector<double> held(std::int64_t first, std::int64_t count) const {
    return testing::held(buffer(), first * columns_, count * columns_);
  }

 private:
  std::int64_t columns_;
};

// First tokens of the windows: around every power of two at which an index of elements or bytes, of
// D or of 2 D columns, could wrap; the start; the end.
std::vector<std::int64_t> windows() {
  std::vector<std::int64_t> first = {0, kTokens - kWindow};
  for (int bits = 21; bits <= 24; ++bits) {
    first.push_back(std::min<std::int64_t>((1ll << bits) - kWindow / 2, kTokens - kWindow));
  }
  return first;
}

TensorView f64_tokens(std::vector<double>& v, std::int64_t columns) {
  return contiguous(v.data(), {1, 1, kWindow, columns});
}

// |ours - reference| within one spacing of bf16 at `size`, elementwise; the first that is not.
void expect_close(const std::vector<double>& ours, const std::vector<double>& reference,
                  const std::vector<double>& size, const char* what, std::int64_t first) {
  for (std::size_t i = 0; i < reference.size(); ++i) {
    ASSERT_LE(std::abs(ours[i] - reference[i]), ulp_at(size[i], DType::kBF16))
        << what << ", element " << i << " of the window from token " << first << ": " << ours[i]
        << " and not " << reference[i];
  }
}

class LrpeLarge : public LargeTest {
 protected:
  std::vector<double> theta_values_ = Dense(kCPU, DType::kF32, {1, kD}).normal(3).values();
};
ANNULUS_EACH_DEVICE(LrpeLarge);

TEST_P(LrpeLarge, CosineForwardAndBackward) {
  const double x_gib = static_cast<double>(kTokens * kD * 2) / kGiB;
  // With dtheta x, dy and dx are separate; without it dx may take the place of x.
  const bool need_dtheta = device().type == DeviceType::kCUDA;
  const double gib = x_gib * (need_dtheta ? 4 : 3);
  if (!has_room(gib)) GTEST_SKIP() << no_room(gib);
  Dense theta(device(), DType::kF32, {1, kD}), dtheta(device(), DType::kF32, {1, kD});
  theta.write(theta_values_);
  const TensorView theta_f64 = contiguous(theta_values_.data(), {1, kD});
  PeriodicTokens x(device(), kD, 1), y(device(), 2 * kD, 2);
  LrpeCosineOptions options{.shape = {kTokens}};
  lrpe_cosine_forward(x.view(), theta.view(), y.view(), options, context_);
  synchronize(device());
  for (const std::int64_t first : windows()) {
    std::vector<double> in = x.filled(first, kWindow), expected(in.size() * 2);
    reference::lrpe_cosine_forward(f64_tokens(in, kD), theta_f64, f64_tokens(expected, 2 * kD),
                                   {.shape = {kWindow}, .offset = first});
    expect_close(y.held(first, kWindow), expected, expected, "y", first);
  }
  if (HasFatalFailure()) return;

  // y's memory holds dy from here on; on the CPU x's holds dx.
  y.fill();
  Buffer dx_buffer(device(), need_dtheta ? static_cast<std::size_t>(kTokens * kD * 2) : 0);
  TensorView dx = x.view();
  if (need_dtheta) dx.data = dx_buffer.data();
  lrpe_cosine_backward(y.view(), need_dtheta ? x.view() : TensorView(), theta.view(), dx,
                       need_dtheta ? dtheta.view() : TensorView(), options, context_);
  synchronize(device());
  for (const std::int64_t first : windows()) {
    std::vector<double> dy = y.filled(first, kWindow);
    std::vector<double> expected(dy.size() / 2), size(dy.size() / 2);
    for (std::size_t i = 0; i < size.size(); ++i) {
      const std::size_t at = i / kD * 2 * kD + i % kD;
      size[i] = std::abs(dy[at]) + std::abs(dy[at + kD]);
    }
    reference::lrpe_cosine_backward(f64_tokens(dy, 2 * kD), {}, theta_f64, f64_tokens(expected, kD),
                                    {}, {.shape = {kWindow}, .offset = first});
    expect_close(held(need_dtheta ? dx_buffer : x.buffer(), first * kD, kWindow * kD), expected,
                 size, "dx", first);
  }
  if (HasFatalFailure() || !need_dtheta) return;

  // dtheta of the whole is the sum of dtheta of parts, none of which is large.
  const std::vector<double> whole = dtheta.values();
  std::vector<double> sum(kD, 0.0);
  constexpr std::int64_t kPart = 1 << 22;
  for (std::int64_t first = 0; first < kTokens; first += kPart) {
    const std::int64_t count = std::min(kPart, kTokens - first);
    options.shape = {count};
    options.offset = first;
    lrpe_cosine_backward(y.tokens(first, count), x.tokens(first, count), theta.view(), {},
                         dtheta.view(), options, context_);
    const std::vector<double> part = dtheta.values();
    for (std::size_t i = 0; i < sum.size(); ++i) sum[i] += part[i];
  }
  double error = 0, size = 0;
  for (std::size_t i = 0; i < sum.size(); ++i) {
    error += (whole[i] - sum[i]) * (whole[i] - sum[i]);
    size += sum[i] * sum[i];
  }
  EXPECT_GT(size, 0);
  EXPECT_LE(std::sqrt(error / size), kPolicy.guard_backward_factor * guard_of(DType::kF32));
}

TEST_P(LrpeLarge, RotateInPlace) {
  const double gib = static_cast<double>(kTokens * kD * 2) / kGiB;
  if (!has_room(gib)) GTEST_SKIP() << no_room(gib);
  Dense theta(device(), DType::kF32, {1, kD / 2});
  theta_values_.resize(kD / 2);
  theta.write(theta_values_);
  PeriodicTokens x(device(), kD, 1);
  lrpe_rotate_forward(x.view(), theta.view(), x.view(), {.shape = {kTokens}}, context_);
  synchronize(device());
  for (const std::int64_t first : windows()) {
    std::vector<double> in = x.filled(first, kWindow), expected(in.size()), size(in.size());
    for (std::size_t i = 0; i < size.size(); ++i) {
      const std::size_t pair = i % kD < kD / 2 ? i + kD / 2 : i - kD / 2;
      size[i] = std::abs(in[i]) + std::abs(in[pair]);
    }
    reference::lrpe_rotate_forward(f64_tokens(in, kD),
                                   contiguous(theta_values_.data(), {1, kD / 2}),
                                   f64_tokens(expected, kD), {.shape = {kWindow}, .offset = first});
    expect_close(x.held(first, kWindow), expected, size, "y", first);
  }
}

}  // namespace
}  // namespace annulus::testing
