#include "bench/record.h"

#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <nlohmann/json.hpp>

#include "files/file.h"
#include "files/json.h"
#include "files/words.h"

namespace annulus::bench {
namespace {

using files::FileError;
using files::Json;
using files::JsonError;
using files::JsonObject;
using files::printable;

// What a file may hold. A record of ours is about 1 KiB, so these are generous.
constexpr std::size_t kMostFileBytes = std::size_t{64} << 20, kMostLineBytes = std::size_t{1} << 20;
constexpr std::size_t kMostRows = 100'000;

struct OptionalReal {
  const char* key;
  std::optional<double> Record::*value;
  double most = 1e30;
};
constexpr OptionalReal kOptionalReals[] = {
    {"zero_rows", &Record::zero_rows, 1},          {"flops_needed", &Record::flops_needed},
    {"flops_executed", &Record::flops_executed},   {"bytes", &Record::bytes},
    {"workspace_bytes", &Record::workspace_bytes}, {"peak_bytes", &Record::peak_bytes},
    {"floor_ms", &Record::floor_ms, 1e12}};
struct Word {
  const char* key;
  std::string Record::*value;
};
constexpr Word kWords[] = {{"suite", &Record::suite},   {"row", &Record::row},
                           {"op", &Record::op},         {"impl", &Record::impl},
                           {"device", &Record::device}, {"dtype", &Record::dtype}};

// --- writing ------------------------------------------------------------------------------------

// JSON has no NaN and no infinity; as strings they survive every parser.
Json number(double v) {
  if (std::isnan(v)) return "NaN";
  if (std::isinf(v)) return v > 0 ? "Infinity" : "-Infinity";
  // Byte and flop counts are whole numbers and read better as such.
  if (v == std::floor(v) && std::fabs(v) < 0x1p53) return static_cast<std::int64_t>(v);
  return v;
}

Json param(const ParamValue& value) {
  return std::visit([](const auto& v) { return Json(v); }, value);
}

// --- reading -------------------------------------------------------------------------------------

constexpr std::array kStatusNames = {"ok", "skipped", "failed"};
constexpr std::array kFloorKindNames = {"bandwidth", "compute", "latency"};
constexpr std::array kMeasuresNames = {"time", "memory"};

// The value of an enum whose names stand in its order.
template <class E, std::size_t N>
E one_of(const JsonObject& o, const char* key, const std::array<const char*, N>& names) {
  return static_cast<E>(o.one_of(key, {names.begin(), names.end()}));
}

ParamValue read_param(const std::string& key, const Json& j) {
  if (j.is_boolean()) return j.get<bool>();
  if (j.is_number_integer()) {
    if (j.is_number_unsigned() && j.get<std::uint64_t>() > std::uint64_t{INT64_MAX}) {
      throw JsonError(fmt::format("\"params.{}\" does not fit in 63 bits", printable(key)));
    }
    return j.get<std::int64_t>();
  }
  if (j.is_number()) return j.get<double>();
  if (j.is_string()) return j.get<std::string>();
  if (j.is_array() && j.size() <= 64) {
    std::vector<std::int64_t> values;
    for (const Json& e : j) {
      if (!e.is_number_integer()) break;
      values.push_back(e.get<std::int64_t>());
    }
    if (values.size() == j.size()) return values;
  }
  throw JsonError(
      fmt::format("\"params.{}\" must be a number, a string, a boolean or at most 64 whole numbers",
                  printable(key)));
}

void read_measurement(const JsonObject& o, Record& r) {
  if (o.has("time_ms")) {
    const JsonObject t = o.object("time_ms", {"median", "min", "p95", "n"});
    r.time_ms = TimeMs{t.real("median", 0, 1e12), t.real("min", 0, 1e12), t.real("p95", 0, 1e12),
                       t.whole("n", 1, 1'000'000'000)};
    if (r.time_ms->min > r.time_ms->median || r.time_ms->median > r.time_ms->p95) {
      throw JsonError(
          fmt::format("\"time_ms\" must have min <= median <= p95 but has {:g}, {:g}, {:g}",
                      r.time_ms->min, r.time_ms->median, r.time_ms->p95));
    }
  }
  if (o.has("error")) {
    const JsonObject e = o.object("error", {"metric", "value"});
    r.error = ErrorFigure{e.text("metric"), e.any_real("value")};
    if (r.error->value < 0) {
      throw JsonError(
          fmt::format("\"error.value\" must not be below 0 but is {:g}", r.error->value));
    }
  }
  if (r.status != Status::kOk) return;
  if (!r.time_ms) throw JsonError("key \"time_ms\" is missing, and status is ok");
  if (!r.error) {
    throw JsonError("key \"error\" is missing: a time without an error figure is not a result");
  }
}

// Its key was "seed", which is what random numbers have.
OriginalFigure read_original(const JsonObject& o) {
  const char* key = o.has("original") ? "original" : "seed";
  if (o.has("original") && o.has("seed")) {
    throw JsonError("\"seed\" is what \"original\" was called: there must be one of them");
  }
  const JsonObject s = o.object(key, {"value", "unit", "hardware", "columns"});
  OriginalFigure f{s.real("value", 0, 1e12), s.text("unit"), s.text("hardware", true), {}};
  if (!s.has("columns")) return f;
  const Json& columns = s.at("columns");
  if (!columns.is_object() || columns.size() > 16) {
    throw JsonError(fmt::format("\"{}.columns\" must be an object of at most 16 numbers", key));
  }
  for (const auto& [name, value] : columns.items()) {
    if (!value.is_number()) {
      throw JsonError(fmt::format("\"{}.columns\" must hold numbers only", key));
    }
    f.columns.emplace_back(name, value.get<double>());
  }
  return f;
}

Record from_json(const Json& j) {
  const JsonObject o(j, "", {"schema",       "suite",          "row",        "op",
                             "impl",         "device",         "dtype",      "params",
                             "measures",     "time_ms",        "error",      "zero_rows",
                             "flops_needed", "flops_executed", "bytes",      "workspace_bytes",
                             "peak_bytes",   "floor_ms",       "floor_kind", "ceiling",
                             "original",     "seed",           "hardware",   "commit",
                             "date",         "status",         "reason"});
  if (const auto schema = o.whole("schema", 0, 1'000'000); schema != kSchemaVersion) {
    throw JsonError(
        fmt::format("schema {} is not the one this program reads ({})", schema, kSchemaVersion));
  }
  Record r;
  for (const Word& w : kWords) r.*w.value = o.text(w.key);
  r.hardware = o.text("hardware", true);
  r.commit = o.text_or("commit", "");
  r.date = o.text_or("date", "");
  r.status = one_of<Status>(o, "status", kStatusNames);
  r.reason = o.text_or("reason", "");
  if (r.status != Status::kOk && r.reason.empty()) {
    throw JsonError(fmt::format("a {} row must have a \"reason\"", name_of(r.status)));
  }
  if (o.has("measures")) r.measures = one_of<Measures>(o, "measures", kMeasuresNames);
  if (o.has("params")) {
    const Json& p = o.at("params");
    if (!p.is_object()) throw JsonError("\"params\" must be an object");
    if (p.size() > 64) throw JsonError("\"params\" must have at most 64 keys");
    for (const auto& [key, value] : p.items()) r.params[key] = read_param(key, value);
  }
  read_measurement(o, r);
  for (const OptionalReal& f : kOptionalReals) r.*f.value = o.maybe_real(f.key, 0, f.most);
  if (o.has("floor_kind")) r.floor_kind = one_of<FloorKind>(o, "floor_kind", kFloorKindNames);
  if (o.has("ceiling")) {
    const JsonObject c = o.object("ceiling", {"copy_gbs", "gemm_gflops", "gemm", "step_us"});
    r.ceiling = Ceiling{c.maybe_real("copy_gbs").value_or(0),
                        c.maybe_real("gemm_gflops").value_or(0),
                        {},
                        c.maybe_real("step_us").value_or(0)};
    if (c.has("gemm")) {
      std::vector<std::string> names;
      for (const Precision p : kAllProducts) names.emplace_back(name_of(p));
      r.ceiling->gemm = kAllProducts[c.one_of("gemm", names)];
    }
  }
  if (o.has("original") || o.has("seed")) r.original = read_original(o);
  return r;
}

}  // namespace

double floor_beside(const Record& row, const Record& move) {
  const double floor = row.floor_ms.value_or(0);
  const double bytes = row.bytes.value_or(0), moved = move.bytes.value_or(0);
  const bool bandwidth = row.floor_kind == FloorKind::kBandwidth;
  if (!bandwidth || move.status != Status::kOk || !move.time_ms || !(bytes > 0) || !(moved > 0)) {
    return floor;
  }
  const double fastest = move.time_ms->min * (bytes / moved);
  return fastest > 0 ? std::min(floor, fastest) : floor;
}

std::string name_of(Status s) { return kStatusNames[static_cast<std::size_t>(s)]; }
std::string name_of(FloorKind k) { return kFloorKindNames[static_cast<std::size_t>(k)]; }
std::string name_of(Measures m) { return kMeasuresNames[static_cast<std::size_t>(m)]; }

std::string to_string(const ParamValue& value) {
  const Json j = param(value);
  if (j.is_string()) return j.get<std::string>();
  if (!j.is_array()) return j.dump();
  std::string s;
  for (const auto& e : j) s += (s.empty() ? "" : "x") + e.dump();
  return s;
}

std::string to_json_line(const Record& r) {
  Json j;
  j["schema"] = kSchemaVersion;
  for (const Word& w : kWords) j[w.key] = r.*w.value;
  j["params"] = Json::object();
  for (const auto& [key, value] : r.params) j["params"][key] = param(value);
  if (r.measures != Measures::kTime) j["measures"] = name_of(r.measures);
  if (r.time_ms) {
    j["time_ms"] = {{"median", number(r.time_ms->median)},
                    {"min", number(r.time_ms->min)},
                    {"p95", number(r.time_ms->p95)},
                    {"n", r.time_ms->n}};
  }
  if (r.error) j["error"] = {{"metric", r.error->metric}, {"value", number(r.error->value)}};
  for (const OptionalReal& f : kOptionalReals) {
    if (r.*f.value) j[f.key] = number(*(r.*f.value));
  }
  if (r.floor_kind) j["floor_kind"] = name_of(*r.floor_kind);
  if (r.ceiling) {
    j["ceiling"] = {{"copy_gbs", number(r.ceiling->copy_gbs)},
                    {"gemm_gflops", number(r.ceiling->gemm_gflops)}};
    if (r.ceiling->gemm) j["ceiling"]["gemm"] = name_of(*r.ceiling->gemm);
    if (r.ceiling->step_us > 0) j["ceiling"]["step_us"] = number(r.ceiling->step_us);
  }
  if (r.original) {
    j["original"] = {{"value", number(r.original->value)},
                     {"unit", r.original->unit},
                     {"hardware", r.original->hardware}};
    for (const auto& [name, value] : r.original->columns)
      j["original"]["columns"][name] = number(value);
  }
  j["hardware"] = r.hardware;
  j["commit"] = r.commit;
  j["date"] = r.date;
  j["status"] = name_of(r.status);
  if (!r.reason.empty()) j["reason"] = r.reason;
  return j.dump(-1, ' ', false, Json::error_handler_t::replace);
}

Record parse_record(std::string_view line) { return from_json(files::parse_json(line)); }

RecordFile read_records(const std::string& path) {
  const std::string text = files::read_file(path, kMostFileBytes);
  RecordFile file;
  std::size_t line_number = 0;
  const auto refuse = [&](const std::string& what) {
    throw FileError(fmt::format("{}:{}: {}", path, line_number, what));
  };
  for (std::size_t start = 0; start < text.size();) {
    ++line_number;
    const std::size_t newline = text.find('\n', start);
    const bool complete = newline != std::string::npos;
    std::string_view line(text.data() + start, (complete ? newline : text.size()) - start);
    start = complete ? newline + 1 : text.size();
    if (!line.empty() && line.back() == '\r') line.remove_suffix(1);
    if (line.find_first_not_of(" \t") == std::string_view::npos) continue;
    if (line.size() > kMostLineBytes) {
      refuse(fmt::format("the line has {} bytes, more than the {} of a record", line.size(),
                         kMostLineBytes));
    }
    if (file.records.size() == kMostRows) refuse(fmt::format("more than {} rows", kMostRows));
    try {
      file.records.push_back(parse_record(line));
    } catch (const JsonError& e) {
      if (complete || !e.at_end || file.records.empty()) refuse(e.what());
      file.warnings.push_back(
          fmt::format("{}:{}: the last line is cut short and was left out", path, line_number));
    }
  }
  if (file.records.empty()) throw FileError(path + " holds no row");
  return file;
}

}  // namespace annulus::bench
