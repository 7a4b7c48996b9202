// Whole files: read with a limit; written so that a reader, or a machine that loses power, finds the
// old one or the new one and never half of either; never over what is no plain file. Whatever goes
// wrong throws FileError, which names the path as it was given.
#pragma once

#include <cstddef>
#include <stdexcept>
#include <string>
#include <string_view>
#include <vector>

namespace annulus::files {

class FileError : public std::runtime_error {
 public:
  using std::runtime_error::runtime_error;
};

// Only regular files, so that no pipe or device can keep a reader waiting or feed it without end.
std::string read_file(const std::string& path, std::size_t most_bytes);

// Where a file that is to replace `path` goes: `path` itself, or what a symbolic link leads to, so
// that the link stays one. A device, a pipe or a folder must not be renamed over: it is refused.
std::string replaceable_file(const std::string& path);

// A temporary name beside `path`, fsync, rename, fsync of the folder. The temporary file is locked
// while it is written: one that is not was left by a process that was killed.
void write_file(const std::string& path, std::string_view content);

// Removes what write_file, killed, left in `folder` of files whose names begin like this.
void remove_leftovers(const std::string& folder, std::string_view beginning);

// One process at a time: a second Lock of the same path is refused, with `what` in the sentence. The
// system gives it up when the process ends, however it ends. The file is removed with it.
class Lock {
 public:
  Lock(const std::string& path, const std::string& what);
  ~Lock();
  Lock(const Lock&) = delete;
  Lock& operator=(const Lock&) = delete;

 private:
  std::string path_;
  int fd_;
};

// Lines of a run that takes minutes. Each is in `path`.partial before the next is made, so that a
// crash loses nothing; finish() gives the file its name. Until then an older `path` is untouched, and
// a second writer of the same file is refused.
class LineWriter {
 public:
  explicit LineWriter(const std::string& path);  // a .partial of an earlier run is overwritten
  ~LineWriter();  // without finish() the lines stay in partial_path(); no line, no file
  LineWriter(const LineWriter&) = delete;
  LineWriter& operator=(const LineWriter&) = delete;

  void write(std::string_view line);  // without its newline
  void finish();
  std::size_t lines() const { return lines_; }
  const std::string& partial_path() const { return partial_; }

 private:
  std::string path_, target_, partial_;
  std::size_t lines_ = 0;
  int fd_ = -1;
};

void make_folders(const std::string& path);  // it and what is missing above it
void remove_file(const std::string& path);   // silent when there is none
bool exists(const std::string& path);
std::vector<std::string> names_in(const std::string& folder);  // of its plain files, sorted

}  // namespace annulus::files
