// The tile functions inside somebody else's kernel: scores of linear attention from queries and
// keys that are encoded in registers, against the library's forward and a dot product of what it
// wrote.
#include <cuda_runtime.h>
#include <gtest/gtest.h>

#include <cmath>
#include <cstdint>
#include <string>
#include <vector>

#include "annulus/cuda/check.h"
#include "annulus/lrpe_cosine/cuda/tile.cuh"
#include "annulus/lrpe_cosine/lrpe_cosine.h"
#include "testing/dense.h"

namespace annulus::testing {
namespace {

constexpr int kV = 8;

// Phases of kV columns of one token.
template <class Real>
__device__ void phases_of(const lrpe_cosine::device::Positions& positions, const float* theta,
                          std::int64_t token, int column,
                          lrpe_cosine::device::SinCos<Real, kV>& phase) {
  if (token < positions.prefix) return phase.set_zero_phase();
  std::int64_t s[lrpe_cosine::device::kAxes] = {};
  positions.unravel(token, s);
  for (int i = 0; i < kV; ++i) {
    const int c = column + i;
    const float frequency = theta[c % positions.columns_per_axis];
    phase.set(i, positions.column_phase(lrpe_cosine::turn_step64(frequency), s, c));
  }
}

// scores[r][i][j] = <q'(i), k'(j)> of sequence r; q' and k' never leave the registers.
__global__ void scores_kernel(const lrpe_cosine::device::Positions positions, const float* theta,
                              const float* q, const float* k, float* scores, int sequences,
                              int heads, int L, int D) {
  const int at = static_cast<int>(blockIdx.x * blockDim.x + threadIdx.x);
  if (at >= sequences * L * L) return;
  const int r = at / (L * L), i = at / L % L, j = at % L;
  const float* row = theta + r % heads * positions.columns_per_axis;
  float sum = 0;
  for (int column = 0; column < D; column += kV) {
    lrpe_cosine::device::SinCos<float, kV> phase_q, phase_k;
    phases_of(positions, row, i, column, phase_q);
    phases_of(positions, row, j, column, phase_k);
    float x[kV], qc[kV], qs[kV], kc[kV], ks[kV];
    for (int c = 0; c < kV; ++c) x[c] = q[(r * L + i) * D + column + c];
    lrpe_cosine::device::cosine_tile(x, phase_q, qc, qs);
    for (int c = 0; c < kV; ++c) x[c] = k[(r * L + j) * D + column + c];
    lrpe_cosine::device::cosine_tile(x, phase_k, kc, ks);
    for (int c = 0; c < kV; ++c) sum += qc[c] * kc[c] + qs[c] * ks[c];
  }
  scores[at] = sum;
}

// The rotating form and the gradient of the cosine form, one thread for kV columns of a token.
__global__ void rotate_kernel(const lrpe_cosine::device::Positions positions, const float* theta,
                              const float* x, float* y, float* g, int sequences, int heads, int L,
                              int D) {
  const int lanes = D / 2 / kV;
  const int at = static_cast<int>(blockIdx.x * blockDim.x + threadIdx.x);
  if (at >= sequences * L * lanes) return;
  const int r = at / (L * lanes), t = at / lanes % L, column = at % lanes * kV;
  lrpe_cosine::device::SinCos<float, kV> phase;
  phases_of(positions, theta + r % heads * positions.columns_per_axis, t, column, phase);
  const int first = (r * L + t) * D + column, second = first + D / 2;
  float x1[kV], x2[kV], y1[kV], y2[kV];
  for (int c = 0; c < kV; ++c) x1[c] = x[first + c], x2[c] = x[second + c];
  lrpe_cosine::device::rotate_tile(x1, x2, phase, 1.0f, y1, y2);
  for (int c = 0; c < kV; ++c) y[first + c] = y1[c], y[second + c] = y2[c];
  // (x1, x2) read as the two halves of dy.
  lrpe_cosine::device::cosine_tile_backward(x1, x2, phase, y1);
  for (int c = 0; c < kV; ++c) g[(r * L + t) * (D / 2) + column + c] = y1[c];
}

class LrpeTile : public ::testing::Test {
 protected:
  void SetUp() override {
    const std::string why = annulus::cuda::why_unavailable();
    if (!why.empty()) GTEST_SKIP() << "no CUDA device: " << why;
  }
  static void finish(const char* kernel) {
    annulus::cuda::throw_on_error(cudaGetLastError(), "tile test", kernel);
    annulus::cuda::throw_on_error(cudaDeviceSynchronize(), "tile test", kernel);
  }
  static float* floats(const Dense& t) { return static_cast<float*>(t.view().data); }

