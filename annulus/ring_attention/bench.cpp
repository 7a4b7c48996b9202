// The suites that have ranks.
//
//   ring-attention                 sequences over ranks beside the same on one; the floor is that of the machine, which
//                                  all ranks share
//   ring-attention-comprehensive   the original's six classes at its sizes, each as the operator that its name promises, over
//                                  as many ranks
#include <fmt/format.h>

#include <string>
#include <utility>
#include <vector>

#include "annulus/attention/bench_original.h"
#include "annulus/ring_attention/bench_ranks.h"

namespace annulus::bench {
namespace {

constexpr double kMiBOfGb = 1024;

std::vector<Row> ring_rows(const SuiteRequest& request) {
  std::vector<Row> rows;
  const auto add = [&](const std::string& name, AttentionProblem p, bool backward,
                       const char* computes) {
    for (const int ranks : {1, 2, 4}) {
      rows.push_back(ring_row(fmt::format("{}-P{}", name, ranks), p, backward, ranks, request));
      rows.back().params["computes"] = std::string(computes);
    }
  };
  const bool quick = request.size == Size::kQuick;
  // What a hop computes beside the same on one device: two rows whose ratio is the rate that a ring keeps.
  for (const std::int64_t D : {64, 128}) {
    if (request.device != DeviceType::kCUDA || request.group != nullptr) break;
    AttentionProblem p = dense(8192, DType::kBF16);
    p.D = p.Dv = D;
    for (const bool backward : {false, true}) {
      const std::string what = fmt::format("{}-d{}-n8192", backward ? "fwdbwd" : "fwd", D);
      rows.push_back(attention_row("OneDevice-" + what, p, backward, request.device));
      rows.push_back(attention_row("Hop-" + what, p, backward, request.device));
      Row& hop = rows.back();
      hop.op = "ring_attention";
      hop.problem = [problem = completed(p, backward)] {
        return testing::one_hop(problem, bench_case(problem));
      };
      hop.error_problem = [small = error_problem(completed(p, backward), backward)] {
        return testing::over_local_ranks(small, bench_case(small), 1, false);
      };
      hop.params["computes"] = std::string("the rows of another rank, without their way here");
    }
  }
  for (const DType dtype : dtypes_of(request)) {
    for (const std::int64_t n : {1024, 2048, 4096, 8192}) {
      if (quick && n > 1024) continue;
      AttentionProblem p = dense(n, dtype), sparse = blocks(n, dtype, 0.1);
      sparse.shared_list = true;
      p.B = sparse.B = 2;
      add(fmt::format("Standard-n{}", n), p, false, "dense attention");
      add(fmt::format("Distributed-n{}", n), p, false, "the same as Standard, in the original too");
      AttentionProblem window = p;
      window.window_left = window.window_right = n / 16;
      add(fmt::format("Hilbert-window-n{}", n), window, false,
          "an eighth of the tokens around each, of a sequence that was ordered before it was cut");
      add(fmt::format("BlockSparse-n{}", n), sparse, false, "a tenth of the blocks of 64 x 64");
      p.B = 1;
      const std::string both = fmt::format("Standard-fwdbwd-n{}", n);
      add(both, p, true, "dense attention and its gradients");
      for (const int ranks : {1, 2}) {
        rows.push_back(ring_row(fmt::format("{}-P{}", both, ranks), p, true, ranks, request, true));
      }
    }
  }
  return fitting(std::move(rows), request);
}

// --- ring-attention-comprehensive ------------------------------------------------------------------------------

Row comprehensive_row(const RingOriginalClass& c, const RingOriginalRow& figures, DType dtype,
                      const SuiteRequest& request) {
  const std::string name = fmt::format("{}-n{}", c.name, figures.n);
  const bool small = figures.n <= 2048;
  const std::string computes = c.computes;
  AttentionProblem p = dilated(
      figures.n, dtype,
      computes.starts_with("grouped_kv") ? DilatedMode::kGroupedKv : DilatedMode::kGrouped,
      small ? std::vector<std::int64_t>{512, 1024} : std::vector<std::int64_t>{1024, 2048, 4096},
      small ? std::vector<std::int64_t>{1, 2} : std::vector<std::int64_t>{1, 2, 4});
  p.remainder_last = computes.ends_with("last groups");
  Row row = c.ranks > 1 ? ring_row(name, p, false, c.ranks, request)
                        : attention_row(name, p, false, request.device);
  row.params["computes"] = computes;
  if (is_16_bits(dtype)) {
    row.original = {figures.ms, "ms", kAttentionOriginalHardware, {}};
    row.memory_name = "memory-" + name;
    row.memory_calls = row.calls;
    row.memory_original = {kMiBOfGb * figures.gb, "MiB", kAttentionOriginalHardware, {}};
  }
  row.params["original_did"] = std::string(c.did);
  row.params["original_gflop_executed"] = figures.executed;
  row.params["original_gflop_needed"] = figures.needed;
  row.params["original_zero_rows"] = figures.zero_rows;
  return row;
}

std::vector<Row> comprehensive_rows(const SuiteRequest& request) {
  std::vector<Row> rows;
  for (const DType dtype : dtypes_of(request)) {
    for (std::size_t i = 0; i < kRingOriginalClasses[0].rows.size(); ++i) {
      for (const RingOriginalClass& c : kRingOriginalClasses) {
        rows.push_back(comprehensive_row(c, c.rows[i], dtype, request));
      }
      // What their names come from: every head runs every branch.
      const Row& first = rows[rows.size() - kRingOriginalClasses.size()];
      const auto list = [&](const char* name) {
        return std::get<std::vector<std::int64_t>>(first.params.at(name));
      };
      const std::int64_t n = kRingOriginalClasses[0].rows[i].n;
      rows.push_back(attention_row(
          fmt::format("LongNet-n{}", n),
          dilated(n, dtype, DilatedMode::kLongNet, list("segment_lengths"), list("dilation_rates")),
          false, request.device));
    }
  }
  return fitting(std::move(rows), request);
}

constexpr const char* kProcesses =
    "every rank a process under mpirun with its own shard; the time is the slowest rank's";

const SuiteRegistration suite(
    {"ring-attention",
     "attention over 1, 2 and 4 ranks: the rings of the original's summary, made real",
     ring_rows,
     {{"annulus-deterministic", "the same bits for every number of ranks"},
      {"annulus-mpi", kProcesses},
      {"annulus-deterministic-mpi", "the same bits for every number of ranks, of processes"}}});

const SuiteRegistration comprehensive(
    {"ring-attention-comprehensive",
     "dilated attention by the six class names of the original's table, on one device or over 4 "
     "ranks as they say, and LongNet",
     comprehensive_rows,
     {{"annulus-mpi", kProcesses}}});

}  // namespace
}  // namespace annulus::bench
