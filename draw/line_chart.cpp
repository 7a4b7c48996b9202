#include "draw/line_chart.h"

#include <fmt/format.h>

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

}  // namespace annulus::draw
