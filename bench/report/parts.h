// What a page is made of: charts of time over size (inline SVG, native <title> tooltips, no script), and
// the tables.
#pragma once

#include <cstddef>
#include <string>
#include <vector>

#include "bench/report/model.h"

namespace annulus::bench::report {

struct Series {
  std::string name;
  int style = 0;              // colour and shape: 0 annulus, 1 move, 2 from torch, then the others
  bool hollow = false;        // figures of another machine
  std::vector<double> times;  // ms, one a problem; 0: not solved
};

// Problems that differ in their size, side by side from the smallest to the largest: one direction, one
// dtype, no variants. Where rows are named alike but for one number they are those of the longest such
// family ("fwd-1d-…-l0-b12"), else all there are, thinned to twelve.
struct Panel {
  std::string direction, dtype;
  std::string pattern;              // what the rows' names share
  std::vector<std::string> labels;  // what they do not, one a problem
  std::vector<Series> series;       // not empty; the first is drawn on top
  std::vector<double> floor;        // ms, one a problem; 0: not known
};
std::vector<Panel> panels_of(const Place& place, std::size_t most);
// The one that says most of a place, with ours, ours from torch and the four fastest peers.
Panel story_of(const std::vector<Panel>& panels);

// The class of its colour, one of nine. Ours, move and ours from torch have their own; the others repeat
// theirs after six, then with another shape, so that twelve differ.
std::string css_of(int style, bool hollow = false);

// Empty where there is nothing to draw.
std::string chart(const Panel& panel, const std::string& title);

// The mark of a style, for the legend: a small inline SVG.
std::string legend_mark(int style, bool hollow);

// --- the tables of a place -----------------------------------------------------------------------------

// Colour and shape of an implementation within its place.
int style_of(const Place& place, const std::string& impl);
// "annulus-torch" is what a user of PyTorch gets, and called so.
std::string label_of(const std::string& impl);

// The fastest that is not ours and no yardstick, of those timed right.
const Record* fastest_peer(const ProblemGroup& g);

// The note under a table that leaves rows out; nothing where it leaves out none.
std::string left_out(std::size_t rows);
// Who was timed here, what each computes, and how ours compares.
std::string implementation_table(const Place& place, const Words& words);
// Each takes from `budget` the rows it prints, and says what it left out.
std::string problem_table(const Place& place, std::size_t* budget);  // a line a problem
std::string time_table(const Place& place, std::size_t* budget);     // a line an implementation
std::string memory_table(const Place& place, std::size_t* budget);
// Ours beside every column of the original's table; empty when the records carry none.
std::string original_table(const Place& place, std::size_t* budget);

}  // namespace annulus::bench::report
