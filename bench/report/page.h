// One self-contained HTML page: no script, no external address, at most a megabyte.
#pragma once

#include <cstddef>
#include <string>

#include "bench/report/model.h"

namespace annulus::bench::report {

inline constexpr std::size_t kMaxPageBytes = 1'000'000;

std::string render(const Model& model);

}  // namespace annulus::bench::report
