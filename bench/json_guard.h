// JSON from strangers: size, nesting and duplicate keys are checked before and while parsing, so
// that no file can exhaust the stack or memory, or say one thing to us and another to the next
// reader.
#pragma once

#include <cstddef>
#include <nlohmann/json.hpp>
#include <stdexcept>
#include <string>
#include <string_view>
#include <vector>

namespace annulus::bench {

class JsonError : public std::runtime_error {
 public:
  JsonError(const std::string& what, bool at_end) : std::runtime_error(what), at_end(at_end) {}
  bool at_end;  // the text stops too early, as a file cut short does
};

// Keys keep their order. Throws JsonError.
nlohmann::ordered_json parse_guarded(std::string_view text, int max_depth, std::size_t max_string);

// The candidate with the smallest edit distance; empty when none is near.
std::string nearest(std::string_view word, const std::vector<std::string>& candidates);

// For messages: control characters and anything outside ASCII become '?', long text is cut.
std::string printable(std::string_view text, std::size_t max = 80);

}  // namespace annulus::bench
