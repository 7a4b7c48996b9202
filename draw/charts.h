// Charts between the axes of a Drawing: lines, with bands around them and dashed rules across; a matrix
// as colours, with a line on top where there is one.
#pragma once

#include <cstddef>
#include <string>
#include <vector>

#include "draw/drawing.h"

namespace annulus::draw {

struct Line {
  std::string name = {};  // written at its right end; empty: not written
  int style = 0;          // colour 0 .. 8 of the page
  Points points = {};
  Points band = {};  // low and high beside every point, or empty
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
  std::string title = {};
  Frame frame = {};
  Axis x = {}, y = {};
  std::vector<Line> lines = {};
  std::vector<Rule> rules = {};
};
std::string svg_of(const LineChart& chart);

// values (rows, columns), row 0 at the top. Colour is how far a value is from zero: one hue for
// values above it and, where `diverging`, a second one for those below; the page shows through at
// zero. A bar of the colours stands beneath.
struct HeatMap {
  std::string title = {};
  Frame frame = {.width = 360, .height = 360, .left = 44, .right = 8, .top = 28, .bottom = 66};
  std::size_t rows = 0, columns = 0;
  std::vector<double> values = {};
  bool diverging = false;
  double most = 0;  // the value of the full colour; 0: the largest there is
  std::string x_label = {}, y_label = {};
  std::vector<std::pair<double, std::string>> x_ticks = {}, y_ticks = {};  // in cells
  Points trace = {};  // a line on top, in cells
};
std::string svg_of(const HeatMap& map);

// Means over blocks, so that at most `most` rows and columns are left. Every block is of the same
// size; the last may be cut.
HeatMap pooled(const HeatMap& map, std::size_t most_rows, std::size_t most_columns);

}  // namespace annulus::draw
