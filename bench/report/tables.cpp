#include "bench/report/parts.h"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>

#include "draw/html.h"
#include "draw/scale.h"

namespace annulus::bench::report {
namespace {

using draw::cell;
using draw::Column;
using draw::text;
using draw::times;

constexpr double kMiB = 1 << 20;

// Four significant digits with their zeros, so that a column lines up.
std::string ms(double v) {
  return v >= 1e4 || v == 0 ? fmt::format("{:.4g}", v) : fmt::format("{:#.4g}", v);
}
std::string mib(double bytes) { return fmt::format("{:.1f}", bytes / kMiB); }

// One row of the page's budget, or one more that is left out.
bool take(std::size_t* budget, std::size_t* omitted) {
  if (*budget == 0) {
    ++*omitted;
    return false;
  }
  --*budget;
  return true;
}

// What the seed's table has beside its own figure: at most eight columns of all records.
struct SeedColumns {
  std::vector<std::string> names;
  std::string hardware;

  void add(const Record& r) {
    if (!r.seed) return;
    hardware = r.seed->hardware;
    for (const auto& [name, value] : r.seed->columns) {
      const bool known = std::find(names.begin(), names.end(), name) != names.end();
      if (!known && names.size() < 8) names.push_back(name);
    }
  }
};

std::optional<double> seed_value(const Record& r, const std::string& column) {
  std::optional<double> found;
  if (!r.seed) return found;
  for (const auto& [name, value] : r.seed->columns) {
    if (name == column) found = value;
  }
  return found;
}

std::string problem_cells(const ProblemGroup& g) {
  return "<tr class=\"g\">" + cell(text(g.row, 60), "l row") + cell(text(g.dtype, 12), "l dim");
}

bool has_seed_time(const Record& r) { return r.seed && r.seed->unit == "ms"; }

// The length says time / floor on a log scale: nothing at the floor, full at a hundred times it.
std::string bar(double ratio, int style) {
  const double width = std::clamp(30 * std::log10(std::max(ratio, 1.0)), 1.0, 60.0);
  return fmt::format(
      "<span class=\"track\"><span class=\"bar {}\" style=\"width:{:.0f}px\"></span></span>",
      css_of(style), width);
}

std::string error_cell(const Record& r) {
  if (!r.error) return cell("");
  const double v = r.error->value;
  return fmt::format("<td title=\"{}\"{}>{}</td>", text(r.error->metric),
                     std::isfinite(v) ? "" : " class=\"bad\"",
                     v == 0          ? "0"
                     : std::isnan(v) ? "NaN"
                                     : fmt::format("{:.1e}", v));
}

// Why the row above does not count.
std::string reason_row(const Record& r, std::size_t columns) {
  return fmt::format("<tr><td></td><td></td><td class=\"why bad\" colspan=\"{}\">{}: {}</td></tr>",
                     columns, name_of(r.status), text(r.reason));
}

std::string time_row(const Place& place, const ProblemGroup& g, const Record& r, bool first,
                     bool with_seed) {
  const int style = style_of(place, r.impl);
  std::string row = first ? "<tr class=\"g\">" : "<tr>";
  row += cell(first ? text(g.row, 60) : "", "l row");
  row += cell(first ? text(g.dtype, 12) : "", "l dim");
  row += cell(legend_mark(style, false) + text(r.impl, 32), r.impl == "annulus" ? "l ours" : "l");
  if (!r.time_ms) {
    return row + fmt::format("<td class=\"why\" colspan=\"{}\">{}: {}</td></tr>", with_seed ? 8 : 7,
                             name_of(r.status), text(r.reason));
  }
  row += cell(ms(r.time_ms->median), r.impl == "annulus" ? "ours" : "");
  row += cell(ms(r.time_ms->p95), "dim");
  row += cell(r.floor_ms ? ms(*r.floor_ms) : "", "dim");
  const auto ratio = over_floor(r);
  row += cell(ratio ? bar(*ratio, style) + times(*ratio) : "");
  // What is not right is shown with its time and its reason, and held against nothing.
  const bool ok = r.status == Status::kOk;
  const Record* ours = g.find("annulus");
  row += cell(ok && ours && ours != &r && ours->time_ms->median > 0
                  ? times(r.time_ms->median / ours->time_ms->median)
                  : "");
  row += error_cell(r);
  row += cell(r.peak_bytes ? mib(*r.peak_bytes) : "");
  if (!with_seed) {
    // No row of this table has one: the column is not there.
  } else if (ok && has_seed_time(r) && r.time_ms->median > 0) {
    row += fmt::format("<td title=\"{}\">{} <span class=\"dim\">({})</span></td>",
                       text(r.seed->hardware), ms(r.seed->value),
                       times(r.seed->value / r.time_ms->median));
  } else {
    row += cell("");
  }
  row += "</tr>";
  if (!ok) row += reason_row(r, with_seed ? 9 : 8);
  return row;
}

}  // namespace

std::string left_out(std::size_t rows) {
  if (rows == 0) return "";
  return fmt::format("<p class=\"note\">{} in the result files; the page keeps to a megabyte.</p>",
                     rows == 1 ? "1 more row is" : fmt::format("{} more rows are", rows));
}

int style_of(const Place& place, const std::string& impl) {
  if (impl == "annulus") return 0;
  if (impl == "move") return 1;
  int other = 2;
  for (const std::string& name : place.impls) {
    if (name == "annulus" || name == "move") continue;
    if (name == impl) break;
    ++other;
  }
  return other;
}

std::string time_table(const Place& place, std::size_t* budget) {
  if (place.time.empty()) return "";
  bool with_seed = false;
  for (const ProblemGroup& g : place.time) {
    for (const Record* r : g.records) with_seed = with_seed || has_seed_time(*r);
  }
  std::vector<Column> heads = {
      {"row", true}, {"dtype", true},  {"implementation", true}, {"median ms"}, {"p95"},
      {"floor"},     {"time / floor"}, {"time / annulus"},       {"error"},     {"peak MiB"}};
  if (with_seed) heads.push_back({"seed ms (seed / ours)"});
  std::string s = "<h3>Every row</h3>" + draw::open_table(heads);
  std::size_t omitted = 0;
  for (const ProblemGroup& g : place.time) {
    bool first = true;
    for (const Record* r : g.records) {
      if (!take(budget, &omitted)) continue;
      s += time_row(place, g, *r, first, with_seed);
      first = false;
    }
  }
  return s + std::string(draw::kCloseTable) + left_out(omitted);
}

std::string memory_table(const Place& place, std::size_t* budget) {
  if (place.memory.empty()) return "";
  SeedColumns seeds;
  for (const ProblemGroup& g : place.memory) {
    for (const Record* r : g.records) seeds.add(*r);
  }
  std::vector<Column> heads = {
      {"row", true}, {"dtype", true}, {"implementation", true}, {"peak MiB"}, {"of it scratch"}};
  for (const auto& c : seeds.names) heads.push_back({c});
  heads.push_back({"seed / ours"});
  const std::string beside =
      seeds.hardware.empty() ? "" : ", beside the seed's on " + text(seeds.hardware);
  std::string s = "<h3>Memory" + beside + "</h3>" + draw::open_table(heads);
  std::size_t omitted = 0;
  for (const ProblemGroup& g : place.memory) {
    for (const Record* r : g.records) {
      if (!take(budget, &omitted)) continue;
      s += problem_cells(g) + cell(text(r->impl, 32), "l") +
           cell(r->peak_bytes ? mib(*r->peak_bytes) : "", "ours") +
           cell(r->workspace_bytes ? mib(*r->workspace_bytes) : "", "dim");
      for (const auto& c : seeds.names) {
        const auto value = seed_value(*r, c);
        s += cell(value ? fmt::format("{:.1f}", *value) : "");
      }
      const bool ok = r->status == Status::kOk;
      const bool both = ok && r->seed && r->peak_bytes && *r->peak_bytes > 0;
      s += cell(both ? times(r->seed->value / (*r->peak_bytes / kMiB)) : "") + "</tr>";
      if (!ok) s += reason_row(*r, seeds.names.size() + 4);
    }
  }
  return s + std::string(draw::kCloseTable) + left_out(omitted);
}

std::string seed_table(const Place& place, std::size_t* budget) {
  SeedColumns seeds;
  for (const ProblemGroup& g : place.time) {
    if (const Record* r = g.find("annulus")) seeds.add(*r);
  }
  if (seeds.names.empty()) return "";
  std::vector<Column> heads = {{"row", true}, {"dtype", true}, {"ours, ms"}};
  for (const auto& c : seeds.names) heads.push_back({c});
  heads.push_back({"best of them / ours"});
  std::string s =
      fmt::format("<h3>Beside the seed's table, measured on {}</h3>", text(seeds.hardware)) +
      draw::open_table(heads);
  std::size_t omitted = 0;
  for (const ProblemGroup& g : place.time) {
    const Record* r = g.find("annulus");
    if (!r || !r->seed || r->seed->columns.empty() || !take(budget, &omitted)) continue;
    s += problem_cells(g) + cell(ms(r->time_ms->median), "ours");
    double best = 0;
    for (const auto& c : seeds.names) {
      const auto value = seed_value(*r, c);
      if (value && *value > 0 && (best == 0 || *value < best)) best = *value;
      s += cell(value ? ms(*value) : "");
    }
    s += cell(best > 0 && r->time_ms->median > 0 ? times(best / r->time_ms->median) : "") + "</tr>";
  }
  return s + std::string(draw::kCloseTable) + left_out(omitted);
}

}  // namespace annulus::bench::report
