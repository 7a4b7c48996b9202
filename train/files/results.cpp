#include "train/files/results.h"

#include <fmt/format.h>

#include <algorithm>
#include <nlohmann/json.hpp>
#include <numbers>

#include "annulus/core/errors.h"
#include "annulus/core/info.h"
#include "files/file.h"
#include "files/json.h"
#include "files/words.h"

namespace annulus::train {
namespace {

using files::JsonError;
using json = files::Json;

constexpr int kResultsSchema = 1;
constexpr int kGainPoints = 41;
constexpr std::int64_t kMostProbes = 64;  // starts at rest, and sequences with noise

// Six digits: more than the figures are good for, and the same text for the same bits.
double rounded(double v) { return std::stod(fmt::format("{:.6g}", v)); }

json to_json(const Evaluation& e, double lead) {
  return {{"sequences", e.sequences},
          {"T", e.T},
          {"lead", lead},
          {"mean", rounded(e.mean)},
          {"std", rounded(e.std)},
          {"max", rounded(e.max)},
          {"final", rounded(e.final)}};
}

std::vector<double> all_rounded(std::vector<double> values) {
  for (double& v : values) v = rounded(v);
  return values;
}

json to_json(const NoiseCurve& c) {
  return {{"level", c.level},
          {"mean", all_rounded(c.error)},
          {"integrator", all_rounded(c.integrator)}};
}

constexpr std::size_t kMostPeerBytes = std::size_t{1} << 20, kMostPeers = 16, kMostPoints = 4000;

Peer peer_of(const json& j) {
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
  p.parameters = o.has("parameters") ? o.whole("parameters", 0, kMostCount) : 0;
  p.steps = o.has("steps") ? o.whole("steps", 0, kMostCount) : 0;
  p.seconds = o.maybe_real("seconds", 0, 1e9).value_or(0);
  p.note = o.text_or("note", "");
  return p;
}

std::vector<Peer> peers_of(const json& j) {
  if (!j.is_array()) return {peer_of(j)};
  if (j.empty() || j.size() > kMostPeers) {
    throw JsonError("a list of peers must have 1 to " + std::to_string(kMostPeers) + " of them");
  }
  std::vector<Peer> peers;
  for (const json& one : j) peers.push_back(peer_of(one));
  return peers;
}

}  // namespace

std::vector<Peer> parse_peers(std::string_view text) {
  try {
    return peers_of(files::parse_json(text));
  } catch (const JsonError& e) {
    throw InvalidArgument(e.what());
  }
}

std::vector<Peer> read_peers(const std::string& path) {
  const std::string text = files::read_file(path, kMostPeerBytes);
  try {
    return parse_peers(text);
  } catch (const InvalidArgument& e) {
    throw InvalidArgument(path + ": " + e.what());
  }
}

RecipeResult collect(Trainer& trainer, std::int64_t sequences) {
  RingModel& model = trainer.model();
  RecipeResult r;
  r.recipe = trainer.recipe();
  r.history = trainer.history();
  r.seconds = trainer.seconds();
  r.parameters = model.parameter_count();
  r.test = evaluate(model, sequences, kTestLength);
  r.long_test = evaluate(model, sequences, kLongTestLength);
  r.abrupt = evaluate(model, sequences, kTestLength, kAbruptLead);
  r.example = example(model, sequences, kTestLength);
  r.Wa = model.parameters()[0].value;
  r.Wo = model.parameters()[1].value;
  const std::int64_t probes = std::min(sequences, kMostProbes);
  r.rest = drift_at_rest(model, probes, kRestSteps);
  r.turning = turn_curve(model);
  r.velocity_noise = velocity_noise_curve(model, probes, kTestLength);
  r.state_noise = state_noise_curve(model, probes, kTestLength);
  if (model.has_gain()) {
    const auto K = static_cast<std::size_t>(r.recipe.actions);
    const auto right = static_cast<std::size_t>(right_action(r.recipe));
    for (int i = 1; i <= kGainPoints; ++i) {
      const double v = kFastest * i / kGainPoints;
      r.gains.velocity.push_back(v);
      r.gains.now.push_back(gains_at(model.gain_parameters(), v, 0)[right]);
      r.gains.before.push_back(gains_at(model.gain_parameters(), 0, v)[K + right]);
    }
  }
  return r;
}

std::string results_json(const Results& results) {
  json j;
  j["schema"] = kResultsSchema;
  j["kind"] = "annulus ring-attractor results";
  j["version"] = build_info().version;
  j["commit"] = build_info().commit;
  j["device"] = results.device;
  j["error"] = "circular |decoded - target|, radians";
  j["turning_at_once"] = rounded(results.turning_at_once);
  for (const RecipeResult& r : results.recipes) {
    json one;
    one["recipe"] = to_json(r.recipe);
    one["parameters"] = r.parameters;
    one["seconds"] = rounded(r.seconds);
    one["test"] = {to_json(r.test, kLead), to_json(r.long_test, kLead),
                   to_json(r.abrupt, kAbruptLead)};
    one["learned"] = r.learned();
    one["growth"] = rounded(r.growth());
    one["rest"] = {{"steps", r.rest.mean.size()},
                   {"starts", r.rest.starts},
                   {"mean", rounded(r.rest.mean.back())},
                   {"max", rounded(r.rest.most.back())}};
    one["turning"] = {{"told", all_rounded(r.turning.told)},
                      {"turned", all_rounded(r.turning.turned)}};
    one["velocity_noise"] = to_json(r.velocity_noise);
    one["state_noise"] = to_json(r.state_noise);
    for (const double v : r.long_test.curve) one["curve"].push_back(rounded(v));
    j["recipes"].push_back(one);
  }
  for (const Peer& p : results.peers) {
    j["peers"].push_back({{"name", p.name},
                          {"T", p.T},
                          {"mean", p.mean},
                          {"std", p.std},
                          {"max", p.max},
                          {"final", p.final}});
  }
  return j.dump(1, ' ', false, json::error_handler_t::replace) + "\n";
}

std::string curve_csv(const RecipeResult& r) {
  std::string csv = "step,length,rate,loss,error\n";
  for (std::size_t i = 0; i < r.history.loss.size(); ++i) {
    const auto step = static_cast<std::int64_t>(i);
    csv += fmt::format("{},{},{:.9g},{:.9g},{:.9g}\n", step, length_at(r.recipe, step),
                       rate_at(r.recipe.schedule, step, r.recipe.steps), r.history.loss[i],
                       r.history.error[i]);
  }
  return csv;
}

std::vector<ResultRow> result_rows(const Results& results) {
  std::vector<ResultRow> rows;
  for (const RecipeResult& r : results.recipes) {
    for (const Evaluation* e : {&r.test, &r.long_test, &r.abrupt}) {
      rows.push_back({r.recipe.name, e == &r.test, e == &r.abrupt, r.learned(), r.recipe.steps,
                      r.parameters, r.seconds, *e});
    }
  }
  for (const Peer& p : results.peers) {
    const auto learned = p.T < kTestLength ? std::nullopt : std::optional<bool>(p.mean < kLearned);
    rows.push_back({p.name, true, false, learned, p.steps, p.parameters, p.seconds, p});
  }
  return rows;
}

std::string verdict(std::optional<bool> learned) {
  return learned ? (*learned ? "yes" : "no") : "";
}

std::vector<std::string> what_did_not_learn(const Results& results) {
  std::vector<std::string> lines;
  for (const RecipeResult& r : results.recipes) {
    if (r.learned()) continue;
    lines.push_back(fmt::format(
        "{} did not learn: mean error {:.2f} rad over {} steps, and learned is below {:g} "
        "(guessing: {:.2f})",
        r.recipe.name, r.test.mean, r.test.T, kLearned, std::numbers::pi / 2));
  }
  return lines;
}

std::string results_table(const Results& results) {
  std::string s =
      "| model | learned | steps | seconds | parameters | T | mean rad | std | max | final |\n"
      "|---|---|--:|--:|--:|--:|--:|--:|--:|--:|\n";
  for (ResultRow& r : result_rows(results)) {
    r.name = files::escaped(r.name);  // a peer's may be anything
    std::replace(r.name.begin(), r.name.end(), '|', '?');
    s += fmt::format("| {}{} | {} | {} | {} | {} | {} | {:.4f} | {:.4f} | {:.3f} | {:.4f} |\n",
                     r.name, r.abrupt ? ", moving at once" : "", verdict(r.learned),
                     r.steps > 0 ? fmt::format("{}", r.steps) : "",
                     r.seconds > 0 ? fmt::format("{:.1f}", r.seconds) : "",
                     r.parameters > 0 ? fmt::format("{}", r.parameters) : "", r.error.T,
                     r.error.mean, r.error.std, r.error.max, r.error.final);
  }
  return s;
}

}  // namespace annulus::train
