#include "train/peer.h"

#include <nlohmann/json.hpp>
#include <numbers>

#include "annulus/core/errors.h"
#include "files/file.h"
#include "files/json.h"

namespace annulus::train {
namespace {

using files::Json;
using files::JsonError;

constexpr std::size_t kMostBytes = std::size_t{1} << 20, kMostPeers = 16, kMostPoints = 4000;

Peer read(const Json& j) {
  constexpr double kHalfTurn = std::numbers::pi + 1e-3;
  constexpr std::int64_t kMostCount = std::int64_t{1} << 53;
  const files::JsonObject o(j, "",
                            {"name", "T", "mean", "std", "max", "final", "parameters", "steps",
                             "seconds", "note", "curve"});
  for (const auto& [key, value] : j.items()) {  // not even where it may be left out
    if (value.is_null()) throw JsonError("\"" + key + "\" must not be null");
  }
  Peer p;
  p.name = o.text("name");
  p.T = o.whole("T", 1, 1'000'000);
  p.mean = o.real("mean", 0, kHalfTurn);
  p.std = o.real("std", 0, kHalfTurn);
  p.max = o.real("max", 0, kHalfTurn);
  p.final = o.real("final", 0, kHalfTurn);
  p.curve = o.reals("curve", 2, kMostPoints, 0, kHalfTurn);
  p.parameters = o.whole_or("parameters", 0, kMostCount, 0);
  p.steps = o.whole_or("steps", 0, kMostCount, 0);
  p.seconds = o.maybe_real("seconds", 0, 1e9).value_or(0);
  p.note = o.text_or("note", "");
  return p;
}

std::vector<Peer> read_all(const Json& j) {
  if (!j.is_array()) return {read(j)};
  if (j.empty() || j.size() > kMostPeers) {
    throw JsonError("a list of peers must have 1 to " + std::to_string(kMostPeers) + " of them");
  }
  std::vector<Peer> peers;
  for (const Json& one : j) peers.push_back(read(one));
  return peers;
}

}  // namespace

std::vector<Peer> parse_peers(std::string_view text) {
  try {
    return read_all(files::parse_json(text));
  } catch (const JsonError& e) {
    throw InvalidArgument(e.what());
  }
}

std::vector<Peer> read_peers(const std::string& path) {
  const std::string text = files::read_file(path, kMostBytes);
  try {
    return parse_peers(text);
  } catch (const InvalidArgument& e) {
    throw InvalidArgument(path + ": " + e.what());
  }
}

}  // namespace annulus::train
