#include "cli/plan_page.h"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <functional>
#include <limits>

#include "draw/charts.h"
#include "draw/html.h"

namespace annulus::cli {

namespace {

// Three digits of the largest unit that leaves one before the point.
std::string in_units(double value, double step, std::initializer_list<const char*> units) {
  const char* const* unit = units.begin();
  while (value >= 0.9995 * step && unit + 1 != units.end()) value /= step, ++unit;
  const int digits = value >= 99.95 || value == 0 ? 0 : value >= 9.995 ? 1 : 2;
  return fmt::format("{:.{}f} {}", value, digits, *unit);
}

using Figure = std::function<double(const RingPlan&)>;
struct Curve {
  const char* name;
  int style;
  Figure figure;
};

// What `unit` is one of stands on the axis.
std::string chart(const char* title, const char* label, double unit,
                  const std::vector<const PlannedRing*>& rings, const std::vector<Curve>& curves,
                  double limit) {
  draw::LineChart c{.title = title,
                    .frame = {.width = 552, .height = 320, .left = 58, .right = 118}};
  const auto ranks = [](const PlannedRing& r) { return static_cast<double>(r.problem.ranks); };
  double low = std::numeric_limits<double>::infinity(), high = 0;
  const auto show = [&](double y) {
    low = std::min(low, y);
    high = std::max(high, y);
  };
  for (const Curve& curve : curves) {
    draw::Line line{.name = curve.name, .style = curve.style};
    for (const PlannedRing* r : rings) {
      const double y = curve.figure(r->plan) / unit;
      if (!(y > 0)) continue;  // one rank sends nothing, which a logarithm does not have
      line.points.emplace_back(ranks(*r), y);
      show(y);
    }
    c.lines.push_back(std::move(line));
  }
  if (limit > 0) {
    show(limit / unit);
    c.rules.push_back({false, limit / unit, "what a rank has"});
  }
  if (high == 0) low = high = 1;
  c.x = {.low = ranks(*rings.front()), .high = ranks(*rings.back()), .log = true, .label = "ranks"};
  for (const PlannedRing* r : rings) {
    if (rings.size() > 9) break;  // the axis chooses some
    c.x.ticks.emplace_back(ranks(*r), std::to_string(r->problem.ranks));
  }
  c.y = {.low = low / 1.5, .high = high * 1.5, .log = true, .label = label};
  return "<div class=\"card\">" + svg_of(c) + "</div>";
}

std::string table(const std::vector<const PlannedRing*>& rings) {
  std::string s =
      "<div>" +
      draw::open_table({{"ranks"}, {"tokens"}, {"forward"}, {"hides"}, {"backward"}, {"hides"}});
  for (const PlannedRing* r : rings) {
    s += "<tr>" + draw::cell(std::to_string(r->problem.ranks)) +
         draw::cell(count_label((r->problem.tokens + r->problem.ranks - 1) / r->problem.ranks));
    for (const RingPassPlan* pass : {&r->plan.forward, &r->plan.backward}) {
      s += draw::cell(time_label(pass->time_s)) + draw::cell(hides_label(*pass));
    }
    s += "</tr>";
  }
  return s + std::string(draw::kCloseTable) + "</div>";
}

std::string section(const std::vector<const PlannedRing*>& rings) {
  const RingPlanProblem& p = rings.front()->problem;
  std::string s =
      fmt::format("<h2>{} tokens</h2><div class=\"beside two\">", count_label(p.tokens));
  constexpr double kGB = 1e9, kGiB = 1 << 30;
  s += chart("Bytes that a rank sends", "GB, log scale", kGB, rings,
             {{"gather", 1, [](const RingPlan& r) { return r.gather_forward.bytes; }},
              {"gather, backward", 4, [](const RingPlan& r) { return r.gather_backward.bytes; }},
              {"ring", 0, [](const RingPlan& r) { return r.forward.bytes.max; }},
              {"ring, backward", 7, [](const RingPlan& r) { return r.backward.bytes.max; }}},
             0);
  s += chart(
      "Time, forward and backward", "s, log scale", 1, rings,
      {{"transfers alone", 3,
        [](const RingPlan& r) { return r.forward.transfer_s.max + r.backward.transfer_s.max; }},
       {"work alone", 2,
        [](const RingPlan& r) { return r.forward.compute_s.max + r.backward.compute_s.max; }},
       {"gather", 1,
        [](const RingPlan& r) { return r.gather_forward.time_s + r.gather_backward.time_s; }},
       {"ring", 0, [](const RingPlan& r) { return r.forward.time_s + r.backward.time_s; }}},
      0);
  s += chart(
      "Memory of a rank, at most", "GiB, log scale", kGiB, rings,
      {{"gather", 1,
        [](const RingPlan& r) {
          return static_cast<double>(
              std::max(r.gather_forward.memory.total(), r.gather_backward.memory.total()));
        }},
       {"ring", 0,
        [](const RingPlan& r) {
          return static_cast<double>(std::max(r.forward.memory.total(), r.backward.memory.total()));
        }}},
      p.memory_bytes);
  s += table(rings);
  return s + "</div>";
}

}  // namespace

std::string traffic_label(double bytes) {
  return in_units(bytes, 1000, {"B", "kB", "MB", "GB", "TB", "PB"});
}
std::string memory_label(double bytes) {
  return in_units(bytes, 1024, {"B", "KiB", "MiB", "GiB", "TiB", "PiB"});
}
std::string work_label(double flops) {
  return in_units(flops, 1000,
                  {"FLOP", "kFLOP", "MFLOP", "GFLOP", "TFLOP", "PFLOP", "EFLOP", "ZFLOP"});
}
std::string time_label(double seconds) {
  constexpr double kHour = 3600, kDay = 24 * kHour;
  if (seconds >= 2 * kDay) return in_units(seconds / kDay, 1e9, {"days"});
  if (seconds >= 2 * kHour) return in_units(seconds / kHour, 1e9, {"h"});
  if (seconds >= 0.9995) return in_units(seconds, 1e9, {"s"});
  return in_units(seconds * 1e9, 1000, {"ns", "us", "ms", "s"});
}
std::string count_label(std::int64_t n) {
  std::string digits = std::to_string(n);
  for (std::ptrdiff_t i = static_cast<std::ptrdiff_t>(digits.size()) - 3; i > 0; i -= 3) {
    digits.insert(static_cast<std::size_t>(i), " ");
  }
  return digits;
}

std::string hides_label(const RingPassPlan& pass) {
  if (pass.hops == 0) return "-";
  if (pass.hides()) return "yes";
  const std::string how =
      pass.hidden_hops == 0 ? "no" : fmt::format("{} of {} hops", pass.hidden_hops, pass.hops);
  return pass.hides_from ? how + ", from " + count_label(*pass.hides_from) : how;
}

std::string words_of(const RingPlanProblem& p) {
  std::string s =
      fmt::format("{} {} of {} columns", p.heads, p.heads == 1 ? "head" : "heads", p.head_dim);
  if (p.kv_heads != p.heads) s += fmt::format(" ({} of keys)", p.kv_heads);
  s += fmt::format(", {}, {}", name_of(p.dtype), p.causal ? "causal" : "full");
  if (p.window_left >= 0) s += fmt::format(", {} before", count_label(p.window_left));
  if (p.window_right >= 0) s += fmt::format(", {} after", count_label(p.window_right));
  if (p.batch > 1) s += fmt::format(", batch {}", p.batch);
  s += p.balance == Balance::kZigzag ? ", zigzag shards" : ", contiguous shards";
  return s + fmt::format("; {:g} TFLOP/s a rank, {:g} GB/s a link each way", p.flops_per_s / 1e12,
                         p.link_bytes_per_s / 1e9);
}

namespace {

constexpr const char* kHow =
    "Bytes are those that communicators count. Times are modelled: a hop takes the "
    "longer of what comes and what is computed with it; a gather computes when all "
    "has come. Memory is a rank&#39;s tensors, what it carries in fp32 and messages.";

std::string sections(const std::vector<PlannedRing>& rings) {
  std::string body =
      "<p class=\"lede\">" + draw::text(words_of(rings.front().problem), 400) + ".</p>";
  std::vector<std::int64_t> tokens;
  for (const PlannedRing& r : rings) tokens.push_back(r.problem.tokens);
  std::sort(tokens.begin(), tokens.end());
  tokens.erase(std::unique(tokens.begin(), tokens.end()), tokens.end());
  for (const std::int64_t n : tokens) {
    std::vector<const PlannedRing*> those;
    for (const PlannedRing& r : rings) {
      if (r.problem.tokens == n) those.push_back(&r);
    }
    std::sort(those.begin(), those.end(), [](const PlannedRing* a, const PlannedRing* b) {
      return a->problem.ranks < b->problem.ranks;
    });
    body += section(those);
  }
  return body;
}

}  // namespace

std::string plan_page(const std::vector<PlannedRing>& rings) {
  return draw::page("Annulus: ring plan", "Ring attention, planned", sections(rings), kHow);
}

std::string plan_example() {
  std::vector<PlannedRing> rings;
  RingPlanProblem p{.tokens = 1 << 20, .heads = 32, .kv_heads = 8, .head_dim = 128, .causal = true};
  p.flops_per_s = 400e12;
  for (p.ranks = 1; p.ranks <= 64; p.ranks *= 2) rings.push_back({p, plan_ring(p)});
  return std::string(
             "<h2>What a ring of ranks would cost</h2><p class=\"where\">Not measured: what "
             "<code>annulus plan ring</code> says of this example. ") +
         kHow + "</p>" + sections(rings);
}

}  // namespace annulus::cli
