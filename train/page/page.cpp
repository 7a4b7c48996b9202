#include "train/page/page.h"

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

// A figure, drawn for both kinds of screens, and what to look for in it; nothing where it is empty.
template <class Figure>
std::string card(const std::string& look, Width width, Figure&& figure) {
  const std::string wide = figure(width);
  if (wide.empty()) return "";
  return fmt::format(
      "<div class=\"card{}\"><div class=\"wide\">{}</div><div class=\"narrow\">{}</div>"
      "<p class=\"look\">{}</p></div>",
      width == Width::kFull ? " alone" : "", wide, figure(Width::kNarrow), look);
}
// One that is small enough for either.
std::string card(const std::string& look, const std::string& figure) {
  return fmt::format("<div class=\"card\">{}<p class=\"look\">{}</p></div>", figure, look);
}

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
                                    {"steps", true},
                                    {"mean rad"},
                                    {"mean °"},
                                    {"learned", true},
                                    {"std"},
                                    {"max"},
                                    {"final"},
                                    {"trained"},
                                    {"time"},
                                    {"parameters"}});
  for (const ResultRow& r : result_rows(results)) {
    const auto said = [&](bool is, const std::string& word) {
      return cell(r.first && is ? word : "");
    };
    s += r.first ? "<tr class=\"g\">" : "<tr>";
    s += cell(r.first ? text(r.name, 48) : "", "l wrap") +
         cell(fmt::format("{}{}", r.error.T, r.abrupt ? ", moving almost at once" : ""), "l wrap") +
         cell(radians(r.error.mean), "ours") +
         cell(fmt::format("{:.2f}", r.error.mean * 180 / std::numbers::pi)) +
         cell(r.first ? verdict(r.learned) : "", r.learned == false ? "l bad" : "l") +
         cell(radians(r.error.std)) + cell(fmt::format("{:.3f}", r.error.max)) +
         cell(radians(r.error.final)) + said(r.steps > 0, fmt::format("{} steps", r.steps)) +
         said(r.seconds > 0, fmt::format("{:.0f} s", r.seconds)) +
         said(r.parameters > 0, fmt::format("{}", r.parameters)) + "</tr>";
  }
  return s + std::string(draw::kCloseTable);
}

// The model and its task in formulas, for any recipe.
constexpr const char* kEquations =
    "<h3>The equations</h3><div class=\"card alone\">"
    "<p class=\"eq\">y<sub>i</sub> = J<sub>0</sub> Σ<sub>j</sub> r<sub>j</sub> + J<sub>1</sub> "
    "Σ<sub>j</sub> Wo<sub>ij</sub> r<sub>j</sub> + Σ<sub>k</sub> A<sub>k</sub> Σ<sub>j</sub> "
    "Wa<sub>kij</sub> r<sub>j</sub> <small>what neuron i of N receives in a step</small></p>"
    "<p class=\"eq\">r<sub>i</sub> ← (1 − α) r<sub>i</sub> + α F(y<sub>i</sub>) "
    "<small>its new activity; Wo and Wa are learned, J<sub>0</sub>, J<sub>1</sub>, α and F "
    "given</small></p>"
    "<p class=\"eq\">A = (max(−v, 0), max(v, 0)) <small>the actions: how fast to the left, how "
    "fast "
    "to the right; a gain network, where there is one, makes them of this velocity and the one "
    "before</small></p>"
    "<p class=\"eq\">angle = atan2(Σ<sub>i</sub> r<sub>i</sub> sin(2πi/N), Σ<sub>i</sub> "
    "r<sub>i</sub> "
    "cos(2πi/N)) <small>where the bump points</small></p>"
    "<p class=\"eq\">L = mean |u − (cos θ, sin θ)|² + 0.2 mean (S − S<sub>first</sub>)² <small>the "
    "loss: "
    "u is the direction of the bump, θ the angle wanted, S = Σ<sub>i</sub> "
    "|r<sub>i</sub>|</small></p></div>";

