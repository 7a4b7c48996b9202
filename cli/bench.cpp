// annulus bench: runs suites, prints a table, saves records row by row.
#include <fmt/format.h>

#include <algorithm>
#include <iostream>
#include <memory>

#include "annulus/core/errors.h"
#include "annulus/core/info.h"
#include "bench/output.h"
#include "bench/record.h"
#include "bench/runner.h"
#include "bench/suite.h"
#include "cli/commands.h"
#include "cli/options.h"
#include "cli/terminal.h"
#include "files/file.h"
#include "files/words.h"

namespace annulus::cli {
namespace {

struct BenchOptions {
  std::vector<std::string> suites;
  std::string device, size = "quick", filter, format = "md", save;
  int repetitions = 0;
  bool list = false;
};

struct Job {
  const bench::Suite* suite;
  bench::Row row;
};

// All where none is named; one that is named twice runs once.
std::vector<const bench::Suite*> pick_suites(const std::vector<std::string>& names) {
  std::vector<std::string> known;
  for (const bench::Suite& s : bench::all_suites()) known.push_back(s.name);
  std::vector<const bench::Suite*> picked;
  for (const std::string& name : names.empty() ? known : names) {
    const auto it = std::find(known.begin(), known.end(), name);
    if (it == known.end()) {
      const std::string near = files::meant(name, known);
      throw InvalidArgument(
          fmt::format("unknown suite \"{}\"{}{} {}", files::printable(name), near,
                      near.empty() ? "; suites are:" : " Suites are:", fmt::join(known, " ")));
    }
    const bench::Suite* suite = &bench::all_suites()[static_cast<std::size_t>(it - known.begin())];
    if (std::find(picked.begin(), picked.end(), suite) == picked.end()) picked.push_back(suite);
  }
  return picked;
}

// "ring-rnn/fwd-b256-n1024-k16-t20/f32", and with an option set "/annulus-tf32" after it.
std::string full_name(const bench::Suite& suite, const bench::Row& row) {
  return fmt::format("{}/{}/{}{}", suite.name, row.name, name_of(row.dtype),
                     row.impl == "annulus" ? "" : "/" + row.impl);
}

std::vector<Job> pick_rows(const BenchOptions& o, Device device) {
  const bench::SuiteRequest request{.size = o.size == "full"      ? bench::Size::kFull
                                            : o.size == "machine" ? bench::Size::kMachine
                                                                  : bench::Size::kQuick,
                                    .device = device.type,
                                    .memory_bytes = bench::available_bytes(device) / 10 * 9};
  const auto wanted = name_filter(o.filter);
  std::vector<Job> jobs;
  for (const bench::Suite* suite : pick_suites(o.suites)) {
    for (bench::Row& row : suite->rows(request)) {
      if (!wanted || wanted(full_name(*suite, row))) {
        jobs.push_back({suite, std::move(row)});
      }
    }
  }
  if (jobs.empty())
    throw InvalidArgument("--filter \"" + files::printable(o.filter) + "\" leaves no row");
  return jobs;
}

struct Outcome {
  std::size_t failed = 0, skipped = 0;  // rows
  std::size_t jobs_done = 0;            // fewer than there are when a signal asked for a stop
};

// Prints the rows as they come and hands each to the writer, where there is one.
Outcome measure(const BenchOptions& o, Device device, const std::vector<Job>& jobs,
                files::LineWriter* writer) {
  Progress progress(jobs.size());
  progress.start("measuring the ceilings of this machine");
  bench::Runner runner({.device = device, .repetitions = o.repetitions, .hardware = {}});

  const BuildInfo build = build_info();
  const auto output = bench::make_output(o.format, std::cout);
  progress.clear();
  output->begin({runner.hardware(), to_string(device), build.version, build.commit, build.compiler,
                 bench::iso_date(), runner.ceilings()});
  Outcome outcome;
  for (const Job& job : jobs) {
    if (stop_asked()) break;
    progress.start(job.row.name);
    const auto records = runner.measure(job.suite->name, job.row);
    for (const bench::Record& r : records) {
      if (writer) writer->write(to_json_line(r));
      outcome.failed += r.status == bench::Status::kFailed;
      outcome.skipped += r.status == bench::Status::kSkipped;
    }
    progress.clear();
    output->rows(records);
    progress.advance();
    ++outcome.jobs_done;
  }
  progress.clear();
  output->end();
  return outcome;
}

int run_bench(const BenchOptions& o) {
  const Device device = pick_device(o.device);
  const std::vector<Job> jobs = pick_rows(o, device);
  if (o.list) {
    for (const Job& job : jobs) std::cout << full_name(*job.suite, job.row) << "\n";
    return kDone;
  }
  std::unique_ptr<files::LineWriter> writer;
  if (!o.save.empty()) writer = std::make_unique<files::LineWriter>(o.save);
  const auto say_saved_to = [&](const std::string& path) {
    if (!writer || writer->lines() == 0) return;
    std::cerr << fmt::format("annulus: {} saved to {}\n", files::counted(writer->lines(), "row"),
                             path);
  };
  try {
    note_stop_signals();
    const Outcome outcome = measure(o, device, jobs, writer.get());
    if (outcome.skipped > 0) {
      std::cerr << fmt::format("annulus: {} skipped, reasons in the table\n",
                               files::counted(outcome.skipped, "row"));
    }
    if (outcome.failed > 0) {
      std::cerr << fmt::format("annulus: {} FAILED\n", files::counted(outcome.failed, "row"));
    }
    if (outcome.jobs_done < jobs.size()) {
      std::cerr << fmt::format("annulus: stopped after {} of {} problems\n", outcome.jobs_done,
                               jobs.size());
      if (writer) say_saved_to(writer->partial_path());
      return stop_code();
    }
    if (writer) writer->finish();
    say_saved_to(o.save);
    return outcome.failed > 0 ? kFailed : kDone;
  } catch (...) {
    if (writer) say_saved_to(writer->partial_path());
    throw;
  }
}

}  // namespace

void add_bench_command(CLI::App& app, int& exit_code) {
  auto o = std::make_shared<BenchOptions>();
  CLI::App* command = app.add_subcommand(
      "bench", "time the operators against floors measured here and the original's tables");
  std::string suites;
  for (const bench::Suite& s : bench::all_suites()) suites += "\n  " + s.name + "  " + s.summary;
  command->footer(
      "Suites:" + suites +
      "\n\nCtrl-C stops after the row under way, prints what there is and ends with code\n"
      "130 (143 after a polite kill); rows to be saved are then in F.partial.\n" +
      kExitCodes);
  command->add_option("SUITE", o->suites, "which tables; all when none is named");
  add_device(*command, o->device);
  add_choice(*command, "--size", o->size, {"quick", "machine", "full"},
             "quick: about a minute on a laptop; machine: the largest of the original's rows that "
             "fit; full: all of the original's rows");
  command->add_option("--reps", o->repetitions, "repetitions a row; 0: as many as fit in a second")
      ->check(CLI::Range(0, 1'000'000))
      ->capture_default_str();
  command->add_option(
      "--filter", o->filter,
      "rows whose suite/row/dtype[/annulus-option] matches this regular expression (grep -E)");
  add_choice(*command, "--format", o->format, {"md", "csv", "json"}, "md, csv or json, on stdout");
  command
      ->add_option("--save", o->save,
                   "write the rows here (JSONL); until the run is done they are in F.partial, each "
                   "as soon as it is measured, and an older F stays as it is")
      ->type_name("F");
  command->add_flag("--list", o->list, "print the rows that would run, and stop");
  command->callback([o, &exit_code] { exit_code = run_bench(*o); });
}

}  // namespace annulus::cli
