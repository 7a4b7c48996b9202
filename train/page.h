// The run as one self-contained HTML page: figures as inline SVG, no script, no external address,
// light and dark, at most a megabyte.
#pragma once

#include <cstddef>
#include <string>

#include "train/results.h"

namespace annulus::train {

inline constexpr std::size_t kMostPageBytes = 1'000'000;

std::string render_page(const Results& results);

}  // namespace annulus::train