std::string recipe_list(const RecipeResult& result) {
  const Recipe& r = result.recipe;
  std::string s = "<dl>";
  const auto row = [&](const char* key, const std::string& value) {
    s += fmt::format("<dt>{}</dt><dd>{}</dd>", text(key), text(value));
  };
  row("network", fmt::format("{} neurons, {} actions, {}, J0 {:g}, J1 {:g}, alpha {:g}", r.neurons,
                             r.actions, name_of(r.activation), r.J0, r.J1, r.alpha));
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
  row("noise", r.noise.velocity > 0 || r.noise.state > 0
                   ? fmt::format("{:g} rad in the velocity, {:g} of a peak in the state",
                                 r.noise.velocity, r.noise.state)
                   : "none");
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
  s += card(
      "The bright band is the bump. It should lie under the line, which is the true angle, all "
      "the way to the right, and keep its brightness and width once it has settled.",
      Width::kFull, [&](Width w) {
        return bump_figure(r, w, w == Width::kNarrow ? detail.columns / 2 : detail.columns);
      });
  s += card(
      "The thin line should hide in the thick one. Where it leaves for good the ring has lost "
      "its way.",
      Width::kFull, [&](Width w) { return angle_figure(r, w); });
  s += "<h3>Its weights</h3><div class=\"beside three\">";
  s += card("Look for a band along the diagonal: neurons that excite their neighbours hold a bump.",
            matrix_figure("Wo, which always acts", r.Wo.data(), N, detail.cells));
  s += card(
      "Look for two bands of opposite sign beside the diagonal: they push a bump one way.",
      matrix_figure(turns ? "Wa, turning left" : "Wa, first action", r.Wa.data(), N, detail.cells));
  s += card("It should be the mirror image of its neighbour.",
            matrix_figure(turns ? "Wa, turning right" : "Wa, last action",
                          r.Wa.data() + right_action(r.recipe) * N * N, N, detail.cells));
  s += "</div><div class=\"beside two\">";
  s += card(
      "In a ring that works Wo is even about 0, and the two Wa are mirror images of each other.",
      Width::kHalf, [&](Width w) { return profile_figure(r, w); });
  s += card(
      "How much of a velocity turns the ring in the step it is told and in the step after. 1 and "
      "0 would be no network at all; a curve over speed makes up for the ring's own.",
      Width::kHalf, [&](Width w) { return gain_figure(r, w); });
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
  s += kEquations;
  s += "<h3>Training</h3><div class=\"beside two\">";
  s += card(
      "It should fall steeply once and end flat. A rise where sequences grow longer "
      "is no fault.",
      Width::kHalf, [&](Width w) { return loss_figure(results, w); });
  s += card(
      "Of batches as long as those of the training. A low end here and a high one in the next "
      "figure is a ring that learned to be right for so many steps only.",
      Width::kHalf, [&](Width w) { return training_error_figure(results, w); });
  s += "</div><h3>Sequences it never saw</h3>";
  s += card(
      "Flat, or rising slowly as small mistakes add up, is a ring attractor. A steep climb after "
      "the training length is none: its bump fades or bursts.",
      Width::kFull, [&](Width w) { return error_by_length_figure(results, w); });
  s += results_rows(results);
  s += fmt::format(
      "<p class=\"note\">Circular error |decoded - target|, over {} sequences and all their steps; "
      "final: at the last step; learned: mean below {:g} over {} steps (guessing is wrong by "
      "1.57). \"moving almost at once\": still for 1 % of the steps instead of "
      "10 %, as in the original's own evaluation, so that the bump has no time to settle.</p>",
      results.recipes.empty() ? 0 : results.recipes[0].test.sequences, kLearned, kTestLength);
  s += "<h3>One of the sequences, the one that turns farthest</h3>";
  if (!results.recipes.empty()) {
    s += card("What the rings are told: nothing for a tenth of the steps, then turns with pauses.",
              Width::kFull, [&](Width w) { return velocity_figure(results.recipes[0], w); });
  }
  s += card("Jumps follow fast turns and should go back; what stays is an error that adds up.",
            Width::kFull, [&](Width w) { return example_error_figure(results, w); });
  s += "<h3>Left alone, turned evenly, disturbed</h3><div class=\"beside two\">";
  s += card(
      fmt::format(
          "{} starts around the circle, then nothing for {} steps. A perfect ring stays at "
          "0; a rise is a ring that creeps, a plateau one whose bump rests at some angles only.",
          results.recipes.empty() ? 0 : results.recipes[0].rest.starts, kRestSteps),
      Width::kHalf, [&](Width w) { return rest_figure(results, w); });
  s += card(
      "How fast the bump turns when it is told one velocity all the time. On the thick line it "
      "integrates at every speed; flat at 0, it sticks; bent at the ends, it cannot follow.",
      Width::kHalf, [&](Width w) { return turn_figure(results, w); });
  s += card(
      "Noise in what it is told adds up in any integrator. On the thick line a ring makes no "
      "mistake of its own.",
      Width::kHalf, [&](Width w) { return noise_figure(results, w, true); });
  s += card(
      "Noise in what every neuron receives. A ring that averages it over its neurons rises slowly; "
      "one that rises at once is pushed about by single neurons.",
      Width::kHalf, [&](Width w) { return noise_figure(results, w, false); });
  s += "</div>";
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
