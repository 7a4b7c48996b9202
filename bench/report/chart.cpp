#include "bench/report/parts.h"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <numbers>

#include "draw/drawing.h"
#include "draw/html.h"

namespace annulus::bench::report {
namespace {

using draw::Axis;
using draw::Drawing;
using draw::text;

// As wide as a telephone: there a panel is shown at its own size, and on a desk three of them fit.
// Names of series stand to the right of the axes.
constexpr draw::Frame kFrame = {
    .width = 380, .height = 380, .left = 54, .right = 116, .bottom = 48};

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

// time = factor * floor: straight and rising in log-log, clipped to the panel.
void draw_diagonal(Drawing& drawing, double factor, const char* css, const char* name) {
  const draw::Scale &x = drawing.x(), &y = drawing.y();
  const double from = std::max(x.low(), y.low() / factor);
  const double to = std::min(x.high(), y.high() / factor);
  if (!(to > from)) return;
  drawing.path(css, drawing.through({{from, from * factor}, {to, to * factor}}));
  // The name sits just above the line at its lower end and runs along it.
  const double slope = std::atan2(y(to * factor) - y(from * factor), x(to) - x(from));
  const double at = from * std::pow(to / from, 0.015);
  drawing.add(
      fmt::format("<text class=\"fl\" transform=\"translate({:.1f} {:.1f}) rotate({:.1f})\" "
                  "dy=\"-5\">{}</text>",
                  x(at), y(at * factor), slope * 180 / std::numbers::pi, name));
}

void draw_points(Drawing& drawing, const Series& s, std::size_t max_points, std::size_t* thinned) {
  const std::size_t step =
      (s.points.size() + max_points - 1) / std::max<std::size_t>(max_points, 1);
  const Point* last = nullptr;
  for (std::size_t i = 0; i < s.points.size(); ++i) {
    const Point& p = s.points[i];
    if (!last || p.floor_ms >= last->floor_ms) last = &p;
    if (step > 1 && i % step != 0) {
      ++*thinned;
      continue;
    }
    drawing.add(
        mark(drawing.x()(p.floor_ms), drawing.y()(p.time_ms), s.style, s.hollow, 3.6, p.label));
  }
  if (last) drawing.name_at_end(last->time_ms, s.name, css_of(s.style, s.hollow));
}

// Both axes hold every point of every panel, and the floor line with its names.
std::pair<Axis, Axis> axes_of(const std::vector<Panel>& panels) {
  double least = 1e300, most = 0, time_least = 1e300, time_most = 0;
  for (const Panel& panel : panels) {
    for (const Series& s : panel.series) {
      for (const Point& p : s.points) {
        least = std::min(least, p.floor_ms);
        most = std::max(most, p.floor_ms);
        time_least = std::min({time_least, p.time_ms, p.floor_ms});
        time_most = std::max({time_most, p.time_ms, p.floor_ms});
      }
    }
  }
  Axis x{.log = true, .label = "floor", .name = draw::duration_label, .gap = 50};
  Axis y{.log = true, .label = "time", .name = draw::duration_label, .gap = 18};
  // Room on the left, where the names of the diagonals stand, and for whole marks at the ends.
  const double room = std::pow(most / least, 0.04);
  x.low = least / (std::pow(most / least, 0.1) * 1.3 * room);
  x.high = most * 1.25 * room;
  y.low = std::min(time_least / 1.25, x.low);
  y.high = time_most * 1.35;
  return {x, y};
}

}  // namespace

std::string css_of(int style, bool hollow) {
  return hollow ? "hollow" : fmt::format("c{}", style < 2 ? style : 2 + (style - 2) % 7);
}

std::string legend_mark(int style, bool hollow) {
  return "<svg class=\"key\" width=\"12\" height=\"12\" viewBox=\"0 0 12 12\" "
         "aria-hidden=\"true\">" +
         mark(6, 6, style, hollow, 4, "") + "</svg>";
}

std::string chart(const std::vector<Panel>& panels, std::size_t max_points, std::size_t* thinned) {
  const auto [x, y] = axes_of(panels);
  if (!(x.high > 0)) return "";
  std::string drawings;
  for (const Panel& panel : panels) {
    Drawing drawing(kFrame, x, y, panel.title, true,
                    panel.title + ": time against floor, log axes");
    draw_diagonal(drawing, 10, "rule", "10×");
    draw_diagonal(drawing, 2, "rule", "2×");
    draw_diagonal(drawing, 1, "floor", "floor");
    // Our own points last, on top.
    for (std::size_t k = panel.series.size(); k-- > 0;) {
      draw_points(drawing, panel.series[k], max_points, thinned);
    }
    drawings += drawing.finish();
  }
  return drawings;
}

}  // namespace annulus::bench::report
