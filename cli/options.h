// Values of options that several commands take.
#pragma once

#include <CLI/CLI.hpp>
#include <cstdint>
#include <functional>
#include <string>
#include <vector>

#include "annulus/core/device.h"

namespace annulus::cli {

// A whole number. CLI11's own checks go through double, wrap around below zero and print ranges of
// hundreds of digits.
CLI::Validator whole_number(std::uint64_t low, std::uint64_t high);

// An option that takes one of these words. Where `value` holds one, that is the default and --help
// says so.
CLI::Option* add_choice(CLI::App& command, const std::string& name, std::string& value,
                        const std::vector<std::string>& words, const std::string& about);

// --device auto, cpu or cuda.
void add_device(CLI::App& command, std::string& value);

std::string why_no_cuda();  // empty where there is one

// "cpu", "cuda", or "auto": cuda where there is one. Throws NotSupported, with the reason.
Device pick_device(const std::string& name);

// What --filter lets through: empty for an empty expression. Throws InvalidArgument where it is none.
std::function<bool(const std::string&)> name_filter(const std::string& expression);

}  // namespace annulus::cli
