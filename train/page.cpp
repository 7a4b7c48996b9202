#include "train/page.h"

#include <fmt/format.h>

#include <algorithm>
#include <ranges>

#include "annulus/core/info.h"
#include "draw/html.h"

namespace annulus::train {
namespace {

using draw::cell;
using draw::text;
using draw::tile;

// How fine the maps are drawn; coarser where the page would grow too large.
struct Detail {
  std::size_t cells = 128;    // of a matrix, each way
  std::size_t columns = 250;  // of the activity
};

std::string radians(double v) { return fmt::format("{:.4f}", v); }
std::string degrees(double v) { return fmt::format("{:.1f}°", v * 180 / std::numbers::pi); }

std::string card(const std::string& figure, const char* more = "") {
  return figure.empty() ? "" : fmt::format("<div class=\"card{}\">{}</div>", more, figure);
}
std::string alone(const std::string& figure) { return card(figure, " alone"); }

std::string tiles(const Results& results) {
  std::string s = "<div class=\"tiles\">";
  for (const RecipeResult& r : results.recipes | std::views::reverse) {
    s += tile(radians(r.test.mean) + " rad",
              fmt::format("mean error, {} recipe{}", r.recipe.name,
                          r.learned() ? "" : ", which did not learn"),
              fmt::format("{} over {} sequences of {} steps", degrees(r.test.mean),
                          r.test.sequences, r.test.T),
              !r.learned()                  ? "failed"
              : r.recipe.name != "original" ? "lead"
                                            : "");
  }
  for (const RecipeResult& r : results.recipes | std::views::reverse) {
    s += tile(radians(r.long_test.mean) + " rad",
              fmt::format("over {} steps, {} recipe", r.long_test.T, r.recipe.name),
              fmt::format("{:.2f} times that over {}", r.growth(), r.test.T));
  }
  for (const Peer& p : results.peers) {
    if (p.T != kTestLength) continue;
    s += tile(radians(p.mean) + " rad", "mean error, " + p.name,
              fmt::format("{} over {} steps", degrees(p.mean), p.T));
  }
  s += tile(radians(results.turning_at_once) + " rad", "a perfect integrator that turns at once",
            "the target is a step behind the input");
  return s + "</div>";
}

std::string results_rows(const Results& results) {
  std::string s = draw::open_table({{"model", true},
                                    {"learned", true},
                                    {"steps"},
                                    {"time"},
                                    {"parameters"},
                                    {"sequences", true},
                                    {"mean rad"},
                                    {"std"},
                                    {"max"},
                                    {"final"},
                                    {"mean °"}});
  for (const ResultRow& r : result_rows(results)) {
    const auto said = [&](bool is, const std::string& word) {
      return cell(r.first && is ? word : "");
    };
    s += r.first ? "<tr class=\"g\">" : "<tr>";
    s +=
        cell(r.first ? text(r.name, 48) : "", "l") +
        cell(r.first ? verdict(r.learned) : "", r.learned == false ? "l bad" : "l") +
        said(r.steps > 0, fmt::format("{}", r.steps)) +
        said(r.seconds > 0, fmt::format("{:.0f} s", r.seconds)) +
        said(r.parameters > 0, fmt::format("{}", r.parameters)) +
        cell(fmt::format("{} steps{}", r.error.T, r.abrupt ? ", moving almost at once" : ""), "l") +
        cell(radians(r.error.mean), "ours") + cell(radians(r.error.std)) +
        cell(fmt::format("{:.3f}", r.error.max)) + cell(radians(r.error.final)) +
        cell(fmt::format("{:.2f}", r.error.mean * 180 / std::numbers::pi)) + "</tr>";
  }
  return s + std::string(draw::kCloseTable);
}

std::string recipe_list(const RecipeResult& result) {
  const Recipe& r = result.recipe;
  std::string s = "<dl>";
  const auto row = [&](const char* key, const std::string& value) {
    s += fmt::format("<dt>{}</dt><dd>{}</dd>", text(key), text(value));
  };
  row("network", fmt::format("{} neurons, {} actions, {}, J0 -0.1, J1 0.1, alpha 0.15", r.neurons,
                             r.actions, name_of(r.activation)));
  row("steps", fmt::format("{} of {} sequences", r.steps, r.batch));
  row("length", r.growth > 0 && r.first_length != r.length
                    ? fmt::format("{} growing to {} over the first {:g} %", r.first_length,
                                  r.length, 100 * r.growth)
                    : fmt::format("{}", r.length));
  row("Adam",
      r.schedule.final < 1
          ? fmt::format("rate {:g}, {} steps of warm-up, then a cosine down to {:g}",
                        r.schedule.rate, r.schedule.warm_up, r.schedule.rate * r.schedule.final)
          : fmt::format("rate {:g}", r.schedule.rate));
  row("velocity", r.delay > 0 ? fmt::format("told {} step{} later", r.delay, r.delay > 1 ? "s" : "")
                              : "told as it comes");
  row("gain network", r.gain_hidden > 0 ? fmt::format("{} hidden neurons, trained from step {}",
                                                      r.gain_hidden, first_gain_step(r))
                                        : "none");
  row("weights at first", fmt::format("normal, {:g} over the root of N", r.spread));
  row("still at first", fmt::format("{:g} % of a training sequence", 100 * r.lead));
  row("seed", fmt::format("{}", r.seed));
  return s + "</dl>";
}

std::string recipe_section(const RecipeResult& r, const Detail& detail) {
  const std::int64_t N = r.recipe.neurons;
  const bool turns = r.recipe.encoding == Encoding::kTurns;
  std::string s = fmt::format("<h2>The {} recipe</h2>", text(r.recipe.name, 40));
  s += recipe_list(r);
  s += "<h3>The same sequence</h3>";
  s += alone(bump_figure(r, detail.columns));
  s += alone(angle_figure(r));
  s += "<h3>Its weights</h3><div class=\"beside three\">";
  s += card(matrix_figure("Wo, which always acts", r.Wo.data(), N, detail.cells));
  s += card(
      matrix_figure(turns ? "Wa, turning left" : "Wa, first action", r.Wa.data(), N, detail.cells));
  s += card(matrix_figure(turns ? "Wa, turning right" : "Wa, last action",
                          r.Wa.data() + right_action(r.recipe) * N * N, N, detail.cells));
  s += "</div><div class=\"beside two\">";
  s += card(profile_figure(r)) + card(gain_figure(r));
  return s + "</div>";
}

// What a reader takes away from the page: never that a run learned which did not.
std::string heading(const Results& results) {
  std::string learned, failed;
  for (const RecipeResult& r : results.recipes) {
    std::string& names = r.learned() ? learned : failed;
    names += (names.empty() ? "" : ", ") + text(r.recipe.name, 40);
  }
  if (failed.empty()) return "A ring attractor that learned to keep its bearings";
  if (learned.empty()) return "A ring attractor that did not learn to keep its bearings";
  return fmt::format("Keeping its bearings: {} learned to, {} did not", learned, failed);
}

std::string render_with(const Results& results, const Detail& detail) {
  std::string s = fmt::format(
      "<p class=\"lede\">A recurrent network is told how fast it turns, step by step, and must "
      "know "
      "where it points. Its state is a bump of activity on a ring of neurons; training has to find "
      "the weights that hold the bump still when nothing happens and carry it around when "
      "something "
      "does. Judged on sequences it never saw, many times longer than those of the training.</p>"
      "<p class=\"where\"><b>{}</b>, annulus {} ({})</p>",
      text(results.device), text(build_info().version), text(build_info().commit, 40));
  s += tiles(results);
  s += "<div class=\"beside two\">" + card(loss_figure(results)) +
       card(training_error_figure(results)) + "</div>";
  s += alone(error_by_length_figure(results));
  s += results_rows(results);
  s += fmt::format(
      "<p class=\"note\">Circular error |decoded - target|, over {} sequences and all their steps; "
      "final: at the last step; learned: mean below {:g} over {} steps (guessing is wrong by "
      "1.57). \"moving almost at once\": still for 1 % of the steps instead of "
      "10 %, as in the original's own evaluation, so that the bump has no time to settle.</p>",
      results.recipes.empty() ? 0 : results.recipes[0].test.sequences, kLearned, kTestLength);
  s += "<h3>One of the sequences, the one that turns farthest</h3>";
  s += alone(example_error_figure(results));
  for (const RecipeResult& r : results.recipes | std::views::reverse)
    s += recipe_section(r, detail);
  return draw::page(
      "Ring attractor", heading(results), s,
      "Task: start anywhere on the circle; angular velocity zero for the first tenth, "
      "then zero with probability 0.2, 0.5 or 0.8 (one of them a sequence), else uniform within "
      "±18° a step. The target of a step is the start plus all velocities before that step, so the "
      "velocity of a step is wanted in the angle of the next: who turns at once is wrong by it. "
      "Loss: squared distance of population vector's direction and target on the unit circle, plus "
      "0.2 times the squared deviation of the summed activity from that of the first step. "
      "The same seed gives this page again.");
}

}  // namespace

std::string render_page(const Results& results) {
  Detail detail;
  for (;;) {
    std::string page = render_with(results, detail);
    if (page.size() <= draw::kMaxPageBytes || detail.cells <= 8) return page;
    detail.cells = detail.cells * 3 / 4;
    detail.columns = std::max<std::size_t>(detail.columns * 3 / 4, 8);
  }
}

}  // namespace annulus::train
