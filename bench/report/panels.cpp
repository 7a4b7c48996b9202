// Which rows of a place stand side by side in a chart of time over size.
#include <algorithm>
#include <cctype>
#include <cmath>
#include <cstdlib>
#include <map>

#include "bench/report/parts.h"

namespace annulus::bench::report {
namespace {

using Groups = std::vector<const ProblemGroup*>;

constexpr std::size_t kMostRows = 12;
// A name as suites make them. Longer ones are taken as they are: cutting a name of 64 KiB at each of
// its dashes would take minutes.
constexpr std::size_t kMostName = 80;
constexpr std::size_t kMostSearched = 2000;  // rows among which a family is looked for
constexpr std::size_t kMostPeers = 4;

std::string param_of(const ProblemGroup& g, const char* name) {
  for (const Record* r : g.records) {
    const auto it = r->params.find(name);
    if (it != r->params.end()) return to_string(it->second);
  }
  return "";
}

std::string direction_of(const ProblemGroup& g) {
  const std::string d = param_of(g, "direction");
  return d == "fwd"      ? "forward"
         : d == "bwd"    ? "backward"
         : d == "fwdbwd" ? "forward and backward"
                         : d;
}

std::vector<std::string> parts_of(const std::string& name) {
  std::vector<std::string> parts(1);
  for (const char c : name) {
    if (c == '-') {
      parts.emplace_back();
    } else {
      parts.back() += c;
    }
  }
  return parts;
}

// "n4096" is ("n", 4096); a part that is not letters and a number has no number.
std::pair<std::string, double> sized(const std::string& part) {
  std::size_t at = 0;
  while (at < part.size() && std::isalpha(static_cast<unsigned char>(part[at]))) ++at;
  const bool number = at > 0 && at < part.size() &&
                      std::all_of(part.begin() + static_cast<std::ptrdiff_t>(at), part.end(),
                                  [](unsigned char c) { return std::isdigit(c); });
  if (!number) return {part, -1};
  return {part.substr(0, at), std::strtod(part.c_str() + at, nullptr)};
}

// The largest set of rows whose names differ in one number alone, by that number; empty below three.
Groups family_of(const Groups& groups) {
  std::map<std::string, std::vector<std::pair<double, const ProblemGroup*>>> families;
  std::vector<std::string> order;
  for (std::size_t at = 0; at < std::min(groups.size(), kMostSearched); ++at) {
    const ProblemGroup* g = groups[at];
    if (g->row.size() > kMostName) continue;
    const auto parts = parts_of(g->row);
    for (std::size_t i = 0; i < parts.size(); ++i) {
      const auto [letters, number] = sized(parts[i]);
      if (number < 0) continue;
      std::string key;
      for (std::size_t k = 0; k < parts.size(); ++k)
        key += (k == i ? letters + '#' : parts[k]) + '-';
      auto& family = families[key];
      if (family.empty()) order.push_back(key);
      family.emplace_back(number, g);
    }
  }
  const std::string* largest = nullptr;
  for (const std::string& key : order) {
    if (!largest || families[key].size() > families[*largest].size()) largest = &key;
  }
  if (!largest || families[*largest].size() < 3) return {};
  auto& family = families[*largest];
  std::stable_sort(family.begin(), family.end(),
                   [](const auto& a, const auto& b) { return a.first < b.first; });
  Groups sorted;
  for (const auto& [number, g] : family) sorted.push_back(g);
  return sorted;
}

double bulk_of(const ProblemGroup& g) {
  for (const Record* r : g.records) {
    const double size =
        r->floor_kind == FloorKind::kCompute ? r->flops_needed.value_or(0) : r->bytes.value_or(0);
    if (size > 0) return size;
  }
  return 0;
}

Groups thinned(const Groups& groups) {
  if (groups.size() <= kMostRows) return groups;
  Groups kept;
  for (std::size_t i = 0; i < kMostRows; ++i) {
    kept.push_back(groups[i * (groups.size() - 1) / (kMostRows - 1)]);
  }
  return kept;
}

void name_rows(const Groups& groups, Panel* panel) {
  std::vector<std::vector<std::string>> names;
  for (const ProblemGroup* g : groups) {
    names.push_back(g->row.size() > kMostName ? std::vector<std::string>{g->row}
                                              : parts_of(g->row));
  }
  // What all names have, wherever: some have a word more ("-causal") than others.
  const auto common = [&](const std::string& part) {
    return names.size() > 1 && std::all_of(names.begin(), names.end(), [&](const auto& n) {
             return std::find(n.begin(), n.end(), part) != n.end();
           });
  };
  const auto append = [](std::string* text, const std::string& part) {
    *text += (text->empty() ? "" : "-") + part;
  };
  if (std::any_of(names[0].begin(), names[0].end(), common)) {
    for (const std::string& part : names[0]) {
      if (common(part)) {
        append(&panel->pattern, part);
      } else if (!panel->pattern.ends_with("…")) {
        append(&panel->pattern, "…");
      }
    }
  }
  for (std::size_t i = 0; i < names.size(); ++i) {
    std::string& label = panel->labels.emplace_back();
    for (const std::string& part : names[i]) {
      if (!common(part)) append(&label, part);
    }
    if (label.empty()) label = groups[i]->row;
  }
}

bool solved(const Series& s) {
  return std::any_of(s.times.begin(), s.times.end(), [](double t) { return t > 0; });
}

Panel panel_of(const Place& place, const Groups& groups) {
  Panel panel;
  panel.direction = direction_of(*groups[0]);
  panel.dtype = groups[0]->dtype;
  name_rows(groups, &panel);
  Series original{"original", 0, true, std::vector<double>(groups.size())};
  for (const std::string& impl : place.impls) {
    Series s{impl, style_of(place, impl), false, {}};
    for (const ProblemGroup* g : groups) {
      const Record* r = g->find(impl);
      s.times.push_back(r ? r->time_ms->median : 0);
    }
    if (solved(s)) panel.series.push_back(std::move(s));
  }
  panel.floor.resize(groups.size());
  for (std::size_t i = 0; i < groups.size(); ++i) {
    const Record* ours = groups[i]->find("annulus");
    if (!ours) continue;
    panel.floor[i] = floor_of(*groups[i], *ours).value_or(0);
    if (!ours->original || ours->original->unit != "ms") continue;
    original.name = "original, " + ours->original->hardware;
    original.times[i] = ours->original->value;
  }
  if (solved(original)) panel.series.push_back(std::move(original));
  return panel;
}

// How much of a place a panel shows.
std::size_t times_in(const Panel& p) {
  std::size_t n = 0;
  for (const Series& s : p.series) {
    n += static_cast<std::size_t>(
        std::count_if(s.times.begin(), s.times.end(), [](double t) { return t > 0; }));
  }
  return n;
}

// Where it was timed, how it stands on average; the more rows, the better it can be seen.
std::pair<std::size_t, double> standing(const Series& s) {
  std::size_t missing = 0;
  double log_sum = 0;
  for (const double t : s.times) {
    if (t > 0) {
      log_sum += std::log(t);
    } else {
      ++missing;
    }
  }
  return {missing, log_sum};
}

}  // namespace

std::vector<Panel> panels_of(const Place& place, std::size_t most) {
  std::vector<Groups> kinds;  // of one direction and dtype each
  std::map<std::pair<std::string, std::string>, std::size_t> index;
  for (const ProblemGroup& g : place.time) {
    if (!param_of(g, "variant").empty()) continue;
    const bool timed = std::any_of(g.records.begin(), g.records.end(), [&](const Record* r) {
      return r->status == Status::kOk && r->time_ms && r->time_ms->median > 0;
    });
    if (!timed) continue;
    const auto [it, fresh] = index.try_emplace({direction_of(g), g.dtype}, kinds.size());
    if (fresh) kinds.emplace_back();
    kinds[it->second].push_back(&g);
  }
  std::vector<Panel> panels;
  for (Groups& groups : kinds) {
    if (panels.size() == most) break;
    Groups family = family_of(groups);
    if (family.empty()) {
      family = groups;
      std::stable_sort(
          family.begin(), family.end(),
          [](const ProblemGroup* a, const ProblemGroup* b) { return bulk_of(*a) < bulk_of(*b); });
    }
    panels.push_back(panel_of(place, thinned(family)));
  }
  return panels;
}

Panel story_of(const std::vector<Panel>& panels) {
  if (panels.empty()) return {};
  Panel story = *std::max_element(panels.begin(), panels.end(), [](const Panel& a, const Panel& b) {
    return times_in(a) < times_in(b);
  });
  std::vector<Series> peers;
  const auto is_peer = [](const Series& s) {
    return s.name != "annulus" && s.name != kOursInTorch && s.name != "move" && !s.hollow &&
           !is_our_option(s.name);
  };
  std::copy_if(story.series.begin(), story.series.end(), std::back_inserter(peers), is_peer);
  std::erase_if(story.series,
                [](const Series& s) { return s.name != "annulus" && s.name != kOursInTorch; });
  std::stable_sort(peers.begin(), peers.end(),
                   [](const Series& a, const Series& b) { return standing(a) < standing(b); });
  if (peers.size() > kMostPeers) peers.resize(kMostPeers);
  story.series.insert(story.series.end(), peers.begin(), peers.end());
  return story;
}

}  // namespace annulus::bench::report
