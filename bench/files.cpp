#include "bench/files.h"

#include <fcntl.h>
#include <fmt/format.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <cstdio>
#include <cstring>
#include <filesystem>

namespace annulus::bench {
namespace {

[[noreturn]] void fail_to_write(const std::string& path, const std::string& why) {
  throw RecordError(fmt::format("cannot write {}: {}", path, why));
}
[[noreturn]] void fail_to_write(const std::string& path) {
  fail_to_write(path, std::strerror(errno));
}

// All of it, or an exception that names `path`.
void write_all(int fd, std::string_view data, const std::string& path) {
  while (!data.empty()) {
    const ssize_t n = ::write(fd, data.data(), data.size());
    if (n < 0 && errno == EINTR) continue;
    if (n <= 0) fail_to_write(path);
    data.remove_prefix(static_cast<std::size_t>(n));
  }
}

void sync(int fd, const std::string& path) {
  if (::fsync(fd) != 0 && errno != EINVAL) fail_to_write(path);  // EINVAL: nothing there to sync
}

}  // namespace

std::string replaceable_file(const std::string& path) {
  struct stat there {};
  if (::lstat(path.c_str(), &there) != 0) return path;  // opening it will say what is wrong, if so
  std::string target = path;
  if (S_ISLNK(there.st_mode)) {
    std::error_code error;
    target = std::filesystem::canonical(path, error).string();
    if (error || ::stat(path.c_str(), &there) != 0) {
      fail_to_write(path, "it is a symbolic link that leads nowhere");
    }
  }
  if (S_ISDIR(there.st_mode)) fail_to_write(path, "it is a folder");
  if (!S_ISREG(there.st_mode)) {
    fail_to_write(path, "it exists and is not a regular file (a device, a pipe or a socket)");
  }
  return target;
}

void write_file_atomically(const std::string& path, std::string_view content) {
  const std::string target = replaceable_file(path);
  const std::string temporary = fmt::format("{}.{}.tmp", target, ::getpid());
  const int fd = ::open(temporary.c_str(), O_WRONLY | O_CREAT | O_EXCL | O_CLOEXEC, 0644);
  if (fd < 0) fail_to_write(path);
  try {
    write_all(fd, content, path);
    sync(fd, path);
    if (::rename(temporary.c_str(), target.c_str()) != 0) fail_to_write(path);
  } catch (...) {
    ::close(fd);
    ::unlink(temporary.c_str());
    throw;
  }
  ::close(fd);
}

RecordWriter::RecordWriter(const std::string& path)
    : path_(path), target_(replaceable_file(path)), partial_(target_ + ".partial") {
  replaceable_file(partial_);
  fd_ = ::open(partial_.c_str(), O_WRONLY | O_CREAT | O_TRUNC | O_CLOEXEC, 0644);
  if (fd_ < 0) fail_to_write(path);
}

RecordWriter::~RecordWriter() {
  if (fd_ < 0) return;
  ::close(fd_);
  if (rows_ == 0) ::unlink(partial_.c_str());
}

void RecordWriter::write(const Record& r) {
  write_all(fd_, to_json_line(r) + "\n", partial_);
  ++rows_;
}

void RecordWriter::finish() {
  sync(fd_, partial_);
  ::close(fd_);
  fd_ = -1;
  if (::rename(partial_.c_str(), target_.c_str()) != 0) fail_to_write(path_);
}

}  // namespace annulus::bench
