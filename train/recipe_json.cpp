#include "train/recipe_json.h"

#include <array>
#include <cstdint>
#include <nlohmann/json.hpp>

#include "files/json.h"

namespace annulus::train {
namespace {

using files::JsonObject;
using json = files::Json;

constexpr std::array<const char*, 2> kEncodings = {"turns", "spread"};
constexpr std::array<const char*, 4> kActivations = {"relu", "gelu", "tanh", "silu"};

// Reads or writes one field, so that both directions share one list of them.
class Writer {
 public:
  json out;
  void text(const char* key, std::string& v) { out[key] = v; }
  void whole(const char* key, std::int64_t& v) { out[key] = v; }
  void bits(const char* key, std::uint64_t& v) { out[key] = v; }
  void real(const char* key, double& v) { out[key] = v; }
  template <class E, std::size_t n>
  void choice(const char* key, E& v, const std::array<const char*, n>& names) {
    out[key] = names[static_cast<std::size_t>(v)];
  }
};

class Reader {
 public:
  explicit Reader(const JsonObject& in) : in_(in) {}
  void text(const char* key, std::string& v) { v = in_.text(key); }
  void whole(const char* key, std::int64_t& v) { v = in_.whole(key, INT64_MIN, INT64_MAX); }
  void bits(const char* key, std::uint64_t& v) { v = in_.bits(key); }
  void real(const char* key, double& v) { v = in_.real(key, -1e300, 1e300); }
  template <class E, std::size_t n>
  void choice(const char* key, E& v, const std::array<const char*, n>& names) {
    v = static_cast<E>(in_.one_of(key, {names.begin(), names.end()}));
  }

 private:
  const JsonObject& in_;
};

template <class Visitor>
void visit(Recipe& r, Visitor& v) {
  v.text("name", r.name);
  v.whole("neurons", r.neurons);
  v.whole("actions", r.actions);
  v.choice("encoding", r.encoding, kEncodings);
  v.choice("activation", r.activation, kActivations);
  v.whole("batch", r.batch);
  v.whole("steps", r.steps);
  v.whole("length", r.length);
  v.whole("first_length", r.first_length);
  v.real("growth", r.growth);
  v.real("rate", r.schedule.rate);
  v.whole("warm_up", r.schedule.warm_up);
  v.real("final", r.schedule.final);
  v.real("lead", r.lead);
  v.real("clip", r.clip);
  v.real("amplitude_weight", r.amplitude_weight);
  v.whole("delay", r.delay);
  v.real("spread", r.spread);
  v.whole("gain_hidden", r.gain_hidden);
  v.real("gain_start", r.gain_start);
  v.bits("seed", r.seed);
}

}  // namespace

json to_json(const Recipe& recipe) {
  Writer writer;
  Recipe copy = recipe;
  visit(copy, writer);
  return writer.out;
}

Recipe recipe_from_json(const json& in) {
  std::vector<std::string> known;
  const json every = to_json(Recipe{});
  for (const auto& [key, value] : every.items()) known.push_back(key);
  const JsonObject object(in, "recipe", known);
  Reader reader(object);
  Recipe recipe;
  visit(recipe, reader);
  check(recipe);
  return recipe;
}

std::string difference(const Recipe& saved, const Recipe& asked) {
  const json a = to_json(saved), b = to_json(asked);
  for (const auto& [key, value] : a.items()) {
    if (b.at(key) != value) return key + " " + value.dump() + ", not " + b.at(key).dump();
  }
  return "";
}

const char* name_of(Encoding e) { return kEncodings[static_cast<std::size_t>(e)]; }
const char* name_of(RingRnnActivation a) { return kActivations[static_cast<std::size_t>(a)]; }

}  // namespace annulus::train
