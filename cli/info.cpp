// annulus info: the machine, the build, what runs here and why not.
#include <fmt/format.h>

#include <iostream>
#include <memory>
#include <nlohmann/json.hpp>

#include "annulus/core/info.h"
#include "annulus/cuda/memory.h"
#include "bench/ceilings.h"
#include "bench/runner.h"
#include "cli/commands.h"
#include "cli/options.h"

namespace annulus::cli {
namespace {

using nlohmann::ordered_json;

#if ANNULUS_HAVE_MPI
constexpr const char* kMpi = "built in: bench --transport mpi runs over mpirun's processes";
#else
constexpr const char* kMpi = "not built";
#endif

struct InfoOptions {
  bool json = false, markdown = false, measure = false;
};

std::string join(const std::vector<std::string>& words) {
  return fmt::format("{}", fmt::join(words, ", "));
}

std::vector<std::string> dtype_names(const OperatorInfo& op) {
  std::vector<std::string> names;
  for (const DType t : op.dtypes) names.emplace_back(name_of(t));
  return names;
}

ordered_json ceilings_json(DeviceType device) {
  const bench::Ceilings c = bench::measure_ceilings(device);
  ordered_json j{{"copy_gbs", c.copy_gbs}, {"gemm_gflops", ordered_json::object()}};
  for (const Precision p : bench::kAllProducts) {
    if (c.gemm_gflops(p) > 0) j["gemm_gflops"][name_of(p)] = c.gemm_gflops(p);
  }
  if (c.launch_ms > 0) j["launch_ms"] = c.launch_ms;
  if (c.barrier_ms > 0) j["barrier_ms"] = c.barrier_ms;
  j["summary"] = bench::to_string(c);
  return j;
}

ordered_json support_json(const Support& s) {
  return {{"available", s.available}, {s.available ? "implementation" : "reason", s.reason}};
}

ordered_json collect(bool measure) {
  const BuildInfo build = build_info();
  ordered_json j;
  j["version"] = build.version;
  j["commit"] = build.commit;
  j["build"] = {{"compiler", build.compiler}, {"cuda", build.cuda},     {"simd", build.simd},
                {"blas", build.blas},         {"openmp", build.openmp}, {"mpi", kMpi}};
  auto& cpu = j["hardware"]["cpu"];
  cpu = {{"name", cpu_name()},
         {"threads", cpu_threads()},
         {"simd", cpu_features()},
         {"memory_available_bytes", bench::available_bytes(kCPU)}};
  if (measure) cpu["ceilings"] = ceilings_json(DeviceType::kCPU);
  j["backends"]["cpu"] = {{"available", true}};
  const std::string why_not = why_no_cuda();
  j["backends"]["cuda"] = {{"available", why_not.empty()}};
  if (!why_not.empty()) j["backends"]["cuda"]["reason"] = why_not;
  if (why_not.empty()) {
    j["hardware"]["cuda"] = ordered_json::array();
    for (int i = 0; i < cuda::device_count(); ++i) {
      const cuda::DeviceInfo d = cuda::device_info(i);
      ordered_json g{{"name", d.name},
                     {"compute_capability", fmt::format("{}.{}", d.major, d.minor)},
                     {"multiprocessors", d.multiprocessors},
                     {"memory_bytes", d.total_bytes},
                     {"l2_bytes", d.l2_bytes},
                     {"driver", d.driver_version},
                     {"runtime", d.runtime_version}};
      if (measure && i == 0) g["ceilings"] = ceilings_json(DeviceType::kCUDA);
      j["hardware"]["cuda"].push_back(std::move(g));
    }
  }
  j["operators"] = ordered_json::object();
  for (const OperatorInfo& op : operators()) {
    auto& o = j["operators"][op.name];
    o = {{"summary", op.summary},
         {"dtypes", dtype_names(op)},
         {"gradients", op.gradients},
         {"deterministic", op.deterministic}};
    o["cpu"] = support_json(op.support(DeviceType::kCPU));
    o["cuda"] = support_json(op.support(DeviceType::kCUDA));
    o["precisions_measured_with"] = op.precisions_measured_with;
    o["precisions"] = ordered_json::array();
    for (const PrecisionInfo& p : op.precisions) {
      o["precisions"].push_back({{"name", p.name},
                                 {"product", p.product},
                                 {"state_error", p.state_error},
                                 {"gradient_error", p.gradient_error}});
    }
  }
  return j;
}

template <class... T>
void say(fmt::format_string<T...> format, T&&... values) {
  std::cout << fmt::format(format, std::forward<T>(values)...) << "\n";
}

void print_text(const ordered_json& j) {
  const auto text = [](const ordered_json& v) { return v.get<std::string>(); };
  const auto words = [](const ordered_json& v) { return join(v.get<std::vector<std::string>>()); };
  const auto say_ceilings = [&](const ordered_json& device) {
    if (device.contains("ceilings")) say("            {}", text(device["ceilings"]["summary"]));
  };
  constexpr double kGiB = 1 << 30, kMiB = 1 << 20;
  const auto& hardware = j["hardware"];
  const auto& cpu = hardware["cpu"];
  say("annulus {} ({})\n\nhardware", text(j["version"]), text(j["commit"]));
  say("  cpu       {}, {} threads, {}, {:.1f} GiB free", text(cpu["name"]),
      cpu["threads"].get<int>(), text(cpu["simd"]),
      cpu["memory_available_bytes"].get<double>() / kGiB);
  say_ceilings(cpu);
  for (const auto& g : hardware.value("cuda", ordered_json::array())) {
    say("  cuda      {}, sm_{}, {} SMs, {:.0f} GiB, L2 {:.0f} MiB", text(g["name"]),
        text(g["compute_capability"]), g["multiprocessors"].get<int>(),
        g["memory_bytes"].get<double>() / kGiB, g["l2_bytes"].get<double>() / kMiB);
    say_ceilings(g);
  }
  say("\nbuild");
  for (const char* key : {"compiler", "simd", "cuda", "blas", "openmp", "mpi"}) {
    say("  {:<9} {}", key, text(j["build"][key]));
  }
  const auto& gpu = j["backends"]["cuda"];
  say("\nbackends\n  cpu       available\n  cuda      {}",
      gpu["available"] ? "available" : "not available: " + text(gpu["reason"]));
  say("\noperators");
  for (const auto& [name, op] : j["operators"].items()) {
    say("  {}: {}", name, text(op["summary"]));
    say("    dtypes {}; gradients {}; deterministic {}", words(op["dtypes"]),
        words(op["gradients"]),
        op["deterministic"].get<bool>() ? "always" : "on the CPU; on CUDA when asked");
    for (const char* device : {"cpu", "cuda"}) {
      const auto& s = op[device];
      say("    {:<5} {}", device,
          s["available"] ? "yes: " + text(s["implementation"]) : "no: " + text(s["reason"]));
    }
    if (op["precisions"].empty()) continue;
    say("    error of states and gradients, {}:", text(op["precisions_measured_with"]));
    for (const auto& p : op["precisions"]) {
      say("      {:<7} {:.1e}  {:.1e}  {}", text(p["name"]), p["state_error"].get<double>(),
          p["gradient_error"].get<double>(), text(p["product"]));
    }
  }
  if (j["operators"].empty()) say("  none is linked into this program");
}

// The table of the README. It speaks of the build, not of this machine: a GPU that is absent here
// is not a missing backend.
void print_markdown() {
  const char* cuda = cuda::built() ? "yes" : "not in this build";
  say("| operator | dtypes | gradients | CPU | CUDA | PyTorch | deterministic |\n"
      "|---|---|---|---|---|---|---|");
  for (const OperatorInfo& op : operators()) {
    const std::string torch =
        ANNULUS_HAVE_TORCH ? "`annulus." + op.name + "`" : std::string("not in this build");
    say("| `{}` | {} | {} | {} | {} | {} | {} |", op.name, join(dtype_names(op)),
        join(op.gradients), op.support(DeviceType::kCPU).available ? "yes" : "no", cuda, torch,
        op.deterministic ? "always" : "when asked");
  }
}

}  // namespace

void add_info_command(CLI::App& app, int& exit_code) {
  auto options = std::make_shared<InfoOptions>();
  CLI::App* command =
      app.add_subcommand("info", "hardware, build, backends and what each operator supports here");
  auto* json = command->add_flag("--json", options->json, "one JSON object");
  command->add_flag("--markdown", options->markdown, "the support table of the README")
      ->excludes(json);
  command->add_flag("--measure", options->measure,
                    "measure the ceilings (copy, GEMM) of the devices here; takes seconds");
  command->callback([options, &exit_code] {
    if (options->markdown) {
      print_markdown();
    } else {
      const ordered_json j = collect(options->measure);
      if (options->json) {
        std::cout << j.dump(2, ' ', false, ordered_json::error_handler_t::replace) << "\n";
      } else {
        print_text(j);
      }
    }
    exit_code = kDone;
  });
}

}  // namespace annulus::cli
