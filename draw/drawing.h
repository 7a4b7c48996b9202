// A drawing with two axes as inline SVG: for a light and a dark page alike (colours are the page's
// variables), no script. What a chart puts between the axes is up to the chart.
#pragma once

#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "draw/scale.h"

namespace annulus::draw {

struct Axis {
  double low = 0, high = 1;
  bool log = false;
  std::string label = {};
  std::vector<std::pair<double, std::string>> ticks = {};  // empty: chosen, and named by `name`
  std::string (*name)(double) = number_label;
  double gap = 45;  // of chosen ones, at least
};

// The whole, and the room around the axes: ticks on the left, names on the right, title on top.
struct Frame {
  double width = 1120, height = 300;
  double left = 58, right = 96, top = 34, bottom = 46;
};

// A point that is not finite breaks a line.
using Points = std::vector<std::pair<double, double>>;

class Drawing {
 public:
  // `about`: what a reader who cannot see it is told; the title where empty.
  Drawing(const Frame& frame, const Axis& x, const Axis& y, const std::string& title,
          bool grid = true, const std::string& about = "");

  const Scale& x() const { return x_; }
  const Scale& y() const { return y_; }
  double right() const { return right_; }  // of the axes
  double bottom() const { return bottom_; }

  void add(std::string_view svg) { svg_ += svg; }
  void path(std::string_view css, std::string_view d, std::string_view more = "");
  // `anchor`: "start", "middle" or "end" is at x.
  void text(std::string_view css, std::string_view anchor, double x, double y,
            std::string_view text, std::size_t most_bytes = 160);
  std::string through(const Points& points) const;  // the d of a path, kept within the axes in y

  // The name of what ends at this height, written to the right of the axes in its colour. Names are
  // pushed apart where they would touch.
  void name_at_end(double y, const std::string& name, const std::string& css);
  std::string finish();

 private:
  struct Name {
    double y;
    std::string name, css;
  };

  Frame frame_;
  double right_, bottom_;
  Scale x_, y_;
  std::string svg_;
  std::vector<Name> names_;
};

}  // namespace annulus::draw
