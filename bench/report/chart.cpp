#include "bench/report/chart.h"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>

#include "bench/report/html.h"
#include "bench/report/scale.h"

namespace annulus::bench::report {
namespace {

// As wide as a telephone: there a panel is shown at its own size, and on a desk three of them fit.
constexpr double kWidth = 380, kHeight = 380;
constexpr double kLeft = 54, kTop = 34, kBottom = 48, kLabels = 116;
constexpr double kRight = kWidth - kLabels;  // of the axes; names of series stand beside them
constexpr double kLabelStep = 14;            // closer than this two direct labels would touch

// Four shapes in turn, so that colour is never the only difference.
std::string mark(double x, double y, int style, bool hollow, double r, const std::string& tip) {
  const std::string attributes =
      fmt::format("class=\"s{}{}\"", colour_of(style), hollow ? " hollow" : "");
  std::string shape;
  switch (style % 4) {
    case 0:
      shape =
          fmt::format("<circle {} cx=\"{:.1f}\" cy=\"{:.1f}\" r=\"{:.1f}\"", attributes, x, y, r);
      break;
    case 1:
      shape = fmt::format(
          "<path {} d=\"M{:.1f} {:.1f}l{:.1f} {:.1f}l{:.1f} {:.1f}l{:.1f} {:.1f}z\"", attributes, x,
          y - 1.25 * r, 1.25 * r, 1.25 * r, -1.25 * r, 1.25 * r, -1.25 * r, -1.25 * r);
      break;
    case 2:
      shape = fmt::format("<rect {} x=\"{:.1f}\" y=\"{:.1f}\" width=\"{:.1f}\" height=\"{:.1f}\"",
                          attributes, x - 0.9 * r, y - 0.9 * r, 1.8 * r, 1.8 * r);
      break;
    default:
      shape = fmt::format("<path {} d=\"M{:.1f} {:.1f}l{:.1f} {:.1f}h{:.1f}z\"", attributes, x,
                          y - 1.2 * r, 1.2 * r, 2.1 * r, -2.4 * r);
  }
  return tip.empty() ? shape + "/>"
                     : shape + "><title>" + text(tip) + "</title></" +
                           shape.substr(1, shape.find(' ') - 1) + ">";
}

struct Domain {
  double low = 1e300, high = 0;
  void add(double v) {
    low = std::min(low, v);
    high = std::max(high, v);
  }
};

struct DirectLabel {
  double y;
  std::string name;
  std::string css;
};

// Pushes labels apart, top to bottom, and back up when they run out of room.
void spread(std::vector<DirectLabel>& labels, double bottom) {
  std::sort(labels.begin(), labels.end(), [](auto& a, auto& b) { return a.y < b.y; });
  for (std::size_t i = 1; i < labels.size(); ++i) {
    labels[i].y = std::max(labels[i].y, labels[i - 1].y + kLabelStep);
  }
  for (std::size_t i = labels.size(); i-- > 0;) {
    const double limit = i + 1 < labels.size() ? labels[i + 1].y - kLabelStep : bottom;
    labels[i].y = std::min(labels[i].y, limit);
  }
}

class PanelDrawing {
 public:
  PanelDrawing(Domain floor, Domain time)
      : x_(floor.low, floor.high, kLeft + 8, kRight - 8),
        y_(time.low, time.high, kHeight - kBottom - 6, kTop + 6) {}

  void axes(std::string& svg, const std::string& title) const {
    svg += fmt::format("<text class=\"ptitle\" x=\"{:.1f}\" y=\"18\">{}</text>", kLeft,
                       text(title, 60));
    for (const double t : y_.ticks(18)) {
      const double y = y_(t);
      svg += fmt::format(
          "<line class=\"grid\" x1=\"{:.1f}\" x2=\"{:.1f}\" y1=\"{:.1f}\" y2=\"{:.1f}\"/>", kLeft,
          kRight, y, y);
      svg += fmt::format(
          "<text class=\"tick\" text-anchor=\"end\" x=\"{:.1f}\" y=\"{:.1f}\">{}</text>", kLeft - 6,
          y + 4, duration_label(t));
    }
    const auto ticks = x_.ticks(50);
    double last = -1e9;
    for (const double t : ticks) {
      const double x = x_(t);
      svg += fmt::format(
          "<line class=\"grid\" x1=\"{:.1f}\" x2=\"{:.1f}\" y1=\"{:.1f}\" y2=\"{:.1f}\"/>", x, x,
          kTop, kHeight - kBottom);
      if (x - last < 46 || x > kRight - 12) continue;
      last = x;
      svg += fmt::format(
          "<text class=\"tick\" text-anchor=\"middle\" x=\"{:.1f}\" y=\"{:.1f}\">{}</text>", x,
          kHeight - kBottom + 18, duration_label(t));
    }
    svg += fmt::format(
        "<text class=\"axis\" text-anchor=\"middle\" x=\"{:.1f}\" y=\"{:.1f}\">floor</text>",
        (kLeft + kRight) / 2, kHeight - 8);
  }

