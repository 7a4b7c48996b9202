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

// What the original's table has beside its own figure: at most eight columns of all records.
struct OriginalColumns {
  std::vector<std::string> names;
  std::string hardware;

  void add(const Record& r) {
    if (!r.original) return;
    hardware = r.original->hardware;
    for (const auto& [name, value] : r.original->columns) {
      const bool known = std::find(names.begin(), names.end(), name) != names.end();
      if (!known && names.size() < 8) names.push_back(name);
    }
  }
};

std::optional<double> original_value(const Record& r, const std::string& column) {
  std::optional<double> found;
  if (!r.original) return found;
  for (const auto& [name, value] : r.original->columns) {
    if (name == column) found = value;
  }
  return found;
}

std::string problem_cells(const ProblemGroup& g) {
  return "<tr class=\"g\">" + cell(text(g.row, 60), "l row") + cell(text(g.dtype, 12), "l dim");
}

bool has_original_time(const Record& r) { return r.original && r.original->unit == "ms"; }

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
                     bool with_original) {
  // The name in every line: what has scrolled away names nothing.
  const int style = style_of(place, r.impl);
  std::string row = first ? "<tr class=\"g\">" : "<tr>";
  row += cell(text(g.row, 60), first ? "l row" : "l row dim");
  row += cell(text(g.dtype, 12), "l dim");
  row += cell(legend_mark(style, false) + text(label_of(r.impl), 40),
              r.impl == "annulus" ? "l ours" : "l");
  if (!r.time_ms) {
    return row + fmt::format("<td class=\"why\" colspan=\"{}\">{}: {}</td></tr>",
                             with_original ? 8 : 7, name_of(r.status), text(r.reason));
  }
  row += cell(ms(r.time_ms->median), r.impl == "annulus" ? "ours" : "");
  row += cell(ms(r.time_ms->p95), "dim");
  const auto floor = floor_of(g, r);
  row += cell(floor ? ms(*floor) : "", "dim");
  const auto ratio = over_floor(g, r);
  row += cell(ratio ? bar(*ratio, style) + times(*ratio) : "");
  // What is not right is shown with its time and its reason, and held against nothing.
  const bool ok = r.status == Status::kOk;
  const Record* ours = g.find("annulus");
  row += cell(ok && ours && ours != &r && ours->time_ms->median > 0
                  ? times(r.time_ms->median / ours->time_ms->median)
                  : "");
  row += error_cell(r);
  row += cell(r.peak_bytes ? mib(*r.peak_bytes) : "");
  if (!with_original) {
    // No row of this table has one: the column is not there.
  } else if (ok && has_original_time(r) && r.time_ms->median > 0) {
    row += fmt::format("<td title=\"{}\">{} <span class=\"dim\">({})</span></td>",
                       text(r.original->hardware), ms(r.original->value),
                       times(r.original->value / r.time_ms->median));
  } else {
    row += cell("");
  }
  row += "</tr>";
  if (!ok) row += reason_row(r, with_original ? 9 : 8);
  return row;
}

}  // namespace

std::string left_out(std::size_t rows) {
  if (rows == 0) return "";
  return fmt::format("<p class=\"note\">{} in the result files; the page keeps to a megabyte.</p>",
                     rows == 1 ? "1 more row is" : fmt::format("{} more rows are", rows));
}

int style_of(const Place& place, const std::string& impl) {
  // Ours, the yardstick and ours from torch look the same in every chart.
  const std::string fixed[] = {"annulus", "move", kOursInTorch};
  const auto at = std::find(std::begin(fixed), std::end(fixed), impl);
  if (at != std::end(fixed)) return static_cast<int>(at - std::begin(fixed));
  int other = 3;
  for (const std::string& name : place.impls) {
    if (std::find(std::begin(fixed), std::end(fixed), name) != std::end(fixed)) continue;
    if (name == impl) break;
    ++other;
  }
  return other;
}

std::string label_of(const std::string& impl) {
  return impl == kOursInTorch ? "from torch: ours" : impl;
}

const Record* fastest_peer(const ProblemGroup& g) {
  const Record* best = nullptr;
  for (const Record* r : g.records) {
    if (r->impl == "annulus" || r->impl == kOursInTorch || r->impl == "move" ||
        is_our_option(r->impl) || r->status != Status::kOk || !r->time_ms ||
        !(r->time_ms->median > 0)) {
      continue;
    }
    if (!best || r->time_ms->median < best->time_ms->median) best = r;
  }
  return best;
}

