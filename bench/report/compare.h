// Two result files of the same machine, before and after a change: what every row became.
#pragma once

#include <cstddef>
#include <string>
#include <vector>

#include "bench/report/model.h"

namespace annulus::bench::report {

enum class Verdict { kSame, kFaster, kSlower, kBroken, kMended };
std::string name_of(Verdict v);

// The same problem and implementation in both files.
struct Change {
  const Record *before = nullptr, *after = nullptr;
  // after / before: of the medians, or of the peak bytes where a row measures memory; 0 where one of
  // the two is not right.
  double ratio = 0;
  Verdict verdict = Verdict::kSame;
};

struct Difference {
  std::vector<Change> changes;  // broken, slower (worst first), faster (best first), the others
  std::vector<const Record*> only_before, only_after;  // in the order of their file
  std::string before_name, after_name;

  std::size_t count(Verdict v) const;
  // Of after / before over the rows that are right in both and have a time; 0 where there is none.
  double geometric_mean() const;
};

// A time has become slower when its median is 5 % longer and beyond the old 95th percentile, faster
// the other way around; memory when it differs by 1 %. What lies between says nothing. Rows of
// another machine are other rows. The result points into the models' records.
Difference difference_of(const Model& before, const Model& after);

// For a terminal: what changed first, then what is in one file only.
std::string to_text(const Difference& d);
// One self-contained page of at most draw::kMaxPageBytes.
std::string render(const Difference& d);

}  // namespace annulus::bench::report