  // time = factor * floor: straight and rising in log-log, clipped to the panel.
  void diagonal(std::string& svg, double factor, const char* css, const std::string& name) const {
    const double from = std::max(x_.low(), y_.low() / factor);
    const double to = std::min(x_.high(), y_.high() / factor);
    if (!(to > from)) return;
    svg +=
        fmt::format("<line class=\"{}\" x1=\"{:.1f}\" y1=\"{:.1f}\" x2=\"{:.1f}\" y2=\"{:.1f}\"/>",
                    css, x_(from), y_(from * factor), x_(to), y_(to * factor));
    // The name sits just above the line at its lower end and runs along it.
    const double slope = std::atan2(y_(to * factor) - y_(from * factor), x_(to) - x_(from));
    const double at = from * std::pow(to / from, 0.015);
    svg += fmt::format(
        "<text class=\"dname\" transform=\"translate({:.1f} {:.1f}) rotate({:.1f})\" "
        "dy=\"-5\">{}</text>",
        x_(at), y_(at * factor), slope * 180 / 3.14159265358979, text(name));
  }

  void points(std::string& svg, const Series& s, std::size_t max_points, std::size_t* thinned,
              std::vector<DirectLabel>& labels) const {
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
      svg += mark(x_(p.floor_ms), y_(p.time_ms), s.style, s.hollow, 3.6, p.label);
    }
    if (last)
      labels.push_back({y_(last->time_ms) + 4, s.name,
                        s.hollow ? "thollow" : fmt::format("t{}", colour_of(s.style))});
  }

 private:
  LogScale x_, y_;
};

}  // namespace

int colour_of(int style) { return style < 2 ? style : 2 + (style - 2) % 7; }

std::string legend_mark(int style, bool hollow) {
  return "<svg class=\"key\" width=\"12\" height=\"12\" viewBox=\"0 0 12 12\" "
         "aria-hidden=\"true\">" +
         mark(6, 6, style, hollow, 4, "") + "</svg>";
}

std::string chart(const std::vector<Panel>& panels, std::size_t max_points, std::size_t* thinned) {
  Domain floor, time;
  for (const Panel& panel : panels) {
    for (const Series& s : panel.series) {
      for (const Point& p : s.points) {
        floor.add(p.floor_ms);
        time.add(p.time_ms);
        time.add(p.floor_ms);  // the floor line is always in view
      }
    }
  }
  if (!(floor.high > 0)) return "";
  // Room on the left, where the names of the diagonals stand.
  floor.low /= std::pow(floor.high / floor.low, 0.1) * 1.3;
  floor.high *= 1.25;
  time.low = std::min(time.low / 1.25, floor.low);
  time.high *= 1.35;

  std::string drawings;
  for (const Panel& panel : panels) {
    drawings += fmt::format(
        "<svg class=\"chart\" viewBox=\"0 0 {} {}\" role=\"img\" "
        "aria-label=\"{}: time against floor, log axes\">",
        kWidth, kHeight, text(panel.title, 60));
    const PanelDrawing drawing(floor, time);
    drawing.axes(drawings, panel.title);
    drawing.diagonal(drawings, 10, "times", "10×");
    drawing.diagonal(drawings, 2, "times", "2×");
    drawing.diagonal(drawings, 1, "floor", "floor");
    std::vector<DirectLabel> labels;
    // Our own points last, on top.
    for (std::size_t k = panel.series.size(); k-- > 0;) {
      drawing.points(drawings, panel.series[k], max_points, thinned, labels);
    }
    spread(labels, kHeight - kBottom);
    for (const DirectLabel& l : labels) {
      drawings += fmt::format("<text class=\"label {}\" x=\"{:.1f}\" y=\"{:.1f}\">{}</text>", l.css,
                              kRight + 4, l.y, text(l.name, 17));
    }
    drawings += "</svg>";
  }
  return drawings;
}

}  // namespace annulus::bench::report
