// A bar on stderr while a command works, and nothing at all when stderr is not a terminal.
#pragma once

#include <chrono>
#include <cstddef>
#include <string>

namespace annulus::cli {

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

}  // namespace annulus::cli
