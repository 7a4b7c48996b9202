// One self-contained HTML page: no script, no external address, at most a megabyte.
#pragma once

#include <string>
#include <vector>

#include "bench/record.h"

namespace annulus::bench::report {

inline constexpr std::size_t kMaxPageBytes = 1'000'000;

std::string render(const std::vector<Record>& records);

}  // namespace annulus::bench::report
