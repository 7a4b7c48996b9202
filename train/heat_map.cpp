// A heat map is one path a colour, made of horizontal strokes a cell high: 128 x 128 cells take about
// 60 KB where a rectangle a cell would take a megabyte.
#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <cmath>

#include "bench/report/html.h"
#include "train/figure.h"

namespace annulus::train {
namespace {

using bench::report::text;

constexpr int kLevels = 15;  // of each hue; zero is the page itself
constexpr double kMapTop = 28, kAxis = 40, kBar = 26;

int level_of(double value, double most, bool diverging) {
  if (!std::isfinite(value) || !(most > 0)) return 0;
  const double share = std::clamp(value / most, diverging ? -1.0 : 0.0, 1.0);
  return static_cast<int>(std::lround(share * kLevels));
}

std::string colour(int level) {
  return fmt::format("class=\"{}\" stroke-opacity=\"{:.2g}\"", level > 0 ? "hp" : "hm",
                     std::abs(level) / static_cast<double>(kLevels));
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

}  // namespace

std::string draw(const HeatMap& m) {
  double most = m.most;
  if (!(most > 0)) {
    for (const double v : m.values) {
      if (std::isfinite(v)) most = std::max(most, m.diverging ? std::fabs(v) : v);
    }
  }
  const double bottom = m.height - kAxis - (m.scale ? kBar : 0), right = m.width - m.right;
  const double cell_x = (right - m.left) / static_cast<double>(std::max<std::size_t>(m.columns, 1));
  const double cell_y = (bottom - kMapTop) / static_cast<double>(std::max<std::size_t>(m.rows, 1));
  std::string svg = fmt::format(
      "<svg class=\"fig\" viewBox=\"0 0 {:g} {:g}\" role=\"img\" aria-label=\"{}\">"
      "<text class=\"ft\" x=\"{:g}\" y=\"17\">{}</text>",
      m.width, m.height, text(m.title), m.left, text(m.title));
  svg += fmt::format(
      "<rect class=\"frame\" x=\"{:g}\" y=\"{:g}\" width=\"{:.2f}\" height=\"{:.2f}\"/>", m.left,
      kMapTop, right - m.left, bottom - kMapTop);

  std::vector<int> levels(m.values.size());
  std::transform(m.values.begin(), m.values.end(), levels.begin(),
                 [&](double v) { return level_of(v, most, m.diverging); });
  svg +=
      fmt::format("<g class=\"heat\" transform=\"translate({:.2f} {:.2f}) scale({:.5f} {:.5f})\">",
                  m.left, kMapTop + cell_y / 2, cell_x, cell_y);
  for (int level = -kLevels; level <= kLevels; ++level) {
    if (level == 0) continue;
    const std::string d = strokes(levels, m.rows, m.columns, level);
    if (!d.empty()) svg += fmt::format("<path {} d=\"{}\"/>", colour(level), d);
  }
  svg += "</g>";

  if (!m.trace.empty()) {
    std::string d;
    bool pen = false;
    for (const auto& [x, y] : m.trace) {
      const bool there = std::isfinite(x) && std::isfinite(y);
      if (there) {
        d += fmt::format("{}{:.1f} {:.1f}", pen ? "L" : "M", m.left + x * cell_x,
                         kMapTop + y * cell_y);
      }
      pen = there;
    }
    svg += fmt::format("<path class=\"trace\" d=\"{}\"/>", d);
  }
  for (const auto& [at, label] : m.x_ticks) {
    svg += fmt::format("<text text-anchor=\"middle\" x=\"{:.1f}\" y=\"{:.1f}\">{}</text>",
                       m.left + at * cell_x, bottom + 16, text(label));
  }
  for (const auto& [at, label] : m.y_ticks) {
    svg += fmt::format("<text text-anchor=\"end\" x=\"{:.1f}\" y=\"{:.1f}\">{}</text>", m.left - 7,
                       kMapTop + at * cell_y + 4, text(label));
  }
  svg +=
      fmt::format("<text class=\"fl\" text-anchor=\"middle\" x=\"{:.1f}\" y=\"{:.1f}\">{}</text>",
                  (m.left + right) / 2, bottom + 33, text(m.x_label));
  svg += fmt::format("<text class=\"fl\" text-anchor=\"end\" x=\"{:.1f}\" y=\"17\">{}</text>",
                     right, text(m.y_label));
  if (m.scale) {
    // The same levels as a bar, from the least to the most.
    const int first = m.diverging ? -kLevels : 1;
    const double width = 7, y = m.height - 10;
    const double from = (m.left + right) / 2 - width * (kLevels - first + 1) / 2;
    svg += fmt::format("<text text-anchor=\"end\" x=\"{:.1f}\" y=\"{:.1f}\">{:.2g}</text>",
                       from - 6, y + 4, m.diverging ? -most : 0.0);
    for (int level = first; level <= kLevels; ++level) {
      if (level == 0) continue;
      svg += fmt::format(
          "<path class=\"{} bar\" stroke-opacity=\"{:.2g}\" d=\"M{:.1f} {:.1f}h{:g}\"/>",
          level > 0 ? "hp" : "hm", std::abs(level) / static_cast<double>(kLevels),
          from + (level - first) * width, y, width);
    }
    svg += fmt::format("<text x=\"{:.1f}\" y=\"{:.1f}\">{:.2g}</text>",
                       from + (kLevels - first + 1) * width + 6, y + 4, most);
  }
  return svg + "</svg>";
}

}  // namespace annulus::train
