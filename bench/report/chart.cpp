#include "bench/report/parts.h"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>

#include "draw/drawing.h"
#include "draw/html.h"
#include "draw/scale.h"

namespace annulus::bench::report {
namespace {

using draw::Axis;
using draw::Drawing;
using draw::text;

// Between a telephone and half a desk, so that letters can be read on both. Names of series stand to the
// right of the axes.
constexpr double kWidth = 470, kPlotHeight = 250, kRight = 158;
constexpr std::size_t kMostLabel = 20;  // letters of a row's name under the axis

// Four shapes in turn, so that colour is never the only difference.
std::string mark(double x, double y, int style, bool hollow, double r, const std::string& tip) {
  const std::string css = fmt::format("class=\"{} m\"", css_of(style, hollow));
  std::string shape;
  switch (style % 4) {
    case 0:
      shape = fmt::format("<circle {} cx=\"{:.1f}\" cy=\"{:.1f}\" r=\"{:.1f}\"", css, x, y, r);
      break;
    case 1:
      shape = fmt::format(
          "<path {} d=\"M{:.1f} {:.1f}l{:.1f} {:.1f}l{:.1f} {:.1f}l{:.1f} {:.1f}z\"", css, x,
          y - 1.25 * r, 1.25 * r, 1.25 * r, -1.25 * r, 1.25 * r, -1.25 * r, -1.25 * r);
      break;
    case 2:
      shape = fmt::format("<rect {} x=\"{:.1f}\" y=\"{:.1f}\" width=\"{:.1f}\" height=\"{:.1f}\"",
                          css, x - 0.9 * r, y - 0.9 * r, 1.8 * r, 1.8 * r);
      break;
    default:
      shape = fmt::format("<path {} d=\"M{:.1f} {:.1f}l{:.1f} {:.1f}h{:.1f}z\"", css, x,
                          y - 1.2 * r, 1.2 * r, 2.1 * r, -2.4 * r);
  }
  return tip.empty() ? shape + "/>"
                     : shape + "><title>" + text(tip) + "</title></" +
                           shape.substr(1, shape.find(' ') - 1) + ">";
}

void draw_series(Drawing& drawing, const Panel& panel, const Series& s) {
  draw::Points points;
  for (std::size_t i = 0; i < s.times.size(); ++i) {
    if (s.times[i] > 0) points.emplace_back(static_cast<double>(i), s.times[i]);
  }
  const std::string css = css_of(s.style, s.hollow);
  drawing.path(css + " line", drawing.through(points));
  for (const auto& [at, ms] : points) {
    drawing.add(mark(drawing.x()(at), drawing.y()(ms), s.style, s.hollow, 3.6,
                     fmt::format("{}: {} {:.4g} ms", panel.labels[static_cast<std::size_t>(at)],
                                 label_of(s.name), ms)));
  }
  if (!points.empty()) drawing.name_at_end(points.back().second, label_of(s.name), css);
}

void draw_floor(Drawing& drawing, const Panel& panel) {
  draw::Points points;
  for (std::size_t i = 0; i < panel.floor.size(); ++i) {
    if (panel.floor[i] > 0) points.emplace_back(static_cast<double>(i), panel.floor[i]);
  }
  if (points.empty()) return;
  if (points.size() == 1) {  // a line still
    const auto [at, ms] = points[0];
    points = {{at - 0.3, ms}, {at + 0.3, ms}};
  }
  drawing.path("floor", drawing.through(points));
  drawing.name_at_end(points.back().second, "floor", "hollow");
}

// Every row by its name under the axis, slanted so that twelve fit.
void draw_labels(Drawing& drawing, const Panel& panel) {
  for (std::size_t i = 0; i < panel.labels.size(); ++i) {
    drawing.add(
        fmt::format("<text text-anchor=\"end\" transform=\"translate({:.1f} {:.1f}) "
                    "rotate(-35)\">{}</text>",
                    drawing.x()(static_cast<double>(i)) + 4, drawing.bottom() + 15,
                    text(panel.labels[i], kMostLabel)));
  }
}

}  // namespace

std::string css_of(int style, bool hollow) {
  return hollow ? "hollow" : fmt::format("c{}", style < 3 ? style : 3 + (style - 3) % 6);
}

std::string legend_mark(int style, bool hollow) {
  return "<svg class=\"key\" width=\"12\" height=\"12\" viewBox=\"0 0 12 12\" "
         "aria-hidden=\"true\">" +
         mark(6, 6, style, hollow, 4, "") + "</svg>";
}

std::string chart(const Panel& panel, const std::string& title) {
  double least = 1e300, most = 0;
  const auto see = [&](double v) {
    if (!(v > 0)) return;
    least = std::min(least, v);
    most = std::max(most, v);
  };
  for (const double v : panel.floor) see(v);
  for (const Series& s : panel.series) {
    for (const double v : s.times) see(v);
  }
  if (!(most > 0) || panel.series.empty()) return "";
  std::size_t longest = 0;
  for (const std::string& label : panel.labels) {
    longest = std::max(longest, std::min(label.size(), kMostLabel));
  }
  const double slant = 4.2 * static_cast<double>(longest);
  // The first name ends beside the axis and begins left of it.
  const double left =
      panel.labels.empty()
          ? 58
          : std::max(58.0,
                     4.9 * static_cast<double>(std::min(panel.labels[0].size(), kMostLabel)) - 13);
  // Names of many series need a step each.
  const double height = std::max(kPlotHeight, 15.0 * static_cast<double>(panel.series.size() + 1));
  const draw::Frame frame = {.width = kWidth,
                             .height = 34 + height + slant + 40,
                             .left = left,
                             .right = kRight,
                             .top = 34,
                             .bottom = slant + 40};
  const double last = static_cast<double>(panel.labels.size()) - 1;
  Axis x{.low = -0.3, .high = last + 0.3};
  for (std::size_t i = 0; i < panel.labels.size(); ++i) {
    x.ticks.emplace_back(static_cast<double>(i), "");
  }
  const Axis y{
      .low = least / 1.3, .high = most * 1.3, .log = true, .name = draw::duration_label, .gap = 18};
  Drawing drawing(frame, x, y, title, true, title + ": time over size, log axis");
  draw_labels(drawing, panel);
  drawing.text("fl", "middle", (frame.left + drawing.right()) / 2, frame.height - 6,
               panel.pattern.empty() ? "row" : panel.pattern, 60);
  draw_floor(drawing, panel);
  // Our own last, on top.
  for (std::size_t k = panel.series.size(); k-- > 0;) draw_series(drawing, panel, panel.series[k]);
  return drawing.finish();
}

}  // namespace annulus::bench::report
