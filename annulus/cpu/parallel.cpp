#include "annulus/cpu/parallel.h"

#include <pthread.h>
#include <sys/stat.h>

#include <algorithm>
#include <atomic>
#include <exception>
#include <mutex>
#include <thread>
#include <vector>

#if defined(_OPENMP)
#include <omp.h>
#endif

namespace annulus::cpu {

// More than any machine has cores; libgomp ends the process where it cannot start a thread (tens of thousands).
constexpr int kMostThreads = 1024;

int resolve_threads(int requested) {
  if (requested > 0) return std::min(requested, kMostThreads);
#if defined(_OPENMP)
  return omp_get_max_threads();
#else
  return 1;
#endif
}

namespace {

// fork() copies no threads, but libgomp believes in its own (and in those of another user of it, torch say)
// and waits for them for ever. So in the child of a process that had threads, calls run on the one that
// made them: no result depends on their number. Watched from the moment the library is loaded.
std::atomic<bool> threads_lost{false};

class ForkWatch {
 public:
  ForkWatch() {
    pthread_atfork([] { threads_there_.store(count_threads() > 1); }, nullptr,
                   [] {
                     if (threads_there_.load()) threads_lost.store(true);
                   });
  }

 private:
  // The folder has an entry for every thread. Where there is none to look at, the worst is assumed.
  static long count_threads() {
    struct stat folder {};
    return stat("/proc/self/task", &folder) == 0 ? static_cast<long>(folder.st_nlink) - 2 : 2;
  }
  static inline std::atomic<bool> threads_there_{false};
};
const ForkWatch fork_watch;

// How many threads a call may have that asked for n.
int available_threads(int n) {
  return n <= 1 || threads_lost.load(std::memory_order_relaxed) ? 1 : n;
}

}  // namespace

namespace detail {

void parallel_for(std::int64_t tasks, int threads, void (*body)(void*, std::int64_t), void* state) {
  const int n =
      available_threads(static_cast<int>(std::min<std::int64_t>(resolve_threads(threads), tasks)));
  if (n == 1) {
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

void run_team(int threads, void (*body)(void*, Member&), void* state) {
  const int n = available_threads(resolve_threads(threads));
  if (n == 1) {
    Team team(1);
    Member member(team, 0);
    body(state, member);
    return;
  }
  // A runtime may give fewer threads than asked for: the others do the share of those that are not.
  Team team(n);
#if defined(_OPENMP)
#pragma omp parallel num_threads(n)
  {
    Member member(team, omp_get_thread_num());
    body(state, member);
  }
#else
  const auto run = [&](int rank) {
    Member member(team, rank);
    body(state, member);
  };
  std::vector<std::thread> workers;
  for (int w = 1; w < n; ++w) workers.emplace_back(run, w);
  run(0);
  for (std::thread& worker : workers) worker.join();
#endif
}

}  // namespace detail

Team::Team(int size) : size_(size), ranges_(std::min(size, kRanges)) {
  static const unsigned processors = std::thread::hardware_concurrency();
  // Some ten microseconds: the others are near, if they all have a processor.
  patience_ = static_cast<unsigned>(size) <= processors ? 4000 : 0;
}

void Team::finish(unsigned phase) {
  finished_.store(phase + 1, std::memory_order_release);
  finished_.notify_all();
}

// Until `phase` is finished, or a later one: the count may wrap around.
void Team::wait(unsigned phase) {
  for (int spin = 0;; ++spin) {
    const unsigned finished = finished_.load(std::memory_order_acquire);
    if (static_cast<int>(finished - phase) > 0) return;
    if (spin >= patience_) {
      finished_.wait(finished, std::memory_order_acquire);
      continue;
    }
#if defined(__aarch64__)
    asm volatile("isb");  // some tens of cycles, unlike yield, which is none
#elif defined(__x86_64__)
    __builtin_ia32_pause();
#endif
  }
}

}  // namespace annulus::cpu
