// What a command writes: whole or not at all, never over what is no plain file.
#include "files/file.h"

#include <gtest/gtest.h>
#include <sys/stat.h>
#include <unistd.h>

#include <filesystem>
#include <fstream>
#include <string>

#include "testing/scratch_folder.h"

namespace annulus::files {
namespace {

namespace fs = std::filesystem;

class Files : public ::testing::Test {
 protected:
  std::string path(const std::string& name) const { return (folder_ / name).string(); }
  std::string content(const std::string& name) const { return read_file(path(name), 100); }
  void put(const std::string& name, const std::string& text) const {
    std::ofstream(path(name)) << text;
  }
  std::size_t entries() const {
    return static_cast<std::size_t>(std::distance(fs::directory_iterator(folder_), {}));
  }

  const testing::ScratchFolder scratch_;
  const fs::path folder_ = scratch_.path();
};

std::string refusal(const std::string& path) {
  try {
    write_file(path, "new");
  } catch (const FileError& e) {
    return e.what();
  }
  return "written";
}

TEST_F(Files, AtomicWriteReplacesAndLeavesNothingBeside) {
  put("page", "old");
  put("page." + std::to_string(::getpid()) + ".tmp", "left by a process that died");
  write_file(path("page"), "new");
  EXPECT_EQ(content("page"), "new");
  EXPECT_EQ(entries(), 1u);
}

TEST_F(Files, WhatIsNoPlainFileIsRefusedAndStays) {
  ASSERT_EQ(::mkfifo(path("pipe").c_str(), 0600), 0);
  fs::create_directory(path("folder"));
  fs::create_symlink("/dev/null", path("link_to_device"));
  fs::create_symlink(path("nothing"), path("link_to_nothing"));
  for (const char* name : {"pipe", "folder", "link_to_device", "link_to_nothing"}) {
    const auto kind = fs::symlink_status(path(name)).type();
    EXPECT_EQ(refusal(path(name)).find("cannot write " + path(name) + ": "), 0u) << name;
    EXPECT_EQ(fs::symlink_status(path(name)).type(), kind) << name;
    EXPECT_THROW(LineWriter{path(name)}, FileError) << name;
  }
  EXPECT_EQ(entries(), 4u);
}

TEST_F(Files, ALinkIsFollowedAndStaysALink) {
  put("target", "old");
  fs::create_symlink("target", path("link"));
  write_file(path("link"), "new");
  EXPECT_TRUE(fs::is_symlink(path("link")));
  EXPECT_EQ(content("target"), "new");
  EXPECT_EQ(entries(), 2u);
}

TEST_F(Files, AMessageNamesThePathThatWasGiven) {
  const std::string message = refusal("/nonexistent/page.html");
  EXPECT_EQ(message.find("cannot write /nonexistent/page.html: "), 0u) << message;
  EXPECT_THROW(LineWriter("/nonexistent/file.jsonl"), FileError);
}

TEST_F(Files, RowsAreOnDiskAtOnceAndTheOldFileStaysUntilTheEnd) {
  put("rows", "old content");
  {
    LineWriter writer(path("rows"));
    writer.write("row");
    EXPECT_EQ(read_file(writer.partial_path(), 100), "row\n");
    EXPECT_EQ(content("rows"), "old content");
    writer.write("row");
    writer.finish();
  }
  EXPECT_EQ(content("rows"), "row\nrow\n");
  EXPECT_EQ(entries(), 1u);
}

TEST_F(Files, RowsOfARunThatWasBrokenOffStayBesideTheOldFile) {
  put("rows", "old content");
  { const LineWriter writer(path("rows")); }
  EXPECT_EQ(entries(), 1u);  // no row, no file
  LineWriter(path("rows")).write("row");
  EXPECT_EQ(content("rows"), "old content");
  EXPECT_EQ(content("rows.partial"), "row\n");
}

TEST_F(Files, OneWriterAtATime) {
  put("rows.partial", "of a run that was killed");
  LineWriter first(path("rows"));
  first.write("row");
  try {
    const LineWriter second(path("rows"));
    ADD_FAILURE() << "a second writer";
  } catch (const FileError& e) {
    EXPECT_EQ(e.what(), "cannot write " + path("rows") + ": another process writes " +
                            path("rows") + ".partial");
  }
  EXPECT_EQ(content("rows.partial"), "row\n");
  first.finish();
  EXPECT_NO_THROW(LineWriter{path("rows")});
  EXPECT_EQ(content("rows"), "row\n");
}

TEST_F(Files, ALockIsHeldByOneAndLeavesNothing) {
  put("lock", "left by a kill");
  {
    const Lock lock(path("lock"), "first");
    EXPECT_THROW(Lock(path("lock"), "in use"), FileError);
  }
  EXPECT_EQ(entries(), 0u);
  fs::create_symlink(path("target"), path("lock"));
  EXPECT_THROW(Lock(path("lock"), "in use"), FileError);
  EXPECT_THROW(Lock("/nonexistent/lock", "in use"), FileError);
}

TEST_F(Files, LeftoversOfAKillGoAndNothingElse) {
  for (const char* name : {"page.1.tmp", "page.4000000.tmp"}) put(name, "left");
  for (const char* name :
       {"page.tmp", "page.x1.tmp", "page1.tmp", "page.1.tmp.old", "other.1.tmp"}) {
    put(name, "kept");
  }
  fs::create_symlink("page.tmp", path("page.2.tmp"));
  // What another process writes just now is locked.
  put("page.3.tmp", "written");
  const Lock held(path("page.3.tmp"), "");
  write_file(path("page"), "new");
  EXPECT_EQ(entries(), 8u);
  EXPECT_FALSE(exists(path("page.1.tmp")) || exists(path("page.4000000.tmp")));
  EXPECT_EQ(names_in(path("")).size(), 7u);  // without the link
}

TEST_F(Files, ReadsPlainFilesUpToTheLimit) {
  put("x", std::string("a\0b", 3));
  EXPECT_EQ(read_file(path("x"), 3), std::string("a\0b", 3));
  EXPECT_THROW((void)read_file(path("x"), 2), FileError);
  ASSERT_EQ(::mkfifo(path("pipe").c_str(), 0600), 0);
  for (const std::string& no_file :
       {path("none"), path("pipe"), std::string("/"), std::string("/dev/zero")}) {
    EXPECT_THROW((void)read_file(no_file, 1 << 20), FileError) << no_file;
  }
}

}  // namespace
}  // namespace annulus::files
