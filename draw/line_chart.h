// Lines over two axes, with bands around them and dashed rules across.
#pragma once

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

}  // namespace annulus::draw
