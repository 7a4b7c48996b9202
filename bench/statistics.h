// A repetition, and the few numbers a row of them is reduced to.
#pragma once

#include <algorithm>
#include <chrono>
#include <cmath>
#include <stdexcept>
#include <vector>

#include "bench/record.h"

namespace annulus::bench {

// How long f takes.
template <class F>
double milliseconds(F&& f) {
  const auto start = std::chrono::steady_clock::now();
  f();
  return std::chrono::duration<double, std::milli>(std::chrono::steady_clock::now() - start)
      .count();
}

// Linear interpolation between order statistics, q in [0, 1]; `sorted` must not be empty.
inline double quantile(const std::vector<double>& sorted, double q) {
  const double position = q * static_cast<double>(sorted.size() - 1);
  const auto below = static_cast<std::size_t>(position);
  const std::size_t above = std::min(below + 1, sorted.size() - 1);
  const double share = position - static_cast<double>(below);
  return sorted[below] + share * (sorted[above] - sorted[below]);
}

// Median, minimum, 95th percentile. Throws std::invalid_argument when there is no repetition.
inline TimeMs summarize(std::vector<double> times_ms) {
  if (times_ms.empty()) throw std::invalid_argument("no repetition to summarize");
  std::sort(times_ms.begin(), times_ms.end());
  return {quantile(times_ms, 0.5), times_ms.front(), quantile(times_ms, 0.95),
          static_cast<std::int64_t>(times_ms.size())};
}

// max |value - reference| / max |reference|, and the plain maximum when the reference is all zero.
// NaN as soon as a value is not finite where the reference is.
inline double max_relative_error(const std::vector<double>& value,
                                 const std::vector<double>& reference) {
  if (value.size() != reference.size()) throw std::invalid_argument("sizes differ");
  double error = 0, scale = 0;
  for (std::size_t i = 0; i < value.size(); ++i) {
    if (!std::isfinite(value[i])) {
      if (std::isfinite(reference[i])) return std::nan("");
      continue;
    }
    error = std::max(error, std::fabs(value[i] - reference[i]));
    scale = std::max(scale, std::fabs(reference[i]));
  }
  return scale > 0 ? error / scale : error;
}

}  // namespace annulus::bench
