#include "python/csrc/groups.h"

#include <map>
#include <string>
#include <utility>

#include "annulus/dist/callbacks.h"
#include "python/csrc/torch_glue.h"

namespace annulus::torch_glue {

namespace {

struct Groups {
  std::mutex mutex;
  std::map<std::int64_t, std::shared_ptr<Group>> open;
  std::int64_t made = 0;  // numbers are not used again: an old one is never taken for a new one
};
Groups& groups() {
  static Groups& all =
      *new Groups;  // Python, which a group calls when it ends, may end before main does
  return all;
}

// address: of a LinkCallbacks.
std::int64_t open_group(std::int64_t address, double deadline_s, bool checksum) {
  return typed_errors([&] {
    auto& callbacks = *reinterpret_cast<dist::LinkCallbacks*>(static_cast<std::intptr_t>(address));
    auto group = std::make_shared<Group>();
    group->communicator = dist::communicator_over(dist::callback_link(callbacks),
                                                  {.deadline_s = deadline_s, .checksum = checksum});
    const std::lock_guard lock(groups().mutex);
    groups().open.emplace(++groups().made, std::move(group));
    return groups().made;
  });
}

// A call that is using it goes on to its end.
void close_group(std::int64_t handle) {
  std::shared_ptr<Group>
      last;  // declared first, so that it ends after the lock does: it calls Python
  const std::lock_guard lock(groups().mutex);
  const auto found = groups().open.find(handle);
  if (found == groups().open.end()) return;
  last = std::move(found->second);
  groups().open.erase(found);
}

}  // namespace

std::shared_ptr<Group> group_of(const char* op, std::int64_t handle) {
  const std::lock_guard lock(groups().mutex);
  const auto found = groups().open.find(handle);
  if (found == groups().open.end()) {
    throw InvalidArgument(argument(op, "group") +
                          " must be one that exists but was destroyed since, or never was (its "
                          "number is " +
                          std::to_string(handle) + ")");
  }
  return found->second;
}

}  // namespace annulus::torch_glue

STABLE_TORCH_LIBRARY_FRAGMENT(annulus, m) {
  m.def("_open_group(int callbacks, float deadline_s, bool checksum) -> int");
  m.def("_close_group(int group) -> ()");
}
STABLE_TORCH_LIBRARY_IMPL(annulus, CompositeExplicitAutograd, m) {
  m.impl("_open_group", TORCH_BOX(&annulus::torch_glue::open_group));
  m.impl("_close_group", TORCH_BOX(&annulus::torch_glue::close_group));
}
