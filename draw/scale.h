// Where a value lies on an axis, which values are marked there, and how figures are written.
#pragma once

#include <string>
#include <vector>

namespace annulus::draw {

class Scale {
 public:
  // Maps low to `from` and high to `to`; low may be the larger. Where `log`, both are positive. Equal
  // ones are spread: by a factor of two either way, or by one.
  Scale(double low, double high, double from, double to, bool log);
  double operator()(double value) const;
  double low() const { return low_; }
  double high() const { return high_; }
  bool holds(double value) const;
  double inside(double value) const;  // the nearest value that it holds

  // At least `gap` apart. Linear: steps of 1, 2 or 5 times a power of ten. Log: powers of ten, and 2
  // and 5 times them where there is room or where there would be few; linear ones where even those
  // are fewer than two.
  std::vector<double> ticks(double gap) const;

 private:
  double low_, high_, from_, to_;
  bool log_;
};

// Steps of 1, 2 or 5 times a power of ten, about `about` of them.
std::vector<double> linear_ticks(double low, double high, double about);

std::string number_label(double value);  // 0.05 -> "0.05"
// 0.0005 -> "0.5 µs", 20 -> "20 ms", 3000 -> "3 s".
std::string duration_label(double ms);
// 2.5 -> "2.50×", 25 -> "25.0×".
std::string times(double ratio);

}  // namespace annulus::draw
