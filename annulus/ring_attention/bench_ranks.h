// A row of attention over local ranks: the same tensors, cut where they lie, every rank a thread of its own.
#pragma once

#include "annulus/attention/bench_rows.h"
#include "annulus/ring_attention/test/cases.h"

namespace annulus::bench {

inline Row ring_row(std::string name, const AttentionProblem& problem, bool backward, int ranks,
                    DeviceType device, bool deterministic = false) {
  Row row = attention_row(std::move(name), problem, backward, device);
  row.op = "ring_attention";
  row.params["ranks"] = std::int64_t{ranks};
  if (deterministic) row.impl = "annulus-deterministic";
  const auto over = [=](const AttentionProblem& p) {
    return [=] { return testing::over_local_ranks(p, bench_case(p), ranks, deterministic); };
  };
  const AttentionProblem p = completed(problem, backward);
  row.problem = over(p);
  row.error_problem = over(error_problem(p, backward));
  return row;
}

}  // namespace annulus::bench
