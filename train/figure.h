// Line charts and heat maps as inline SVG: drawn for a light and a dark page alike (colours are the
// page's variables), no script, small enough that a page holds a dozen.
#pragma once

#include <span>
#include <string>
#include <utility>
#include <vector>

namespace annulus::train {

struct Axis {
  double low = 0, high = 1;
  bool log = false;
  std::string label;
  std::vector<std::pair<double, std::string>> ticks;  // empty: chosen
};

struct Line {
  std::string name;                               // written at its right end; empty: not written
  int style = 0;                                  // colour s0 .. s8 of the page
  std::vector<std::pair<double, double>> points;  // a point that is not finite breaks the line
  std::vector<std::pair<double, double>> band;    // low and high beside every point, or empty
  double width = 1.8;
  bool soft = false;  // a thick pale line behind the others
};

// A dashed line across, with its name.
struct Rule {
  bool vertical = false;
  double at = 0;
  std::string name;
};

struct LineChart {
  std::string title;
  double width = 1120, height = 300;
  Axis x, y;
  std::vector<Line> lines;
  std::vector<Rule> rules;
  double left = 58, right = 96;  // room for ticks and for the names of lines
};
std::string draw(const LineChart& chart);

// values (rows, columns), row 0 at the top. Colour is how far a value is from zero: one hue for
// values above it and, where `diverging`, a second one for those below; the page shows through at
// zero.
struct HeatMap {
  std::string title;
  double width = 360, height = 360;
  std::size_t rows = 0, columns = 0;
  std::vector<double> values;
  bool diverging = false;
  double most = 0;  // the value of the full colour; 0: the largest there is
  std::string x_label, y_label;
  std::vector<std::pair<double, std::string>> x_ticks, y_ticks;  // in cells
  std::vector<std::pair<double, double>> trace;  // a line on top, in cells; breaks as in Line
  double left = 44, right = 8;
  bool scale = true;  // a bar of the colours beneath
};
std::string draw(const HeatMap& map);

// Means over blocks, so that at most `most` rows and columns are left. Every block is of the same
// size; the last may be cut.
HeatMap pooled(const HeatMap& map, std::size_t most_rows, std::size_t most_columns);

// Steps of 1, 2 or 5 times a power of ten, about `about` of them.
std::vector<double> linear_ticks(double low, double high, int about);

}  // namespace annulus::train
