// parallel_for: OpenMP behind one function. The partition is fixed by the number of tasks, never by
// the number of threads, and a task's result may depend on its index alone: so no result depends on
// how many threads run.
#pragma once

#include <atomic>
#include <cstdint>
#include <memory>
#include <type_traits>

namespace annulus::cpu {

// What a Context's `threads` (0 = all) comes to here.
int resolve_threads(int requested);

// How many of `wanted` threads can be started now beside those there are: that many are, at once, and ended.
int startable_threads(int wanted);

namespace detail {
void parallel_for(std::int64_t tasks, int threads, void (*body)(void*, std::int64_t), void* state);
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

// A team: threads that go through a sequence of phases together, each a list of items to be done
// before the next phase begins. Nobody waits for a thread, only for items: where one has no processor
// the others do its share, so that a busy machine or more threads than processors cost little. What
// an item writes must depend on its index alone.
class Team {
 public:
  static constexpr int kRanges = 64;  // parts the items of a phase are split into, at most

  explicit Team(int size);
  Team(const Team&) = delete;
  Team& operator=(const Team&) = delete;

  int size() const { return size_; }

 private:
  friend class Member;
  // Counters that only grow: a thread that comes late finds the items of its phase taken, and goes
  // on.
  struct alignas(64) Counter {
    std::atomic<std::int64_t> value{0};
  };
  void finish(unsigned phase);
  void wait(unsigned phase);

  int size_, ranges_;
  int patience_ = 0;  // rounds of waiting before the processor is given away
  Counter done_;
  alignas(64) std::atomic<unsigned> finished_{0};  // phases
  Counter taken_[kRanges];
};

// One thread of a team.
class Member {
 public:
  Member(Team& team, int rank) : team_(team), rank_(rank) {}
  Member(const Member&) = delete;
  Member& operator=(const Member&) = delete;

  int size() const { return team_.size(); }
  int rank() const { return rank_; }  // 0 .. size() - 1, each once

  // Calls f(begin, end) for parts of 0..items-1 of at most `most` items; returns when all items of
  // the phase are done, by whomever. All members make the same calls in the same order. A thread
  // begins with the same items each time there are as many, which its cache may hold.
  template <class F>
  void each(std::int64_t items, std::int64_t most, F&& f) {
    if (items == 0) return;
    if (team_.size_ == 1) return f(std::int64_t{0}, items);
    const int ranges = team_.ranges_;
    const std::int64_t all = done_ + items;
    for (int i = 0; i < ranges; ++i) {
      const int r = (rank_ + i) % ranges;
      const std::int64_t first = first_of(items, r);
      const std::int64_t end = first_[r] + first_of(items, r + 1) - first;
      std::atomic<std::int64_t>& taken = team_.taken_[r].value;
      std::int64_t at = taken.load(std::memory_order_relaxed);
      while (at < end) {
        const std::int64_t next = at + most < end ? at + most : end;
        if (!taken.compare_exchange_weak(at, next, std::memory_order_relaxed)) continue;
        f(first + at - first_[r], first + next - first_[r]);
        const std::int64_t before =
            team_.done_.value.fetch_add(next - at, std::memory_order_acq_rel);
        if (before + next - at == all) team_.finish(phase_);
        at = taken.load(std::memory_order_relaxed);
      }
    }
    for (int r = 0; r < ranges; ++r) first_[r] += first_of(items, r + 1) - first_of(items, r);
    done_ = all;
    team_.wait(phase_++);
  }
  // Calls f() once.
  template <class F>
  void once(F&& f) {
    each(1, 1, [&](std::int64_t, std::int64_t) { f(); });
  }

 private:
  // Where range r of the items begins: all are of equal length, as near as may be.
  std::int64_t first_of(std::int64_t items, int r) const {
    const std::int64_t length = items / team_.ranges_;
    const std::int64_t longer = items % team_.ranges_;
    return r * length + (r < longer ? r : longer);
  }

  Team& team_;
  int rank_;
  unsigned phase_ = 0;
  std::int64_t done_ = 0;                   // items of the phases so far
  std::int64_t first_[Team::kRanges] = {};  // of them, in each range
};

namespace detail {
void run_team(int threads, void (*body)(void*, Member&), void* state);
}  // namespace detail

// Calls f(member) once on each of `threads` threads (0 = all), at the same time. f must not throw.
template <class F>
void run_team(int threads, F&& f) {
  using Body = std::remove_reference_t<F>;
  detail::run_team(
      threads, [](void* state, Member& m) { (*static_cast<Body*>(state))(m); },
      const_cast<void*>(static_cast<const void*>(std::addressof(f))));
}

}  // namespace annulus::cpu
