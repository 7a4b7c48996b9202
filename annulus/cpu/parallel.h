// parallel_for: OpenMP behind one function. The partition is fixed by the number of tasks, never by
// the number of threads, and a task's result may depend on its index alone: so no result depends on
// how many threads run.
#pragma once

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

}  // namespace annulus::cpu
