#include "train/recipe_json.h"

#include <array>
#include <cmath>
#include <limits>
#include <nlohmann/json.hpp>

#include "annulus/core/check.h"
#include "bench/words.h"

namespace annulus::train {
namespace {

using json = nlohmann::ordered_json;

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
  explicit Reader(const json& in) : in_(in) {
    if (!in.is_object()) invalid("train", "recipe", "be an object", "is not");
  }
  void text(const char* key, std::string& v) {
    const json& j = at(key);
    if (!j.is_string()) wrong(key, "be a string");
    v = j.get<std::string>();
  }
  void whole(const char* key, std::int64_t& v) {
    const json& j = at(key);
    const bool fits = j.is_number_integer() &&
                      (!j.is_number_unsigned() ||
                       j.get<std::uint64_t>() <=
                           static_cast<std::uint64_t>(std::numeric_limits<std::int64_t>::max()));
    if (!fits) wrong(key, "be a whole number");
    v = j.get<std::int64_t>();
  }
  void bits(const char* key, std::uint64_t& v) {
    const json& j = at(key);
    if (!j.is_number_unsigned()) wrong(key, "be a whole number, zero or more");
    v = j.get<std::uint64_t>();
  }
  void real(const char* key, double& v) {
    const json& j = at(key);
    if (!j.is_number()) wrong(key, "be a number");
    v = j.get<double>();
    if (!std::isfinite(v)) wrong(key, "be finite");
  }
  template <class E, std::size_t n>
  void choice(const char* key, E& v, const std::array<const char*, n>& names) {
    std::string name;
    text(key, name);
    for (std::size_t i = 0; i < n; ++i) {
      if (name == names[i]) {
        v = static_cast<E>(i);
        return;
      }
    }
    wrong(key, "be one of its names");
  }
  void no_other() const {
    for (const auto& [key, value] : in_.items()) {
      if (std::find(known_.begin(), known_.end(), key) != known_.end()) continue;
      const std::string near = bench::nearest(key, known_);
      invalid("train", "recipe", "have known keys only",
              "has \"" + bench::printable(key) + "\"" +
                  (near.empty() ? "" : ", did you mean \"" + near + "\"?"));
    }
  }

 private:
  const json& at(const char* key) {
    known_.push_back(key);
    if (!in_.contains(key)) invalid("train", key, "be in the recipe", "is not there");
    return in_.at(key);
  }
  [[noreturn]] void wrong(const char* key, const char* rule) const {
    invalid(
        "train", key, rule,
        "is " + bench::printable(in_.at(key).dump(-1, ' ', true, json::error_handler_t::replace)));
  }

  const json& in_;
  std::vector<std::string> known_;
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
  Reader reader(in);
  Recipe recipe;
  visit(recipe, reader);
  reader.no_other();
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
