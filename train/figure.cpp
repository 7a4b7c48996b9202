#include "train/figure.h"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>

#include "bench/report/html.h"

namespace annulus::train {
namespace {

using bench::report::text;

constexpr double kTop = 34, kBottom = 46;
constexpr double kLabelStep = 15;  // closer than this two names would touch

class Scale {
 public:
  Scale(const Axis& axis, double from, double to) : axis_(axis), from_(from), to_(to) {}
  double operator()(double v) const {
    const double way = axis_.log ? std::log(v / axis_.low) / std::log(axis_.high / axis_.low)
                                 : (v - axis_.low) / (axis_.high - axis_.low);
    return from_ + (to_ - from_) * way;
  }
  bool holds(double v) const {
    return std::isfinite(v) && v >= axis_.low * (1 - 1e-9) - (axis_.log ? 0 : 1e-12) &&
           v <= axis_.high + 1e-9 * std::fabs(axis_.high);
  }

 private:
  const Axis& axis_;
  double from_, to_;
};

std::vector<std::pair<double, std::string>> ticks_of(const Axis& axis, int about) {
  if (!axis.ticks.empty()) return axis.ticks;
  std::vector<std::pair<double, std::string>> ticks;
  if (axis.log) {
    const bool between = axis.high / axis.low < 300;
    for (int e = static_cast<int>(std::floor(std::log10(axis.low))); e < 20; ++e) {
      for (const double m : {1.0, 2.0, 5.0}) {
        const double v = m * std::pow(10, e);
        if (v > axis.high * (1 + 1e-9)) {
          if (ticks.size() > 1) return ticks;
          Axis linear = axis;  // less than a factor of two: plain steps say more
          linear.log = false;
          return ticks_of(linear, about);
        }
        if (v < axis.low * (1 - 1e-9) || (m != 1 && !between)) continue;
        ticks.emplace_back(v, fmt::format("{:g}", v));
      }
    }
    return ticks;
  }
  for (const double v : linear_ticks(axis.low, axis.high, about)) {
    ticks.emplace_back(v, fmt::format("{:g}", v));
  }
  return ticks;
}

// "M1 2L3 4..." through the points that are finite, clamped to the axes; a gap starts anew.
std::string path_of(const std::vector<std::pair<double, double>>& points, const Scale& x,
                    const Scale& y, const Axis& ya) {
  std::string d;
  bool pen = false;
  for (const auto& [px, py] : points) {
    if (!std::isfinite(px) || !std::isfinite(py)) {
      pen = false;
      continue;
    }
    d += fmt::format("{}{:.1f} {:.1f}", pen ? "L" : "M", x(px), y(std::clamp(py, ya.low, ya.high)));
    pen = true;
  }
  return d;
}

std::string band_of(const Line& line, const Scale& x, const Scale& y, const Axis& ya) {
  if (line.band.size() != line.points.size() || line.band.empty()) return "";
  std::string d = "M";
  const auto put = [&](double px, double py) {
    d += fmt::format("{:.1f} {:.1f} ", x(px), y(std::clamp(py, ya.low, ya.high)));
  };
  const auto whole = [&](std::size_t i) {
    return std::isfinite(line.points[i].first) && std::isfinite(line.band[i].first) &&
           std::isfinite(line.band[i].second);
  };
  for (std::size_t i = 0; i < line.band.size(); ++i) {
    if (whole(i)) put(line.points[i].first, line.band[i].second);
  }
  for (std::size_t i = line.band.size(); i-- > 0;) {
    if (whole(i)) put(line.points[i].first, line.band[i].first);
  }
  return fmt::format("<path class=\"f{} band\" d=\"{}Z\"/>", line.style, d);
}

struct EndName {
  double y;
  std::string name;
  int style;
};

// Names pushed apart, top to bottom, and back up where they run out of room.
void spread(std::vector<EndName>& names, double bottom) {
  std::sort(names.begin(), names.end(), [](auto& a, auto& b) { return a.y < b.y; });
  for (std::size_t i = 1; i < names.size(); ++i) {
    names[i].y = std::max(names[i].y, names[i - 1].y + kLabelStep);
  }
  for (std::size_t i = names.size(); i-- > 0;) {
    const double limit = i + 1 < names.size() ? names[i + 1].y - kLabelStep : bottom;
    names[i].y = std::min(names[i].y, limit);
  }
}

std::string head(const std::string& title, double width, double height, double left) {
  return fmt::format(
      "<svg class=\"fig\" viewBox=\"0 0 {:g} {:g}\" role=\"img\" aria-label=\"{}\">"
      "<text class=\"ft\" x=\"{:g}\" y=\"17\">{}</text>",
      width, height, text(title), left, text(title));
}

}  // namespace

std::vector<double> linear_ticks(double low, double high, int about) {
  std::vector<double> ticks;
  if (!(high > low) || !std::isfinite(high - low)) return ticks;
  const double rough = (high - low) / std::max(1, about);
  const double power = std::pow(10, std::floor(std::log10(rough)));
  double step = 10 * power;
  for (const double m : {1.0, 2.0, 5.0}) {
    if (m * power >= rough * (1 - 1e-9)) {
      step = m * power;
      break;
    }
  }
  for (double i = std::ceil(low / step - 1e-9); i * step <= high + 1e-9 * step; ++i) {
    ticks.push_back(i == 0 ? 0 : i * step);
  }
  return ticks;
}

std::string draw(const LineChart& c) {
  const double right = c.width - c.right, bottom = c.height - kBottom;
  const Scale x(c.x, c.left, right), y(c.y, bottom, kTop);
  std::string svg = head(c.title, c.width, c.height, c.left);
  for (const auto& [v, label] : ticks_of(c.y, static_cast<int>(c.height / 55))) {
    svg += fmt::format(
        "<path class=\"g\" d=\"M{:.1f} {:.1f}H{:.1f}\"/>"
        "<text text-anchor=\"end\" x=\"{:.1f}\" y=\"{:.1f}\">{}</text>",
        c.left, y(v), right, c.left - 8, y(v) + 4, text(label));
  }
  for (const auto& [v, label] : ticks_of(c.x, static_cast<int>((right - c.left) / 80))) {
    svg += fmt::format(
        "<path class=\"g\" d=\"M{:.1f} {:.1f}V{:.1f}\"/>"
        "<text text-anchor=\"middle\" x=\"{:.1f}\" y=\"{:.1f}\">{}</text>",
        x(v), kTop, bottom, x(v), bottom + 17, text(label));
  }
  svg +=
      fmt::format("<text class=\"fl\" text-anchor=\"middle\" x=\"{:.1f}\" y=\"{:.1f}\">{}</text>",
                  (c.left + right) / 2, c.height - 8, text(c.x.label));
  svg += fmt::format("<text class=\"fl\" text-anchor=\"end\" x=\"{:.1f}\" y=\"17\">{}</text>",
                     right, text(c.y.label));
  for (const Rule& r : c.rules) {
    if (r.vertical && x.holds(r.at)) {
      svg += fmt::format(
          "<path class=\"rule\" d=\"M{:.1f} {:.1f}V{:.1f}\"/><text class=\"fl\" x=\"{:.1f}\" "
          "y=\"{:.1f}\">{}</text>",
          x(r.at), kTop, bottom, x(r.at) + 6, kTop + 12, text(r.name));
    } else if (!r.vertical && y.holds(r.at)) {
      svg += fmt::format(
          "<path class=\"rule\" d=\"M{:.1f} {:.1f}H{:.1f}\"/><text class=\"fl\" "
          "text-anchor=\"end\" x=\"{:.1f}\" y=\"{:.1f}\">{}</text>",
          c.left, y(r.at), right, right - 6, y(r.at) - 5, text(r.name));
    }
  }
  std::vector<EndName> names;
  for (const Line& line : c.lines) svg += band_of(line, x, y, c.y);
  for (const Line& line : c.lines) {
    svg += fmt::format("<path class=\"l{}{}\" stroke-width=\"{:g}\" d=\"{}\"/>", line.style,
                       line.soft ? " soft" : "", line.width, path_of(line.points, x, y, c.y));
    if (line.name.empty() || line.points.empty()) continue;
    const double end = line.points.back().second;
    if (!std::isfinite(end)) continue;
    names.push_back({y(std::clamp(end, c.y.low, c.y.high)) + 4, line.name, line.style});
  }
  spread(names, bottom);
  for (const EndName& n : names) {
    svg += fmt::format("<text class=\"fn t{}\" x=\"{:.1f}\" y=\"{:.1f}\">{}</text>", n.style,
                       right + 7, n.y, text(n.name, 24));
  }
  return svg + "</svg>";
}

HeatMap pooled(const HeatMap& map, std::size_t most_rows, std::size_t most_columns) {
  const auto block = [](std::size_t n, std::size_t most) {
    return std::max<std::size_t>(1, (n + most - 1) / std::max<std::size_t>(most, 1));
  };
  const std::size_t down = block(map.rows, most_rows), across = block(map.columns, most_columns);
  if (down == 1 && across == 1) return map;
  HeatMap small = map;
  small.rows = (map.rows + down - 1) / down;
  small.columns = (map.columns + across - 1) / across;
  small.values.assign(small.rows * small.columns, 0.0);
  for (std::size_t i = 0; i < small.rows; ++i) {
    for (std::size_t j = 0; j < small.columns; ++j) {
      double sum = 0, count = 0;
      for (std::size_t a = i * down; a < std::min(map.rows, (i + 1) * down); ++a) {
        for (std::size_t b = j * across; b < std::min(map.columns, (j + 1) * across); ++b) {
          sum += map.values[a * map.columns + b];
          ++count;
        }
      }
      small.values[i * small.columns + j] = sum / count;
    }
  }
  const double shrink_x = 1 / static_cast<double>(across), shrink_y = 1 / static_cast<double>(down);
  for (auto& tick : small.x_ticks) tick.first *= shrink_x;
  for (auto& tick : small.y_ticks) tick.first *= shrink_y;
  for (auto& point : small.trace) {
    point.first *= shrink_x;
    point.second *= shrink_y;
  }
  return small;
}

}  // namespace annulus::train
