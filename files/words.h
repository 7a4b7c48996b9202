// Words in messages: what was probably meant, and what strangers wrote made safe to print.
#pragma once

#include <cstddef>
#include <string>
#include <string_view>
#include <vector>

namespace annulus::files {

// ", did you mean \"near\"?" of the candidate with the smallest edit distance; nothing when none is near.
std::string meant(std::string_view word, const std::vector<std::string>& candidates);

// Control characters as \x1b: none reaches a terminal, which would obey it. Other text stays.
std::string escaped(std::string_view text);

// For messages: what is outside ASCII is escaped as well, long text is cut.
std::string printable(std::string_view text, std::size_t max = 80);

// "1 row", "2 rows".
std::string counted(std::size_t n, const char* thing);

}  // namespace annulus::files
