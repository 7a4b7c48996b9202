// The subcommands of `annulus`. Each file adds its own; main.cpp only calls these.
#pragma once

#include <CLI/CLI.hpp>

namespace annulus::cli {

// Exit codes, the same for every command.
inline constexpr int kDone = 0;
inline constexpr int kFailed = 1;        // a check or a comparison failed
inline constexpr int kBadUsage = 2;      // bad usage or input
inline constexpr int kNotAvailable = 3;  // what was asked for is not available here (and why)

// At the end of every --help.
inline constexpr const char* kExitCodes =
    "Exit codes: 0 done, 1 a check or a comparison failed, 2 bad usage or input,\n"
    "3 what was asked for is not available here (and why).";

// Of the exception that is being handled: one line on stderr, and the exit code of its kind.
int explain_exception();

void add_info_command(CLI::App& app, int& exit_code);
void add_check_command(CLI::App& app, int& exit_code);
void add_bench_command(CLI::App& app, int& exit_code);
void add_report_command(CLI::App& app, int& exit_code);
void add_plan_command(CLI::App& app, int& exit_code);
void add_train_command(CLI::App& app, int& exit_code);

}  // namespace annulus::cli
