// LRPE-cosine on the CPU, from C++ and with nothing but the library: encodes queries and keys, sees
// that their scores depend on the difference of positions alone, and takes the gradients back.
#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <exception>
#include <numeric>
#include <random>
#include <vector>

#include "annulus/annulus.h"

namespace {

constexpr std::int64_t kBatch = 1, kHeads = 2, kTokens = 64, kDim = 32;

std::vector<float> random_normal(std::int64_t count, unsigned seed) {
  std::mt19937 generator(seed);
  std::normal_distribution<float> normal;
  std::vector<float> values(static_cast<std::size_t>(count));
  for (float& v : values) v = normal(generator);
  return values;
}

// y (B, H, L, 2D) of x (B, H, L, D), whose first token stands at position `offset`.
std::vector<float> encode(const std::vector<float>& x, const std::vector<float>& theta,
                          std::int64_t offset, annulus::Context& context) {
  std::vector<float> y(x.size() * 2);
  annulus::lrpe_cosine_forward(annulus::contiguous(x.data(), {kBatch, kHeads, kTokens, kDim}),
                               annulus::contiguous(theta.data(), {kHeads, kDim}),
                               annulus::contiguous(y.data(), {kBatch, kHeads, kTokens, 2 * kDim}),
                               {.shape = {kTokens}, .offset = offset}, context);
  return y;
}

// The attention score of query token s and key token t in head 0.
double score(const std::vector<float>& q, const std::vector<float>& k, std::int64_t s,
             std::int64_t t) {
  const auto row_q = q.begin() + s * 2 * kDim;
  const auto row_k = k.begin() + t * 2 * kDim;
  return std::inner_product(row_q, row_q + 2 * kDim, row_k, 0.0);
}

int run() {
  annulus::Context context;
  const std::vector<float> q = random_normal(kBatch * kHeads * kTokens * kDim, 1);
  const std::vector<float> k = random_normal(kBatch * kHeads * kTokens * kDim, 2);
  std::vector<float> theta(static_cast<std::size_t>(kHeads * kDim));
  for (std::size_t i = 0; i < theta.size(); ++i) {
    const double column = static_cast<double>(i % static_cast<std::size_t>(kDim));
    theta[i] = static_cast<float>(std::pow(10000.0, -column / static_cast<double>(kDim)));
  }

  // The same tokens at positions 0.. and at a million and more: the scores must not change.
  const auto q_near = encode(q, theta, 0, context), k_near = encode(k, theta, 0, context);
  const auto q_far = encode(q, theta, 1'000'000, context);
  const auto k_far = encode(k, theta, 1'000'000, context);
  double worst = 0, largest = 0;
  for (std::int64_t s = 0; s < kTokens; ++s) {
    for (std::int64_t t = 0; t < kTokens; ++t) {
      const double near = score(q_near, k_near, s, t);
      worst = std::max(worst, std::fabs(near - score(q_far, k_far, s, t)));
      largest = std::max(largest, std::fabs(near));
    }
  }
  std::printf("score(5, 3)              %+.6f at position 0, %+.6f at position 1000000\n",
              score(q_near, k_near, 5, 3), score(q_far, k_far, 5, 3));
  std::printf("worst difference         %.2e of %.2f\n", worst, largest);

  // The gradient of sum(y * y) / 2 is dy = y; cos^2 + sin^2 = 1 makes dx = x and dtheta = 0.
  std::vector<float> dx(q.size()), dtheta(theta.size());
  annulus::lrpe_cosine_backward(
      annulus::contiguous(q_near.data(), {kBatch, kHeads, kTokens, 2 * kDim}),
      annulus::contiguous(q.data(), {kBatch, kHeads, kTokens, kDim}),
      annulus::contiguous(theta.data(), {kHeads, kDim}),
      annulus::contiguous(dx.data(), {kBatch, kHeads, kTokens, kDim}),
      annulus::contiguous(dtheta.data(), {kHeads, kDim}), {.shape = {kTokens}}, context);
  double dx_error = 0, dtheta_size = 0;
  for (std::size_t i = 0; i < q.size(); ++i) {
    dx_error = std::max(dx_error, std::fabs(static_cast<double>(dx[i]) - q[i]));
  }
  for (float d : dtheta) dtheta_size = std::max(dtheta_size, std::fabs(static_cast<double>(d)));
  std::printf("gradient of |y|^2 / 2    |dx - x| <= %.2e, |dtheta| <= %.2e\n", dx_error,
              dtheta_size);

  const bool right = worst <= 1e-5 * largest && dx_error <= 1e-5 && dtheta_size <= 1e-2;
  std::printf("%s\n", right ? "all as it should be" : "WRONG");
  return right ? 0 : 1;
}

}  // namespace

int main() {
  try {
    return run();
  } catch (const std::exception& error) {
    std::fprintf(stderr, "%s\n", error.what());
    return 1;
  }
}
