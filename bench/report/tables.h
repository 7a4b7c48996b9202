// The tables of a place.
#pragma once

#include <cstddef>
#include <string>

#include "bench/report/model.h"

namespace annulus::bench::report {

// Colour and shape of an implementation within its place.
int style_of(const Place& place, const std::string& impl);

// Each takes from `budget` the rows it prints, and says what it left out.
std::string time_table(const Place& place, std::size_t* budget);
std::string memory_table(const Place& place, std::size_t* budget);
// Ours beside every column of the seed's table; empty when the records carry none.
std::string seed_table(const Place& place, std::size_t* budget);

}  // namespace annulus::bench::report
