#include "cli/options.h"

#include <fmt/format.h>

#include <charconv>
#include <regex>

#include "annulus/core/errors.h"
#include "annulus/cuda/memory.h"
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

CLI::Option* add_choice(CLI::App& command, const std::string& name, std::string& value,
                        const std::vector<std::string>& words, const std::string& about) {
  CLI::Option* option = command.add_option(name, value, about)->check(CLI::IsMember(words));
  return value.empty() ? option : option->capture_default_str();
}

void add_device(CLI::App& command, std::string& value) {
  value = "auto";
  add_choice(command, "--device", value, {"auto", "cpu", "cuda"},
             "cpu, cuda, or auto: cuda where there is one");
}

std::string why_no_cuda() {
  return cuda::built() ? cuda::why_unavailable() : "this build has no CUDA";
}

Device pick_device(const std::string& name) {
  const std::string why_not = why_no_cuda();
  if (name == "cuda" && !why_not.empty()) {
    throw NotSupported("device cuda is not available: " + why_not);
  }
  return name == "cuda" || (name == "auto" && why_not.empty()) ? cuda_device() : kCPU;
}

std::function<bool(const std::string&)> name_filter(const std::string& expression) {
  if (expression.empty()) return {};
  try {
    const std::regex filter(expression, std::regex::ECMAScript | std::regex::optimize);
    return [filter](const std::string& name) { return std::regex_search(name, filter); };
  } catch (const std::regex_error& e) {
    throw InvalidArgument(
        fmt::format("--filter must be a regular expression but \"{}\" is not one: {}",
                    files::printable(expression), e.what()));
  }
}

}  // namespace annulus::cli
