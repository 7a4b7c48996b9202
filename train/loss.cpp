#include "train/loss.h"

#include <cmath>

#include "train/task.h"

namespace annulus::train {

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

}  // namespace annulus::train
