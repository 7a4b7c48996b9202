// Ctrl-C and a polite kill ask a long command to stop where it can still finish what it prints; a
// second one ends the process as always.
#pragma once

#include <csignal>

namespace annulus::cli {

// While it lives, the first SIGINT or SIGTERM is only noted.
class StopOnSignal {
 public:
  StopOnSignal();
  ~StopOnSignal();
  StopOnSignal(const StopOnSignal&) = delete;
  StopOnSignal& operator=(const StopOnSignal&) = delete;

  bool asked() const;
  int exit_code() const;  // as shells have it: 130 after Ctrl-C, 143 after a polite kill

 private:
  struct sigaction interrupt_ {};
  struct sigaction terminate_ {};
};

}  // namespace annulus::cli
