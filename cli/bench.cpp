// annulus bench: runs suites, prints a table, saves records row by row.
#include <fmt/format.h>
#if ANNULUS_HAVE_MPI
#include <mpi.h>

#include "annulus/dist/mpi.h"
#endif

#include <algorithm>
#include <cstdio>
#include <exception>
#include <iostream>
#include <memory>

#include "annulus/core/errors.h"
#include "annulus/core/info.h"
#include "annulus/dist/communicator.h"
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
  std::string device, size = "quick", filter, format = "md", save, transport = "local";
  double deadline_s = CommunicatorOptions{}.deadline_s;
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

// Rows over the group's ranks where there is one, and the same ones on each.
std::vector<Job> pick_rows(const BenchOptions& o, Device device, Communicator* group) {
  double minus_free = -static_cast<double>(bench::available_bytes(device));
  bench::largest_of_ranks(group, {&minus_free, 1});
  const bench::SuiteRequest request{.size = o.size == "full"      ? bench::Size::kFull
                                            : o.size == "machine" ? bench::Size::kMachine
                                                                  : bench::Size::kQuick,
                                    .device = device.type,
                                    .memory_bytes = static_cast<std::size_t>(-0.9 * minus_free),
                                    .group = group};
  const auto wanted = name_filter(o.filter);
  std::vector<Job> jobs;
  std::string names;
  for (const bench::Suite* suite : pick_suites(o.suites)) {
    for (bench::Row& row : suite->rows(request)) {
      if (group && !row.params.contains("transport")) continue;
      const std::string name = full_name(*suite, row);
      if (wanted && !wanted(name)) continue;
      names += name + "\n";
      jobs.push_back({suite, std::move(row)});
    }
  }
  if (jobs.empty() && group && !wanted) {
    throw InvalidArgument(
        fmt::format("no row of these suites runs over {}, which is what mpirun has started",
                    files::counted(static_cast<std::size_t>(group->size()), "rank")));
  }
  if (jobs.empty())
    throw InvalidArgument("--filter \"" + files::printable(o.filter) + "\" leaves no row");
  if (group) group->agree("bench", names);
  return jobs;
}

struct Outcome {
  std::size_t failed = 0, skipped = 0;  // rows
  std::size_t jobs_done = 0;            // fewer than there are when a signal asked for a stop
};

// Prints the rows as they come and hands each to the writer, where there is one.
Outcome measure(const BenchOptions& o, Device device, const std::vector<Job>& jobs,
                files::LineWriter* writer, Communicator* group) {
  Progress progress(jobs.size());
  progress.start("measuring the ceilings of this machine");
  bench::Runner runner(
      {.device = device, .repetitions = o.repetitions, .hardware = {}, .group = group});
  if (group) group->set_deadline_s(o.deadline_s);  // now that the ceilings are there

  const BuildInfo build = build_info();
  const auto output = bench::make_output(o.format, std::cout);
  progress.clear();
  output->begin({runner.hardware(), to_string(device), build.version, build.commit, build.compiler,
                 bench::iso_date(), runner.ceilings()});
  Outcome outcome;
  for (const Job& job : jobs) {
    double stop = stop_asked();
    bench::largest_of_ranks(group, {&stop, 1});
    if (stop > 0) break;
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

int run_bench(const BenchOptions& o, Communicator* group) {
  const Device device = pick_device(o.device);
  const std::vector<Job> jobs = pick_rows(o, device, group);
  const bool first = !group || group->rank() == 0;
  const auto say = [&](const std::string& text) {
    if (first) std::cerr << "annulus: " << text << "\n";
  };
  if (o.list) {
    for (const Job& job : jobs) std::cout << full_name(*job.suite, job.row) << "\n";
    return kDone;
  }
  std::unique_ptr<files::LineWriter> writer;
  if (!o.save.empty() && first) writer = std::make_unique<files::LineWriter>(o.save);
  const auto say_saved_to = [&](const std::string& path) {
    if (!writer || writer->lines() == 0) return;
    say(files::counted(writer->lines(), "row") + " saved to " + path);
  };
  try {
    note_stop_signals();
    const Outcome outcome = measure(o, device, jobs, writer.get(), group);
    if (outcome.skipped > 0) {
      say(files::counted(outcome.skipped, "row") + " skipped, reasons in the table");
    }
    if (outcome.failed > 0) say(files::counted(outcome.failed, "row") + " FAILED");
    if (outcome.jobs_done < jobs.size()) {
      say(fmt::format("stopped after {} of {} problems", outcome.jobs_done, jobs.size()));
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

// As one of the processes that mpirun started, of which only the first has a stdout. Where one throws, the others need not wait
// for it: it says so and ends with the exit code of what was thrown.
#if ANNULUS_HAVE_MPI
int run_over_processes(const BenchOptions& o) {
  MPI_Init(nullptr, nullptr);
  int code = kDone;
  try {
    const auto group = mpi_communicator();
    try {
      if (group->rank() != 0 && !std::freopen("/dev/null", "w", stdout)) {
        throw NotSupported("/dev/null cannot be written");
      }
      code = run_bench(o, group.get());
    } catch (const std::exception& e) {
      group->abandon(e.what());
      throw;
    }
  } catch (...) {
    mpi_leave(explain_exception());  // MPI_Finalize would wait for a rank that is lost
  }
  MPI_Finalize();
  return code;
}
#else
int run_over_processes(const BenchOptions&) {
  throw NotSupported(
      "transport mpi is not available: this build has no MPI (install libopenmpi-dev and "
      "openmpi-bin, and configure again)");
}
#endif

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
  add_choice(
      *command, "--size", o->size, {"quick", "machine", "full"},
      "quick: about a minute a suite on a laptop; machine: the largest of the original's rows that "
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
  add_choice(*command, "--transport", o->transport, {"local", "mpi"},
             "local: ranks are threads of this process; mpi: those of the rows with as many ranks "
             "as mpirun -n has started processes, each a rank");
  command
      ->add_option("--deadline", o->deadline_s,
                   "seconds that a process waits in a row for another before all give up (mpi)")
      ->check(CLI::Range(0.1, 86'400.0))
      ->capture_default_str();
  command->add_flag("--list", o->list, "print the rows that would run, and stop");
  command->callback([o, &exit_code] {
    exit_code = o->transport == "mpi" ? run_over_processes(*o) : run_bench(*o, nullptr);
  });
}

}  // namespace annulus::cli
