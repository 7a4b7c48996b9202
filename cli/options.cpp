#include "cli/options.h"

#include <fmt/format.h>
#include <regex.h>

#include <cctype>
#include <charconv>
#include <memory>

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
  const auto refuse = [&](const std::string& why) {
    throw InvalidArgument(
        fmt::format("--filter must be an extended regular expression (grep -E) but \"{}\" {}",
                    files::printable(expression), why));
  };
  // Unlike std::regex, the C library's matcher takes no stack and time linear in the name, but for
  // references back and counts. Classes such as \d it would read as letters.
  constexpr std::size_t kLongest = 1000;
  if (expression.size() > kLongest) refuse(fmt::format("is longer than {} characters", kLongest));
  if (expression.find('{') != std::string::npos) refuse("has a count in braces");
  for (std::size_t i = 0; i + 1 < expression.size(); ++i) {
    if (expression[i] != '\\') continue;
    if (std::isalnum(static_cast<unsigned char>(expression[++i]))) {
      refuse(fmt::format("has \\{}", expression[i]));
    }
  }
  const std::shared_ptr<regex_t> filter(new regex_t{}, [](regex_t* p) {
    regfree(p);
    delete p;
  });
  if (const int error = regcomp(filter.get(), expression.c_str(), REG_EXTENDED | REG_NOSUB)) {
    char text[200];
    regerror(error, filter.get(), text, sizeof text);
    refuse(std::string("is not one: ") + text);
  }
  return [filter](const std::string& name) {
    return regexec(filter.get(), name.c_str(), 0, nullptr, 0) == 0;
  };
}

}  // namespace annulus::cli
