// The records of all files, sorted into what the page shows: suite, place (device and hardware),
// problem, implementation.
#pragma once

#include <map>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "bench/record.h"

namespace annulus::bench::report {

inline constexpr const char* kOursInTorch = "annulus-torch";
// "annulus-tf32": annulus with an option set, beside what it does by itself.
bool is_our_option(const std::string& impl);

// One problem and everyone who solved it.
struct ProblemGroup {
  std::string row, dtype;
  std::vector<const Record*> records;  // annulus first, its options, then move, then peers by name

  // The timed record of that implementation, or nullptr. Only one with status ok: a time whose
  // result is wrong is no time to headline, to draw or to compare with.
  const Record* find(const std::string& impl) const;
};

struct Place {
  std::string suite, device, hardware;
  std::vector<ProblemGroup> time, memory;  // in order of appearance
  std::vector<std::string> impls;          // in the same order; sixteen at most
  std::vector<Ceiling> ceilings;           // one for each kind of product
  bool one_run = true;                     // every row that names a ceiling is of the same run
  std::vector<std::string> commits;
  std::string first_date, last_date;
  std::size_t ok = 0, skipped = 0, failed = 0;
};

struct Model {
  std::vector<Place> places;  // by suite, then in order of appearance
  std::size_t records = 0;
  std::size_t superseded = 0;  // left out, because the same row was measured again
};

// A record measured twice (same problem, same implementation, same place) counts once: the one with
// the newer date, and the later one where dates do not say. The model points into `records`.
Model build_model(const std::vector<Record>& records);

// time / floor of a record that has both and is right. The floor is the record's own, lowered to what
// the move of the same problem reached where that was faster (floor_beside).
std::optional<double> floor_of(const ProblemGroup& g, const Record& r);
// What sets it: "copy" or "move" (bandwidth), "products", "steps" or "launch"; nothing where the file
// does not say.
std::string floor_source(const ProblemGroup& g, const Record& r);
std::optional<double> over_floor(const ProblemGroup& g, const Record& r);

// A right time below its floor: the ceiling that gave the floor was none for this row.
struct BelowFloor {
  const Record* record;
  double ratio;
  std::string reason;
};
std::vector<BelowFloor> below_floor(const Place& place);

// How one implementation compares with another over the problems both solved.
struct Comparison {
  std::size_t rows = 0;
  double low = 0, geometric_mean = 0, high = 0;  // of other / ours
  bool same_run = true;                          // both were timed in turns, in every row
};
Comparison compare(const Place& place, const std::string& ours, const std::string& other);

struct FloorSpread {
  std::size_t rows = 0, below = 0;  // of them below their floor
  double best = 0, median = 0, worst = 0;
  std::string best_row;
};
FloorSpread floor_spread(const Place& place, const std::string& impl);

// What an implementation computes, in a sentence: suite -> implementation -> words. Whoever makes the
// rows says it (bench/suite.h).
using Words = std::map<std::string, std::map<std::string, std::string>>;

// One self-contained HTML page of at most draw::kMaxPageBytes; `more` is HTML that stands behind the results.
std::string render(const Model& model, const Words& words = {}, const std::string& more = {});

}  // namespace annulus::bench::report
