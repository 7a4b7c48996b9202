// annulus plan ring: what a ring of P ranks would cost, as a table, as JSON and as a page of curves.
#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <iostream>
#include <memory>
#include <nlohmann/json.hpp>
#include <set>

#include "annulus/core/errors.h"
#include "cli/commands.h"
#include "cli/options.h"
#include "cli/plan_page.h"
#include "files/file.h"

namespace annulus::cli {
namespace {

using nlohmann::ordered_json;

struct PlanOptions {
  std::vector<std::int64_t> tokens, ranks;
  std::int64_t kv_heads = 0;  // 0: as many as heads
  std::string dtype = "bf16", balance = "zigzag", format = "md", out;
  double link_gbs = 50, tflops = 400, memory_gib = 0;
  const CLI::Option* memory_option = nullptr;
  RingPlanProblem problem{.heads = 32, .head_dim = 128};
};

DType dtype_named(const std::string& name) {
  return name == "f32" ? DType::kF32 : name == "f16" ? DType::kF16 : DType::kBF16;
}

// The planner would name its own fields.
void check_speeds(const PlanOptions& o) {
  const auto check = [](const char* name, double value, bool good) {
    if (good && std::isfinite(value)) return;
    throw InvalidArgument(
        fmt::format("{} must be more than 0 and finite but is {:g}", name, value));
  };
  check("--link-gbs", o.link_gbs, o.link_gbs > 0);
  check("--tflops", o.tflops, o.tflops > 0);
  check("--memory-gib", o.memory_gib, o.memory_gib > 0 || o.memory_option->count() == 0);
}

std::vector<PlannedRing> plans_of(const PlanOptions& o) {
  check_speeds(o);
  RingPlanProblem p = o.problem;
  p.kv_heads = o.kv_heads == 0 ? p.heads : o.kv_heads;
  p.dtype = dtype_named(o.dtype);
  p.balance = o.balance == "zigzag" ? Balance::kZigzag : Balance::kContiguous;
  p.link_bytes_per_s = o.link_gbs * 1e9;
  p.flops_per_s = o.tflops * 1e12;
  p.memory_bytes = o.memory_gib * (1 << 30);
  std::vector<PlannedRing> all;
  for (const std::int64_t tokens : o.tokens) {
    for (const std::int64_t ranks : o.ranks) {
      p.tokens = tokens;
      p.ranks = static_cast<int>(ranks);
      all.push_back({p, plan_ring(p)});
    }
  }
  return all;
}

// --- table ---

void print_md(const std::vector<PlannedRing>& rings) {
  std::cout << words_of(rings.front().problem) << "\n\n"
            << "| tokens | ranks | pass | a hop | sent | work | max/mean | compute | transfer | "
               "takes | hides | memory | gather: sent | takes | memory |\n"
               "|---|---|---|---|---|---|---|---|---|---|---|---|---|---|---|\n";
  for (const PlannedRing& r : rings) {
    const auto row = [&](const char* name, const RingPassPlan& pass, const GatherPlan& gather) {
      const auto memory = [&](const RingMemory& m) {
        const auto bytes = static_cast<double>(m.total());
        const bool fits = r.problem.memory_bytes == 0 || bytes <= r.problem.memory_bytes;
        return memory_label(bytes) + (fits ? "" : ", does not fit");
      };
      std::cout << fmt::format(
          "| {} | {} | {} | {} | {} | {} | {:.3f} | {} | {} | {} | {} | {} | {} | {} | {} |\n",
          count_label(r.problem.tokens), r.problem.ranks, name, traffic_label(pass.hop_bytes),
          traffic_label(pass.bytes.max), work_label(pass.flops.max), pass.work_balance(),
          time_label(pass.compute_s.max), time_label(pass.transfer_s.max), time_label(pass.time_s),
          hides_label(pass), memory(pass.memory), traffic_label(gather.bytes),
          time_label(gather.time_s), memory(gather.memory));
    };
    row("forward", r.plan.forward, r.plan.gather_forward);
    row("backward", r.plan.backward, r.plan.gather_backward);
  }
  std::cout
      << "\nOf the rank that has most. hides: what comes in a hop takes no longer than computing "
         "with it,\nor from how many tokens a rank on it would. memory: tensors of the rank, what "
         "it carries in\nfp32, messages. gather: all keys and values on every rank.\n";
}

// --- JSON ---

ordered_json spread_json(const RingSpread& s) { return {{"max", s.max}, {"mean", s.mean}}; }
ordered_json memory_json(const RingMemory& m) {
  return {{"tensors", m.tensors},
          {"carried", m.carried},
          {"messages", m.messages},
          {"total", m.total()}};
}
ordered_json pass_json(const RingPassPlan& p) {
  ordered_json j{{"bytes", spread_json(p.bytes)},
                 {"hop_bytes", p.hop_bytes},
                 {"flops", spread_json(p.flops)},
                 {"work_balance", p.work_balance()},
                 {"compute_s", spread_json(p.compute_s)},
                 {"transfer_s", spread_json(p.transfer_s)},
                 {"time_s", p.time_s},
                 {"hops", p.hops},
                 {"hidden_hops", p.hidden_hops},
                 {"hides", p.hides()},
                 {"hides_from", nullptr},
                 {"memory_bytes", memory_json(p.memory)}};
  if (p.hides_from) j["hides_from"] = *p.hides_from;
  return j;
}
ordered_json gather_json(const GatherPlan& g) {
  return {{"bytes", g.bytes}, {"time_s", g.time_s}, {"memory_bytes", memory_json(g.memory)}};
}

void print_json(const std::vector<PlannedRing>& rings) {
  ordered_json all = ordered_json::array();
  for (const auto& [p, plan] : rings) {
    all.push_back({{"tokens", p.tokens},
                   {"ranks", p.ranks},
                   {"heads", p.heads},
                   {"kv_heads", p.kv_heads},
                   {"head_dim", p.head_dim},
                   {"batch", p.batch},
                   {"dtype", name_of(p.dtype)},
                   {"causal", p.causal},
                   {"window", {p.window_left, p.window_right}},
                   {"balance", p.balance == Balance::kZigzag ? "zigzag" : "contiguous"},
                   {"slice", p.slice},
                   {"link_bytes_per_s", p.link_bytes_per_s},
                   {"flops_per_s", p.flops_per_s},
                   {"forward", pass_json(plan.forward)},
                   {"backward", pass_json(plan.backward)},
                   {"backward_sends", plan.queries_travel ? "queries" : "keys"},
                   {"gather_forward", gather_json(plan.gather_forward)},
                   {"gather_backward", gather_json(plan.gather_backward)},
                   {"fits", plan.fits},
                   {"gather_fits", plan.gather_fits}});
  }
  std::cout << all.dump(2) << "\n";
}

int run_plan(const PlanOptions& o) {
  const bool draws = !o.out.empty();
  if (draws) {
    files::replaceable_file(o.out);
    if (std::set(o.ranks.begin(), o.ranks.end()).size() < 2) {
      throw InvalidArgument("--out draws curves over ranks and needs two values of --ranks");
    }
  }
  const std::vector<PlannedRing> rings = plans_of(o);
  if (o.format == "json") {
    print_json(rings);
  } else {
    print_md(rings);
  }
  if (draws) {
    files::write_file(o.out, plan_page(rings));
    std::cerr << "annulus: the same as a page: " << o.out << "\n";
  }
  const bool some =
      std::any_of(rings.begin(), rings.end(), [](const PlannedRing& r) { return r.plan.fits; });
  if (some) return kDone;
  std::cerr << fmt::format("annulus: none of these fits in {:g} GiB a rank\n", o.memory_gib);
  return kFailed;
}

}  // namespace

void add_plan_command(CLI::App& app, int& exit_code) {
  CLI::App* plan = app.add_subcommand("plan", "what something would cost, before it runs");
  plan->require_subcommand(1);
  auto o = std::make_shared<PlanOptions>();
  CLI::App* command = plan->add_subcommand(
      "ring", "attention over P ranks: bytes, time, memory, and whether transfers hide");
  command->footer(
      "Several values of --tokens and --ranks give a row each:\n"
      "  annulus plan ring --tokens 1000000 --ranks 2 4 8 16 --causal --kv-heads 8 --memory-gib "
      "80\n"
      "Exit codes: 0 done, 1 nothing that was asked for fits in --memory-gib, 2 bad usage or "
      "input,\n"
      "3 what was asked for is not available here (and why).");
  const auto count = [&](const char* name, auto& value, std::uint64_t low, std::uint64_t high,
                         const char* about) {
    return command->add_option(name, value, about)->check(whole_number(low, high));
  };
  constexpr std::uint64_t kMany = 1'000'000'000;
  count("--tokens", o->tokens, 1, kMany, "of the whole sequence; one or several")->required();
  count("--ranks", o->ranks, 1, 4096, "that share it; one or several")->required();
  count("--heads", o->problem.heads, 1, kMany, "of queries")->capture_default_str();
  count("--kv-heads", o->kv_heads, 1, kMany, "of keys and values (default: as many)");
  count("--head-dim", o->problem.head_dim, 1, 256, "columns of a head")->capture_default_str();
  count("--batch", o->problem.batch, 1, kMany, "sequences at once")->capture_default_str();
  add_choice(*command, "--dtype", o->dtype, {"f32", "f16", "bf16"}, "f32, f16 or bf16");
  command->add_flag("--causal,!--full", o->problem.causal,
                    "every token sees those before it; or all (the default)");
  count("--window-left", o->problem.window_left, 0, kMany, "keys before a query, at most");
  count("--window-right", o->problem.window_right, 0, kMany, "keys behind a query, at most");
  add_choice(*command, "--balance", o->balance, {"zigzag", "contiguous"}, "how it is cut");
  count("--slice", o->problem.slice, 1, kMany,
        "rows of a message, of which a rank has three: 8192 between GPUs, 1536 between CPUs")
      ->capture_default_str();
  command->add_option("--link-gbs", o->link_gbs, "GB/s of a rank's link, each way")
      ->capture_default_str();
  command->add_option("--tflops", o->tflops, "TFLOP/s of a rank, in attention")
      ->capture_default_str();
  o->memory_option = command->add_option("--memory-gib", o->memory_gib,
                                         "GiB that a rank has (default: not asked)");
  add_choice(*command, "--format", o->format, {"md", "json"}, "md or json");
  command->add_option("--out", o->out, "also draw bytes, time and memory over ranks (HTML)");
  command->callback([o, &exit_code] { exit_code = run_plan(*o); });
}

}  // namespace annulus::cli
