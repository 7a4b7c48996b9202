#include "files/file.h"

#include <fcntl.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <filesystem>
#include <system_error>

namespace annulus::files {
namespace {

namespace fs = std::filesystem;

[[noreturn]] void fail(const char* doing, const std::string& path, const std::string& why) {
  throw FileError(std::string("cannot ") + doing + " " + path + ": " + why);
}
[[noreturn]] void fail(const char* doing, const std::string& path) {
  fail(doing, path, std::generic_category().message(errno));
}

struct Descriptor {
  explicit Descriptor(int number) : fd(number) {}
  ~Descriptor() {
    if (fd >= 0) ::close(fd);
  }
  Descriptor(const Descriptor&) = delete;
  Descriptor& operator=(const Descriptor&) = delete;
  const int fd;
};

// All of it, or an exception that names `path`.
void write_all(int fd, std::string_view data, const std::string& path) {
  while (!data.empty()) {
    const ssize_t n = ::write(fd, data.data(), data.size());
    if (n < 0 && errno == EINTR) continue;
    if (n <= 0) fail("write", path);
    data.remove_prefix(static_cast<std::size_t>(n));
  }
}

// Whether `fd` is open under this name still.
bool has_name(int fd, const std::string& path) {
  struct stat open {
  }, named{};
  return ::fstat(fd, &open) == 0 && ::lstat(path.c_str(), &named) == 0 &&
         open.st_dev == named.st_dev && open.st_ino == named.st_ino;
}

// Opens or makes the file and locks it, again where its name was taken away in between. -1 where
// another process holds it.
int open_locked(const std::string& path, int flags, const std::string& said) {
  while (true) {
    const int fd = ::open(path.c_str(), O_RDWR | O_CREAT | O_CLOEXEC | O_NOFOLLOW | flags, 0644);
    if (fd < 0) fail("write", said);
    if (::flock(fd, LOCK_EX | LOCK_NB) != 0) {
      const int error = errno;
      ::close(fd);
      if (error == EINTR) continue;
      if (error == EWOULDBLOCK) return -1;
      errno = error;
      fail("lock", said);
    }
    if (has_name(fd, path)) return fd;
    ::close(fd);
  }
}

constexpr std::string_view kTemporary = ".tmp";

std::string temporary_name(const std::string& target) {
  return target + "." + std::to_string(::getpid()) + std::string(kTemporary);
}
// "<beginning><anything>.<digits>.tmp"
bool is_temporary(std::string_view name, std::string_view beginning) {
  if (!name.starts_with(beginning) || !name.ends_with(kTemporary)) return false;
  name.remove_suffix(kTemporary.size());
  const std::size_t dot = name.find_last_not_of("0123456789");
  return dot != std::string_view::npos && name[dot] == '.' && dot + 1 < name.size() &&
         dot + 1 >= beginning.size();
}

// What is open as `fd` under one name gets the other, for good.
void take_name(int fd, const std::string& from, const std::string& to, const std::string& path) {
  if (::fsync(fd) != 0 && errno != EINVAL) fail("write", path);  // EINVAL: nothing there to sync
  if (::rename(from.c_str(), to.c_str()) != 0) fail("write", path);
  // The new name itself is on disk only when the folder is. Some file systems refuse this; they then
  // have nothing better to offer.
  const std::string folder = fs::path(to).parent_path().string();
  const Descriptor held(
      ::open(folder.empty() ? "." : folder.c_str(), O_RDONLY | O_DIRECTORY | O_CLOEXEC));
  if (held.fd >= 0) (void)::fsync(held.fd);
}

}  // namespace

std::string read_file(const std::string& path, std::size_t most_bytes) {
  // O_NONBLOCK: opening a pipe without a writer would wait for one.
  const Descriptor file(::open(path.c_str(), O_RDONLY | O_CLOEXEC | O_NONBLOCK));
  struct stat status {};
  if (file.fd < 0 || ::fstat(file.fd, &status) != 0) fail("read", path);
  if (!S_ISREG(status.st_mode)) fail("read", path, "not a regular file");
  const auto size = static_cast<std::size_t>(status.st_size);
  if (size > most_bytes) {
    fail("read", path,
         "it has " + std::to_string(size) + " bytes, at most " + std::to_string(most_bytes) +
             " are read");
  }
  std::string bytes(size, '\0');
  std::size_t at = 0;
  while (at < size) {
    const ssize_t got = ::read(file.fd, bytes.data() + at, size - at);
    if (got < 0 && errno == EINTR) continue;
    if (got < 0) fail("read", path);
    if (got == 0) break;  // it was cut while we read
    at += static_cast<std::size_t>(got);
  }
  bytes.resize(at);
  return bytes;
}

std::string replaceable_file(const std::string& path) {
  struct stat there {};
  if (::lstat(path.c_str(), &there) != 0) return path;  // opening it will say what is wrong, if so
  std::string target = path;
  if (S_ISLNK(there.st_mode)) {
    std::error_code error;
    target = fs::canonical(path, error).string();
    if (error || ::stat(path.c_str(), &there) != 0) {
      fail("write", path, "it is a symbolic link that leads nowhere");
    }
  }
  if (S_ISDIR(there.st_mode)) fail("write", path, "it is a folder");
  if (!S_ISREG(there.st_mode)) {
    fail("write", path, "it exists and is not a regular file (a device, a pipe or a socket)");
  }
  return target;
}

void write_file(const std::string& path, std::string_view content) {
  const std::string target = replaceable_file(path);
  const fs::path parts(target);
  remove_leftovers(parts.parent_path().string(), parts.filename().string() + ".");
  const std::string temporary = temporary_name(target);
  const Descriptor file(open_locked(temporary, O_EXCL, path));
  if (file.fd < 0) fail("write", path, "another process writes it");
  try {
    write_all(file.fd, content, path);
    take_name(file.fd, temporary, target, path);
  } catch (...) {
    ::unlink(temporary.c_str());
    throw;
  }
}

void remove_leftovers(const std::string& folder, std::string_view beginning) {
  for (const std::string& name : names_in(folder.empty() ? "." : folder)) {
    if (!is_temporary(name, beginning)) continue;
    const std::string path = (fs::path(folder) / name).string();
    const Descriptor file(::open(path.c_str(), O_RDONLY | O_CLOEXEC | O_NOFOLLOW | O_NONBLOCK));
    // While we hold the lock nobody else takes the name for a file of theirs.
    if (file.fd >= 0 && ::flock(file.fd, LOCK_EX | LOCK_NB) == 0) (void)::unlink(path.c_str());
  }
}

Lock::Lock(const std::string& path, const std::string& what)
    : path_(path), fd_(open_locked(path, 0, path)) {
  if (fd_ < 0) throw FileError(what);
}

Lock::~Lock() {
  (void)::unlink(path_.c_str());
  ::close(fd_);
}

LineWriter::LineWriter(const std::string& path)
    : path_(path), target_(replaceable_file(path)), partial_(target_ + ".partial") {
  replaceable_file(partial_);
  fd_ = open_locked(partial_, 0, path);
  if (fd_ < 0) fail("write", path, "another process writes " + partial_);
  if (::ftruncate(fd_, 0) != 0) fail("write", path);
}

LineWriter::~LineWriter() {
  if (fd_ < 0) return;
  if (lines_ == 0) ::unlink(partial_.c_str());
  ::close(fd_);
}

void LineWriter::write(std::string_view line) {
  write_all(fd_, std::string(line) + "\n", partial_);
  ++lines_;
}

void LineWriter::finish() {
  take_name(fd_, partial_, target_, path_);
  ::close(fd_);
  fd_ = -1;
}

void make_folders(const std::string& path) {
  std::error_code error;
  fs::create_directories(path, error);
  if (error || !fs::is_directory(path, error)) {
    throw FileError("cannot make the folder " + path + ": " +
                    (error ? error.message() : std::string("a file has that name")));
  }
}

void remove_file(const std::string& path) { (void)::unlink(path.c_str()); }

bool exists(const std::string& path) {
  struct stat status {};
  return ::stat(path.c_str(), &status) == 0;
}

std::vector<std::string> names_in(const std::string& folder) {
  std::vector<std::string> names;
  std::error_code error;
  for (fs::directory_iterator at(folder, error), end; !error && at != end; at.increment(error)) {
    std::error_code unknown;
    if (fs::is_regular_file(at->symlink_status(unknown))) {
      names.push_back(at->path().filename().string());
    }
  }
  std::sort(names.begin(), names.end());
  return names;
}

}  // namespace annulus::files
