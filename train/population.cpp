#include "train/population.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <numbers>

#include "annulus/core/errors.h"
#include "annulus/cpu/parallel.h"

namespace annulus::train {
namespace {

constexpr std::int64_t kRowsPerTask = 64;
constexpr std::int64_t kLanes = 8;  // partial sums of a row: a fixed order that vectorises

void sums_of_row(const float* r, const float* ring, std::int64_t N, float* sums) {
  std::array<float, kLanes> x{}, y{}, s{};
  const auto add = [&](std::int64_t i, std::size_t lane) {
    x[lane] += r[i] * ring[i];
    y[lane] += r[i] * ring[N + i];
    s[lane] += std::fabs(r[i]);
  };
  std::int64_t i = 0;
  for (; i + kLanes <= N; i += kLanes) {
    for (std::size_t lane = 0; lane < kLanes; ++lane) {
      add(i + static_cast<std::int64_t>(lane), lane);
    }
  }
  for (std::size_t lane = 0; i < N; ++i, ++lane) add(i, lane);
  double X = 0, Y = 0, S = 0;
  for (std::size_t lane = 0; lane < kLanes; ++lane) {
    X += x[lane];
    Y += y[lane];
    S += s[lane];
  }
  sums[0] = static_cast<float>(X);
  sums[1] = static_cast<float>(Y);
  sums[2] = static_cast<float>(S);
}

template <class F>
void for_rows(std::int64_t rows, Context& context, F&& row) {
  const std::int64_t tasks = (rows + kRowsPerTask - 1) / kRowsPerTask;
  cpu::parallel_for(tasks, context.threads, [&](std::int64_t task) {
    const std::int64_t end = std::min(rows, (task + 1) * kRowsPerTask);
    for (std::int64_t i = task * kRowsPerTask; i < end; ++i) row(i);
  });
}

}  // namespace

#if !ANNULUS_HAVE_CUDA
// Never reached: no tensor lives on a device that the build does not have.
namespace cuda {
void population_sums(const float*, const float*, float*, std::int64_t, std::int64_t, Context&) {
  throw NotSupported("[train] this build has no CUDA");
}
void population_gradients(const float*, const float*, const float*, float*, std::int64_t,
                          std::int64_t, Context&) {
  throw NotSupported("[train] this build has no CUDA");
}
}  // namespace cuda
#endif

void ring_table(std::int64_t N, float* table) {
  for (std::int64_t i = 0; i < N; ++i) {
    const double angle = 2 * std::numbers::pi * static_cast<double>(i) / static_cast<double>(N);
    table[i] = static_cast<float>(std::cos(angle));
    table[N + i] = static_cast<float>(std::sin(angle));
  }
}

void population_sums(const TensorView& states, const TensorView& ring, const TensorView& sums,
                     Context& context) {
  const std::int64_t rows = states.shape[0] * states.shape[1], N = states.shape[2];
  const auto* r = static_cast<const float*>(states.data);
  const auto* table = static_cast<const float*>(ring.data);
  auto* out = static_cast<float*>(sums.data);
  if (states.device.type == DeviceType::kCUDA) {
    cuda::population_sums(r, table, out, rows, N, context);
    return;
  }
  for_rows(rows, context, [&](std::int64_t i) { sums_of_row(r + i * N, table, N, out + 3 * i); });
}

void population_gradients(const TensorView& states, const TensorView& ring, const TensorView& dsums,
                          const TensorView& dstates, Context& context) {
  const std::int64_t rows = states.shape[0] * states.shape[1], N = states.shape[2];
  const auto* r = static_cast<const float*>(states.data);
  const auto* table = static_cast<const float*>(ring.data);
  const auto* d = static_cast<const float*>(dsums.data);
  auto* out = static_cast<float*>(dstates.data);
  if (states.device.type == DeviceType::kCUDA) {
    cuda::population_gradients(r, table, d, out, rows, N, context);
    return;
  }
  for_rows(rows, context, [&](std::int64_t row) {
    const float dX = d[3 * row], dY = d[3 * row + 1], dS = d[3 * row + 2];
    const float* state = r + row * N;
    float* dstate = out + row * N;
    for (std::int64_t i = 0; i < N; ++i) {
      const float sign = static_cast<float>(state[i] > 0) - static_cast<float>(state[i] < 0);
      dstate[i] = dX * table[i] + dY * table[N + i] + dS * sign;
    }
  });
}

}  // namespace annulus::train
