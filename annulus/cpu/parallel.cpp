#include "annulus/cpu/parallel.h"

#include <pthread.h>
#include <signal.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <exception>
#include <mutex>
#include <system_error>
#include <thread>
#include <vector>

#if defined(_OPENMP)
#include <omp.h>
#endif

namespace annulus::cpu {

// More than any machine has cores; to look for tens of thousands would take seconds.
constexpr int kMostThreads = 1024;

int resolve_threads(int requested) {
  if (requested > 0) return std::min(requested, kMostThreads);
#if defined(_OPENMP)
  return omp_get_max_threads();
#else
  return 1;
#endif
}

int startable_threads(int wanted) {
  std::vector<std::thread> threads;
  std::vector<pid_t> ids(static_cast<std::size_t>(wanted));
  std::atomic<bool> go_home{false};
  try {
    threads.reserve(ids.size());
    for (pid_t& id : ids) {
      threads.emplace_back([&] {
        id = gettid();
        go_home.wait(false);
      });
    }
  } catch (const std::exception&) {  // of processes, of memory for its stack: a limit is reached
  }
  go_home = true;
  go_home.notify_all();
  for (std::thread& thread : threads) thread.join();
  // A thread that was joined counts until the kernel has forgotten it, which is a moment later.
  for (std::size_t i = 0; i < threads.size(); ++i) {
    for (int patience = 10'000; patience > 0 && tgkill(getpid(), ids[i], 0) == 0; --patience) {
      std::this_thread::yield();
    }
  }
  return static_cast<int>(threads.size());
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

#if defined(_OPENMP)
// libgomp ends the process where it cannot start a thread. It starts some when a team is larger than the one
// before it in this thread (of a smaller one it lets the surplus go), so before it does they are looked for,
// and a team has as many as were found. What is left to chance: that another takes them in between, and that a
// smaller team in this thread was not ours.
class TeamsOfThisThread {
 public:
  // How many threads a team may have that asked for n, and could use `most` as well.
  int available(int n, int most) {
    if (omp_get_active_level() >= omp_get_max_active_levels()) return 1;
    const int there = omp_get_level() == 0 ? last_ : 1;  // nested teams keep no threads
    // Rather than let a few go that the next call starts again, they come and find nothing to do.
    if (n <= there) return there <= std::min(most, 2 * n) ? there : n;
    // Also where as many have run before: those are gone, and whether they can be started again only a try
    // tells. A limit that came in between would end the process.
    // Where there were too few they are not looked for in every call, nor given up for ever.
    if (there == found_ && Clock::now() < again_) return there;
    found_ = there + startable_threads(n - there);
    again_ = found_ < n ? Clock::now() + std::chrono::seconds(1) : Clock::time_point{};
    return found_;
  }
  void ran(int n) {
    if (omp_get_level() == 1) last_ = n;
  }

 private:
  using Clock = std::chrono::steady_clock;

  int last_ = 1;   // threads of the team before
  int found_ = 0;  // what the last look came to
  Clock::time_point again_;
};
thread_local TeamsOfThisThread teams;
#endif

// How many threads a call may have that asked for n, and could use `most` as well.
int available_threads(int n, [[maybe_unused]] int most) {
  if (n <= 1 || threads_lost.load(std::memory_order_relaxed)) return 1;
#if defined(_OPENMP)
  return teams.available(n, most);
#else
  return n;
#endif
}

#if !defined(_OPENMP)
// False where no thread can be started.
template <class F>
bool start(std::vector<std::thread>& workers, const F& f, int rank) {
  try {
    workers.emplace_back(f, rank);
    return true;
  } catch (const std::system_error&) {
    return false;
  }
}
#endif

}  // namespace

namespace detail {

void parallel_for(std::int64_t tasks, int threads, void (*body)(void*, std::int64_t), void* state) {
  const int most = resolve_threads(threads);
  const int n = available_threads(static_cast<int>(std::min<std::int64_t>(most, tasks)), most);
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
#pragma omp parallel num_threads(n)
  {
#pragma omp master
    teams.ran(omp_get_num_threads());
#pragma omp for schedule(static) nowait
    for (std::int64_t i = 0; i < tasks; ++i) run(i);
  }
#else
  // Started anew for each call: this branch is for ThreadSanitizer, which cannot see into libgomp.
  const auto share = [&](int w) {
    for (std::int64_t i = tasks * w / n; i < tasks * (w + 1) / n; ++i) run(i);
  };
  std::vector<std::thread> workers;
  for (int w = 0; w < n; ++w) {
    if (!start(workers, share, w)) share(w);
  }
  for (std::thread& worker : workers) worker.join();
#endif
  if (error) std::rethrow_exception(error);
}

void run_team(int threads, void (*body)(void*, Member&), void* state) {
  const int most = resolve_threads(threads);
  const int n = available_threads(most, most);
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
#pragma omp master
    teams.ran(omp_get_num_threads());
    Member member(team, omp_get_thread_num());
    body(state, member);
  }
#else
  const auto run = [&](int rank) {
    Member member(team, rank);
    body(state, member);
  };
  std::vector<std::thread> workers;
  for (int w = 1; w < n && start(workers, run, w); ++w) {
  }
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
