#include <fmt/format.h>

#include <algorithm>
#include <cmath>

#include "bench/report/model.h"
#include "bench/report/parts.h"
#include "draw/html.h"
#include "draw/scale.h"
#include "files/words.h"

namespace annulus::bench::report {
namespace {

using draw::text;
using draw::tile;
using draw::times;
using files::counted;

struct Limits {
  std::size_t table_rows = 1600;
  std::size_t panels = 6;  // a place
  std::size_t places = 24;
};
constexpr std::size_t kMostCards = 4;

std::string place_name(const Place& place) {
  return fmt::format("{} on {}", place.suite,
                     place.hardware.empty() ? place.device : place.hardware);
}

// Of every suite the place that says most: the one with the most times.
std::vector<const Place*> leads_of(const Model& model) {
  std::vector<const Place*> leads;
  for (const Place& p : model.places) {  // sorted by suite
    if (leads.empty() || leads.back()->suite != p.suite) {
      leads.push_back(&p);
    } else if (p.ok > leads.back()->ok) {
      leads.back() = &p;
    }
  }
  return leads;
}

std::string floor_card(const Place& place, const std::string& what) {
  const FloorSpread f = floor_spread(place, "annulus");
  if (f.rows == 0) return "";
  std::string detail =
      fmt::format("{} to {} over {}", times(f.best), times(f.worst), counted(f.rows, "row"));
  if (f.below > 0) detail += fmt::format("; {} below, with the reason", f.below);
  return tile(times(f.median), "the floor, median row" + what, detail, "lead");
}

// Ours against the fastest of the peers, row by row: from torch where that was timed.
std::string peer_card(const Place& place, const std::string& what) {
  std::size_t rows = 0, behind = 0;
  double log_sum = 0, low = 0, high = 0;
  bool from_torch = true;
  for (const ProblemGroup& g : place.time) {
    const Record* in_torch = g.find(kOursInTorch);
    const Record* ours = in_torch ? in_torch : g.find("annulus");
    const Record* peer = fastest_peer(g);
    if (!ours || !peer || !(ours->time_ms->median > 0)) continue;
    const double ratio = peer->time_ms->median / ours->time_ms->median;
    from_torch = from_torch && in_torch;
    low = rows == 0 ? ratio : std::min(low, ratio);
    high = std::max(high, ratio);
    behind += ratio < 1;
    log_sum += std::log(ratio);
    ++rows;
  }
  if (rows == 0) return "";
  const double mean = std::exp(log_sum / static_cast<double>(rows));
  std::string detail = fmt::format("{}{} to {} over {}", from_torch ? "from torch, " : "",
                                   times(low), times(high), counted(rows, "row"));
  if (behind > 0) detail += fmt::format("; slower in {}", behind);
  return tile(times(mean >= 1 ? mean : 1 / mean),
              (mean >= 1 ? "faster than the fastest peer" : "slower than the fastest peer") + what,
              detail);
}

// What calling through PyTorch adds.
std::string torch_card(const Place& place) {
  const Comparison c = compare(place, "annulus", kOursInTorch);
  if (c.rows == 0) return "";
  return tile(times(c.geometric_mean), "the bare kernel, called from torch",
              fmt::format("{} to {} over {}", times(c.low), times(c.high), counted(c.rows, "row")));
}

std::string count_card(const Place& place) {
  return tile(fmt::format("{}", place.ok), place.ok == 1 ? "row measured" : "rows measured",
              fmt::format("{} skipped, {} failed", place.skipped, place.failed),
              place.failed > 0 ? "bad" : "");
}

std::string cards(std::vector<std::string> all) {
  std::erase(all, "");
  if (all.size() > kMostCards) all.resize(kMostCards);
  std::string s = "<div class=\"tiles\">";
  for (const std::string& card : all) s += card;
  return s + "</div>";
}

std::string place_cards(const Place& place) {
  return cards({peer_card(place, ""), floor_card(place, ""), torch_card(place), count_card(place)});
}

// The first screen: a chart a suite, then four cards at most.
std::string story(const Model& model) {
  const auto leads = leads_of(model);
  std::string charts;
  std::vector<std::string> all;
  for (std::size_t i = 0; i < std::min(leads.size(), kMostCards); ++i) {
    const Panel panel = story_of(panels_of(*leads[i], 12));
    const std::string drawing =
        chart(panel, fmt::format("{}, {} {}", leads[i]->suite, panel.direction, panel.dtype));
    if (drawing.empty()) continue;
    charts += fmt::format("<div class=\"card\">{}<p class=\"note\">{}</p></div>", drawing,
                          text(place_name(*leads[i])));
  }
  const std::string s = charts.empty() ? "" : "<div class=\"beside two\">" + charts + "</div>";
  if (model.places.size() == 1) return s + place_cards(model.places[0]);
  for (const auto card : {peer_card, floor_card}) {
    for (const Place* place : leads) {
      if (all.size() < kMostCards) all.push_back(card(*place, ", " + place->suite));
      std::erase(all, "");
    }
  }
  return s + cards(std::move(all));
}

std::string where_line(const Place& place) {
  std::string s = fmt::format("<p class=\"where\"><b>{}</b> ({})", text(place.hardware),
                              text(place.device, 24));
  if (!place.ceilings.empty()) {
    s += fmt::format(", copy {:.4g} GB/s", place.ceilings[0].copy_gbs);
    double step = 0;
    for (const Ceiling& c : place.ceilings) {
      step = std::max(step, c.step_us);
      if (!(c.gemm_gflops > 0)) continue;
      s += fmt::format(", {}GEMM ", c.gemm ? std::string(name_of(*c.gemm)) + " " : "");
      s += c.gemm_gflops >= 1e4 ? fmt::format("{:.4g} TFLOP/s", c.gemm_gflops * 1e-3)
                                : fmt::format("{:.4g} GFLOP/s", c.gemm_gflops);
    }
    if (step > 0) s += fmt::format(", {:.3g} µs between two steps", step);
    s += place.one_run ? " measured in the same run"
                       : " measured in one of several runs; each floor is by those of its own run";
  }
  if (!place.commits.empty()) {
    s += ", commit ";
    for (std::size_t i = 0; i < std::min<std::size_t>(place.commits.size(), 4); ++i) {
      s += (i ? ", " : "") + text(place.commits[i], 40);
    }
  }
  if (!place.first_date.empty()) s += ", " + text(place.first_date, 40);
  return s + "</p>";
}

std::string below_note(const Place& place) {
  const auto below = below_floor(place);
  if (below.empty()) return "";
  constexpr std::size_t kShown = 6;
  std::string s = fmt::format("<p class=\"note\">Below their floor, which for {} is none: ",
                              below.size() == 1 ? "this row" : "these rows");
  for (std::size_t i = 0; i < std::min(below.size(), kShown); ++i) {
    const Record& r = *below[i].record;
    s += fmt::format("{}<b>{} {}</b> {} at {} ({})", i ? "; " : "", text(r.row, 60),
                     text(r.dtype, 12), text(label_of(r.impl), 40), times(below[i].ratio),
                     text(below[i].reason, 240));
  }
  if (below.size() > kShown) s += fmt::format("; and {} more", below.size() - kShown);
  return s + ".</p>";
}

std::string place_section(const Place& place, const Limits& limits, const Words& words,
                          bool with_cards, std::size_t* budget) {
  std::string s = fmt::format("<h3>{}</h3>", text(place_name(place))) + where_line(place);
  if (with_cards) s += place_cards(place);
  s += below_note(place);
  std::string drawings;
  for (const Panel& panel : panels_of(place, limits.panels)) {
    const std::string title =
        panel.direction.empty() ? panel.dtype : panel.direction + ", " + panel.dtype;
    drawings += chart(panel, title);
  }
  if (!drawings.empty()) s += "<div class=\"card panels\">" + drawings + "</div>";
  s += implementation_table(place, words);
  s += problem_table(place, budget);
  s += original_table(place, budget);
  s += memory_table(place, budget);
  s += time_table(place, budget);
  return s;
}

std::string render_within(const Model& model, const Words& words, const Limits& limits,
                          const std::string& more) {
  const std::size_t shown = std::min(model.places.size(), limits.places);
  std::string s = fmt::format(
      "<p class=\"lede\">{}, {}. Every time stands beside its floor (what the "
      "problem would take at the best rates that its run measured) and the error against double "
      "precision.</p>",
      counted(model.records, "row"), counted(model.places.size(), "place"));
  std::size_t failed = 0;
  for (const Place& place : model.places) failed += place.failed;
  if (failed > 0) {
    s += fmt::format("<p class=\"bad\"><b>{} failed</b>: the reason stands beside each.</p>",
                     counted(failed, "row"));
  }
  s += story(model);
  std::size_t budget = limits.table_rows;
  for (std::size_t i = 0; i < shown; ++i) {
    const bool new_suite = i == 0 || model.places[i].suite != model.places[i - 1].suite;
    if (new_suite) s += fmt::format("<h2>{}</h2>", text(model.places[i].suite, 80));
    s += place_section(model.places[i], limits, words, model.places.size() > 1, &budget);
  }
  if (shown < model.places.size()) {
    s += fmt::format("<p class=\"note\">{} more places are in the result files.</p>",
                     model.places.size() - shown);
  }
  s += more;
  return draw::page("Annulus benchmark report", "Annulus benchmark report", s,
                    "Time: median of interleaved repetitions with cold caches. Floor: the larger "
                    "of bytes / bandwidth and "
                    "flops / GEMM rate of the products used, for a recurrence plus a barrier a "
                    "step, and never less than an "
                    "empty launch. Bandwidth is the faster of a copy larger than the caches, at "
                    "the start of the run, and of "
                    "the move of the row's own bytes (reads, writes and footprint as the row has "
                    "them) at its fastest; the "
                    "others are measured at the start of the run. A row that is faster still is "
                    "named with the reason. "
                    "From torch: ours is the operator as PyTorch calls it, kernel the same without "
                    "PyTorch. Error: as the "
                    "cell's tooltip says, against a double-precision definition. Peak: inputs, "
                    "outputs and scratch. Original: "
                    "the table that started the suite, on the hardware named.");
}

}  // namespace

std::string render(const Model& model, const Words& words, const std::string& more) {
  Limits limits;
  for (;;) {
    std::string page = render_within(model, words, limits, more);
    const bool smallest = limits.table_rows == 0 && limits.panels <= 1 && limits.places <= 1;
    if (page.size() <= draw::kMaxPageBytes || smallest) return page;
    // Thousands of rows: show fewer of everything until it fits.
    limits.table_rows = limits.table_rows * 2 / 3;
    limits.panels = std::max<std::size_t>(limits.panels * 2 / 3, 1);
    limits.places = std::max<std::size_t>(limits.places * 3 / 4, 1);
  }
}

}  // namespace annulus::bench::report
