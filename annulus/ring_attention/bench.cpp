// Suite ring-attention: sequences over local ranks beside the same on one, with error, floor and bytes. The floor is that of the
// machine, which all ranks share.
#include <fmt/format.h>

#include <vector>

#include "annulus/ring_attention/bench_ranks.h"

namespace annulus::bench {
namespace {

std::vector<Row> ring_rows(const SuiteRequest& request) {
  std::vector<Row> rows;
  const auto add = [&](const std::string& name, AttentionProblem p, bool backward,
                       const char* computes) {
    for (const int ranks : {1, 2, 4}) {
      rows.push_back(
          ring_row(fmt::format("{}-P{}", name, ranks), p, backward, ranks, request.device));
      rows.back().params["computes"] = std::string(computes);
    }
  };
  const bool quick = request.size == Size::kQuick;
  for (const DType dtype : dtypes_of(request)) {
    for (const std::int64_t n : {1024, 2048, 4096, 8192}) {
      if (quick && n > 1024) continue;
      AttentionProblem p = dense(n, dtype), sparse = blocks(n, dtype, 0.1);
      sparse.shared_list = true;
      p.B = sparse.B = 2;
      add(fmt::format("Standard-n{}", n), p, false, "dense attention");
      AttentionProblem window = p;
      window.window_left = window.window_right = n / 16;
      add(fmt::format("Hilbert-window-n{}", n), window, false,
          "an eighth of the tokens around each, of a sequence that was ordered before it was cut");
      add(fmt::format("BlockSparse-n{}", n), sparse, false, "a tenth of the blocks of 64 x 64");
      p.B = 1;
      add(fmt::format("Standard-fwdbwd-n{}", n), p, true, "dense attention and its gradients");
    }
  }
  return fitting(std::move(rows), request);
}

const SuiteRegistration suite(
    {"ring-attention",
     "attention over 1, 2 and 4 local ranks: the rings of the original's summary, made real",
     ring_rows});

}  // namespace
}  // namespace annulus::bench
