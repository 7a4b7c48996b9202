#include "cli/terminal.h"

#include <fmt/format.h>
#include <unistd.h>

#include <csignal>
#include <cstdio>

namespace annulus::cli {
namespace {

// A handler may write to nothing else.
volatile std::sig_atomic_t noted_signal = 0;
void note_signal(int signal) { noted_signal = signal; }

}  // namespace

Progress::Progress(std::size_t total) : total_(total), terminal_(::isatty(STDERR_FILENO) == 1) {}
Progress::~Progress() { clear(); }

void Progress::start(const std::string& what) {
  what_ = what;
  draw();
}

void Progress::advance() {
  ++done_;
  draw();
}

void Progress::clear() {
  if (!terminal_) return;
  std::fputs("\r\033[K", stderr);
  std::fflush(stderr);
}

void Progress::draw() {
  if (!terminal_ || total_ == 0) return;
  constexpr std::size_t kWidth = 24;
  const std::size_t filled = kWidth * done_ / total_;
  const std::chrono::duration<double> elapsed = std::chrono::steady_clock::now() - begin_;
  std::string left;
  if (done_ > 0 && done_ < total_) {
    const double s =
        elapsed.count() / static_cast<double>(done_) * static_cast<double>(total_ - done_);
    left = fmt::format("  {:.0f} s left", s);
  }
  std::string bar;
  for (std::size_t i = 0; i < kWidth; ++i) bar += i < filled ? "█" : "░";
  std::fputs(
      fmt::format("\r\033[K{} {}/{}{}  {}", bar, done_, total_, left, what_.substr(0, 40)).c_str(),
      stderr);
  std::fflush(stderr);
}

void note_stop_signals() {
  struct sigaction action {};
  action.sa_handler = note_signal;
  // SA_RESTART: a write that the signal meets is finished, not failed.
  action.sa_flags = static_cast<int>(SA_RESETHAND | SA_RESTART);
  sigaction(SIGINT, &action, nullptr);
  sigaction(SIGTERM, &action, nullptr);
}

bool stop_asked() { return noted_signal != 0; }
// Where another process was asked, and told this one, the code is its: SIGINT.
int stop_code() { return 128 + (noted_signal != 0 ? static_cast<int>(noted_signal) : SIGINT); }

}  // namespace annulus::cli