  Device device = cuda_device(0);
  Context context;
};

struct Places {
  LrpeGrid shape;
  std::int64_t E, prefix, offset;
};

TEST_F(LrpeTile, ScoresFromRegistersEqualForwardThenDotProduct) {
  const int B = 2, H = 3, D = 32;
  for (const Places& places : {Places{{40}, 32, 0, 0}, Places{{37}, 32, 3, 1 << 30},
                               Places{{5, 7}, 16, 2, 0}, Places{{3, 2, 6}, 11, 1, 0}}) {
    LrpeCosineOptions options;
    options.shape = places.shape;
    options.prefix = places.prefix;
    options.offset = places.offset;
    std::int64_t tokens = places.prefix, n = 1;
    for (int j = 0; j < places.shape.axes; ++j) {
      n *= places.shape.extent[static_cast<std::size_t>(j)];
    }
    tokens += n;
    const auto L = static_cast<int>(tokens);
    Dense q(device, DType::kF32, {B, H, L, D}), k(device, DType::kF32, {B, H, L, D});
    Dense theta(device, DType::kF32, {H, places.E});
    Dense yq(device, DType::kF32, {B, H, L, 2 * D}), yk(device, DType::kF32, {B, H, L, 2 * D});
    Dense scores(device, DType::kF32, {B, H, L, L});
    q.normal(1), k.normal(2), theta.normal(3);

    lrpe_cosine_qk_forward(q.view(), k.view(), theta.view(), yq.view(), yk.view(), options,
                           context);
    const lrpe_cosine::device::Positions positions = lrpe_cosine::device::make_positions(
        places.shape.axes, places.shape.extent.data(), places.prefix, places.offset, places.E);
    scores_kernel<<<(B * H * L * L + 127) / 128, 128>>>(positions, floats(theta), floats(q),
                                                        floats(k), floats(scores), B * H, H, L, D);
    finish("scores_kernel");

    const std::vector<double> a = yq.values(), b = yk.values(), ours = scores.values();
    const auto row = static_cast<std::size_t>(2 * D), length = static_cast<std::size_t>(L);
    for (std::size_t at = 0; at < ours.size(); ++at) {
      const double* u = a.data() + (at / (length * length) * length + at / length % length) * row;
      const double* v = b.data() + (at / (length * length) * length + at % length) * row;
      double sum = 0, size = 0;
      for (std::size_t c = 0; c < row; ++c) sum += u[c] * v[c], size += std::abs(u[c] * v[c]);
      // 64 fp32 products and sums, each to 2^-24 of at most `size`, and a phase to 2^-23.
      ASSERT_NEAR(ours[at], sum, 64 * 0x1p-24 * size)
          << "score " << at << ", " << places.shape.axes << " axes";
    }
  }
}

TEST_F(LrpeTile, RotationAndGradientEqualTheLibrary) {
  constexpr int B = 2, H = 3, D = 64, L = 41;
  Dense x(device, DType::kF32, {B, H, L, D}), theta(device, DType::kF32, {H, D / 2});
  Dense y(device, DType::kF32, {B, H, L, D}), tile(device, DType::kF32, {B, H, L, D});
  Dense g(device, DType::kF32, {B, H, L, D / 2}), dx(device, DType::kF32, {B, H, L, D / 2});
  x.normal(1), theta.normal(2);
  LrpeRotateOptions rotate;
  rotate.shape = {39};
  rotate.prefix = 2;
  rotate.offset = 1000000;
  lrpe_rotate_forward(x.view(), theta.view(), y.view(), rotate, context);
  LrpeCosineOptions cosine;
  static_cast<LrpePositions&>(cosine) = rotate;
  lrpe_cosine_backward(x.view(), {}, theta.view(), dx.view(), {}, cosine, context);
  const std::int64_t extent = 39;
  const lrpe_cosine::device::Positions positions =
      lrpe_cosine::device::make_positions(1, &extent, rotate.prefix, rotate.offset, D / 2);
  const int threads = B * H * L * (D / 2 / kV);
  rotate_kernel<<<(threads + 127) / 128, 128>>>(positions, floats(theta), floats(x), floats(tile),
                                                floats(g), B * H, H, L, D);
  finish("rotate_kernel");

  // Columns c and c + D/2 are a pair in both forms; the phase is right to 2^-23 of a value, and so
  // are the two products and their sum.
  const std::vector<double> in = x.values(), turned = tile.values(), gradient = g.values();
  const std::vector<double> expected = y.values(), expected_gradient = dx.values();
  constexpr std::size_t kHalf = D / 2;
  for (std::size_t i = 0; i < gradient.size(); ++i) {
    const std::size_t first = i / kHalf * D + i % kHalf, second = first + kHalf;
    const double limit = 4 * 0x1p-23 * (std::abs(in[first]) + std::abs(in[second]));
    ASSERT_NEAR(turned[first], expected[first], limit) << "rotation, pair " << i;
    ASSERT_NEAR(turned[second], expected[second], limit) << "rotation, pair " << i;
    ASSERT_NEAR(gradient[i], expected_gradient[i], limit) << "gradient, element " << i;
  }
}

}  // namespace
}  // namespace annulus::testing
