// Record: one measured row, and the only thing that benchmarks, peers and the report exchange. A
// results file holds one JSON object a line (JSONL). bench/README.md documents the fields.
//
// The reader trusts nothing: sizes, nesting, types, ranges and keys are checked, and whatever is
// wrong throws files::FileError with the file and the line. It never skips a bad row silently.
#pragma once

#include <array>
#include <cstdint>
#include <map>
#include <optional>
#include <string>
#include <string_view>
#include <utility>
#include <variant>
#include <vector>

#include "annulus/core/precision.h"

namespace annulus::bench {

inline constexpr int kSchemaVersion = 1;

struct TimeMs {
  double median = 0, min = 0, p95 = 0;
  std::int64_t n = 0;  // timed repetitions
};

struct ErrorFigure {
  std::string metric;
  double value = 0;  // NaN and infinity are legal here: they are what a broken kernel gives
};

// What the table that started the suite says about this row.
struct OriginalFigure {
  double value = 0;
  std::string unit;  // "ms" or "MiB"
  std::string hardware;
  std::vector<std::pair<std::string, double>> columns;  // every column of the original's table
};

// What ceilings are measured of.
inline constexpr std::array kAllProducts = {Precision::kFp32, Precision::kTf32, Precision::kBf16};

struct Ceiling {
  double copy_gbs = 0;            // bytes read plus bytes written, a second
  double gemm_gflops = 0;         // 0: not measured
  std::optional<Precision> gemm;  // the multiply units a row can use at best; not in old files
  double step_us = 0;  // one step of a recurrence at least, however little it computes; 0: no steps
};

using ParamValue = std::variant<bool, std::int64_t, double, std::string, std::vector<std::int64_t>>;
using Params = std::map<std::string, ParamValue>;

enum class Status { kOk, kSkipped, kFailed };
enum class FloorKind { kBandwidth, kCompute, kLatency };
enum class Measures { kTime, kMemory };  // which of the two the row compares with the original

struct Record {
  std::string suite, row, op, impl, device, dtype;
  Params params;
  Measures measures = Measures::kTime;
  std::optional<TimeMs> time_ms;
  std::optional<ErrorFigure> error;
  std::optional<double> zero_rows;  // share of output rows that are all zeros
  std::optional<double> flops_needed, flops_executed, bytes, workspace_bytes, peak_bytes;
  std::optional<double> floor_ms;
  std::optional<FloorKind> floor_kind;
  std::optional<Ceiling> ceiling;
  std::optional<OriginalFigure> original;
  std::string hardware, commit, date;
  Status status = Status::kOk;
  std::string reason;  // why it was skipped or failed
};

// What `move`, the same bytes moved beside the row, says of a floor set by bandwidth: the copy of the
// start of the run reads as much as it writes and is larger than any cache, so a row that reads more
// or is smaller can beat it. The faster of the two rates is the ceiling; other floors stay.
double floor_beside(const Record& row, const Record& move);

std::string name_of(Status s);
std::string name_of(FloorKind k);
std::string name_of(Measures m);
std::string to_string(const ParamValue& v);

// One line, without its newline.
std::string to_json_line(const Record& r);
Record parse_record(std::string_view line);  // throws files::JsonError

struct RecordFile {
  std::vector<Record> records;
  std::vector<std::string> warnings;  // a last line cut short, which a killed run leaves behind
};
RecordFile read_records(const std::string& path);

}  // namespace annulus::bench
