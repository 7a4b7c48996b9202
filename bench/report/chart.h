// Time against floor on two log axes, as inline SVG: the diagonal is the floor, so the height above
// it is what an implementation wastes. Native <title> tooltips, no script.
#pragma once

#include <string>
#include <vector>

namespace annulus::bench::report {

struct Point {
  double floor_ms = 0, time_ms = 0;
  std::string label;
};

struct Series {
  std::string name;
  int style = 0;        // colour and shape: 0 annulus, 1 move, then the others
  bool hollow = false;  // figures of another machine
  std::vector<Point> points;
};

// The class of its colour, one of nine. The others repeat theirs after seven, then with another shape,
// so that twenty-eight differ.
std::string css_of(int style, bool hollow = false);

struct Panel {
  std::string title;
  std::vector<Series> series;
};

// A drawing for each panel, all with the same axes: the page sets them side by side where it is wide
// and below each other where it is narrow. At most `max_points` points a series are drawn; `thinned`
// counts the rest.
std::string chart(const std::vector<Panel>& panels, std::size_t max_points, std::size_t* thinned);

// The mark of a style, for the legend: a small inline SVG.
std::string legend_mark(int style, bool hollow);

}  // namespace annulus::bench::report
