// Whole files: read with a limit, written so that a reader, or a machine that loses power, finds the
// old one or the new one and never half of either.
#pragma once

#include <cstddef>
#include <span>
#include <stdexcept>
#include <string>
#include <string_view>
#include <vector>

namespace annulus::train {

class FileError : public std::runtime_error {
 public:
  using std::runtime_error::runtime_error;
};

// Only regular files, so that no pipe or device can keep a reader waiting or feed it without end.
std::vector<std::byte> read_file(const std::string& path, std::size_t most_bytes);

// A temporary name beside `path`, fsync, rename, fsync of the folder.
void write_file(const std::string& path, std::span<const std::byte> bytes);
void write_file(const std::string& path, std::string_view text);

void make_folders(const std::string& path);  // it and what is missing above it
void remove_file(const std::string& path);   // silent when there is none
bool exists(const std::string& path);

}  // namespace annulus::train
