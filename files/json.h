// JSON from strangers. The text is checked before and while it is parsed, so that no file can exhaust
// the stack or memory, or say one thing to us and another to the next reader; values are then taken
// out by key, type and range, and whatever is wrong throws JsonError, which names the key.
#pragma once

#include <cstddef>
#include <cstdint>
#include <nlohmann/json_fwd.hpp>
#include <optional>
#include <stdexcept>
#include <string>
#include <string_view>
#include <vector>

namespace annulus::files {

using Json = nlohmann::ordered_json;

class JsonError : public std::runtime_error {
 public:
  explicit JsonError(const std::string& what, bool at_end = false)
      : std::runtime_error(what), at_end(at_end) {}
  bool at_end;  // the text stops too early, as a file cut short does
};

// Keys keep their order; one that appears twice is refused, and so is what nests more than 16 deep, has
// a string of more than 64 KiB or more than 4096 values.
Json parse_json(std::string_view text);

// An object's values. Messages call the key "name.key", or "key" where the object has no name.
class JsonObject {
 public:
  // `known`: all the keys it may have. `json` must outlive this.
  JsonObject(const Json& json, std::string name, const std::vector<std::string>& known);

  bool has(const char* key) const;  // and it is not null
  const Json& at(const char* key) const;
  JsonObject object(const char* key, const std::vector<std::string>& known) const;

  std::string text(const char* key, bool may_be_empty = false) const;
  std::string text_or(const char* key, const char* otherwise) const;
  std::size_t one_of(const char* key, const std::vector<std::string>& names) const;  // which
  std::int64_t whole(const char* key, std::int64_t low, std::int64_t high) const;
  std::uint64_t bits(const char* key) const;
  double real(const char* key, double low = 0, double high = 1e30) const;  // finite, within these
  std::optional<double> maybe_real(const char* key, double low = 0, double high = 1e30) const;
  double any_real(const char* key) const;  // NaN and infinity too, spelled as strings
  // A list of so many numbers from low to high.
  std::vector<double> reals(const char* key, std::size_t least, std::size_t most, double low,
                            double high) const;

 private:
  std::string path(std::string_view key) const;

  const Json& json_;
  std::string name_;
};

}  // namespace annulus::files
