#include "train/files.h"

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <filesystem>
#include <system_error>

namespace annulus::train {
namespace {

[[noreturn]] void fail(const std::string& doing, const std::string& path) {
  throw FileError("cannot " + doing + " " + path + ": " + std::generic_category().message(errno));
}

class Descriptor {
 public:
  explicit Descriptor(int fd) : fd_(fd) {}
  ~Descriptor() { close(); }
  Descriptor(const Descriptor&) = delete;
  Descriptor& operator=(const Descriptor&) = delete;
  int get() const { return fd_; }
  void close() {
    if (fd_ >= 0) ::close(fd_);
    fd_ = -1;
  }

 private:
  int fd_;
};

std::string folder_of(const std::string& path) {
  const auto slash = path.rfind('/');
  if (slash == std::string::npos) return ".";
  return slash == 0 ? "/" : path.substr(0, slash);
}

}  // namespace

std::vector<std::byte> read_file(const std::string& path, std::size_t most_bytes) {
  // O_NONBLOCK: opening a pipe without a writer would wait for one.
  const Descriptor file(::open(path.c_str(), O_RDONLY | O_CLOEXEC | O_NONBLOCK));
  if (file.get() < 0) fail("read", path);
  struct stat status {};
  if (::fstat(file.get(), &status) != 0) fail("read", path);
  if (!S_ISREG(status.st_mode)) throw FileError("cannot read " + path + ": not a regular file");
  const auto size = static_cast<std::uint64_t>(status.st_size);
  if (size > most_bytes) {
    throw FileError("cannot read " + path + ": it has " + std::to_string(size) +
                    " bytes, at most " + std::to_string(most_bytes) + " are read");
  }
  std::vector<std::byte> bytes(static_cast<std::size_t>(size));
  std::size_t at = 0;
  while (at < bytes.size()) {
    const ssize_t got = ::read(file.get(), bytes.data() + at, bytes.size() - at);
    if (got < 0 && errno == EINTR) continue;
    if (got < 0) fail("read", path);
    if (got == 0) break;  // it was cut while we read
    at += static_cast<std::size_t>(got);
  }
  bytes.resize(at);
  return bytes;
}

void write_file(const std::string& path, std::span<const std::byte> bytes) {
  const std::string temporary = path + "." + std::to_string(::getpid()) + ".tmp";
  // A process that died while writing may have left one, and process numbers come back.
  (void)::unlink(temporary.c_str());
  {
    Descriptor file(::open(temporary.c_str(), O_WRONLY | O_CREAT | O_EXCL | O_CLOEXEC, 0644));
    if (file.get() < 0) fail("write", temporary);
    try {
      for (std::size_t at = 0; at < bytes.size();) {
        const ssize_t put = ::write(file.get(), bytes.data() + at, bytes.size() - at);
        if (put < 0 && errno == EINTR) continue;
        if (put < 0) fail("write", temporary);
        at += static_cast<std::size_t>(put);
      }
      if (::fsync(file.get()) != 0 && errno != EINVAL) fail("write", temporary);
      file.close();
      if (::rename(temporary.c_str(), path.c_str()) != 0) fail("write", path);
    } catch (...) {
      ::unlink(temporary.c_str());
      throw;
    }
  }
  // The new name itself is on disk only when the folder is. Some file systems refuse this; they then
  // have nothing better to offer.
  const Descriptor folder(::open(folder_of(path).c_str(), O_RDONLY | O_DIRECTORY | O_CLOEXEC));
  if (folder.get() >= 0) (void)::fsync(folder.get());
}

void write_file(const std::string& path, std::string_view text) {
  write_file(path, std::as_bytes(std::span(text.data(), text.size())));
}

void make_folders(const std::string& path) {
  std::error_code error;
  std::filesystem::create_directories(path, error);
  if (error || !std::filesystem::is_directory(path, error)) {
    throw FileError("cannot make the folder " + path + ": " +
                    (error ? error.message() : std::string("a file has that name")));
  }
}

void remove_file(const std::string& path) { (void)::unlink(path.c_str()); }

bool exists(const std::string& path) {
  struct stat status {};
  return ::stat(path.c_str(), &status) == 0;
}

}  // namespace annulus::train
