// Ranks as processes under mpirun: library annulus_mpi, where the build found MPI. The program initialises MPI (from
// one thread: MPI_THREAD_FUNNELED is enough) and outlives its communicators with it.
//
//   int main(int argc, char** argv) {
//     MPI_Init(&argc, &argv);
//     try {
//       auto ring = annulus::mpi_communicator();
//       ...
//     } catch (const annulus::RankLost& e) {
//       std::cerr << e.what() << '\n';
//       annulus::mpi_leave(1);  // MPI_Finalize would wait for the lost rank
//     }
//     MPI_Finalize();
//   }
//
// mpirun ends all ranks of a job when one of them dies or leaves without MPI_Finalize, maybe before they can report it;
// with --enable-recovery it leaves them to find out. Then each ends by itself, but mpirun may return 0: look at the ranks' own exit codes.
#pragma once

#include <memory>

#include "annulus/dist/communicator.h"

namespace annulus {

constexpr int kMpiWorld = -1;

// Called by all ranks of an MPI communicator: MPI_COMM_WORLD, or the one whose MPI_Comm_c2f is given. It is
// duplicated, so nothing of the program's own messages gets in the way, and the duplicate is never freed: make one for
// the program, not one for each call. Throws RankLost where the ranks do not all
// come within the deadline (then of rank -1: MPI does not say who is missing) or do not fit together.
std::unique_ptr<Communicator> mpi_communicator(const CommunicatorOptions& options = {},
                                               int fortran_handle = kMpiWorld);

// For main() after RankLost: writes out what streams hold, and ends the process with that code and without
// MPI_Finalize. Other ranks are not touched.
[[noreturn]] void mpi_leave(int code);

namespace dist {
class Link;
std::unique_ptr<Link> mpi_link(double deadline_s, int fortran_handle);
}  // namespace dist

}  // namespace annulus
