#include "bench/record.h"

#include <fmt/format.h>
#include <sys/stat.h>

#include <cerrno>
#include <cmath>
#include <cstring>
#include <fstream>
#include <nlohmann/json.hpp>

#include "bench/json_guard.h"
#include "bench/words.h"

namespace annulus::bench {
namespace {

using nlohmann::ordered_json;
using json = ordered_json;

// --- writing ------------------------------------------------------------------------------------

// JSON has no NaN and no infinity; as strings they survive every parser.
ordered_json number(double v) {
  if (std::isnan(v)) return "NaN";
  if (std::isinf(v)) return v > 0 ? "Infinity" : "-Infinity";
  // Byte and flop counts are whole numbers and read better as such.
  if (v == std::floor(v) && std::fabs(v) < 0x1p53) return static_cast<std::int64_t>(v);
  return v;
}

ordered_json param(const ParamValue& value) {
  return std::visit([](const auto& v) { return ordered_json(v); }, value);
}

// --- reading: typed access with a message that names the key -------------------------------------

class Object {
 public:
  Object(const json& j, std::string name, std::vector<std::string> known)
      : json_(j), name_(std::move(name)) {
    if (!j.is_object()) fail(name_.empty() ? "the line" : name_, "an object", j);
    for (const auto& [key, value] : j.items()) {
      if (std::find(known.begin(), known.end(), key) != known.end()) continue;
      const std::string near = nearest(key, known);
      throw RecordError(
          fmt::format("unknown key \"{}\"{}", printable(path(key)),
                      near.empty() ? "" : fmt::format(", did you mean \"{}\"?", near)));
    }
  }

  bool has(const char* key) const { return json_.contains(key) && !json_.at(key).is_null(); }
  const json& at(const char* key) const {
    if (!has(key)) throw RecordError(fmt::format("key \"{}\" is missing", path(key)));
    return json_.at(key);
  }

  std::string text(const char* key, bool may_be_empty = false) const {
    const json& j = at(key);
    if (!j.is_string()) fail(path(key), "a string", j);
    if (!may_be_empty && j.get_ref<const std::string&>().empty()) {
      throw RecordError(fmt::format("\"{}\" must not be empty", path(key)));
    }
    return j.get<std::string>();
  }
  std::string text_or(const char* key, const char* otherwise) const {
    return has(key) ? text(key, true) : otherwise;
  }

  // Finite and within [low, high].
  double real(const char* key, double low = 0, double high = 1e30) const {
    const double v = any_real(key);
    if (!(v >= low && v <= high)) {
      throw RecordError(
          fmt::format("\"{}\" must be between {:g} and {:g} but is {:g}", path(key), low, high, v));
    }
    return v;
  }
  std::optional<double> maybe_real(const char* key, double low = 0, double high = 1e30) const {
    return has(key) ? std::optional(real(key, low, high)) : std::nullopt;
  }
  // NaN and infinity too, spelled as strings.
  double any_real(const char* key) const {
    const json& j = at(key);
    if (j.is_number()) return j.get<double>();
    if (j.is_string()) {
      const auto& s = j.get_ref<const std::string&>();
      if (s == "NaN") return std::nan("");
      if (s == "Infinity") return HUGE_VAL;
      if (s == "-Infinity") return -HUGE_VAL;
    }
    fail(path(key), "a number, \"NaN\", \"Infinity\" or \"-Infinity\"", j);
  }
  std::int64_t whole(const char* key, std::int64_t low, std::int64_t high) const {
    const json& j = at(key);
    const bool fits = j.is_number_integer() && (!j.is_number_unsigned() ||
                                                j.get<std::uint64_t>() <= std::uint64_t{INT64_MAX});
    if (!fits || j.get<std::int64_t>() < low || j.get<std::int64_t>() > high) {
      fail(path(key), fmt::format("a whole number between {} and {}", low, high), j);
    }
    return j.get<std::int64_t>();
  }
  template <class E>
  E one_of(const char* key, std::initializer_list<E> values) const {
    const std::string s = text(key);
    std::string allowed;
    for (const E e : values) {
      if (name_of(e) == s) return e;
      allowed += std::string(allowed.empty() ? "" : ", ") + name_of(e);
    }
    throw RecordError(
        fmt::format("\"{}\" must be one of {} but is \"{}\"", path(key), allowed, printable(s)));
  }

