#include "train/network/loss.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <numbers>

#include "annulus/core/operator.h"
#include "annulus/cpu/parallel.h"
#include "train/task.h"

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

const float* floats(const TensorView& v) { return static_cast<const float*>(v.data); }

// f(row) of every state.
template <class F>
void for_rows(const TensorView& states, Context& context, F&& f) {
  const std::int64_t rows = states.shape[0] * states.shape[1];
  const std::int64_t tasks = (rows + kRowsPerTask - 1) / kRowsPerTask;
  cpu::parallel_for(tasks, context.threads, [&](std::int64_t task) {
    const std::int64_t end = std::min(rows, (task + 1) * kRowsPerTask);
    for (std::int64_t row = task * kRowsPerTask; row < end; ++row) f(row);
  });
}

}  // namespace

LossFigures ring_loss(std::span<const float> sums, std::span<const double> target, std::int64_t B,
                      std::int64_t T, double amplitude_weight, std::span<float> dsums) {
  LossFigures figures;
  if (B * T == 0) return figures;
  const double each = 1 / static_cast<double>(B * T);
  for (std::int64_t b = 0; b < B; ++b) {
    const auto first = static_cast<std::size_t>(b * T);
    const double S0 = sums[3 * first + 2];
    double dS0 = 0;
    for (std::size_t at = first; at < first + static_cast<std::size_t>(T); ++at) {
      const double X = sums[3 * at], Y = sums[3 * at + 1];
      const double apart = sums[3 * at + 2] - S0;
      const double length = std::hypot(X, Y);
      const bool points = length > 0;
      const double ux = points ? X / length : 1, uy = points ? Y / length : 0;
      const double cx = std::cos(target[at]), cy = std::sin(target[at]);
      figures.angle += each * ((ux - cx) * (ux - cx) + (uy - cy) * (uy - cy));
      figures.amplitude += each * apart * apart;
      figures.error += each * circular_distance(std::atan2(uy, ux), target[at]);
      if (dsums.empty()) continue;
      // d(2 - 2 u.c) = -2 c.du, and du/dX has only the part across u.
      const double across = points ? 2 * each * (uy * cx - ux * cy) / length : 0;
      dsums[3 * at] = static_cast<float>(-across * uy);
      dsums[3 * at + 1] = static_cast<float>(across * ux);
      const double dS = 2 * each * amplitude_weight * apart;
      dsums[3 * at + 2] = static_cast<float>(dS);
      dS0 -= dS;
    }
    // S_b0 is in every term of its sequence (its own is zero).
    if (!dsums.empty()) dsums[3 * first + 2] = static_cast<float>(dS0);
  }
  figures.total = figures.angle + amplitude_weight * figures.amplitude;
  return figures;
}

void ring_table(std::int64_t N, float* table) {
  for (std::int64_t i = 0; i < N; ++i) {
    const double angle = 2 * std::numbers::pi * static_cast<double>(i) / static_cast<double>(N);
    table[i] = static_cast<float>(std::cos(angle));
    table[N + i] = static_cast<float>(std::sin(angle));
  }
}

void population_sums(const TensorView& states, const TensorView& ring, const TensorView& sums,
                     Context& context) {
  const auto cpu = [&] {
    const std::int64_t N = states.shape[2];
    for_rows(states, context, [&](std::int64_t row) {
      sums_of_row(floats(states) + row * N, floats(ring), N,
                  static_cast<float*>(sums.data) + 3 * row);
    });
  };
  dispatch("train", states.device, cpu,
           [&] { cuda::population_sums(states, ring, sums, context); });
}

void population_gradients(const TensorView& states, const TensorView& ring, const TensorView& dsums,
                          const TensorView& dstates, Context& context) {
  const auto cpu = [&] {
    const std::int64_t N = states.shape[2];
    for_rows(states, context, [&](std::int64_t row) {
      const float* d = floats(dsums) + 3 * row;
      const float dX = d[0], dY = d[1], dS = d[2];
      const float *state = floats(states) + row * N, *table = floats(ring);
      float* dstate = static_cast<float*>(dstates.data) + row * N;
      for (std::int64_t i = 0; i < N; ++i) {
        const float sign = static_cast<float>(state[i] > 0) - static_cast<float>(state[i] < 0);
        dstate[i] = dX * table[i] + dY * table[N + i] + dS * sign;
      }
    });
  };
  dispatch("train", states.device, cpu,
           [&] { cuda::population_gradients(states, ring, dsums, dstates, context); });
}

}  // namespace annulus::train