std::string implementation_table(const Place& place, const Words& words) {
  const auto suite = words.find(place.suite);
  const bool in_torch =
      std::find(place.impls.begin(), place.impls.end(), kOursInTorch) != place.impls.end();
  std::string s =
      "<h3>Who was timed, and what each computes</h3>" +
      draw::open_table({{"implementation", true},
                        {"what it computes", true},
                        {in_torch ? "its time / ours from torch" : "its time / annulus"},
                        {"from"},
                        {"to"},
                        {"rows"}});
  for (const std::string& impl : place.impls) {
    // Peers run under PyTorch; where annulus was timed there too, that is the fair one to hold against
    // them. What is ours, and the yardstick, stand against the bare kernel.
    const bool ours = impl == "annulus" || impl == kOursInTorch || is_our_option(impl);
    const bool bare = ours || impl == "move" || !in_torch;
    const Comparison c = compare(place, bare ? "annulus" : kOursInTorch, impl);
    std::string about;
    if (suite != words.end()) {
      const auto it = suite->second.find(impl);
      if (it != suite->second.end()) about = it->second;
    }
    s += "<tr class=\"g\">" +
         cell(legend_mark(style_of(place, impl), false) + text(label_of(impl), 40),
              ours ? "l ours" : "l");
    s += cell(about.empty()
                  ? "<span class=\"dim\">not explained: this program does not know it</span>"
                  : text(about, 400),
              "why");
    if (impl == "annulus" || c.rows == 0) {
      s += cell("") + cell("") + cell("") + cell("") + "</tr>";
      continue;
    }
    s += cell(times(c.geometric_mean) +
              (bare && in_torch ? " <span class=\"dim\">of the kernel</span>" : "")) +
         cell(times(c.low), "dim") + cell(times(c.high), "dim") +
         cell(fmt::format("{}{}", c.rows, c.same_run && !bare ? ", same run" : ""), "dim") +
         "</tr>";
  }
  return s + std::string(draw::kCloseTable);
}

std::string problem_table(const Place& place, std::size_t* budget) {
  if (place.time.empty()) return "";
  bool in_torch = false, peers = false;
  for (const ProblemGroup& g : place.time) {
    in_torch = in_torch || g.find(kOursInTorch);
    peers = peers || fastest_peer(g);
  }
  std::vector<Column> heads = {{"row", true}, {"dtype", true}, {"kernel, ms"}};
  if (in_torch) heads.push_back({"from torch: ours"});
  if (peers) {
    heads.push_back({"fastest peer"});
    heads.push_back({in_torch ? "it / ours" : "it / kernel"});
  }
  for (const char* name : {"floor, set by", "kernel / floor", "error"}) heads.push_back({name});
  std::string s = "<h3>Every problem</h3>" + draw::open_table(heads);
  std::size_t omitted = 0;
  for (const ProblemGroup& g : place.time) {
    if (!take(budget, &omitted)) continue;
    const Record *kernel = g.find("annulus"), *ours = g.find(kOursInTorch), *peer = fastest_peer(g);
    s += problem_cells(g) + cell(kernel ? ms(kernel->time_ms->median) : "", "ours");
    if (in_torch) s += cell(ours ? ms(ours->time_ms->median) : "", "ours");
    if (peers) {
      const Record* fair = in_torch ? ours : kernel;
      const bool both = fair && peer && fair->time_ms->median > 0;
      s += cell(peer ? text(peer->impl, 32) + " " + ms(peer->time_ms->median) : "") +
           cell(both ? times(peer->time_ms->median / fair->time_ms->median) : "");
    }
    const auto floor = kernel ? floor_of(g, *kernel) : std::nullopt;
    const auto ratio = kernel ? over_floor(g, *kernel) : std::nullopt;
    s += cell(floor ? ms(*floor) + " " + floor_source(g, *kernel) : "", "dim") +
         cell(ratio ? bar(*ratio, 0) + times(*ratio) : "", ratio && *ratio < 1 ? "bad" : "") +
         (kernel ? error_cell(*kernel) : cell("")) + "</tr>";
    // What is not right is not left blank.
    for (const Record* r : g.records) {
      if (r->impl == "annulus" && r->status != Status::kOk) s += reason_row(*r, heads.size() - 2);
    }
  }
  return s + std::string(draw::kCloseTable) + left_out(omitted);
}

