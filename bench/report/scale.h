// Axes on a logarithmic scale, and the labels of figures.
#pragma once

#include <string>
#include <vector>

namespace annulus::bench::report {

class LogScale {
 public:
  // Maps [low, high] to [from, to], both ends included; low and high must be positive. Equal ends
  // are spread by a factor of two either way.
  LogScale(double low, double high, double from, double to);
  double operator()(double value) const;
  double low() const { return low_; }
  double high() const { return high_; }
  // Powers of ten inside the domain, and 2 and 5 times them where neighbours then stay `gap` apart
  // or where there would be fewer than two ticks.
  std::vector<double> ticks(double gap) const;

 private:
  double low_, high_, from_, to_;
};

// 0.0005 -> "0.5 µs", 20 -> "20 ms", 3000 -> "3 s".
std::string duration_label(double ms);
// 2.5 -> "2.50×", 25 -> "25.0×".
std::string times(double ratio);

}  // namespace annulus::bench::report
