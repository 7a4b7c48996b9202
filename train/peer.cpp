#include "train/peer.h"

#include <nlohmann/json.hpp>
#include <numbers>

#include "annulus/core/errors.h"
#include "bench/json_guard.h"
#include "bench/words.h"
#include "train/files.h"

namespace annulus::train {
namespace {

using json = nlohmann::ordered_json;

constexpr std::size_t kMostBytes = std::size_t{1} << 20, kMostPeers = 16, kMostPoints = 4000;

[[noreturn]] void refuse(const std::string& what) { throw InvalidArgument(what); }

class Object {
 public:
  explicit Object(const json& j) : json_(j) {
    if (!j.is_object()) refuse("a peer must be an object");
    static const std::vector<std::string> known = {"name",    "T",     "mean",       "std",
                                                   "max",     "final", "parameters", "steps",
                                                   "seconds", "note",  "curve"};
    for (const auto& [key, value] : j.items()) {
      if (std::find(known.begin(), known.end(), key) != known.end()) continue;
      const std::string near = bench::nearest(key, known);
      refuse("unknown key \"" + bench::printable(key) + "\"" +
             (near.empty() ? "" : ", did you mean \"" + near + "\"?"));
    }
  }

  std::string text(const char* key, bool required) const {
    if (!there(key, required)) return "";
    if (!json_.at(key).is_string()) wrong(key, "a string");
    return json_.at(key).get<std::string>();
  }
  double real(const char* key, double high, bool required) const {
    if (!there(key, required)) return 0;
    return number(key, json_.at(key), high);
  }
  std::int64_t whole(const char* key, std::int64_t low, std::int64_t high, bool required) const {
    if (!there(key, required)) return 0;
    const json& j = json_.at(key);
    const auto most = static_cast<std::uint64_t>(high);
    if (!j.is_number_unsigned() || j.get<std::uint64_t>() > most || j.get<std::int64_t>() < low) {
      wrong(key, "a whole number from " + std::to_string(low) + " to " + std::to_string(high));
    }
    return j.get<std::int64_t>();
  }
  std::vector<double> curve(const char* key, double high) const {
    there(key, true);
    const json& j = json_.at(key);
    if (!j.is_array() || j.size() < 2 || j.size() > kMostPoints) {
      wrong(key, "a list of 2 to " + std::to_string(kMostPoints) + " numbers");
    }
    std::vector<double> values;
    for (const json& v : j) values.push_back(number(key, v, high));
    return values;
  }

 private:
  bool there(const char* key, bool required) const {
    const bool is = json_.contains(key);
    if (!is && required) refuse("key \"" + std::string(key) + "\" is missing");
    return is;
  }
  [[noreturn]] static void wrong(const char* key, const std::string& rule) {
    refuse("\"" + std::string(key) + "\" must be " + rule);
  }
  static double number(const char* key, const json& j, double high) {
    const double v = j.is_number() ? j.get<double>() : -1;
    if (!(v >= 0 && v <= high)) wrong(key, "numbers from 0 to " + std::to_string(high));
    return v;
  }

  const json& json_;
};

Peer read(const json& j) {
  constexpr double kHalfTurn = std::numbers::pi + 1e-3;
  const Object o(j);
  Peer p;
  p.name = o.text("name", true);
  if (p.name.empty()) refuse("\"name\" must not be empty");
  p.T = o.whole("T", 1, 1'000'000, true);
  p.mean = o.real("mean", kHalfTurn, true);
  p.std = o.real("std", kHalfTurn, true);
  p.max = o.real("max", kHalfTurn, true);
  p.final = o.real("final", kHalfTurn, true);
  p.curve = o.curve("curve", kHalfTurn);
  p.parameters = o.whole("parameters", 0, std::int64_t{1} << 53, false);
  p.steps = o.whole("steps", 0, std::int64_t{1} << 53, false);
  p.seconds = o.real("seconds", 1e9, false);
  p.note = o.text("note", false);
  return p;
}

}  // namespace

std::vector<Peer> parse_peers(std::string_view text) {
  json j;
  try {
    j = bench::parse_guarded(text, 16, std::size_t{64} << 10);
  } catch (const bench::JsonError& e) {
    refuse(e.what());
  }
  std::vector<Peer> peers;
  if (j.is_array()) {
    if (j.empty() || j.size() > kMostPeers) {
      refuse("a list of peers must have 1 to " + std::to_string(kMostPeers) + " of them");
    }
    for (const json& one : j) peers.push_back(read(one));
  } else {
    peers.push_back(read(j));
  }
  return peers;
}

std::vector<Peer> read_peers(const std::string& path) {
  try {
    const std::vector<std::byte> bytes = read_file(path, kMostBytes);
    return parse_peers({reinterpret_cast<const char*>(bytes.data()), bytes.size()});
  } catch (const FileError& e) {
    refuse(e.what());
  } catch (const InvalidArgument& e) {
    refuse(path + ": " + e.what());
  }
}

}  // namespace annulus::train
