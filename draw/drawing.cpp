#include "draw/drawing.h"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>

#include "draw/html.h"

namespace annulus::draw {
namespace {

constexpr double kNameStep = 14;                        // closer than this two names would touch
constexpr double kTitleLetter = 7.6, kLabelLetter = 6;  // widths, about
constexpr double kTwoLines = 44;                        // room above the axes for a second line

std::vector<std::pair<double, std::string>> ticks_of(const Axis& axis, const Scale& scale) {
  if (!axis.ticks.empty()) return axis.ticks;
  std::vector<std::pair<double, std::string>> ticks;
  for (const double v : scale.ticks(axis.gap)) ticks.emplace_back(v, axis.name(v));
  return ticks;
}

}  // namespace

Drawing::Drawing(const Frame& frame, const Axis& x, const Axis& y, const std::string& title,
                 bool grid, const std::string& about)
    : frame_(frame),
      right_(frame.width - frame.right),
      bottom_(frame.height - frame.bottom),
      x_(x.low, x.high, frame.left, right_, x.log),
      y_(y.low, y.high, bottom_, frame.top, y.log) {
  svg_ = fmt::format("<svg class=\"fig\" viewBox=\"0 0 {:g} {:g}\" role=\"img\" aria-label=\"{}\">",
                     frame.width, frame.height, draw::text(about.empty() ? title : about));
  text("ft", "start", frame.left, 17, title, 60);
  // Beside the title, or where both have no room on one line, below it.
  const double letters = kTitleLetter * static_cast<double>(title.size()) +
                         kLabelLetter * static_cast<double>(y.label.size());
  if (letters < right_ - frame.left || frame.top < kTwoLines) {
    text("fl", "end", right_, 17, y.label);
  } else {
    text("fl", "start", frame.left, 34, y.label);
  }
  text("fl", "middle", (frame.left + right_) / 2, bottom_ + 36, x.label);
  for (const auto& [v, label] : ticks_of(y, y_)) {
    if (grid) path("g", fmt::format("M{:.1f} {:.1f}H{:.1f}", frame.left, y_(v), right_));
    text("", "end", frame.left - 7, y_(v) + 4, label);
  }
  double last = -1e9;
  for (const auto& [v, label] : ticks_of(x, x_)) {
    const double at = x_(v);
    if (grid) path("g", fmt::format("M{:.1f} {:.1f}V{:.1f}", at, frame.top, bottom_));
    if (at - last < 44) continue;  // its label would touch the one before
    last = at;
    text("", "middle", at, bottom_ + 17, label);
  }
}

void Drawing::path(std::string_view css, std::string_view d, std::string_view more) {
  svg_ += fmt::format("<path class=\"{}\"{} d=\"{}\"/>", css, more, d);
}

void Drawing::text(std::string_view css, std::string_view anchor, double x, double y,
                   std::string_view text, std::size_t most_bytes) {
  if (text.empty()) return;
  svg_ += "<text";
  if (!css.empty()) svg_ += fmt::format(" class=\"{}\"", css);
  if (anchor != "start") svg_ += fmt::format(" text-anchor=\"{}\"", anchor);
  svg_ += fmt::format(" x=\"{:.1f}\" y=\"{:.1f}\">{}</text>", x, y, draw::text(text, most_bytes));
}

std::string Drawing::through(const Points& points) const {
  std::string d;
  bool pen = false;
  for (const auto& [px, py] : points) {
    const bool there = std::isfinite(px) && std::isfinite(py);
    if (there) d += fmt::format("{}{:.1f} {:.1f}", pen ? "L" : "M", x_(px), y_(y_.inside(py)));
    pen = there;
  }
  return d;
}

void Drawing::name_at_end(double y, const std::string& name, const std::string& css) {
  names_.push_back({y_(y_.inside(y)) + 4, name, css});
}

std::string Drawing::finish() {
  // Apart from top to bottom, and back up where they run out of room.
  std::sort(names_.begin(), names_.end(), [](auto& a, auto& b) { return a.y < b.y; });
  for (std::size_t i = 1; i < names_.size(); ++i) {
    names_[i].y = std::max(names_[i].y, names_[i - 1].y + kNameStep);
  }
  for (std::size_t i = names_.size(); i-- > 0;) {
    const double limit = i + 1 < names_.size() ? names_[i + 1].y - kNameStep : bottom_;
    names_[i].y = std::min(names_[i].y, limit);
  }
  // About seven units a letter.
  const auto most = static_cast<std::size_t>(std::max(frame_.right / 6.8, 4.0));
  for (const Name& n : names_) text("fn " + n.css, "start", right_ + 6, n.y, n.name, most);
  return svg_ + "</svg>";
}

}  // namespace annulus::draw
