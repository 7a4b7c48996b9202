// annulus report: result files in, one self-contained page out; with --compare, what two files differ in.
#include <fmt/format.h>

#include <algorithm>
#include <filesystem>
#include <iostream>
#include <memory>

#include "annulus/core/errors.h"
#include "bench/record.h"
#include "bench/report/compare.h"
#include "bench/report/model.h"
#include "bench/suite.h"
#include "cli/commands.h"
#include "cli/plan_page.h"
#include "files/file.h"
#include "files/words.h"

namespace annulus::cli {
namespace {

struct ReportOptions {
  std::vector<std::string> files;
  std::string out = "report.html";
  bool compare = false;
};

// Before anything is read: a page written over its own rows would lose them.
void check_output(const ReportOptions& o) {
  files::replaceable_file(o.out);
  for (const std::string& path : o.files) {
    std::error_code error;  // a file that is not there is not the same
    if (std::filesystem::equivalent(o.out, path, error)) {
      throw InvalidArgument(fmt::format("--out {} is one of the result files ({})", o.out, path));
    }
  }
}

std::vector<bench::Record> read(const std::string& path) {
  bench::RecordFile file = bench::read_records(path);
  for (const std::string& warning : file.warnings) std::cerr << "annulus: " << warning << "\n";
  return std::move(file.records);
}

bench::report::Model model_of(const std::vector<bench::Record>& records) {
  bench::report::Model model = bench::report::build_model(records);
  if (model.superseded > 0) {
    std::cerr << fmt::format(
        "annulus: {} {} of a row that was measured again; the newest of each row is shown\n",
        model.superseded, model.superseded == 1 ? "record is" : "records are");
  }
  return model;
}

int run_compare(const ReportOptions& o) {
  if (o.files.size() != 2) {
    throw InvalidArgument(fmt::format(
        "--compare takes two result files, the old and the new, but got {}", o.files.size()));
  }
  const std::vector<bench::Record> before = read(o.files[0]), after = read(o.files[1]);
  const bench::report::Model a = model_of(before), b = model_of(after);
  bench::report::Difference d = bench::report::difference_of(a, b);
  d.before_name = o.files[0];
  d.after_name = o.files[1];
  files::write_file(o.out, bench::report::render(d));
  std::cout << bench::report::to_text(d);
  std::cerr << "annulus: the same as a page: " << o.out << "\n";
  if (d.changes.empty()) {
    std::cerr << "annulus: nothing was compared: no row of one machine is in both files\n";
    return kFailed;
  }
  using bench::report::Verdict;
  return d.count(Verdict::kSlower) + d.count(Verdict::kBroken) > 0 ? kFailed : kDone;
}

int run_report(const ReportOptions& o) {
  check_output(o);
  if (o.compare) return run_compare(o);
  std::vector<bench::Record> records;
  for (const std::string& path : o.files) {
    std::vector<bench::Record> more = read(path);
    std::move(more.begin(), more.end(), std::back_inserter(records));
  }
  const bench::report::Model model = model_of(records);
  const bool ring = std::any_of(records.begin(), records.end(),
                                [](const bench::Record& r) { return r.op == "ring_attention"; });
  const std::string page =
      bench::report::render(model, bench::implementation_words(), ring ? plan_example() : "");
  files::write_file(o.out, page);
  std::cout << fmt::format("{}: {} from {}, {} KiB\n", o.out, files::counted(model.records, "row"),
                           files::counted(o.files.size(), "file"), (page.size() + 1023) / 1024);
  return kDone;
}

}  // namespace

void add_report_command(CLI::App& app, int& exit_code) {
  auto o = std::make_shared<ReportOptions>();
  CLI::App* command = app.add_subcommand(
      "report", "draw result files, peers' included, as one self-contained HTML page");
  command->add_option("FILE", o->files, "results as `annulus bench --save` writes them (JSONL)")
      ->required();
  command->add_option("--out", o->out, "where to write the page")->capture_default_str();
  command->add_flag("--compare", o->compare,
                    "two files, the old and the new: what became of each row, what got slower "
                    "first, as a table and as the page; ends with 1 where something did, or broke");
  command->callback([o, &exit_code] { exit_code = run_report(*o); });
}

}  // namespace annulus::cli
