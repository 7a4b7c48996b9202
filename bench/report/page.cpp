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
  std::size_t points = 300;  // a series and panel
  std::size_t places = 24;
};

std::string direction_title(const std::string& direction) {
  if (direction == "fwd") return "forward";
  if (direction == "bwd") return "backward";
  if (direction == "fwdbwd") return "forward and backward";
  return direction;
}

std::string direction_of(const ProblemGroup& g) {
  for (const Record* r : g.records) {
    const auto it = r->params.find("direction");
    if (it != r->params.end()) return direction_title(to_string(it->second));
  }
  return "";
}

// Small multiples by direction; one panel when there is none, or too many.
std::vector<Panel> panels_of(const Place& place) {
  std::vector<std::string> titles;
  for (const ProblemGroup& g : place.time) {
    const std::string d = direction_of(g);
    if (std::find(titles.begin(), titles.end(), d) == titles.end()) titles.push_back(d);
  }
  const bool split = titles.size() <= 3;
  if (!split) titles = {""};
  std::vector<Panel> panels;
  for (const std::string& title : titles) {
    Panel panel{title.empty() ? "time" : title, {}};
    for (const std::string& impl : place.impls) {
      panel.series.push_back({impl, style_of(place, impl), false, {}});
    }
    Series seed{"seed", 0, true, {}};
    for (const ProblemGroup& g : place.time) {
      if (split && direction_of(g) != title) continue;
      const Record* ours = g.find("annulus");
      const double floor = ours ? ours->floor_ms.value_or(0) : 0;
      for (Series& s : panel.series) {
        const Record* r = g.find(s.name);
        if (!r || !(r->time_ms->median > 0)) continue;
        // Everyone is held against the floor of the problem, so that a column is one problem.
        const double x = floor > 0 ? floor : r->floor_ms.value_or(0);
        if (!(x > 0)) continue;
        s.points.push_back({x, r->time_ms->median,
                            fmt::format("{} {}: {} {:.4g} ms, {} the floor", g.row, g.dtype, s.name,
                                        r->time_ms->median, times(r->time_ms->median / x))});
      }
      if (ours && ours->seed && ours->seed->unit == "ms" && floor > 0 && ours->seed->value > 0) {
        seed.name = "seed, " + ours->seed->hardware;
        seed.points.push_back(
            {floor, ours->seed->value,
             fmt::format("{}: {:.4g} ms on {}", g.row, ours->seed->value, ours->seed->hardware)});
      }
    }
    if (!seed.points.empty()) panel.series.push_back(std::move(seed));
    std::erase_if(panel.series, [](const Series& s) { return s.points.empty(); });
    if (!panel.series.empty()) panels.push_back(std::move(panel));
  }
  return panels;
}

std::string place_name(const Place& place) {
  return fmt::format("{} on {}", place.suite,
                     place.hardware.empty() ? place.device : place.hardware);
}

