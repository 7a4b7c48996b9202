#include "bench/statistics.h"

#include <algorithm>
#include <cmath>
#include <stdexcept>

namespace annulus::bench {

double quantile(const std::vector<double>& sorted, double q) {
  const double position = q * static_cast<double>(sorted.size() - 1);
  const auto below = static_cast<std::size_t>(position);
  const std::size_t above = std::min(below + 1, sorted.size() - 1);
  const double share = position - static_cast<double>(below);
  return sorted[below] + share * (sorted[above] - sorted[below]);
}

TimeMs summarize(std::vector<double> times_ms) {
  if (times_ms.empty()) throw std::invalid_argument("no repetition to summarize");
  std::sort(times_ms.begin(), times_ms.end());
  return {quantile(times_ms, 0.5), times_ms.front(), quantile(times_ms, 0.95),
          static_cast<std::int64_t>(times_ms.size())};
}

double max_relative_error(const std::vector<double>& value, const std::vector<double>& reference) {
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
