#include "draw/charts.h"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>

namespace annulus::draw {
namespace {

void draw_band(Drawing& drawing, const Line& line) {
  if (line.band.size() != line.points.size() || line.band.empty()) return;
  Points around;
  const auto put = [&](std::size_t i, double v) {
    const double x = line.points[i].first;
    if (std::isfinite(x) && std::isfinite(v)) around.emplace_back(x, v);
  };
  for (std::size_t i = 0; i < line.band.size(); ++i) put(i, line.band[i].second);
  for (std::size_t i = line.band.size(); i-- > 0;) put(i, line.band[i].first);
  drawing.path(fmt::format("c{} band", line.style), drawing.through(around) + "Z");
}

// A heat map is one path a colour, made of horizontal strokes a cell high: 128 x 128 cells take about
// 60 KB where a rectangle a cell would take a megabyte.
constexpr int kLevels = 15;  // of each hue; zero is the page itself

int level_of(double value, double most, bool diverging) {
  if (!std::isfinite(value) || !(most > 0)) return 0;
  const double share = std::clamp(value / most, diverging ? -1.0 : 0.0, 1.0);
  return static_cast<int>(std::lround(share * kLevels));
}

void draw_level(Drawing& drawing, int level, const std::string& css, const std::string& d) {
  drawing.path((level > 0 ? "hp" : "hm") + css, d,
               fmt::format(" stroke-opacity=\"{:.2g}\"", std::abs(level) / double{kLevels}));
}

// The strokes of one level, each given relative to the end of the one before.
std::string strokes(const std::vector<int>& levels, std::size_t rows, std::size_t columns,
                    int level) {
  std::string d;
  long x = 0, y = 0;
  for (std::size_t i = 0; i < rows; ++i) {
    for (std::size_t j = 0; j < columns;) {
      if (levels[i * columns + j] != level) {
        ++j;
        continue;
      }
      std::size_t end = j;
      while (end < columns && levels[i * columns + end] == level) ++end;
      const long to_x = static_cast<long>(j) - x, to_y = static_cast<long>(i) - y;
      d += fmt::format("m{}{}{}h{}", to_x, to_y < 0 ? "" : " ", to_y, end - j);
      x = static_cast<long>(end);
      y = static_cast<long>(i);
      j = end;
    }
  }
  return d;
}

// The same levels as a bar, from the least to the most.
void draw_bar(Drawing& drawing, const HeatMap& m, double most) {
  const int first = m.diverging ? -kLevels : 1;
  const double width = 7, y = m.frame.height - 10;
  const double from = (m.frame.left + drawing.right()) / 2 - width * (kLevels - first + 1) / 2;
  drawing.text("", "end", from - 6, y + 4, fmt::format("{:.2g}", m.diverging ? -most : 0.0));
  for (int level = first; level <= kLevels; ++level) {
    if (level == 0) continue;
    draw_level(drawing, level, " level",
               fmt::format("M{:.1f} {:.1f}h{:g}", from + (level - first) * width, y, width));
  }
  drawing.text("", "start", from + (kLevels - first + 1) * width + 6, y + 4,
               fmt::format("{:.2g}", most));
}

}  // namespace

std::string svg_of(const LineChart& c) {
  Drawing drawing(c.frame, c.x, c.y, c.title);
  const Scale &x = drawing.x(), &y = drawing.y();
  const double left = c.frame.left, top = c.frame.top, right = drawing.right();
  for (const Rule& r : c.rules) {
    if (r.vertical && x.holds(r.at)) {
      drawing.path("rule", fmt::format("M{:.1f} {:.1f}V{:.1f}", x(r.at), top, drawing.bottom()));
      drawing.text("fl", "start", x(r.at) + 6, top + 12, r.name);
    } else if (!r.vertical && y.holds(r.at)) {
      drawing.path("rule", fmt::format("M{:.1f} {:.1f}H{:.1f}", left, y(r.at), right));
      drawing.text("fl", "end", right - 6, y(r.at) - 5, r.name);
    }
  }
  for (const Line& line : c.lines) draw_band(drawing, line);
  for (const Line& line : c.lines) {
    drawing.path(fmt::format("c{} line{}", line.style, line.soft ? " soft" : ""),
                 drawing.through(line.points), fmt::format(" stroke-width=\"{:g}\"", line.width));
    if (line.name.empty() || line.points.empty() || !std::isfinite(line.points.back().second)) {
      continue;
    }
    drawing.name_at_end(line.points.back().second, line.name, fmt::format("c{}", line.style));
  }
  return drawing.finish();
}

std::string svg_of(const HeatMap& m) {
  double most = m.most;
  if (!(most > 0)) {
    for (const double v : m.values) {
      if (std::isfinite(v)) most = std::max(most, m.diverging ? std::fabs(v) : v);
    }
  }
  const auto cells = [](std::size_t n) { return static_cast<double>(std::max<std::size_t>(n, 1)); };
  Axis x{.high = cells(m.columns), .label = m.x_label, .ticks = m.x_ticks};
  Axis y{.low = cells(m.rows), .high = 0, .label = m.y_label, .ticks = m.y_ticks};
  Drawing drawing(m.frame, x, y, m.title, false);
  const double left = m.frame.left, top = m.frame.top;
  const double cell_y = (drawing.bottom() - top) / y.low;
  drawing.path("frame", fmt::format("M{:g} {:g}H{:g}V{:g}H{:g}Z", left, top, drawing.right(),
                                    drawing.bottom(), left));
  std::vector<int> levels(m.values.size());
  std::transform(m.values.begin(), m.values.end(), levels.begin(),
                 [&](double v) { return level_of(v, most, m.diverging); });
  drawing.add(
      fmt::format("<g class=\"heat\" transform=\"translate({:.2f} {:.2f}) scale({:.5f} {:.5f})\">",
                  left, top + cell_y / 2, (drawing.right() - left) / x.high, cell_y));
  for (int level = -kLevels; level <= kLevels; ++level) {
    if (level == 0) continue;
    const std::string d = strokes(levels, m.rows, m.columns, level);
    if (!d.empty()) draw_level(drawing, level, "", d);
  }
  drawing.add("</g>");
  if (!m.trace.empty()) drawing.path("trace", drawing.through(m.trace));
  draw_bar(drawing, m, most);
  return drawing.finish();
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

}  // namespace annulus::draw
