#include "draw/scale.h"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>

namespace annulus::draw {

Scale::Scale(double low, double high, double from, double to, bool log)
    : low_(low), high_(high), from_(from), to_(to), log_(log) {
  if (high_ != low_) return;
  low_ = log ? low / 2 : low - 1;
  high_ = log ? low * 2 : low + 1;
}

double Scale::operator()(double value) const {
  const double way =
      log_ ? std::log(value / low_) / std::log(high_ / low_) : (value - low_) / (high_ - low_);
  return from_ + (to_ - from_) * way;
}

bool Scale::holds(double value) const {
  return std::fabs(value - inside(value)) <= 1e-9 * (log_ ? low_ : std::fabs(high_ - low_));
}

double Scale::inside(double value) const {
  return std::clamp(value, std::min(low_, high_), std::max(low_, high_));
}

std::vector<double> Scale::ticks(double gap) const {
  const double length = std::fabs(to_ - from_);
  std::vector<double> ticks;
  if (log_) {
    const double decades = std::log10(high_ / low_), per_decade = length / decades;
    const bool between = std::log10(2.0) * per_decade >= gap || decades < 2;
    // Very wide domains keep every second, third, ... power of ten.
    const int step = std::max(1, static_cast<int>(std::ceil(gap / per_decade)));
    for (int e = static_cast<int>(std::floor(std::log10(low_))); std::pow(10, e) <= high_; ++e) {
      if (e % step != 0) continue;
      for (const double m : {1.0, 2.0, 5.0}) {
        const double v = m * std::pow(10, e);
        if ((m == 1.0 || between) && v >= low_ * (1 - 1e-9) && v <= high_ * (1 + 1e-9)) {
          ticks.push_back(v);
        }
      }
    }
    if (ticks.size() > 1) return ticks;
  }
  return linear_ticks(low_, high_, length / gap);
}

std::vector<double> linear_ticks(double low, double high, double about) {
  std::vector<double> ticks;
  if (!(high > low) || !std::isfinite(high - low)) return ticks;
  const double rough = (high - low) / std::max(1.0, about);
  const double power = std::pow(10, std::floor(std::log10(rough)));
  double step = 10 * power;
  for (const double m : {5.0, 2.0, 1.0}) {
    if (m * power >= rough * (1 - 1e-9)) step = m * power;
  }
  for (double i = std::ceil(low / step - 1e-9); i * step <= high + 1e-9 * step; ++i) {
    ticks.push_back(i == 0 ? 0 : i * step);
  }
  return ticks;
}

std::string number_label(double value) { return fmt::format("{:g}", value); }

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

}  // namespace annulus::draw
