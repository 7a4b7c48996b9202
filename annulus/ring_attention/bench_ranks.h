// A row of attention over ranks: local ones, the same tensors, cut where they lie, every rank a thread of its own; or, where the
// request has a group of processes, its ranks, each with its own shard.
#pragma once

#include "annulus/attention/bench_rows.h"
#include "annulus/ring_attention/test/cases.h"

namespace annulus::bench {

inline Row ring_row(std::string name, const AttentionProblem& problem, bool backward, int ranks,
                    const SuiteRequest& request, bool deterministic = false) {
  Row row = attention_row(std::move(name), problem, backward, request.device);
  row.op = "ring_attention";
  row.params["ranks"] = std::int64_t{ranks};
  if (deterministic) row.impl = "annulus-deterministic";
  Communicator* const group = request.group;
  if (group && group->size() == ranks) {
    row.impl += "-mpi";
    row.params["transport"] = std::string("mpi");
  }
  const auto over = [=](const AttentionProblem& p, bool whole) {
    return [=] {
      return group ? testing::over_processes(p, bench_case(p), *group, deterministic, whole)
                   : testing::over_local_ranks(p, bench_case(p), ranks, deterministic);
    };
  };
  const AttentionProblem p = completed(problem, backward);
  row.problem = over(p, false);
  row.error_problem = over(error_problem(p, backward), true);
  return row;
}

}  // namespace annulus::bench