 private:
  std::string path(const std::string& key) const { return name_.empty() ? key : name_ + "." + key; }
  [[noreturn]] static void fail(const std::string& key, const std::string& rule, const json& came) {
    // dump() replaces bad bytes instead of throwing; printable() cuts it.
    throw RecordError(
        fmt::format("\"{}\" must be {} but is {}", key, rule,
                    printable(came.dump(-1, ' ', true, json::error_handler_t::replace), 40)));
  }

  const json& json_;
  std::string name_;
};

ParamValue read_param(const std::string& key, const json& j) {
  if (j.is_boolean()) return j.get<bool>();
  if (j.is_number_integer()) {
    if (j.is_number_unsigned() && j.get<std::uint64_t>() > std::uint64_t{INT64_MAX}) {
      throw RecordError(fmt::format("\"params.{}\" does not fit in 63 bits", printable(key)));
    }
    return j.get<std::int64_t>();
  }
  if (j.is_number()) return j.get<double>();
  if (j.is_string()) return j.get<std::string>();
  if (j.is_array() && j.size() <= 64) {
    std::vector<std::int64_t> values;
    for (const json& e : j) {
      if (!e.is_number_integer()) break;
      values.push_back(e.get<std::int64_t>());
    }
    if (values.size() == j.size()) return values;
  }
  throw RecordError(
      fmt::format("\"params.{}\" must be a number, a string, a boolean or at most 64 whole numbers",
                  printable(key)));
}

void read_measurement(const Object& o, Record& r) {
  if (o.has("time_ms")) {
    const Object t(o.at("time_ms"), "time_ms", {"median", "min", "p95", "n"});
    r.time_ms = TimeMs{t.real("median", 0, 1e12), t.real("min", 0, 1e12), t.real("p95", 0, 1e12),
                       t.whole("n", 1, 1'000'000'000)};
    if (r.time_ms->min > r.time_ms->median || r.time_ms->median > r.time_ms->p95) {
      throw RecordError(
          fmt::format("\"time_ms\" must have min <= median <= p95 but has {:g}, {:g}, {:g}",
                      r.time_ms->min, r.time_ms->median, r.time_ms->p95));
    }
  }
  if (o.has("error")) {
    const Object e(o.at("error"), "error", {"metric", "value"});
    r.error = ErrorFigure{e.text("metric"), e.any_real("value")};
    if (r.error->value < 0) {
      throw RecordError(
          fmt::format("\"error.value\" must not be below 0 but is {:g}", r.error->value));
    }
  }
  if (r.status != Status::kOk) return;
  if (!r.time_ms) throw RecordError("key \"time_ms\" is missing, and status is ok");
  if (!r.error) {
    throw RecordError("key \"error\" is missing: a time without an error figure is not a result");
  }
}

Record from_json(const json& j) {
  const Object o(j, "", {"schema",       "suite",          "row",        "op",
                         "impl",         "device",         "dtype",      "params",
                         "measures",     "time_ms",        "error",      "zero_rows",
                         "flops_needed", "flops_executed", "bytes",      "workspace_bytes",
                         "peak_bytes",   "floor_ms",       "floor_kind", "ceiling",
                         "seed",         "hardware",       "commit",     "date",
                         "status",       "reason"});
  if (const auto schema = o.whole("schema", 0, 1'000'000); schema != kSchemaVersion) {
    throw RecordError(
        fmt::format("schema {} is not the one this program reads ({})", schema, kSchemaVersion));
  }
  Record r;
  r.suite = o.text("suite");
  r.row = o.text("row");
  r.op = o.text("op");
  r.impl = o.text("impl");
  r.device = o.text("device");
  r.dtype = o.text("dtype");
  r.hardware = o.text("hardware", true);
  r.commit = o.text_or("commit", "");
  r.date = o.text_or("date", "");
  r.status = o.one_of("status", {Status::kOk, Status::kSkipped, Status::kFailed});
  r.reason = o.text_or("reason", "");
  if (r.status != Status::kOk && r.reason.empty()) {
    throw RecordError(fmt::format("a {} row must have a \"reason\"", name_of(r.status)));
  }
  if (o.has("measures")) r.measures = o.one_of("measures", {Measures::kTime, Measures::kMemory});
  if (o.has("params")) {
    const json& p = o.at("params");
    if (!p.is_object()) throw RecordError("\"params\" must be an object");
    if (p.size() > 64) throw RecordError("\"params\" must have at most 64 keys");
    for (const auto& [key, value] : p.items()) r.params[key] = read_param(key, value);
  }
  read_measurement(o, r);
  r.zero_rows = o.maybe_real("zero_rows", 0, 1);
  r.flops_needed = o.maybe_real("flops_needed");
  r.flops_executed = o.maybe_real("flops_executed");
  r.bytes = o.maybe_real("bytes");
  r.workspace_bytes = o.maybe_real("workspace_bytes");
  r.peak_bytes = o.maybe_real("peak_bytes");
  r.floor_ms = o.maybe_real("floor_ms", 0, 1e12);
  if (o.has("floor_kind")) {
    r.floor_kind =
        o.one_of("floor_kind", {FloorKind::kBandwidth, FloorKind::kCompute, FloorKind::kLatency});
  }
  if (o.has("ceiling")) {
    const Object c(o.at("ceiling"), "ceiling", {"copy_gbs", "gemm_gflops", "gemm", "step_us"});
    r.ceiling = Ceiling{c.maybe_real("copy_gbs").value_or(0),
                        c.maybe_real("gemm_gflops").value_or(0),
                        {},
                        c.maybe_real("step_us").value_or(0)};
    if (c.has("gemm")) {
      r.ceiling->gemm = c.one_of("gemm", {Precision::kFp32, Precision::kTf32, Precision::kBf16});
    }
  }
  if (o.has("seed")) {
    const Object s(o.at("seed"), "seed", {"value", "unit", "hardware", "columns"});
    r.seed = SeedFigure{s.real("value", 0, 1e12), s.text("unit"), s.text("hardware", true), {}};
    if (s.has("columns")) {
      const json& columns = s.at("columns");
      if (!columns.is_object() || columns.size() > 16) {
        throw RecordError("\"seed.columns\" must be an object of at most 16 numbers");
      }
      for (const auto& [name, value] : columns.items()) {
        if (!value.is_number()) throw RecordError("\"seed.columns\" must hold numbers only");
        r.seed->columns.emplace_back(name, value.get<double>());
      }
    }
  }
  return r;
}

std::string errno_text() { return std::strerror(errno); }

}  // namespace

std::string name_of(Status s) {
  return s == Status::kOk ? "ok" : s == Status::kSkipped ? "skipped" : "failed";
}
std::string name_of(FloorKind k) {
  return k == FloorKind::kBandwidth ? "bandwidth"
         : k == FloorKind::kCompute ? "compute"
                                    : "latency";
}
std::string name_of(Measures m) { return m == Measures::kTime ? "time" : "memory"; }

std::string to_string(const ParamValue& value) {
  const ordered_json j = param(value);
  if (j.is_string()) return j.get<std::string>();
  if (!j.is_array()) return j.dump();
  std::string s;
  for (const auto& e : j) s += (s.empty() ? "" : "x") + e.dump();
  return s;
}

std::string to_json_line(const Record& r) {
  ordered_json j;
  j["schema"] = kSchemaVersion;
  j["suite"] = r.suite;
  j["row"] = r.row;
  j["op"] = r.op;
  j["impl"] = r.impl;
  j["device"] = r.device;
  j["dtype"] = r.dtype;
  j["params"] = ordered_json::object();
  for (const auto& [key, value] : r.params) j["params"][key] = param(value);
  if (r.measures != Measures::kTime) j["measures"] = name_of(r.measures);
  if (r.time_ms) {
    j["time_ms"] = {{"median", number(r.time_ms->median)},
                    {"min", number(r.time_ms->min)},
                    {"p95", number(r.time_ms->p95)},
                    {"n", r.time_ms->n}};
  }
  if (r.error) j["error"] = {{"metric", r.error->metric}, {"value", number(r.error->value)}};
  const auto put = [&](const char* key, const std::optional<double>& v) {
    if (v) j[key] = number(*v);
  };
  put("zero_rows", r.zero_rows);
  put("flops_needed", r.flops_needed);
  put("flops_executed", r.flops_executed);
  put("bytes", r.bytes);
  put("workspace_bytes", r.workspace_bytes);
  put("peak_bytes", r.peak_bytes);
  put("floor_ms", r.floor_ms);
  if (r.floor_kind) j["floor_kind"] = name_of(*r.floor_kind);
  if (r.ceiling) {
    j["ceiling"] = {{"copy_gbs", number(r.ceiling->copy_gbs)},
                    {"gemm_gflops", number(r.ceiling->gemm_gflops)}};
    if (r.ceiling->gemm) j["ceiling"]["gemm"] = name_of(*r.ceiling->gemm);
    if (r.ceiling->step_us > 0) j["ceiling"]["step_us"] = number(r.ceiling->step_us);
  }
  if (r.seed) {
    j["seed"] = {
        {"value", number(r.seed->value)}, {"unit", r.seed->unit}, {"hardware", r.seed->hardware}};
    for (const auto& [name, value] : r.seed->columns) j["seed"]["columns"][name] = number(value);
  }
  j["hardware"] = r.hardware;
  j["commit"] = r.commit;
  j["date"] = r.date;
  j["status"] = name_of(r.status);
  if (!r.reason.empty()) j["reason"] = r.reason;
  return j.dump(-1, ' ', false, ordered_json::error_handler_t::replace);
}

Record parse_record(std::string_view line, const ReadLimits& limits) {
  return from_json(parse_guarded(line, limits.depth, limits.string_bytes));
}

RecordFile read_records(const std::string& path, const ReadLimits& limits) {
  struct stat info {};
  if (::stat(path.c_str(), &info) != 0) {
    throw RecordError(fmt::format("cannot read {}: {}", path, errno_text()));
  }
  // A pipe or a device has no size to check and may never end.
  if (!S_ISREG(info.st_mode)) throw RecordError(fmt::format("{} is not a regular file", path));
  if (static_cast<std::size_t>(info.st_size) > limits.file_bytes) {
    throw RecordError(fmt::format("{} has {} bytes, more than the {} this program reads", path,
                                  info.st_size, limits.file_bytes));
  }
  std::ifstream in(path, std::ios::binary);
  std::string text(static_cast<std::size_t>(info.st_size), '\0');
  in.read(text.data(), static_cast<std::streamsize>(text.size()));
  if (!in) throw RecordError(fmt::format("cannot read {}: {}", path, errno_text()));

  RecordFile file;
  std::size_t line_number = 0;
  for (std::size_t start = 0; start < text.size();) {
    ++line_number;
    const std::size_t newline = text.find('\n', start);
    const bool complete = newline != std::string::npos;
    std::string_view line(text.data() + start, (complete ? newline : text.size()) - start);
    start = complete ? newline + 1 : text.size();
    if (!line.empty() && line.back() == '\r') line.remove_suffix(1);
    if (line.find_first_not_of(" \t") == std::string_view::npos) continue;
    if (line.size() > limits.line_bytes) {
      throw RecordError(fmt::format("{}:{}: the line has {} bytes, more than the {} of a record",
                                    path, line_number, line.size(), limits.line_bytes));
    }
    if (file.records.size() == limits.rows) {
      throw RecordError(fmt::format("{}:{}: more than {} rows", path, line_number, limits.rows));
    }
    try {
      file.records.push_back(parse_record(line, limits));
    } catch (const JsonError& e) {
      if (!complete && e.at_end && !file.records.empty()) {
        file.warnings.push_back(
            fmt::format("{}:{}: the last line is cut short and was left out", path, line_number));
      } else {
        throw RecordError(fmt::format("{}:{}: {}", path, line_number, e.what()));
      }
    } catch (const RecordError& e) {
      throw RecordError(fmt::format("{}:{}: {}", path, line_number, e.what()));
    }
  }
  if (file.records.empty()) throw RecordError(fmt::format("{} holds no row", path));
  return file;
}

}  // namespace annulus::bench
