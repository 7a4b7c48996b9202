#include "annulus/cpu/parallel.h"

#include <algorithm>
#include <exception>
#include <mutex>
#include <new>
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

void run_team(int threads, void (*body)(void*, const Member&), void* state) {
  const int n = resolve_threads(threads);
  if (n <= 1) {
    Team team(1);
    body(state, {team, 0});
    return;
  }
#if defined(_OPENMP)
  // A runtime may give fewer threads than asked for: the team is as large as what came.
  alignas(Team) unsigned char room[sizeof(Team)];
  Team* team = nullptr;
#pragma omp parallel num_threads(n)
  {
#pragma omp single
    team = new (room) Team(omp_get_num_threads());
    body(state, {*team, omp_get_thread_num()});
  }
  team->~Team();
#else
  Team team(n);
  std::vector<std::thread> workers;
  for (int w = 1; w < n; ++w) workers.emplace_back([&, w] { body(state, {team, w}); });
  body(state, {team, 0});
  for (std::thread& worker : workers) worker.join();
#endif
}

}  // namespace detail

Team::Team(int size) : size_(size) {
  static const unsigned processors = std::thread::hardware_concurrency();
  // Some ten microseconds: the others are near, if they all have a processor.
  patience_ = static_cast<unsigned>(size) <= processors ? 4000 : 0;
}

void Team::wait() {
  if (size_ == 1) return;
  const unsigned round = round_.load(std::memory_order_acquire);
  if (arrived_.fetch_add(1, std::memory_order_acq_rel) == size_ - 1) {
    arrived_.store(0, std::memory_order_relaxed);
    round_.store(round + 1, std::memory_order_release);
    round_.notify_all();
    return;
  }
  for (int spin = 0; spin < patience_; ++spin) {
    if (round_.load(std::memory_order_acquire) != round) return;
#if defined(__aarch64__)
    asm volatile("isb");  // some tens of cycles, unlike yield, which is none
#elif defined(__x86_64__)
    __builtin_ia32_pause();
#endif
  }
  // Someone has no processor: this one may be what it waits for.
  round_.wait(round, std::memory_order_acquire);
}

}  // namespace annulus::cpu
