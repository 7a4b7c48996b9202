// The run as one self-contained HTML page (draw/html.h): figures as inline SVG, light and dark, at most
// draw::kMaxPageBytes.
#pragma once

#include <string>

#include "train/results.h"

namespace annulus::train {

std::string render_page(const Results& results);

}  // namespace annulus::train