std::string time_table(const Place& place, std::size_t* budget) {
  if (place.time.empty()) return "";
  bool with_original = false;
  for (const ProblemGroup& g : place.time) {
    for (const Record* r : g.records) with_original = with_original || has_original_time(*r);
  }
  std::vector<Column> heads = {
      {"row", true}, {"dtype", true},  {"implementation", true}, {"median ms"}, {"p95"},
      {"floor"},     {"time / floor"}, {"time / annulus"},       {"error"},     {"peak MiB"}};
  if (with_original) heads.push_back({"original ms (original / ours)"});
  std::string s =
      "<details><summary>Every implementation of every row</summary>" + draw::open_table(heads);
  std::size_t omitted = 0;
  for (const ProblemGroup& g : place.time) {
    bool first = true;
    for (const Record* r : g.records) {
      if (!take(budget, &omitted)) continue;
      s += time_row(place, g, *r, first, with_original);
      first = false;
    }
  }
  return s + std::string(draw::kCloseTable) + left_out(omitted) + "</details>";
}

std::string memory_table(const Place& place, std::size_t* budget) {
  if (place.memory.empty()) return "";
  OriginalColumns originals;
  for (const ProblemGroup& g : place.memory) {
    for (const Record* r : g.records) originals.add(*r);
  }
  std::vector<Column> heads = {
      {"row", true}, {"dtype", true}, {"implementation", true}, {"peak MiB"}, {"of it scratch"}};
  for (const auto& c : originals.names) heads.push_back({c});
  heads.push_back({"original / ours"});
  const std::string beside =
      originals.hardware.empty() ? "" : ", beside the original's on " + text(originals.hardware);
  std::string s = "<h3>Memory" + beside + "</h3>" + draw::open_table(heads);
  std::size_t omitted = 0;
  for (const ProblemGroup& g : place.memory) {
    for (const Record* r : g.records) {
      if (!take(budget, &omitted)) continue;
      s += problem_cells(g) + cell(text(label_of(r->impl), 40), "l") +
           cell(r->peak_bytes ? mib(*r->peak_bytes) : "", "ours") +
           cell(r->workspace_bytes ? mib(*r->workspace_bytes) : "", "dim");
      for (const auto& c : originals.names) {
        const auto value = original_value(*r, c);
        s += cell(value ? fmt::format("{:.1f}", *value) : "");
      }
      const bool ok = r->status == Status::kOk;
      const bool both = ok && r->original && r->peak_bytes && *r->peak_bytes > 0;
      s += cell(both ? times(r->original->value / (*r->peak_bytes / kMiB)) : "") + "</tr>";
      if (!ok) s += reason_row(*r, originals.names.size() + 4);
    }
  }
  return s + std::string(draw::kCloseTable) + left_out(omitted);
}

std::string original_table(const Place& place, std::size_t* budget) {
  OriginalColumns originals;
  for (const ProblemGroup& g : place.time) {
    if (const Record* r = g.find("annulus")) originals.add(*r);
  }
  if (originals.names.empty()) return "";
  std::vector<Column> heads = {{"row", true}, {"dtype", true}, {"ours, ms"}};
  for (const auto& c : originals.names) heads.push_back({c});
  heads.push_back({"best of them / ours"});
  std::string s =
      fmt::format("<h3>Beside the original table, measured on {}</h3>", text(originals.hardware)) +
      draw::open_table(heads);
  std::size_t omitted = 0;
  for (const ProblemGroup& g : place.time) {
    const Record* r = g.find("annulus");
    if (!r || !r->original || r->original->columns.empty() || !take(budget, &omitted)) continue;
    s += problem_cells(g) + cell(ms(r->time_ms->median), "ours");
    double best = 0;
    for (const auto& c : originals.names) {
      const auto value = original_value(*r, c);
      if (value && *value > 0 && (best == 0 || *value < best)) best = *value;
      s += cell(value ? ms(*value) : "");
    }
    s += cell(best > 0 && r->time_ms->median > 0 ? times(best / r->time_ms->median) : "") + "</tr>";
  }
  return s + std::string(draw::kCloseTable) + left_out(omitted);
}

}  // namespace annulus::bench::report
