#include "bench/report/scale.h"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>

namespace annulus::bench::report {

LogScale::LogScale(double low, double high, double from, double to)
    : low_(low), high_(high), from_(from), to_(to) {
  if (!(high_ > low_)) {
    low_ = low / 2;
    high_ = low * 2;
  }
}

double LogScale::operator()(double value) const {
  return from_ + (to_ - from_) * std::log(value / low_) / std::log(high_ / low_);
}

std::vector<double> LogScale::ticks(double gap) const {
  const double decades = std::log10(high_ / low_);
  const double per_decade = std::fabs(to_ - from_) / decades;
  const bool between = std::log10(2.0) * per_decade >= gap || decades < 2;
  // Very wide domains keep every second, third, ... power of ten.
  const int step = std::max(1, static_cast<int>(std::ceil(gap / per_decade)));
  std::vector<double> ticks;
  for (int e = static_cast<int>(std::floor(std::log10(low_))); std::pow(10, e) <= high_; ++e) {
    if (e % step != 0) continue;
    for (const double m : {1.0, 2.0, 5.0}) {
      const double v = m * std::pow(10, e);
      if (m != 1.0 && !between) continue;
      if (v >= low_ * (1 - 1e-9) && v <= high_ * (1 + 1e-9)) ticks.push_back(v);
    }
  }
  return ticks;
}

std::string duration_label(double ms) {
  if (ms < 1) return fmt::format("{:.3g} µs", ms * 1e3);
  if (ms < 1e3) return fmt::format("{:.3g} ms", ms);
  return fmt::format("{:.4g} s", ms * 1e-3);
}

std::string times(double v) {
  return v >= 100  ? fmt::format("{:.0f}×", v)
         : v >= 10 ? fmt::format("{:.1f}×", v)
                   : fmt::format("{:.2f}×", v);
}

}  // namespace annulus::bench::report
