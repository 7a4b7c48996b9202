// Files that a command writes: whole or not at all, and never over what is no plain file.
// Whatever goes wrong throws RecordError, which names the path as it was given.
#pragma once

#include <cstddef>
#include <string>
#include <string_view>

#include "bench/record.h"

namespace annulus::bench {

// Where a file that is to replace `path` goes: `path` itself, or what a symbolic link leads to, so
// that the link stays one. A device, a pipe or a folder must not be renamed over: it is refused.
std::string replaceable_file(const std::string& path);

// Writes all of it to a temporary name beside `path`, then renames: a reader sees the old file or
// the new one, never half of either.
void write_file_atomically(const std::string& path, std::string_view content);

// Rows of a run that takes minutes. Each is in `path`.partial before the next is measured, so that a
// crash loses nothing; finish() gives the file its name. Until then an older `path` is untouched.
class RecordWriter {
 public:
  explicit RecordWriter(const std::string& path);  // a .partial of an earlier run is overwritten
  ~RecordWriter();  // without finish() the rows stay in partial_path(); no row, no file
  RecordWriter(const RecordWriter&) = delete;
  RecordWriter& operator=(const RecordWriter&) = delete;

  void write(const Record& r);
  void finish();
  std::size_t rows() const { return rows_; }
  const std::string& partial_path() const { return partial_; }

 private:
  std::string path_, target_, partial_;
  std::size_t rows_ = 0;
  int fd_ = -1;
};

}  // namespace annulus::bench
