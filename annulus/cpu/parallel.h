// parallel_for: OpenMP behind one function. The partition is fixed by the number of tasks, never by
// the number of threads, and a task's result may depend on its index alone: so no result depends on
// how many threads run.
#pragma once

#include <atomic>
#include <cstdint>
#include <memory>
#include <type_traits>

#include "annulus/core/macros.h"

namespace annulus::cpu {

// What a Context's `threads` (0 = all) comes to here.
ANNULUS_API int resolve_threads(int requested);

namespace detail {
ANNULUS_API void parallel_for(std::int64_t tasks, int threads, void (*body)(void*, std::int64_t),
                              void* state);
}  // namespace detail

// Calls f(task) for every task in 0..tasks-1. An exception thrown by a task is rethrown here (the
// first one by task index) once all threads have stopped.
template <class F>
void parallel_for(std::int64_t tasks, int threads, F&& f) {
  using Body = std::remove_reference_t<F>;
  detail::parallel_for(
      tasks, threads, [](void* state, std::int64_t i) { (*static_cast<Body*>(state))(i); },
      const_cast<void*>(static_cast<const void*>(std::addressof(f))));
}

// A team: threads that stay together over many short steps and meet at barriers. What is spread over
// them must again depend on the item's index alone.
class ANNULUS_API Team {
 public:
  explicit Team(int size);
  Team(const Team&) = delete;
  Team& operator=(const Team&) = delete;

  int size() const { return size_; }
  // Returns when all threads of the team are here; what each wrote before is seen by all after.
  void wait();

 private:
  int size_;
  int patience_ = 0;  // rounds of waiting before the processor is given away
  std::atomic<int> arrived_{0};
  std::atomic<unsigned> round_{0};
};

// One thread of a team, and its share of a list of items.
struct Member {
  Team& team;
  int rank;

  struct Range {
    std::int64_t begin, end;
  };
  // A contiguous part of 0..items-1, of equal length for all members as near as may be.
  Range share(std::int64_t items) const {
    const std::int64_t n = team.size();
    const std::int64_t each = items / n;
    const std::int64_t more = items % n;
    const std::int64_t begin = rank * each + (rank < more ? rank : more);
    return {begin, begin + each + (rank < more ? 1 : 0)};
  }
  void wait() const { team.wait(); }
};

namespace detail {
ANNULUS_API void run_team(int threads, void (*body)(void*, const Member&), void* state);
}  // namespace detail

// Calls f(member) once on each of `threads` threads (0 = all), at the same time. f must not throw.
template <class F>
void run_team(int threads, F&& f) {
  using Body = std::remove_reference_t<F>;
  detail::run_team(
      threads, [](void* state, const Member& m) { (*static_cast<Body*>(state))(m); },
      const_cast<void*>(static_cast<const void*>(std::addressof(f))));
}

}  // namespace annulus::cpu
