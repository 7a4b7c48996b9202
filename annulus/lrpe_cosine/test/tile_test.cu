// The tile functions inside somebody else's kernel: scores of linear attention from queries and
// keys that are encoded in registers, against the library's forward and a dot product of what it
// wrote.
#include <cuda_runtime.h>
#include <gtest/gtest.h>

#include <cmath>
#include <cstdint>
#include <vector>

#include "annulus/lrpe_cosine/cuda/tile.cuh"
#include "annulus/lrpe_cosine/lrpe_cosine.h"
#include "annulus/lrpe_cosine/positions.h"
#include "testing/dense.h"
#include "testing/device_test.h"

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

class LrpeTile : public DeviceTest {
 protected:
  static float* floats(const Dense& t) { return static_cast<float*>(t.view().data); }

  Device device = cuda_device(0);
  Context context;
};

struct Places {
  LrpePositions at;
  std::int64_t E;

  lrpe_cosine::device::Positions on_device() const {
    return lrpe_cosine::device::make_positions(at.shape.axes, at.shape.extent.data(), at.prefix,
                                               at.offset, E);
  }
};

TEST_F(LrpeTile, ScoresFromRegistersEqualForwardThenDotProduct) {
  const int B = 2, H = 3, D = 32;
  for (const Places& places :
       {Places{{.shape = {40}}, 32}, Places{{.shape = {37}, .prefix = 3, .offset = 1 << 30}, 32},
        Places{{.shape = {5, 7}, .prefix = 2}, 16},
        Places{{.shape = {3, 2, 6}, .prefix = 1}, 11}}) {
    int L = 1;
    for (const std::int64_t n : places.at.shape.extents()) L *= static_cast<int>(n);
    L += static_cast<int>(places.at.prefix);
    Dense q(device, DType::kF32, {B, H, L, D}), k(device, DType::kF32, {B, H, L, D});
    Dense theta(device, DType::kF32, {H, places.E});
    Dense yq(device, DType::kF32, {B, H, L, 2 * D}), yk(device, DType::kF32, {B, H, L, 2 * D});
    Dense scores(device, DType::kF32, {B, H, L, L});
    q.normal(1), k.normal(2), theta.normal(3);

    lrpe_cosine_qk_forward(q.view(), k.view(), theta.view(), yq.view(), yk.view(),
                           cosine_options(places.at), context);
    scores_kernel<<<(B * H * L * L + 127) / 128, 128>>>(
        places.on_device(), floats(theta), floats(q), floats(k), floats(scores), B * H, H, L, D);
    finish();

    const std::vector<double> a = yq.values(), b = yk.values(), ours = scores.values();
    const auto row = static_cast<std::size_t>(2 * D), length = static_cast<std::size_t>(L);
    for (std::size_t at = 0; at < ours.size(); ++at) {
      const double* u = a.data() + (at / (length * length) * length + at / length % length) * row;
      const double* v = b.data() + (at / (length * length) * length + at % length) * row;
      double sum = 0, size = 0;
      for (std::size_t c = 0; c < row; ++c) sum += u[c] * v[c], size += std::abs(u[c] * v[c]);
      // 64 fp32 products and sums, each to 2^-24 of at most `size`, and a phase to 2^-23.
      ASSERT_NEAR(ours[at], sum, 64 * 0x1p-24 * size)
          << "score " << at << ", " << places.at.shape.axes << " axes";
    }
  }
}

TEST_F(LrpeTile, RotationAndGradientEqualTheLibrary) {
  constexpr int B = 2, H = 3, D = 64, L = 41;
  Dense x(device, DType::kF32, {B, H, L, D}), theta(device, DType::kF32, {H, D / 2});
  Dense y(device, DType::kF32, {B, H, L, D}), tile(device, DType::kF32, {B, H, L, D});
  Dense g(device, DType::kF32, {B, H, L, D / 2}), dx(device, DType::kF32, {B, H, L, D / 2});
  x.normal(1), theta.normal(2);
  const Places places{{.shape = {39}, .prefix = 2, .offset = 1000000}, D / 2};
  lrpe_rotate_forward(x.view(), theta.view(), y.view(), rotate_options(places.at), context);
  lrpe_cosine_backward(x.view(), {}, theta.view(), dx.view(), {}, cosine_options(places.at),
                       context);
  const int threads = B * H * L * (D / 2 / kV);
  rotate_kernel<<<(threads + 127) / 128, 128>>>(places.on_device(), floats(theta), floats(x),
                                                floats(tile), floats(g), B * H, H, L, D);
  finish();

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
