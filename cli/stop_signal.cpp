#include "cli/stop_signal.h"

namespace annulus::cli {
namespace {

// A handler may write to nothing else.
volatile std::sig_atomic_t noted_signal = 0;
void note_signal(int signal) { noted_signal = signal; }

}  // namespace

StopOnSignal::StopOnSignal() {
  noted_signal = 0;
  struct sigaction action {};
  action.sa_handler = note_signal;
  // SA_RESTART: a write that the signal meets is finished, not failed.
  action.sa_flags = static_cast<int>(SA_RESETHAND | SA_RESTART);
  sigaction(SIGINT, &action, &interrupt_);
  sigaction(SIGTERM, &action, &terminate_);
}

StopOnSignal::~StopOnSignal() {
  sigaction(SIGINT, &interrupt_, nullptr);
  sigaction(SIGTERM, &terminate_, nullptr);
}

bool StopOnSignal::asked() const { return noted_signal != 0; }
int StopOnSignal::exit_code() const { return 128 + noted_signal; }

}  // namespace annulus::cli
