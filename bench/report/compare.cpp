#include "bench/report/compare.h"

#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <map>
#include <tuple>

#include "bench/report/parts.h"
#include "draw/html.h"
#include "draw/scale.h"
#include "files/words.h"

namespace annulus::bench::report {
namespace {

using draw::cell;
using draw::text;
using draw::times;
using files::counted;
using files::printable;

constexpr double kTimeNoise = 1.05, kMemoryNoise = 1.01;
constexpr std::array kVerdicts = {"same", "faster", "slower", "broken", "mended"};

using Key = std::tuple<std::string, std::string, std::string, Measures, std::string, std::string,
                       std::string>;
Key key_of(const Record& r) {
  return {r.suite, r.device, r.hardware, r.measures, r.row, r.dtype, r.impl};
}

std::vector<const Record*> records_of(const Model& model) {
  std::vector<const Record*> all;
  for (const Place& place : model.places) {
    for (const auto* groups : {&place.time, &place.memory}) {
      for (const ProblemGroup& g : *groups) {
        all.insert(all.end(), g.records.begin(), g.records.end());
      }
    }
  }
  return all;
}

bool is_memory(const Record& r) { return r.measures == Measures::kMemory; }

// What the row is about; 0 where it says nothing.
double figure(const Record& r) {
  if (r.status != Status::kOk) return 0;
  return is_memory(r) ? r.peak_bytes.value_or(0) : r.time_ms ? r.time_ms->median : 0;
}

Change change_of(const Record& before, const Record& after) {
  Change c{&before, &after, 0, Verdict::kSame};
  const bool was_right = before.status == Status::kOk, is_right = after.status == Status::kOk;
  if (was_right != is_right) c.verdict = is_right ? Verdict::kMended : Verdict::kBroken;
  const double a = figure(before), b = figure(after);
  if (!(a > 0) || !(b > 0)) return c;
  c.ratio = b / a;
  if (is_memory(after)) {
    c.verdict = c.ratio > kMemoryNoise       ? Verdict::kSlower
                : c.ratio < 1 / kMemoryNoise ? Verdict::kFaster
                                             : Verdict::kSame;
  } else if (c.ratio > kTimeNoise && b > before.time_ms->p95) {
    c.verdict = Verdict::kSlower;
  } else if (c.ratio < 1 / kTimeNoise && a > after.time_ms->p95) {
    c.verdict = Verdict::kFaster;
  }
  return c;
}

// What comes first in a list.
std::pair<int, double> order(const Change& c) {
  switch (c.verdict) {
    case Verdict::kBroken:
      return {0, 0};
    case Verdict::kSlower:
      return {1, -c.ratio};
    case Verdict::kMended:
      return {2, 0};
    case Verdict::kFaster:
      return {3, c.ratio};
    case Verdict::kSame:
      break;
  }
  return {4, 0};
}

std::string figure_text(const Record& r) {
  const double v = figure(r);
  if (!(v > 0)) return name_of(r.status);
  return is_memory(r) ? fmt::format("{:.1f} MiB", v / (1 << 20)) : fmt::format("{:#.4g} ms", v);
}

// More memory is not slower.
std::string verdict_text(const Change& c) {
  if (!is_memory(*c.after) || c.ratio == 0) return name_of(c.verdict);
  return c.verdict == Verdict::kSlower   ? "more"
         : c.verdict == Verdict::kFaster ? "less"
                                         : name_of(c.verdict);
}

std::string place_of(const Record& r) {
  return fmt::format("{} on {}", r.suite, r.hardware.empty() ? r.device : r.hardware);
}

std::string commits(const Record* Change::*side, const std::vector<Change>& changes) {
  std::vector<std::string> names;
  for (const Change& c : changes) {
    const std::string& commit = (c.*side)->commit;
    if (commit.empty() || std::find(names.begin(), names.end(), commit) != names.end()) continue;
    if (names.size() == 3) return names[0] + ", " + names[1] + ", " + names[2] + ", ...";
    names.push_back(commit);
  }
  std::string s;
  for (const std::string& name : names) s += (s.empty() ? "" : ", ") + name;
  return s;
}

std::string name_with_commit(const Difference& d, bool after) {
  const std::string commit = commits(after ? &Change::after : &Change::before, d.changes);
  const std::string& name = after ? d.after_name : d.before_name;
  return commit.empty() ? name : name + " (" + commit + ")";
}

std::string counts(const Difference& d) {
  std::string s = counted(d.changes.size(), "row") + " in both files";
  for (const Verdict v : {Verdict::kBroken, Verdict::kSlower, Verdict::kMended, Verdict::kFaster}) {
    // Of memory rows "slower" would be said of more bytes.
    const char* const words[] = {"", "faster or smaller", "slower or larger", "broken", "mended"};
    if (d.count(v) > 0 || v == Verdict::kSlower) {
      s += fmt::format(", {} {}", d.count(v), words[static_cast<std::size_t>(v)]);
    }
  }
  if (const double mean = d.geometric_mean(); mean > 0) {
    s += fmt::format("; times {:.3f} of the old ones (geometric mean)", mean);
  }
  return s;
}

constexpr const char* kRule =
    "slower: the median is 5 % longer and beyond the old 95th percentile; faster: the other way "
    "around; memory: 1 %";

}  // namespace

std::string name_of(Verdict v) { return kVerdicts[static_cast<std::size_t>(v)]; }

std::size_t Difference::count(Verdict v) const {
  return static_cast<std::size_t>(std::count_if(changes.begin(), changes.end(),
                                                [v](const Change& c) { return c.verdict == v; }));
}

double Difference::geometric_mean() const {
  double log_sum = 0;
  std::size_t rows = 0;
  for (const Change& c : changes) {
    if (!(c.ratio > 0) || is_memory(*c.after)) continue;
    log_sum += std::log(c.ratio);
    ++rows;
  }
  return rows == 0 ? 0 : std::exp(log_sum / static_cast<double>(rows));
}

Difference difference_of(const Model& before, const Model& after) {
  Difference d;
  std::map<Key, const Record*> old;
  for (const Record* r : records_of(before)) old[key_of(*r)] = r;
  for (const Record* r : records_of(after)) {
    const auto it = old.find(key_of(*r));
    if (it == old.end()) {
      d.only_after.push_back(r);
      continue;
    }
    d.changes.push_back(change_of(*it->second, *r));
    old.erase(it);
  }
  for (const Record* r : records_of(before)) {
    if (old.count(key_of(*r)) > 0) d.only_before.push_back(r);
  }
  std::stable_sort(d.changes.begin(), d.changes.end(),
                   [](const Change& a, const Change& b) { return order(a) < order(b); });
  return d;
}

std::string to_text(const Difference& d) {
  std::string s = fmt::format("A {}\nB {}\n{}\n{}\n", printable(name_with_commit(d, false)),
                              printable(name_with_commit(d, true)), counts(d), kRule);
  const bool one_place = std::all_of(d.changes.begin(), d.changes.end(), [&](const Change& c) {
    return place_of(*c.after) == place_of(*d.changes[0].after);
  });
  constexpr const char* line = "| {:<36} | {:<5} | {:<14} | {:>11} | {:>11} | {:>6} | {:<6} |{}\n";
  if (!d.changes.empty()) {
    s += fmt::format("\n{}\n", one_place ? printable(place_of(*d.changes[0].after)) : "");
    s += fmt::format(line, "row", "dtype", "impl", "A", "B", "B / A", "", "");
  }
  for (const Change& c : d.changes) {
    const Record& r = *c.after;
    s += fmt::format(line, printable(r.row), printable(r.dtype), printable(r.impl),
                     figure_text(*c.before), figure_text(r),
                     c.ratio > 0 ? fmt::format("{:.3f}", c.ratio) : "",
                     c.verdict == Verdict::kSame ? "" : verdict_text(c),
                     one_place ? "" : " " + printable(place_of(r)));
    if (c.verdict == Verdict::kBroken) s += "  " + printable(r.reason, 300) + "\n";
  }
  const auto list = [&](const char* title, const std::vector<const Record*>& records) {
    if (records.empty()) return;
    s += fmt::format("\n{}: {}\n", title, counted(records.size(), "row"));
    for (const Record* r : records) {
      s += fmt::format("  {} {} {}: {}\n", printable(r->row), printable(r->dtype),
                       printable(r->impl), printable(place_of(*r)));
    }
  };
  list("only in A", d.only_before);
  list("only in B", d.only_after);
  return s;
}

namespace {

std::string change_row(const Change& c) {
  const Record& r = *c.after;
  const bool worse = c.verdict == Verdict::kSlower || c.verdict == Verdict::kBroken;
  // What changed stands beside the name, so that a telephone shows both.
  std::string s = "<tr class=\"g\">" + cell(text(r.row, 60), "l row") +
                  cell(c.ratio > 0 ? times(c.ratio) : "", worse ? "bad" : "") +
                  cell(c.verdict == Verdict::kSame ? "" : verdict_text(c), worse ? "l bad" : "l") +
                  cell(text(r.impl, 32), "l") + cell(text(r.dtype, 12), "l dim") +
                  cell(figure_text(*c.before)) + cell(figure_text(r), "ours") +
                  cell(text(place_of(r), 80), "l dim") + "</tr>";
  if (c.verdict == Verdict::kBroken) {
    s += fmt::format("<tr><td></td><td class=\"why bad\" colspan=\"7\">{}: {}</td></tr>",
                     name_of(r.status), text(r.reason));
  }
  return s;
}

std::string only_table(const std::string& title, const std::vector<const Record*>& records,
                       std::size_t most) {
  if (records.empty()) return "";
  std::string s =
      "<h3>" + text(title) + "</h3>" +
      draw::open_table(
          {{"row", true}, {"dtype", true}, {"implementation", true}, {"figure"}, {"place", true}});
  for (std::size_t i = 0; i < std::min(most, records.size()); ++i) {
    const Record& r = *records[i];
    s += "<tr class=\"g\">" + cell(text(r.row, 60), "l row") + cell(text(r.dtype, 12), "l dim") +
         cell(text(r.impl, 32), "l") + cell(figure_text(r)) + cell(text(place_of(r), 80), "l dim") +
         "</tr>";
  }
  return s + std::string(draw::kCloseTable) +
         left_out(records.size() - std::min(most, records.size()));
}

std::string render_within(const Difference& d, std::size_t most) {
  std::string s = fmt::format("<p class=\"lede\">A: <b>{}</b>, B: <b>{}</b>. {}.</p>",
                              text(name_with_commit(d, false)), text(name_with_commit(d, true)),
                              text(counts(d), 300));
  if (!d.changes.empty()) {
    const std::size_t worse = d.count(Verdict::kSlower), broken = d.count(Verdict::kBroken);
    const std::size_t better = d.count(Verdict::kFaster);
    s += "<div class=\"tiles\">";
    if (const double mean = d.geometric_mean(); mean > 0) {
      s += draw::tile(times(mean), "the old time", "geometric mean, below 1 is faster", "lead");
    }
    s += draw::tile(fmt::format("{}", worse), "slower or larger", "", worse > 0 ? "bad" : "");
    s += draw::tile(fmt::format("{}", better), "faster or smaller", "");
    s += draw::tile(fmt::format("{}", broken), "no longer right", "", broken > 0 ? "bad" : "");
    s += "</div><h3>In both files</h3>" + draw::open_table({{"row", true},
                                                            {"B / A"},
                                                            {"", true},
                                                            {"implementation", true},
                                                            {"dtype", true},
                                                            {"A"},
                                                            {"B"},
                                                            {"place", true}});
    const std::size_t shown = std::min(most, d.changes.size());
    for (std::size_t i = 0; i < shown; ++i) s += change_row(d.changes[i]);
    s += std::string(draw::kCloseTable) + left_out(d.changes.size() - shown);
  }
  s += only_table("Only in A", d.only_before, most);
  s += only_table("Only in B", d.only_after, most);
  return draw::page("Annulus benchmark comparison", "Annulus benchmark comparison", s,
                    std::string("A row is ") + kRule +
                        ". Rows of another machine are other rows. Of a row measured twice in a "
                        "file the newest counts.");
}

}  // namespace

std::string render(const Difference& d) {
  for (std::size_t most = 1600;; most = most * 2 / 3) {
    std::string page = render_within(d, most);
    if (page.size() <= draw::kMaxPageBytes || most == 0) return page;
  }
}

}  // namespace annulus::bench::report
