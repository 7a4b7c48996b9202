#include "bench/json_guard.h"

#include <nlohmann/json.hpp>
#include <set>
#include <vector>

#include "bench/words.h"

namespace annulus::bench {
namespace {

// An ordered object looks keys up one by one, so their number must stay small; a record has about
// 100.
constexpr int kMaxValues = 4096;

// Nesting, lengths and counts, read off the bytes: what this lets through is small enough to parse.
void check_shape(std::string_view text, int max_depth, std::size_t max_string) {
  int depth = 0, values = 1;
  std::size_t string_length = 0;
  bool in_string = false;
  for (std::size_t i = 0; i < text.size(); ++i) {
    const char c = text[i];
    if (in_string) {
      if (c == '"') {
        in_string = false;
      } else {
        if (c == '\\') ++i;
        if (++string_length > max_string) {
          throw JsonError("a string is longer than " + std::to_string(max_string) + " bytes",
                          false);
        }
      }
    } else if (c == '"') {
      in_string = true;
      string_length = 0;
    } else if (c == '{' || c == '[') {
      if (++depth > max_depth) {
        throw JsonError("nested more than " + std::to_string(max_depth) + " deep", false);
      }
    } else if (c == ',') {
      if (++values > kMaxValues) {
        throw JsonError("more than " + std::to_string(kMaxValues) + " values", false);
      }
    } else if (c == '}' || c == ']') {
      --depth;
    }
  }
}

}  // namespace

nlohmann::ordered_json parse_guarded(std::string_view text, int max_depth, std::size_t max_string) {
  using json = nlohmann::ordered_json;
  check_shape(text, max_depth, max_string);
  std::vector<std::set<std::string>> keys;
  std::string duplicate;
  const auto watch_keys = [&](int, json::parse_event_t event, json& value) {
    if (event == json::parse_event_t::object_start) {
      keys.emplace_back();
    } else if (event == json::parse_event_t::object_end) {
      keys.pop_back();
    } else if (event == json::parse_event_t::key) {
      const auto& key = value.get_ref<const std::string&>();
      if (!keys.back().insert(key).second && duplicate.empty()) duplicate = key;
    }
    return true;
  };
  json result;
  try {
    result = json::parse(text.begin(), text.end(), watch_keys);
  } catch (const json::parse_error& e) {
    // "[json.exception.parse_error.101] parse error at line 1, column 5: what": keep column and
    // what.
    std::string what = e.what();
    if (const auto column = what.find("column "); column != std::string::npos) {
      what = what.substr(column);
    }
    throw JsonError("not valid JSON: " + printable(what, 160), e.byte >= text.size());
  } catch (const json::exception& e) {
    // "[json.exception.out_of_range.406] what": the library's number says nothing to a reader.
    const std::string what = e.what();
    const auto bracket = what.find("] ");
    throw JsonError(
        "not valid JSON: " +
            printable(bracket == std::string::npos ? what : what.substr(bracket + 2), 160),
        false);
  }
  if (!duplicate.empty()) {
    throw JsonError("key \"" + printable(duplicate) + "\" appears twice", false);
  }
  return result;
}

}  // namespace annulus::bench