std::string tiles(const Place& place) {
  std::string s = "<div class=\"tiles\">";
  const FloorSpread f = floor_spread(place, "annulus");
  if (f.rows > 0) {
    s += tile(times(f.median), "the floor, median row", "annulus over " + counted(f.rows, "row"),
              "lead");
    s += tile(times(f.best), "the floor, best row", f.best_row);
    s += tile(times(f.worst), "the floor, worst row", f.worst_row);
  }
  // Peers run under PyTorch; where annulus was timed there too, that is the fair one to hold against
  // them.
  const bool in_torch =
      std::find(place.impls.begin(), place.impls.end(), kOursInTorch) != place.impls.end();
  for (const std::string& impl : place.impls) {
    if (impl == "annulus" || impl == kOursInTorch || is_our_option(impl)) continue;
    const bool move = impl == "move";
    const Comparison c = compare(place, in_torch && !move ? kOursInTorch : "annulus", impl);
    if (c.rows == 0) continue;
    if (move) {
      // Against the yardstick the reader asks how much longer we take, so the ratio is turned.
      s += tile(times(1 / c.geometric_mean), "the time of a plain move",
                fmt::format("{} to {} over {}", times(1 / c.high), times(1 / c.low),
                            counted(c.rows, "row")));
    } else {
      const bool faster = c.geometric_mean >= 1;
      s += tile(times(faster ? c.geometric_mean : 1 / c.geometric_mean),
                (faster ? "faster than " : "slower than ") + impl,
                fmt::format("{} to {} over {}{}", times(c.low), times(c.high),
                            counted(c.rows, "row"), c.same_run ? ", same run" : ""));
    }
  }
  s += tile(fmt::format("{}", place.ok), place.ok == 1 ? "row measured" : "rows measured",
            fmt::format("{} skipped, {} failed", place.skipped, place.failed),
            place.failed > 0 ? "bad" : "");
  return s + "</div>";
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

std::string place_section(const Place& place, const Limits& limits, std::size_t* budget) {
  std::string s = where_line(place);
  const auto panels = panels_of(place);
  std::size_t thinned = 0;
  const std::string drawing = chart(panels, limits.points, &thinned);
  if (!drawing.empty()) {
    s += "<div class=\"legend\">";
    std::vector<std::string> shown;
    for (const Panel& panel : panels) {
      for (const Series& series : panel.series) {
        if (std::find(shown.begin(), shown.end(), series.name) != shown.end()) continue;
        shown.push_back(series.name);
        s += fmt::format("<span>{}{}</span>", legend_mark(series.style, series.hollow),
                         text(series.name, 48));
      }
    }
    s += "</div><div class=\"card panels\">" + drawing + "</div>";
    s += "<p class=\"note\">Each column of marks is one problem; the diagonal is the floor, the "
         "least "
         "time this machine could take. Point at a mark to read it.";
    if (thinned > 0) s += fmt::format(" {} marks were left out to keep the page small.", thinned);
    s += "</p>";
  }
  s += seed_table(place, budget);
  s += time_table(place, budget);
  s += memory_table(place, budget);
  return s;
}

std::string render_within(const Model& model, const Limits& limits) {
  const std::size_t shown = std::min(model.places.size(), limits.places);
  std::string s = fmt::format(
      "<p class=\"lede\">{}, {}. Every time stands beside the least this "
      "hardware could take and the error against double precision.</p>",
      counted(model.records, "row"), counted(model.places.size(), "place"));
  for (std::size_t i = 0; i < shown; ++i) {
    s += fmt::format("<h3>{}</h3>", text(place_name(model.places[i])));
    s += tiles(model.places[i]);
  }
  if (shown < model.places.size()) {
    s += fmt::format("<p class=\"note\">{} more places are in the result files.</p>",
                     model.places.size() - shown);
  }
  std::size_t budget = limits.table_rows;
  for (std::size_t i = 0; i < shown; ++i) {
    const bool new_suite = i == 0 || model.places[i].suite != model.places[i - 1].suite;
    if (new_suite) s += fmt::format("<h2>{}</h2>", text(model.places[i].suite, 80));
    s += place_section(model.places[i], limits, &budget);
  }
  return draw::page(
      "Annulus benchmark report", "Annulus benchmark report", s,
      "Time: median of interleaved repetitions with cold caches. Floor: the larger of "
      "bytes / copy bandwidth and flops / GEMM rate of the products used, for a recurrence plus a "
      "barrier a step, and never less than an empty launch; all measured at the start of the "
      "run that timed the row. "
      "move: the same bytes moved and nothing else. Error: as the cell's tooltip says, against a "
      "double-precision definition. Peak: inputs, outputs and scratch. Seed: the table that "
      "started "
      "the suite, on the hardware named.");
}

}  // namespace

std::string render(const Model& model) {
  Limits limits;
  for (;;) {
    std::string page = render_within(model, limits);
    const bool smallest = limits.table_rows == 0 && limits.points <= 8 && limits.places <= 1;
    if (page.size() <= draw::kMaxPageBytes || smallest) return page;
    // Thousands of rows: show fewer of everything until it fits.
    limits.table_rows = limits.table_rows * 2 / 3;
    limits.points = std::max<std::size_t>(limits.points * 2 / 3, 8);
    limits.places = std::max<std::size_t>(limits.places * 3 / 4, 1);
  }
}

}  // namespace annulus::bench::report
