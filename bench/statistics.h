// A repetition, and the few numbers a row of them is reduced to.
#pragma once

#include <chrono>
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
double quantile(const std::vector<double>& sorted, double q);

// Median, minimum, 95th percentile. Throws std::invalid_argument when there is no repetition.
TimeMs summarize(std::vector<double> times_ms);

// max |value - reference| / max |reference|, and the plain maximum when the reference is all zero.
// NaN as soon as a value is not finite where the reference is.
double max_relative_error(const std::vector<double>& value, const std::vector<double>& reference);

}  // namespace annulus::bench
