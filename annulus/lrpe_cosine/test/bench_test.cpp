// The suite says what the original said, and every problem of it is a legal one.
#include <gtest/gtest.h>

#include <set>

#include "annulus/lrpe_cosine/bench_original.h"
#include "bench/suite.h"

namespace annulus::bench {
namespace {

const Suite& suite() {
  for (const Suite& s : all_suites()) {
    if (s.name == "lrpe-cosine") return s;
  }
  throw std::logic_error("suite lrpe-cosine is not registered");
}

// Figures read off the source by eye, one from each corner of it.
TEST(LrpeCosineOriginal, HoldsTheSourcesFigures) {
  const auto find = [](int axes, int n, int prefix, bool backward) {
    for (const LrpeOriginalSeries& s : kLrpeOriginal) {
      if (s.axes != axes || s.prefix != prefix || s.backward != backward) continue;
      for (std::size_t i = 0; i < s.rows.size(); ++i) {
        if (s.first_n << i == n) return s.rows[i];
      }
    }
    throw std::logic_error("no such row");
  };
  EXPECT_EQ(find(1, 256, 0, false)[0], 0.163323);
  EXPECT_EQ(find(1, 32768, 10, true)[3], 7.053078);
  EXPECT_EQ(find(1, 32768, 0, false)[6], 12288.519043);
  EXPECT_EQ(find(2, 128, 10, false)[1], 3.027502);
  EXPECT_EQ(find(2, 16, 0, true)[4], 71.553906);
  EXPECT_EQ(find(3, 4, 0, true)[3], 0.042700);
  EXPECT_EQ(find(3, 32, 10, true)[7], 9411.16748);
}

TEST(LrpeCosineSuite, FullHasAllRowsOfTheOriginal) {
  const auto rows = suite().rows({Size::kFull, DeviceType::kCPU, 0});
  std::size_t speed = 0, memory = 0;
  std::set<std::string> names;
  for (const Row& row : rows) {
    speed += row.original.has_value();
    memory += row.memory_original.has_value();
    EXPECT_TRUE(names.insert(row.name + annulus::name_of(row.dtype)).second) << row.name;
  }
  EXPECT_EQ(speed, 64u);
  EXPECT_EQ(memory, 64u);
}

TEST(LrpeCosineSuite, MachineKeepsOneRowASeriesAndItFits) {
  const std::size_t memory = std::size_t{3} << 30;
  const auto rows = suite().rows({Size::kMachine, DeviceType::kCPU, memory});
  EXPECT_EQ(rows.size(), 12u);
  for (const Row& row : rows) {
    EXPECT_LE(2 * peak_bytes_of(row.problem(), row.calls, kCPU), memory) << row.name;
  }
  // With hardly any memory the smallest row stays, to be skipped with its reason.
  EXPECT_EQ(suite().rows({Size::kMachine, DeviceType::kCPU, 1}).size(), 12u);
}

// The original's 3-D rows never encoded the third axis; ours must.
TEST(LrpeCosineSuite, EveryAxisOwnsColumns) {
  for (const Row& row : suite().rows({Size::kFull, DeviceType::kCPU, 0})) {
    if (row.op.starts_with("lrpe_rotate")) continue;
    const auto axes = std::get<std::vector<std::int64_t>>(row.params.at("shape")).size();
    const auto e = std::get<std::int64_t>(row.params.at("E"));
    const auto d = std::get<std::int64_t>(row.params.at("D"));
    EXPECT_GT(d, static_cast<std::int64_t>(axes - 1) * e) << row.name;
    EXPECT_GE(static_cast<std::int64_t>(axes) * e, d) << row.name;
  }
}

// n = 256 in bf16: x 9 MiB, y 18, dx 9, dy 18, and no copy of any; scratch is a small phase table.
TEST(LrpeCosineSuite, MemoryRowsCountEveryTensorOnce) {
  constexpr double kMiB = 1 << 20;
  int seen = 0;
  for (const Row& row : suite().rows({Size::kFull, DeviceType::kCPU, 0})) {
    const bool forward = row.memory_name == "memory-fwd-1d-n256-l0-b12";
    const bool backward = row.memory_name == "memory-bwd-1d-n256-l0-b12";
    if (!forward && !backward) continue;
    ++seen;
    const auto peak = peak_bytes_of(row.problem(), row.memory_calls, kCPU);
    EXPECT_GE(static_cast<double>(peak) / kMiB, forward ? 27 : 54);
    EXPECT_LE(static_cast<double>(peak) / kMiB, forward ? 36 : 71) << "more than the original's";
  }
  EXPECT_EQ(seen, 2);
}

// Forward in bf16 moves 6 bytes an element: the floors rest on it.
TEST(LrpeCosineSuite, BytesAreThoseOfTheMathematics) {
  for (const Row& row : suite().rows({Size::kFull, DeviceType::kCPU, 0})) {
    if (row.name != "fwd-1d-n256-l0-b12") continue;
    const testing::Case c = row.problem();
    EXPECT_NEAR(c.calls[0].bytes, 12.0 * 12 * 256 * 128 * 6, 0.01 * c.calls[0].bytes);
    return;
  }
  FAIL() << "the row is gone";
}

}  // namespace
}  // namespace annulus::bench
