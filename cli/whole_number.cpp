#include "cli/whole_number.h"

#include <fmt/format.h>

#include <charconv>

#include "files/words.h"

namespace annulus::cli {

CLI::Validator whole_number(std::uint64_t low, std::uint64_t high) {
  const auto check = [low, high](std::string& input) -> std::string {
    std::uint64_t value = 0;
    const char* const end = input.data() + input.size();
    const auto [stopped_at, error] = std::from_chars(input.data(), end, value);
    if (error != std::errc() || stopped_at != end || value < low || value > high) {
      return fmt::format("must be a whole number between {} and {} but is \"{}\"", low, high,
                         files::printable(input, 40));
    }
    input = std::to_string(value);  // CLI11 would read 010 as eight
    return "";
  };
  return CLI::Validator(check, "");
}

}  // namespace annulus::cli
