// What a rank's process takes for ring attention: mpi_memory FOLDER TOKENS. Every rank has nothing but its own shard. Writes into
// FOLDER/peak.RANK by how many bytes its resident memory grew at most, over the shard's tensors and a forward and a backward.
// mpi_memory.py, beside this, runs it.
#include <mpi.h>
#include <sys/resource.h>
#include <unistd.h>

#include <cstdint>
#include <cstdlib>
#include <fstream>
#include <iostream>
#include <string>
#include <vector>

#include "annulus/core/tensor.h"
#include "annulus/dist/mpi.h"
#include "annulus/ring_attention/ring_attention.h"

using namespace annulus;

namespace {

constexpr std::int64_t kHeads = 4, kColumns = 64;

std::int64_t resident_bytes() {
  std::int64_t pages = 0, resident = 0;
  std::ifstream("/proc/self/statm") >> pages >> resident;
  return resident * sysconf(_SC_PAGESIZE);
}

void attend(std::int64_t tokens, Communicator& group) {
  const RingOptions ring{.tokens = tokens};
  std::int64_t rows = 0;
  for (const TokenRange& chunk : ring_shard(tokens, group.size(), group.rank(), ring.balance)) {
    rows += chunk.end - chunk.first;
  }
  const std::vector<std::int64_t> shape = {1, rows, kHeads, kColumns},
                                  lse_shape = {1, kHeads, rows};
  // q, k, v, do, o, dq, dk, dv; drawn, so that every page is there.
  std::vector<std::vector<float>> memory;
  std::vector<TensorView> t;
  std::uint32_t state = static_cast<std::uint32_t>(group.rank()) + 1;
  for (int i = 0; i < 8; ++i) {
    auto& m = memory.emplace_back(static_cast<std::size_t>(rows * kHeads * kColumns));
    for (float& x : m) {
      state = state * 1664525 + 1013904223;
      x = static_cast<float>(state >> 8) * 0x1p-24f - 0.5f;
    }
    t.push_back(contiguous(m.data(), DType::kF32, shape));
  }
  std::vector<float> sums(static_cast<std::size_t>(kHeads * rows), 1);
  const TensorView lse = contiguous(sums.data(), DType::kF32, lse_shape);
  const AttentionOptions options{.causal = true, .window_left = 31};
  Context context;
  context.threads = 1;
  ring_attention_forward(t[0], t[1], t[2], t[4], lse, options, ring, group, context);
  ring_attention_backward(t[3], {}, t[0], t[1], t[2], t[4], lse, t[5], t[6], t[7], options, ring,
                          group, context);
}

}  // namespace

int main(int argc, char** argv) {
  if (argc != 3) return 2;
  MPI_Init(&argc, &argv);
  try {
    const auto group = mpi_communicator({.deadline_s = 60});
    attend(64 * group->size(), *group);  // what MPI and the kernels keep whatever the sequence
    group->barrier();
    const std::int64_t before = resident_bytes();
    attend(std::atoll(argv[2]), *group);
    rusage usage{};
    getrusage(RUSAGE_SELF, &usage);
    std::ofstream(std::string(argv[1]) + "/peak." + std::to_string(group->rank()))
        << usage.ru_maxrss * 1024 - before << std::endl;
    group->barrier();
  } catch (const std::exception& e) {
    std::cerr << e.what() << '\n';
    mpi_leave(1);
  }
  MPI_Finalize();
  return 0;
}
