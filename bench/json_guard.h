// JSON from strangers: size, nesting and duplicate keys are checked before and while parsing, so
// that no file can exhaust the stack or memory, or say one thing to us and another to the next
// reader.
#pragma once

#include <cstddef>
#include <nlohmann/json_fwd.hpp>
#include <stdexcept>
#include <string>
#include <string_view>

namespace annulus::bench {

class JsonError : public std::runtime_error {
 public:
  JsonError(const std::string& what, bool at_end) : std::runtime_error(what), at_end(at_end) {}
  bool at_end;  // the text stops too early, as a file cut short does
};

// Keys keep their order. Throws JsonError.
nlohmann::ordered_json parse_guarded(std::string_view text, int max_depth, std::size_t max_string);

}  // namespace annulus::bench
