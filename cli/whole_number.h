// A whole number on the command line. CLI11's own checks go through double, wrap around below zero
// and print ranges of hundreds of digits.
#pragma once

#include <CLI/CLI.hpp>
#include <cstdint>

namespace annulus::cli {

CLI::Validator whole_number(std::uint64_t low, std::uint64_t high);

}  // namespace annulus::cli
