#include "files/json.h"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <nlohmann/json.hpp>
#include <set>

#include "files/words.h"

namespace annulus::files {
namespace {

constexpr int kMostDepth = 16;
constexpr std::size_t kMostStringBytes = std::size_t{64} << 10;
// An ordered object looks keys up one by one, so their number must stay small; a record has about 100.
constexpr std::size_t kMostValues = 4096;

// Nesting, lengths and counts, read off the bytes: what this lets through is small enough to parse.
void check_shape(std::string_view text) {
  int depth = 0;
  std::size_t values = 1, string_length = 0;
  bool in_string = false;
  for (std::size_t i = 0; i < text.size(); ++i) {
    const char c = text[i];
    if (in_string) {
      if (c == '"') {
        in_string = false;
      } else {
        if (c == '\\') ++i;
        if (++string_length > kMostStringBytes) {
          throw JsonError(fmt::format("a string is longer than {} bytes", kMostStringBytes));
        }
      }
    } else if (c == '"') {
      in_string = true;
      string_length = 0;
    } else if (c == '{' || c == '[') {
      if (++depth > kMostDepth) {
        throw JsonError(fmt::format("nested more than {} deep", kMostDepth));
      }
    } else if (c == ',') {
      if (++values > kMostValues) {
        throw JsonError(fmt::format("more than {} values", kMostValues));
      }
    } else if (c == '}' || c == ']') {
      --depth;
    } else if (c == '\0') {  // the parser would take it for the end
      throw JsonError("not valid JSON: a zero byte");
    }
  }
}

[[noreturn]] void fail(const std::string& path, const std::string& rule, const Json& came) {
  // dump() replaces bad bytes instead of throwing; printable() cuts it.
  throw JsonError(
      fmt::format("\"{}\" must be {} but is {}", path, rule,
                  printable(came.dump(-1, ' ', true, Json::error_handler_t::replace), 40)));
}

double real_of(const Json& j, const std::string& path, double low, double high) {
  const double v = j.is_number() ? j.get<double>() : std::nan("");
  if (!(v >= low && v <= high)) {
    fail(path, fmt::format("a number between {:g} and {:g}", low, high), j);
  }
  return v;
}

}  // namespace

Json parse_json(std::string_view text) {
  check_shape(text);
  std::vector<std::set<std::string>> keys;
  std::string duplicate;
  const auto watch_keys = [&](int, Json::parse_event_t event, Json& value) {
    if (event == Json::parse_event_t::object_start) {
      keys.emplace_back();
    } else if (event == Json::parse_event_t::object_end) {
      keys.pop_back();
    } else if (event == Json::parse_event_t::key) {
      const auto& key = value.get_ref<const std::string&>();
      if (!keys.back().insert(key).second && duplicate.empty()) duplicate = key;
    }
    return true;
  };
  Json result;
  try {
    result = Json::parse(text.begin(), text.end(), watch_keys);
  } catch (const Json::exception& e) {
    // "[json.exception.parse_error.101] parse error at line 1, column 5: what": the library's number
    // and the line, of which there is one, say nothing to a reader.
    std::string what = e.what();
    for (const auto& [mark, skipped] : {std::pair{"column ", 0}, std::pair{"] ", 2}}) {
      const auto at = what.find(mark);
      if (at == std::string::npos) continue;
      what = what.substr(at + static_cast<std::size_t>(skipped));
      break;
    }
    const auto* syntax = dynamic_cast<const Json::parse_error*>(&e);
    throw JsonError("not valid JSON: " + printable(what, 160),
                    syntax != nullptr && syntax->byte >= text.size());
  }
  if (!duplicate.empty()) throw JsonError("key \"" + printable(duplicate) + "\" appears twice");
  return result;
}

JsonObject::JsonObject(const Json& json, std::string name, const std::vector<std::string>& known)
    : json_(json), name_(std::move(name)) {
  if (!json.is_object()) {
    fail(name_.empty() ? "it" : name_, "an object", json);
  }
  for (const auto& [key, value] : json.items()) {
    if (std::find(known.begin(), known.end(), key) != known.end()) continue;
    throw JsonError(fmt::format("unknown key \"{}\"{}", printable(path(key)), meant(key, known)));
  }
}

bool JsonObject::has(const char* key) const {
  return json_.contains(key) && !json_.at(key).is_null();
}

const Json& JsonObject::at(const char* key) const {
  if (!has(key)) throw JsonError(fmt::format("key \"{}\" is missing", path(key)));
  return json_.at(key);
}

JsonObject JsonObject::object(const char* key, const std::vector<std::string>& known) const {
  return {at(key), path(key), known};
}

std::string JsonObject::text(const char* key, bool may_be_empty) const {
  const Json& j = at(key);
  if (!j.is_string()) fail(path(key), "a string", j);
  if (!may_be_empty && j.get_ref<const std::string&>().empty()) {
    throw JsonError(fmt::format("\"{}\" must not be empty", path(key)));
  }
  return j.get<std::string>();
}

std::string JsonObject::text_or(const char* key, const char* otherwise) const {
  return has(key) ? text(key, true) : otherwise;
}

std::size_t JsonObject::one_of(const char* key, const std::vector<std::string>& names) const {
  const auto it = std::find(names.begin(), names.end(), text(key));
  if (it == names.end()) {
    fail(path(key), fmt::format("one of {}", fmt::join(names, ", ")), at(key));
  }
  return static_cast<std::size_t>(it - names.begin());
}

std::int64_t JsonObject::whole(const char* key, std::int64_t low, std::int64_t high) const {
  const Json& j = at(key);
  const bool fits = j.is_number_integer() &&
                    (!j.is_number_unsigned() || j.get<std::uint64_t>() <= std::uint64_t{INT64_MAX});
  if (!fits || j.get<std::int64_t>() < low || j.get<std::int64_t>() > high) {
    fail(path(key), fmt::format("a whole number between {} and {}", low, high), j);
  }
  return j.get<std::int64_t>();
}

std::uint64_t JsonObject::bits(const char* key) const {
  const Json& j = at(key);
  if (!j.is_number_unsigned()) fail(path(key), "a whole number of 64 bits, zero or more", j);
  return j.get<std::uint64_t>();
}

double JsonObject::real(const char* key, double low, double high) const {
  return real_of(at(key), path(key), low, high);
}

std::optional<double> JsonObject::maybe_real(const char* key, double low, double high) const {
  return has(key) ? std::optional(real(key, low, high)) : std::nullopt;
}

double JsonObject::any_real(const char* key) const {
  const Json& j = at(key);
  if (j.is_number()) return j.get<double>();
  if (j == "NaN") return std::nan("");
  if (j == "Infinity") return HUGE_VAL;
  if (j == "-Infinity") return -HUGE_VAL;
  fail(path(key), "a number, \"NaN\", \"Infinity\" or \"-Infinity\"", j);
}

std::vector<double> JsonObject::reals(const char* key, std::size_t least, std::size_t most,
                                      double low, double high) const {
  const Json& j = at(key);
  if (!j.is_array() || j.size() < least || j.size() > most) {
    fail(path(key), fmt::format("a list of {} to {} numbers", least, most), j);
  }
  std::vector<double> values;
  for (const Json& v : j) values.push_back(real_of(v, path(key), low, high));
  return values;
}

std::string JsonObject::path(std::string_view key) const {
  return name_.empty() ? std::string(key) : fmt::format("{}.{}", name_, key);
}

}  // namespace annulus::files
