// What a command writes: whole or not at all, never over what is no plain file.
#include "bench/files.h"

#include <gtest/gtest.h>
#include <sys/stat.h>

#include <filesystem>
#include <fstream>
#include <string>

#include "testing/scratch_folder.h"

namespace annulus::bench {
namespace {

namespace fs = std::filesystem;

class Files : public ::testing::Test {
 protected:
  std::string path(const std::string& name) const { return (folder_ / name).string(); }
  std::string content(const std::string& name) const {
    std::ifstream in(path(name));
    return {std::istreambuf_iterator<char>(in), {}};
  }
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
    write_file_atomically(path, "new");
  } catch (const RecordError& e) {
    return e.what();
  }
  return "written";
}

Record row() {
  Record r;
  r.suite = r.row = r.op = r.impl = r.device = r.dtype = "x";
  r.time_ms = TimeMs{1, 1, 1, 1};
  r.error = ErrorFigure{"max", 0};
  return r;
}

TEST_F(Files, AtomicWriteReplacesAndLeavesNothingBeside) {
  put("page", "old");
  write_file_atomically(path("page"), "new");
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
    EXPECT_THROW(RecordWriter{path(name)}, RecordError) << name;
  }
  EXPECT_EQ(entries(), 4u);
}

TEST_F(Files, ALinkIsFollowedAndStaysALink) {
  put("target", "old");
  fs::create_symlink("target", path("link"));
  write_file_atomically(path("link"), "new");
  EXPECT_TRUE(fs::is_symlink(path("link")));
  EXPECT_EQ(content("target"), "new");
  EXPECT_EQ(entries(), 2u);
}

TEST_F(Files, AMessageNamesThePathThatWasGiven) {
  const std::string message = refusal("/nonexistent/page.html");
  EXPECT_EQ(message.find("cannot write /nonexistent/page.html: "), 0u) << message;
  EXPECT_THROW(RecordWriter("/nonexistent/file.jsonl"), RecordError);
}

TEST_F(Files, RowsAreOnDiskAtOnceAndTheOldFileStaysUntilTheEnd) {
  put("rows", "old content");
  {
    RecordWriter writer(path("rows"));
    writer.write(row());
    EXPECT_EQ(read_records(writer.partial_path()).records.size(), 1u);
    EXPECT_EQ(content("rows"), "old content");
    writer.write(row());
    writer.finish();
  }
  EXPECT_EQ(read_records(path("rows")).records.size(), 2u);
  EXPECT_EQ(entries(), 1u);
}

TEST_F(Files, RowsOfARunThatWasBrokenOffStayBesideTheOldFile) {
  put("rows", "old content");
  {
    RecordWriter writer(path("rows"));
    writer.write(row());
  }
  EXPECT_EQ(content("rows"), "old content");
  EXPECT_EQ(read_records(path("rows.partial")).records.size(), 1u);
}

TEST_F(Files, ARunWithoutARowLeavesNothing) {
  { const RecordWriter writer(path("rows")); }
  EXPECT_EQ(entries(), 0u);
}

}  // namespace
}  // namespace annulus::bench
