// What a long command shows on the terminal and hears from it.
#pragma once

#include <chrono>
#include <cstddef>
#include <string>

namespace annulus::cli {

// A bar on stderr while a command works, and nothing at all when stderr is not a terminal.
class Progress {
 public:
  explicit Progress(std::size_t total);
  ~Progress();  // clears the line
  Progress(const Progress&) = delete;
  Progress& operator=(const Progress&) = delete;

  void start(const std::string& what);  // names the step that begins now
  void advance();                       // the step is done
  void clear();                         // before something else prints to the terminal

 private:
  void draw();

  std::size_t total_, done_ = 0;
  bool terminal_;
  std::string what_;
  std::chrono::steady_clock::time_point begin_ = std::chrono::steady_clock::now();
};

// Ctrl-C and a polite kill ask a long command to stop where it can still finish what it prints: from
// here on the first SIGINT or SIGTERM is only noted; a second one ends the process as always.
void note_stop_signals();
bool stop_asked();
int stop_code();  // as shells have it: 130 after Ctrl-C, 143 after a polite kill

}  // namespace annulus::cli
