// Communicators over groups of torch.distributed, which ops know by a number. python/annulus/_group.py makes one of every
// group that is used, from functions of its own (annulus/dist/callbacks.h), and closes it when the group is gone.
#pragma once

#include <cstdint>
#include <memory>
#include <mutex>

#include "annulus/dist/communicator.h"

namespace annulus::torch_glue {

struct Group {
  std::mutex mutex;  // held by the call that uses it
  std::unique_ptr<Communicator> communicator;
};

// Throws InvalidArgument where the number is none, or its group was closed. The group stays as long as the result.
std::shared_ptr<Group> group_of(const char* op, std::int64_t handle);

}  // namespace annulus::torch_glue
