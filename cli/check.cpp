// `annulus check`: every operator against its definition in fp64, on this machine.
#include <fmt/format.h>
#include <unistd.h>

#include <algorithm>
#include <cmath>
#include <iostream>
#include <limits>
#include <memory>
#include <nlohmann/json.hpp>
#include <optional>
#include <span>
#include <thread>

#include "cli/commands.h"
#include "cli/options.h"
#include "cli/terminal.h"
#include "testing/memory/memory.h"
#include "testing/suite.h"

namespace annulus::cli {
namespace {

using testing::OperatorCases;
using testing::SuiteRow;

struct CheckArguments {
  std::vector<std::string> ops;
  std::string device;  // empty: cpu, or what the repro line says
  std::int64_t cases = 1000;
  std::uint64_t seed = 0;
  std::optional<std::string> repro;  // "" names no case, which is not the same as no --repro
  bool named_only = false;
  std::string filter;     // of named cases
  std::string sanitizer;  // whose cases run, as the operators list them
  std::string format = "md";
  int jobs = 0;
};

constexpr std::size_t kMostFailuresShown = 20;
constexpr std::uint64_t kMostCases = 1'000'000'000;

// What shows how far the cases of a kind are.
std::function<void(std::int64_t, std::int64_t)> bar_of(const std::string& op, const char* kind) {
  if (isatty(STDERR_FILENO) == 0) return {};
  return [op, kind](std::int64_t done, std::int64_t all) {
    if (done == all) {
      std::cerr << "\r\033[K";
    } else if (done % std::max<std::int64_t>(1, all / 200) == 0) {
      std::cerr << fmt::format("\r{} {} {} / {}\033[K", op, kind, done, all);
    }
  };
}

void print_md(const std::vector<SuiteRow>& rows, const std::string& device) {
  std::cout << "| op | kind | device | cases | failures | worst error / limit | mistrusted |\n"
               "|---|---|---|--:|--:|--:|--:|\n";
  for (const SuiteRow& r : rows) {
    std::cout << fmt::format("| {} | {} | {} | {} | {} | {:.3f} | {} |\n", r.op, r.kind, device,
                             r.cases, r.failures.size(), r.worst_ratio, r.mistrusted);
  }
  for (const SuiteRow& r : rows) {
    const std::size_t shown = std::min(r.failures.size(), kMostFailuresShown);
    for (const testing::Failure& f : std::span(r.failures).first(shown)) {
      std::cout << fmt::format("\nFAILED {}\n  {}: {}\n  {}\n", f.params, f.where, f.detail,
                               f.repro);
    }
    if (shown < r.failures.size())
      std::cout << fmt::format("... and {} more\n", r.failures.size() - shown);
    if (r.too_many_mistrusted()) {
      std::cout << fmt::format("\nFAILED {} {}: references that are nearly all zero: {}\n", r.op,
                               r.kind, r.outputs.excess());
    }
  }
}

void print_json(const std::vector<SuiteRow>& rows, const std::string& device) {
  using nlohmann::ordered_json;
  ordered_json out = ordered_json::array();
  for (const SuiteRow& r : rows) {
    ordered_json failures = ordered_json::array();
    for (const testing::Failure& f : r.failures) {
      failures.push_back(
          {{"detail", f.detail}, {"params", f.params}, {"repro", f.repro}, {"where", f.where}});
    }
    out.push_back({{"cases", r.cases},
                   {"device", device},
                   {"failures", failures},
                   {"kind", r.kind},
                   {"mistrusted", r.mistrusted},
                   {"op", r.op},
                   {"passed", r.passed()},
                   {"worst_ratio", r.worst_ratio}});
    if (!std::isfinite(r.worst_ratio)) out.back()["worst_ratio"] = "inf";  // JSON has none
  }
  std::cout << out.dump(2) << "\n";
}

std::vector<SuiteRow> run_all(const CheckArguments& a, Device device) {
  std::vector<const OperatorCases*> ops;
  for (const std::string& name : a.ops) {  // one that is named twice runs once
    const OperatorCases* op = &testing::find_cases(name);
    if (std::find(ops.begin(), ops.end(), op) == ops.end()) ops.push_back(op);
  }
  for (const OperatorCases& op : testing::all_cases()) {
    if (a.ops.empty()) ops.push_back(&op);
  }
  if (!a.sanitizer.empty()) testing::allocate_exactly();
  testing::SuiteOptions options{.device = device, .jobs = a.jobs};
  options.stop = stop_asked;
  options.wants = name_filter(a.filter);
  // One stream and one device: more host threads would only take turns.
  if (device.type == DeviceType::kCUDA) options.jobs = 1;
  if (options.jobs <= 0) {
    options.jobs = std::max(1, static_cast<int>(std::thread::hardware_concurrency()));
  }
  std::vector<SuiteRow> rows;
  for (const OperatorCases* op : ops) {
    if (stop_asked()) break;
    if (!a.sanitizer.empty()) {
      const bool race = a.sanitizer == "racecheck" && !op->raced.empty();
      options.wants = name_filter(race ? op->raced : op->sanitized);
    }
    options.progress = bar_of(op->op, "named");
    rows.push_back(testing::run_named(*op, options));
    if (options.wants || stop_asked()) continue;
    options.progress = {};
    rows.push_back(testing::run_bad_calls(*op, options));
    if (a.named_only || a.cases == 0 || stop_asked()) continue;
    options.progress = bar_of(op->op, "fuzz");
    rows.push_back(testing::run_fuzz(*op, a.seed, a.cases, options));
  }
  if (options.wants && !stop_asked() &&
      std::all_of(rows.begin(), rows.end(), [](const SuiteRow& row) { return row.cases == 0; })) {
    throw std::invalid_argument("--filter: no named case matches '" + a.filter + "'");
  }
  return rows;
}

testing::Repro repro_of(const CheckArguments& a) {
  if (!a.repro) return {};
  try {
    testing::Repro repro = testing::parse_repro(*a.repro);
    const std::string& op = repro.op->op;
    if (!a.ops.empty() && std::find(a.ops.begin(), a.ops.end(), op) == a.ops.end()) {
      throw std::invalid_argument("it names " + op + ", but the operator asked for is " +
                                  a.ops.front());
    }
    return repro;
  } catch (const std::invalid_argument& e) {
    throw std::invalid_argument(std::string("--repro: ") + e.what());
  }
}

int check(const CheckArguments& a) {
  testing::Repro repro = repro_of(a);
  const std::string device_name = !a.device.empty()                       ? a.device
                                  : repro.device.type == DeviceType::kCPU ? "cpu"
                                                                          : "cuda";
  const Device device = pick_device(device_name);
  note_stop_signals();
  std::vector<SuiteRow> rows;
  if (repro.op != nullptr) {
    repro.device = device;
    rows.push_back(testing::run_repro(repro));
  } else {
    rows = run_all(a, device);
  }
  (a.format == "json" ? print_json : print_md)(rows, device_name);
  if (stop_asked()) {
    std::int64_t cases = 0;
    for (const SuiteRow& r : rows) cases += r.cases;
    std::cerr << fmt::format("annulus: stopped; the {} cases so far are in the table\n", cases);
    return stop_code();
  }
  const bool passed =
      std::all_of(rows.begin(), rows.end(), [](const SuiteRow& r) { return r.passed(); });
  return passed ? kDone : kFailed;
}

}  // namespace

void add_check_command(CLI::App& app, int& exit_code) {
  auto a = std::make_shared<CheckArguments>();
  CLI::App* command =
      app.add_subcommand("check", "Check operators against their fp64 definition on this machine");
  command->add_option("op", a->ops, "Operators; all of them when none is named");
  add_choice(*command, "--device", a->device, {"cpu", "cuda"}, "cpu (the default) or cuda");
  command->add_option("--cases", a->cases, "Fuzzed cases per operator")
      ->check(whole_number(0, kMostCases))
      ->capture_default_str();
  command->add_option("--seed", a->seed, "First seed of the fuzzed cases")
      ->check(whole_number(0, std::numeric_limits<std::uint64_t>::max()))
      ->capture_default_str();
  command->add_option("--repro", a->repro,
                      "Run one case again, as a failure printed it: \"OP seed=N device=cpu\"");
  command->add_flag("--named-only", a->named_only, "Skip the fuzzed cases");
  command->add_option(
      "--filter", a->filter,
      "Only the named cases whose description matches this regular expression (grep -E)");
  add_choice(*command, "--sanitize-set", a->sanitizer, {"all", "racecheck"},
             "Only the named cases that each operator lists for a memory tool: all, or racecheck, "
             "which is many times slower")
      ->excludes("--filter");
  add_choice(*command, "--format", a->format, {"md", "json"}, "md or json");
  command->add_option("--jobs", a->jobs, "Host threads (default: all processors; 1 on CUDA)")
      ->check(whole_number(0, testing::kMostJobs));
  command->footer(std::string("Ctrl-C prints what was checked so far and ends with code 130.\n") +
                  kExitCodes);
  command->callback([a, &exit_code] { exit_code = check(*a); });
}

}  // namespace annulus::cli
