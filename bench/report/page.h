// One self-contained HTML page of at most draw::kMaxPageBytes.
#pragma once

#include <string>

#include "bench/report/model.h"

namespace annulus::bench::report {

std::string render(const Model& model);

}  // namespace annulus::bench::report
