// What a page is made of: the chart, time against floor on two log axes as inline SVG (the diagonal is the
// floor, so the height above it is what an implementation wastes; native <title> tooltips, no script), and the
// tables.
#pragma once

#include <cstddef>
#include <string>
#include <vector>

#include "bench/report/model.h"

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

// --- the tables of a place -----------------------------------------------------------------------------

// Colour and shape of an implementation within its place.
int style_of(const Place& place, const std::string& impl);

// The note under a table that leaves rows out; nothing where it leaves out none.
std::string left_out(std::size_t rows);
// Each takes from `budget` the rows it prints, and says what it left out.
std::string time_table(const Place& place, std::size_t* budget);
std::string memory_table(const Place& place, std::size_t* budget);
// Ours beside every column of the seed's table; empty when the records carry none.
std::string seed_table(const Place& place, std::size_t* budget);

}  // namespace annulus::bench::report
