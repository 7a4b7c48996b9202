#include "bench/report/model.h"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <map>
#include <tuple>

#include "bench/statistics.h"

namespace annulus::bench::report {
namespace {

constexpr std::size_t kMaxCommits = 5;
constexpr std::size_t kMaxImpls = 16;
constexpr std::size_t kMaxCeilings = 4;

// annulus leads with its options and itself called from torch, the yardstick follows, peers come by
// name.
std::pair<int, std::string> rank(const std::string& impl) {
  return {impl == "annulus"      ? 0
          : is_our_option(impl)  ? 1
          : impl == kOursInTorch ? 2
          : impl == "move"       ? 3
                                 : 4,
          impl};
}

void count(Place& place, const Record& r) {
  place.ok += r.status == Status::kOk;
  place.skipped += r.status == Status::kSkipped;
  place.failed += r.status == Status::kFailed;
  const auto same_kind = [&](const Ceiling& c) { return c.gemm == r.ceiling->gemm; };
  if (r.ceiling && place.ceilings.size() < kMaxCeilings &&
      std::none_of(place.ceilings.begin(), place.ceilings.end(), same_kind)) {
    place.ceilings.push_back(*r.ceiling);
  }
  const auto missing = [](const auto& list, const auto& value) {
    return std::find(list.begin(), list.end(), value) == list.end();
  };
  // A page has room for a few of either, and a hostile file may name thousands.
  if (place.commits.size() < kMaxCommits && !r.commit.empty() && missing(place.commits, r.commit)) {
    place.commits.push_back(r.commit);
  }
  if (place.impls.size() < kMaxImpls && missing(place.impls, r.impl)) place.impls.push_back(r.impl);
  if (r.date.empty()) return;
  if (place.first_date.empty() || r.date < place.first_date) place.first_date = r.date;
  if (r.date > place.last_date) place.last_date = r.date;
}

// A run measures its ceilings once, so that two runs differ in some digit of the copy bandwidth.
bool of_one_run(const Place& place) {
  const Record* first = nullptr;
  for (const auto* groups : {&place.time, &place.memory}) {
    for (const ProblemGroup& g : *groups) {
      for (const Record* r : g.records) {
        if (!r->ceiling) continue;
        if (!first) first = r;
        if (r->commit != first->commit || r->ceiling->copy_gbs != first->ceiling->copy_gbs) {
          return false;
        }
      }
    }
  }
  return true;
}

std::string why_below(const ProblemGroup& g, const Record& r) {
  if (!r.floor_kind) return "the file does not say what its floor is made of";
  switch (*r.floor_kind) {
    case FloorKind::kCompute:
      return "the products were made faster than at the start of the run, when their rate was "
             "measured";
    case FloorKind::kLatency:
      return "launches or steps passed faster than at the start of the run, when they were "
             "measured";
    case FloorKind::kBandwidth:
      break;
  }
  if (g.find("move")) {
    return "faster than the run's copy and than the move of its own bytes: some of them were still "
           "in a cache";
  }
  return fmt::format(
      "no move of its own {:.1f} MiB was timed beside it, and the copy that the floor is by is "
      "larger than the "
      "caches, in which these may have been",
      r.bytes.value_or(0) / (1 << 20));
}

}  // namespace

bool is_our_option(const std::string& impl) {
  return impl.rfind("annulus-", 0) == 0 && impl != kOursInTorch;
}

const Record* ProblemGroup::find(const std::string& impl) const {
  // They are sorted, and a hostile file has a hundred thousand of one problem.
  const auto it =
      std::lower_bound(records.begin(), records.end(), rank(impl),
                       [](const Record* r, const auto& wanted) { return rank(r->impl) < wanted; });
  if (it == records.end() || (*it)->impl != impl) return nullptr;
  return (*it)->status == Status::kOk && (*it)->time_ms ? *it : nullptr;
}

Model build_model(const std::vector<Record>& records) {
  Model model;
  std::map<std::tuple<std::string, std::string, std::string>, std::size_t> place_index;
  std::map<std::tuple<std::size_t, bool, std::string, std::string>, std::size_t> group_index;
  std::map<std::tuple<std::size_t, bool, std::size_t, std::string>, std::size_t> member_index;
  for (const Record& r : records) {
    const auto [place_it, new_place] =
        place_index.try_emplace({r.suite, r.device, r.hardware}, model.places.size());
    if (new_place) {
      Place place;
      place.suite = r.suite;
      place.device = r.device;
      place.hardware = r.hardware;
      model.places.push_back(std::move(place));
    }
    Place& place = model.places[place_it->second];
    const bool memory = r.measures == Measures::kMemory;
    auto& groups = memory ? place.memory : place.time;
    const auto [group_it, new_group] =
        group_index.try_emplace({place_it->second, memory, r.row, r.dtype}, groups.size());
    if (new_group) groups.push_back({r.row, r.dtype, {}});
    auto& members = groups[group_it->second].records;
    const auto [member_it, new_member] = member_index.try_emplace(
        {place_it->second, memory, group_it->second, r.impl}, members.size());
    if (new_member) {
      members.push_back(&r);
      continue;
    }
    ++model.superseded;
    const Record*& kept = members[member_it->second];
    if (r.date >= kept->date) kept = &r;  // ISO 8601 sorts as text
  }
  for (Place& place : model.places) {
    for (auto* groups : {&place.time, &place.memory}) {
      for (ProblemGroup& g : *groups) {
        std::sort(g.records.begin(), g.records.end(),
                  [](const Record* a, const Record* b) { return rank(a->impl) < rank(b->impl); });
        for (const Record* r : g.records) count(place, *r);
        model.records += g.records.size();
      }
    }
    place.one_run = of_one_run(place);
    std::sort(place.impls.begin(), place.impls.end(),
              [](const auto& a, const auto& b) { return rank(a) < rank(b); });
  }
  std::stable_sort(model.places.begin(), model.places.end(),
                   [](const Place& a, const Place& b) { return a.suite < b.suite; });
  return model;
}

std::optional<double> floor_of(const ProblemGroup& g, const Record& r) {
  if (!r.floor_ms || !(*r.floor_ms > 0)) return {};
  const Record* move = g.find("move");
  return move ? floor_beside(r, *move) : *r.floor_ms;
}

std::string floor_source(const ProblemGroup& g, const Record& r) {
  if (!r.floor_kind) return "";
  switch (*r.floor_kind) {
    case FloorKind::kCompute:
      return "products";
    case FloorKind::kLatency:
      return r.ceiling && r.ceiling->step_us > 0 ? "steps" : "launch";
    case FloorKind::kBandwidth:
      break;
  }
  const Record* move = g.find("move");
  const double by_copy =
      r.ceiling && r.ceiling->copy_gbs > 0 ? 1e-6 * r.bytes.value_or(0) / r.ceiling->copy_gbs : 0;
  // Runs since the move counts have it in their floor already.
  const bool by_move =
      move && (floor_beside(r, *move) < *r.floor_ms || *r.floor_ms < 0.999 * by_copy);
  return by_move ? "move" : "copy";
}

std::optional<double> over_floor(const ProblemGroup& g, const Record& r) {
  const auto floor = floor_of(g, r);
  if (r.status != Status::kOk || !r.time_ms || !floor || !(r.time_ms->median > 0)) return {};
  return r.time_ms->median / *floor;
}

std::vector<BelowFloor> below_floor(const Place& place) {
  std::vector<BelowFloor> all;
  for (const ProblemGroup& g : place.time) {
    for (const Record* r : g.records) {
      const auto ratio = over_floor(g, *r);
      if (ratio && *ratio < 1) all.push_back({r, *ratio, why_below(g, *r)});
    }
  }
  return all;
}

Comparison compare(const Place& place, const std::string& ours, const std::string& other) {
  Comparison c;
  double log_sum = 0;
  for (const ProblemGroup& g : place.time) {
    const Record* a = g.find(ours);
    const Record* b = g.find(other);
    if (!a || !b || !(a->time_ms->median > 0) || !(b->time_ms->median > 0)) continue;
    const double ratio = b->time_ms->median / a->time_ms->median;
    c.low = c.rows == 0 ? ratio : std::min(c.low, ratio);
    c.high = std::max(c.high, ratio);
    log_sum += std::log(ratio);
    // Whoever times implementations in turns dates them together.
    c.same_run = c.same_run && !a->date.empty() && a->date == b->date && a->commit == b->commit;
    ++c.rows;
  }
  if (c.rows > 0) c.geometric_mean = std::exp(log_sum / static_cast<double>(c.rows));
  return c;
}

FloorSpread floor_spread(const Place& place, const std::string& impl) {
  FloorSpread s;
  std::vector<double> ratios;
  for (const ProblemGroup& g : place.time) {
    const Record* r = g.find(impl);
    const auto ratio = r ? over_floor(g, *r) : std::nullopt;
    if (!ratio) continue;
    s.below += *ratio < 1;
    if (ratios.empty() || *ratio < s.best) {
      s.best = *ratio;
      s.best_row = g.row + " " + g.dtype;
    }
    s.worst = std::max(s.worst, *ratio);
    ratios.push_back(*ratio);
  }
  s.rows = ratios.size();
  std::sort(ratios.begin(), ratios.end());
  if (!ratios.empty()) s.median = quantile(ratios, 0.5);
  return s;
}

}  // namespace annulus::bench::report
