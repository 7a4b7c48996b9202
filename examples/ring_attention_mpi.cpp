// Attention whose sequence lies on processes, on one machine or many:
//
//   mpirun -n 4 --oversubscribe ring_attention_mpi
//
// Every rank makes its own tokens and compares its rows with those of one device, for which it makes the whole sequence as well:
// what a program without such a check would never do. Links annulus::mpi.
#include <mpi.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <exception>
#include <vector>

#include "annulus/annulus.h"
#include "annulus/dist/mpi.h"

namespace {

constexpr std::int64_t kTokens = 2000, kHeads = 4, kColumns = 32;
const annulus::AttentionOptions kOptions{.causal = true};
const annulus::RingOptions kRing{.tokens = kTokens};

// A token's row of q, k or v, wherever it is made.
void fill_row(std::int64_t token, std::uint32_t which, float* row) {
  auto state = static_cast<std::uint32_t>(token) * 2654435761u + which;
  for (std::int64_t i = 0; i < kHeads * kColumns; ++i) {
    state = state * 1664525u + 1013904223u;
    row[i] = static_cast<float>(state >> 8) / 8388608.0F - 1.0F;
  }
}

struct Tensors {
  explicit Tensors(std::vector<std::int64_t> of) : tokens(std::move(of)) {
    for (auto* x : {&q, &k, &v, &o}) x->resize(tokens.size() * kHeads * kColumns);
    lse.resize(tokens.size() * kHeads);
    for (std::size_t t = 0; t < tokens.size(); ++t) {
      fill_row(tokens[t], 1, &q[t * kHeads * kColumns]);
      fill_row(tokens[t], 2, &k[t * kHeads * kColumns]);
      fill_row(tokens[t], 3, &v[t * kHeads * kColumns]);
    }
  }
  std::int64_t rows() const { return static_cast<std::int64_t>(tokens.size()); }
  annulus::TensorView view(std::vector<float>& x) const {
    return annulus::contiguous(x.data(), {1, rows(), kHeads, kColumns});
  }
  annulus::TensorView lse_view() { return annulus::contiguous(lse.data(), {1, kHeads, rows()}); }

  std::vector<std::int64_t> tokens;
  std::vector<float> q, k, v, o, lse;
};

bool run() {
  const auto ring = annulus::mpi_communicator({.deadline_s = 30});
  std::vector<std::int64_t> own, all;
  for (const annulus::TokenRange& chunk :
       annulus::ring_shard(kTokens, ring->size(), ring->rank(), kRing.balance)) {
    for (std::int64_t t = chunk.first; t < chunk.end; ++t) own.push_back(t);
  }
  for (std::int64_t t = 0; t < kTokens; ++t) all.push_back(t);

  Tensors mine(own);
  annulus::Context context;
  context.threads = 1;  // ranks may share a machine
  annulus::ring_attention_forward(mine.view(mine.q), mine.view(mine.k), mine.view(mine.v),
                                  mine.view(mine.o), mine.lse_view(), kOptions, kRing, *ring,
                                  context);

  Tensors whole(all);
  annulus::attention_forward(whole.view(whole.q), whole.view(whole.k), whole.view(whole.v),
                             whole.view(whole.o), whole.lse_view(), kOptions, context);
  constexpr std::size_t kRow = kHeads * kColumns;
  double apart = 0;
  for (std::size_t i = 0; i < mine.o.size(); ++i) {
    const float there = whole.o[static_cast<std::size_t>(own[i / kRow]) * kRow + i % kRow];
    apart = std::max(apart, std::fabs(static_cast<double>(mine.o[i]) - static_cast<double>(there)));
  }
  std::printf(
      "rank %d of %d: %d tokens, sent %.1f kB, differs from one device by %.1e at most: %s\n",
      ring->rank(), ring->size(), static_cast<int>(mine.rows()),
      static_cast<double>(ring->traffic().bytes) / 1000, apart,
      apart < 1e-5 ? "as it should be" : "WRONG");
  return apart < 1e-5;
}

}  // namespace

int main(int argc, char** argv) {
  MPI_Init(&argc, &argv);
  bool right = false;
  try {
    right = run();
  } catch (
      const std::exception& error) {  // RankLost for one: MPI_Finalize would wait for the lost rank
    std::fprintf(stderr, "%s\n", error.what());
    annulus::mpi_leave(1);
  }
  MPI_Finalize();
  return right ? 0 : 1;
}
