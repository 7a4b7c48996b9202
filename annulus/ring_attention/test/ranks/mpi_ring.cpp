// One rank of real ring attention, with one real fault: mpi_ring FOLDER DEADLINE TOKENS [cuda | FAULT RANK OP HOP RECEIVING].
// Without a fault it runs every pattern, in both modes and divisions; what is deterministic has the bits of one rank. With `cuda`, on
// the first GPU.
// Writes what it came to into FOLDER/said.RANK, its process id into FOLDER/pid.RANK before, and returns 0 when the ring
// was right, 11 after RankLost, 12 when a value was wrong, 2 on bad usage. mpi_faults.py, beside this, runs it.
#include <mpi.h>
#include <signal.h>
#include <unistd.h>

#include <chrono>
#include <cstdlib>
#include <fstream>
#include <iostream>
#include <memory>
#include <string>

#include "annulus/dist/link.h"
#include "annulus/dist/mpi.h"
#include "annulus/dist/test/fault.h"
#include "annulus/ring_attention/test/ranks/work.h"

using namespace annulus;
using namespace annulus::dist::testing;

int main(int argc, char** argv) {
  if (argc != 4 && argc != 9 && !(argc == 5 && std::string(argv[4]) == "cuda")) return 2;
  MPI_Init(&argc, &argv);
  int rank = 0;
  MPI_Comm_rank(MPI_COMM_WORLD, &rank);
  const std::string folder = argv[1];
  const CommunicatorOptions options{.deadline_s = std::atof(argv[2]), .checksum = true};
  const std::int64_t tokens = std::atoll(argv[3]);
  Fault fault;
  if (argc == 9) {
    if (!find_fault(argv[4], fault.kind)) return 2;
    fault.rank = std::atoi(argv[5]);
    fault.op = argv[6];
    fault.hop = std::atoi(argv[7]);
    fault.receiving = std::atoi(argv[8]) != 0;
  }
  fault.deadline_s = options.deadline_s;
  fault.kill = [] { raise(SIGKILL); };
  fault.stop = [] { raise(SIGSTOP); };
  fault.exit = [] { _exit(3); };
  std::ofstream(folder + "/pid." + std::to_string(rank)) << getpid() << std::endl;

  if (fault.op == "init" && fault.rank == rank) {  // before the ranks have met
    if (fault.kind == FaultKind::kKill) fault.kill();
    if (fault.kind == FaultKind::kStop) fault.stop();
    if (fault.kind == FaultKind::kExit) fault.exit();
  }

  int ranks = 1;
  MPI_Comm_size(MPI_COMM_WORLD, &ranks);
  const Device device = argc == 5 ? cuda_device(0) : kCPU;
  const RingWork work(ranks, tokens, device);
  const auto start = std::chrono::steady_clock::now();
  const auto say = [&](int code, const std::string& what) {
    const double seconds =
        std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
    std::ofstream(folder + "/said." + std::to_string(rank)) << code << '\n'
                                                            << seconds << '\n'
                                                            << what << std::endl;
    return code;
  };
  std::unique_ptr<Communicator> group;
  try {
    // One after another, and many small messages: what one leaves behind must not reach the next.
    for (int i = 0; i < 20 && argc < 9; ++i) {
      const auto brief = mpi_communicator(options);
      float sum = 1;
      brief->all_reduce(std::span(&sum, 1));
      for (int n = 0; n < 20 * i; ++n) {
        int mine = n, got = 0;
        const Part part{&mine, sizeof mine, &got, sizeof got};
        brief->shift({.op = "brief", .hop = n}, {&part, 1})->wait();
      }
    }
    group = argc < 9
                ? mpi_communicator(options)
                : dist::communicator_over(
                      with_fault(dist::mpi_link(options.deadline_s, kMpiWorld), fault), options);
    try {
      work.run(*group);
    } catch (const std::bad_alloc&) {
      group->barrier();
    }
    int turn = 0;
    for (const auto& p : annulus::testing::ring::patterns(tokens < 1000 && argc < 9 ? tokens : 0)) {
      annulus::testing::RingSequence sequence(p, device);
      sequence.run_alone();
      for (const bool same_bits : {false, true}) {
        const Balance balance = ++turn % 3 == 0 ? Balance::kContiguous : Balance::kZigzag;
        if (same_bits) sequence.run(1, Balance::kContiguous, true);
        sequence.run_as_rank({p, group->size(), balance, same_bits, turn % 2 == 0 ? 1536 : 29},
                             *group, same_bits);
      }
    }
  } catch (const RankLost& e) {
    bool closed = !group;
    try {
      if (group) group->barrier();
    } catch (const RankLost&) {
      closed = true;
    }
    const std::string who = std::to_string(e.rank) + " " + std::to_string(e.hop) +
                            (e.direction == RankLost::Direction::kSend ? " send\n" : " receive\n");
    group.reset();
    // Where all ranks are alive, and in time, a new communicator among them works.
    std::string again;
    if (fault.kind >= FaultKind::kNoMemory) {
      try {
        work.run(*mpi_communicator(options));
      } catch (const std::exception& second) {
        again = std::string("\na new ring: ") + second.what();
      }
    }
    mpi_leave(say(closed && again.empty() ? 11 : 12, who + e.what() + again));
  } catch (const std::exception& e) {
    mpi_leave(say(12, e.what()));
  }
  group.reset();
  say(0, "done");
  MPI_Finalize();
  return 0;
}
