// Ranks as GPUs over NCCL 2.28 or later: library annulus_nccl, where the build found NCCL. A rank is a process or a thread
// with a GPU of its own: NCCL refuses two ranks on one.
//
//   // on one rank, whose id goes to all others by whatever they share: MPI_Bcast, a file, torch's store
//   const annulus::NcclId id = annulus::nccl_unique_id();
//   // on every rank
//   auto ring = annulus::nccl_communicator(id, rank, size, device);
//   const annulus::Part parts[] = {{k, bytes, k_next, bytes}, {v, bytes, v_next, bytes}};   // of `device`
//   auto transfer = ring->shift({.op = "rotate", .hop = 0}, parts);
//
// As communicator.h has it, with these differences.
// - Buffers of shift() may be in memory of the device (sends_device_memory()); buffers in host memory go through it.
//   Both are copied within the device, each way: that is what lets send buffers be used again at once, and a transfer
//   that was given up leave its buffers alone.
// - NCCL carries out what a rank begins one after another, in that order. Ranks that send to each other begin the same
//   shifts in the same order, as communicator.h asks for; receive() waits for as much as wait().
// - The sizes of a shift's parts are compared on arrival. To NCCL itself sizes that differ are undefined: agree() upon
//   shapes before the first shift finds them before any data.
// - Ranks have no way to tell each other whom they wait for. When one is lost each of the others throws RankLost by its
//   own deadline, or earlier where NCCL sees that a connection broke (between machines, as a rule), and names the rank
//   that it waited for itself: they need not name the same. Rank -1 in a call that waits for all (agree(), barrier(),
//   all_gather(), the making): NCCL does not say who is missing.
// - abandon() aborts NCCL's communicator and reaches nobody: the others find out as when this rank had died.
// - With CommunicatorOptions::checksum everything is summed on the host. It is meant for tests.
//
// Another rank is waited for in a loop over ncclCommGetAsyncError and an event, never in a call of NCCL or CUDA. When one is lost
// the communicator is ended by ncclCommAbort on a thread of its own: one that does not return in half a second is left
// behind, with the device memory it may still use.
//
// Tested on one GPU, that is with one rank, which sends to itself; with more than one rank it is not.
// NCCL_COMM_BLOCKING=1 in the environment overrules us: then nothing of NCCL's has a deadline.
// What travels is neither encrypted nor authenticated, and NCCL chooses the interfaces it listens on: NCCL_SOCKET_IFNAME=lo
// keeps it to one machine.
#pragma once

#include <array>
#include <cstddef>
#include <memory>

#include "annulus/dist/communicator.h"

namespace annulus {

using NcclId = std::array<std::byte, 128>;

// A new one for each communicator. The process that makes it is where the others meet: it stays until they have.
NcclId nccl_unique_id();

// Called by all ranks with the same id and size, each with its own rank, from 0 to size - 1, and CUDA device. Throws
// NotSupported where there is no device, the NCCL that was loaded is older than 2.28, or NCCL refuses (two ranks on one
// GPU), and RankLost where the ranks do not all come within the deadline or do not fit together.
std::unique_ptr<Communicator> nccl_communicator(const NcclId& id, int rank, int size, int device,
                                                const CommunicatorOptions& options = {});

}  // namespace annulus
