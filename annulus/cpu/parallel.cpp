#include "annulus/cpu/parallel.h"

#include <algorithm>
#include <exception>
#include <mutex>
#include <thread>
#include <vector>

#if defined(_OPENMP)
#include <omp.h>
#endif

namespace annulus::cpu {

int resolve_threads(int requested) {
  if (requested > 0) return requested;
#if defined(_OPENMP)
  return omp_get_max_threads();
#else
  return 1;
#endif
}

namespace detail {

void parallel_for(std::int64_t tasks, int threads, void (*body)(void*, std::int64_t), void* state) {
  const int n = static_cast<int>(std::min<std::int64_t>(resolve_threads(threads), tasks));
  if (n <= 1) {
    for (std::int64_t i = 0; i < tasks; ++i) body(state, i);
    return;
  }
  // An exception may not leave a parallel region, so the first one is kept and rethrown after it.
  std::exception_ptr error;
  std::int64_t error_task = tasks;
  std::mutex guard;
  const auto run = [&](std::int64_t i) {
    try {
      body(state, i);
    } catch (...) {
      const std::lock_guard lock(guard);
      if (i < error_task) {
        error_task = i;
        error = std::current_exception();
      }
    }
  };
#if defined(_OPENMP)
#pragma omp parallel for num_threads(n) schedule(static)
  for (std::int64_t i = 0; i < tasks; ++i) run(i);
#else
  // Started anew for each call: this branch is for ThreadSanitizer, which cannot see into libgomp.
  std::vector<std::thread> workers;
  for (int w = 0; w < n; ++w) {
    workers.emplace_back([&, w] {
      for (std::int64_t i = tasks * w / n; i < tasks * (w + 1) / n; ++i) run(i);
    });
  }
  for (std::thread& worker : workers) worker.join();
#endif
  if (error) std::rethrow_exception(error);
}

}  // namespace detail

}  // namespace annulus::cpu
