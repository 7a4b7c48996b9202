#include "bench/runner.h"

#include <fmt/format.h>
#include <sched.h>
#include <unistd.h>

#include <algorithm>
#include <cmath>
#include <cstdlib>
#include <cstring>
#include <ctime>

#include "annulus/core/errors.h"
#include "annulus/core/info.h"
#include "annulus/cuda/memory.h"
#include "bench/mover.h"
#include "bench/problem.h"
#include "bench/statistics.h"
#include "testing/memory/tensors.h"

namespace annulus::bench {
namespace {

constexpr double kGiB = 1 << 30;
constexpr int kMinRepetitions = 7;
constexpr int kMaxRepetitions = 200;
constexpr const char* kErrorMetric = "max|err|/max|ref|";

bool on_cuda(Device device) { return device.type == DeviceType::kCUDA; }

Record with_status(Record r, Status status, std::string reason) {
  r.status = status;
  r.reason = std::move(reason);
  return r;
}

}  // namespace

std::size_t available_bytes(Device device) {
  const std::size_t free = testing::free_bytes(device);
  return free > 0 ? free : std::size_t{4} << 30;  // not said: assume a small machine
}

std::string hardware_name(Device device) {
  if (on_cuda(device)) return cuda::device_info(device.index).name;
  const int threads = cpu_threads();
  return fmt::format("{}, {} core{}", cpu_name(), threads, threads == 1 ? "" : "s");
}

std::string iso_date() {
  const std::time_t now = std::time(nullptr);
  std::tm utc{};
  gmtime_r(&now, &utc);
  char text[32];
  return {text, std::strftime(text, sizeof text, "%Y-%m-%dT%H:%M:%SZ", &utc)};
}

void largest_of_ranks(Communicator* group, std::span<double> values) {
  if (!group) return;
  std::vector<double> all(values.size() * static_cast<std::size_t>(group->size()));
  group->all_gather(std::as_bytes(values), std::as_writable_bytes(std::span(all)));
  for (std::size_t i = 0; i < all.size(); ++i) {
    double& largest = values[i % values.size()];
    largest = std::max(largest, all[i]);
  }
}

// Those that the ranks of this rank's place may run on between them. (One that mpirun has bound to a core may not on the others, and a
// container not on all that the machine has.)
static int processors_of(Communicator& group, const std::vector<RankCeilings>& ranks) {
  cpu_set_t own;
  CPU_ZERO(&own);
  sched_getaffinity(0, sizeof own, &own);
  std::vector<cpu_set_t> all(ranks.size());
  group.all_gather(std::as_bytes(std::span(&own, 1)), std::as_writable_bytes(std::span(all)));
  const std::uint64_t place = ranks[static_cast<std::size_t>(group.rank())].place;
  for (std::size_t r = 0; r < all.size(); ++r) {
    if (ranks[r].place == place) CPU_OR(&own, &own, &all[r]);
  }
  return CPU_COUNT(&own);
}

// By the first rank of every place, while the others there wait: together they would measure each other.
static Ceilings ceilings_of(Communicator& group, Device device) {
  char host[256] = {};
  gethostname(host, sizeof host - 1);
  std::string place = host;
  RankCeilings mine;
  if (on_cuda(device)) {
    const char* visible = std::getenv("CUDA_VISIBLE_DEVICES");
    place += fmt::format(" {} of {}", device.index, visible ? visible : "all");
  }
  mine.place = std::hash<std::string>()(place);
  std::vector<RankCeilings> all(static_cast<std::size_t>(group.size()));
  const auto tell = [&] {
    group.all_gather(std::as_bytes(std::span(&mine, 1)), std::as_writable_bytes(std::span(all)));
  };
  tell();
  if (!on_cuda(device)) {
    mine.at_most = static_cast<double>(processors_of(group, all)) / cpu_threads();
  }
  const auto first = std::find_if(all.begin(), all.end(),
                                  [&](const RankCeilings& r) { return r.place == mine.place; });
  if (first - all.begin() == group.rank()) mine.ceilings = measure_ceilings(device.type);
  tell();
  return together(all);
}

Runner::Runner(const RunnerOptions& options) : options_(options) {
  if (options_.hardware.empty()) options_.hardware = hardware_name(options_.device);
  if (options.group) {
    ceilings_ = ceilings_of(*options.group, options.device);
    options_.hardware =
        fmt::format("{} ranks of {}", options.group->size(), std::move(options_.hardware));
  } else {
    ceilings_ = measure_ceilings(options.device.type);
  }
  if (on_cuda(options_.device)) {
    cuda_ = std::make_unique<gpu::ColdTimer>();
  } else {
    sweep_ = Buffer(kCPU, std::max(2 * last_level_cache_bytes(), std::size_t{64} << 20));
    std::memset(sweep_.data(), 1, sweep_.bytes());
  }
}

int Runner::repetitions_for(double one_round_ms) const {
  if (options_.repetitions > 0) return options_.repetitions;
  const double fit = 1e3 * options_.seconds / std::max(one_round_ms, 1e-3);
  return std::clamp(static_cast<int>(std::min(fit, 1e6)), kMinRepetitions, kMaxRepetitions);
}

std::vector<std::vector<double>> Runner::time_on_host(const Runs& runs) {
  std::vector<std::vector<double>> times(runs.size());
  const auto round = [&] {
    for (std::size_t i = 0; i < runs.size(); ++i) {
      sweep_caches(sweep_.data(), sweep_.bytes());
      // Twice: a rank that waits long for the last one naps, and may sleep past it; the second wait is short.
      for (int j = 0; options_.group && j < 2; ++j) options_.group->barrier();
      times[i].push_back(milliseconds(runs[i]));
    }
  };
  round();  // page faults, thread start
  double round_ms = milliseconds(round);
  largest_of_ranks(options_.group, {&round_ms, 1});
  const int repetitions = repetitions_for(round_ms);
  for (auto& t : times) t.clear();
  for (int r = 0; r < repetitions; ++r) round();
  for (auto& t : times) largest_of_ranks(options_.group, t);
  return times;
}

std::vector<std::vector<double>> Runner::time(const Runs& runs) {
  // Calls over processes return when they are done, and all ranks must make as many.
  if (!on_cuda(options_.device) || options_.group) return time_on_host(runs);
  cuda_->time(runs, 3);
  const double round_ms = milliseconds([&] { cuda_->time(runs, 3); }) / 3;
  return cuda_->time(runs, repetitions_for(round_ms));
}

std::vector<Record> Runner::measure_or_throw(const Row& row, const Record& blank) {
  const testing::Case problem_case = row.problem();
  const std::size_t peak_bytes = peak_bytes_of(problem_case, row.calls, options_.device);
  const std::size_t ranks = options_.group ? static_cast<std::size_t>(options_.group->size()) : 1;
  const std::size_t needed =
      ranks *
      (peak_bytes + (row.with_move ? mover_bytes(problem_case, row.calls, options_.device) : 0));
  const std::size_t has = available_bytes(options_.device);
  // The last tenth belongs to the rest of the machine, on which all ranks may be.
  double share = static_cast<double>(needed) / (0.9 * static_cast<double>(has));
  largest_of_ranks(options_.group, {&share, 1});
  if (share > 1) {
    return {with_status(
        blank, Status::kSkipped,
        fmt::format("needs {:.1f} GiB, {} has {:.1f} free", static_cast<double>(needed) / kGiB,
                    to_string(options_.device), static_cast<double>(has) / kGiB))};
  }

  // Accuracy first: its buffers are gone before the large ones come.
  const testing::Case error_case = row.error_problem();
  if (row.same_expected.empty() || row.same_expected != expected_for_) {
    expected_for_.clear();
    expected_ = expected_of(error_case, row.calls);
    expected_for_ = row.same_expected;
  }
  const Accuracy accuracy = measure_accuracy(error_case, row.calls, options_.device, expected_);

  Problem problem(problem_case, row.calls, options_.device);
  Runs runs{[&] { problem.run(); }};
  std::optional<Mover> mover;
  std::string no_mover;
  if (row.with_move) {
    mover = make_mover(problem, options_.device, &no_mover);
    if (mover) runs.push_back(mover->run);
  }
  const auto times = time(runs);

  Record r = blank;
  r.params["error_on"] = error_case.params;
  r.bytes = problem.bytes();
  r.flops_needed = problem.flops();
  if (row.work.passes > 1) r.flops_executed = row.work.passes * problem.flops();
  if (row.flops_executed) r.flops_executed = row.flops_executed;
  const Floor floor = floor_of(problem.bytes(), problem.flops(), row.work, ceilings_);
  r.floor_ms = floor.ms;
  r.floor_kind = floor.kind;
  const double step_ms = row.work.steps > 0 ? ceilings_.step_ms(row.work.step_bytes) : 0;
  r.ceiling = Ceiling{ceilings_.copy_gbs, ceilings_.gemm_gflops(row.work.products),
                      row.work.products, 1e3 * step_ms};

  std::vector<Record> records;
  Record ours = r;
  if (row.observe) ours.params.merge(row.observe(problem));
  ours.time_ms = summarize(times[0]);
  ours.error = ErrorFigure{kErrorMetric, accuracy.max_relative};
  ours.zero_rows = accuracy.zero_rows;
  ours.workspace_bytes = static_cast<double>(problem.workspace_bytes());
  ours.peak_bytes = static_cast<double>(peak_bytes);
  ours.original = row.original;
  if (!(accuracy.guard_ratio <= 1)) {
    ours = with_status(ours, Status::kFailed,
                       fmt::format("{}: rms error is {:.3g} times the limit", accuracy.worst_output,
                                   accuracy.guard_ratio));
  }
  records.push_back(ours);

  if (mover) {
    Record move = r;
    move.impl = "move";
    move.params.erase("error_on");
    move.params["moves"] = mover->description;
    move.time_ms = summarize(times[1]);
    move.error = ErrorFigure{"share of bytes wrong", mover->wrong_share()};
    move.bytes = mover->bytes;
    move.flops_needed.reset();
    if (move.error->value > 0)
      move = with_status(move, Status::kFailed, "the bytes did not arrive");
    records.front().floor_ms = move.floor_ms = floor_beside(ours, move);
    records.push_back(move);
  } else if (row.with_move) {
    Record move = blank;
    move.impl = "move";
    records.push_back(with_status(move, Status::kSkipped, no_mover));
  }

  if (row.memory_original) {
    Record memory = records.front();
    memory.row = row.memory_name;
    memory.measures = Measures::kMemory;
    memory.original = row.memory_original;
    memory.peak_bytes =
        static_cast<double>(peak_bytes_of(problem_case, row.memory_calls, options_.device));
    records.push_back(memory);
  }
  return records;
}

std::vector<Record> Runner::measure(const std::string& suite, const Row& row) {
  Record blank;
  blank.suite = suite;
  blank.row = row.name;
  blank.op = row.op;
  blank.impl = row.impl;
  blank.device = on_cuda(options_.device) ? "cuda" : "cpu";
  blank.dtype = annulus::name_of(row.dtype);
  blank.params = row.params;
  blank.hardware = options_.hardware;
  blank.commit = build_info().commit;
  blank.date = iso_date();
  try {
    return measure_or_throw(row, blank);
  } catch (const NotSupported& e) {
    return {with_status(blank, Status::kSkipped, e.what())};
  } catch (const std::exception& e) {
    if (options_.group) throw;
    return {with_status(blank, Status::kFailed, e.what())};
  }
}

}  // namespace annulus::bench
