// Two files against each other: what counts as slower, and what does not.
#include <gtest/gtest.h>

#include <string>

#include "bench/report/compare.h"

namespace annulus::bench::report {
namespace {

Record timed(const std::string& row, double median, double p95) {
  Record r;
  r.suite = "a-suite";
  r.row = row;
  r.impl = "annulus";
  r.device = "cpu";
  r.dtype = "f32";
  r.hardware = "a CPU";
  r.time_ms = TimeMs{median, median, p95, 9};
  return r;
}

Record memory(const std::string& row, double bytes) {
  Record r = timed(row, 1, 1);
  r.measures = Measures::kMemory;
  r.peak_bytes = bytes;
  return r;
}

Record failed(const std::string& row) {
  Record r = timed(row, 1, 1);
  r.status = Status::kFailed;
  r.reason = "wrong result";
  return r;
}

// Its pointers are not to be followed: the records are gone.
Change only_change(const Record& before, const Record& after) {
  const std::vector<Record> a = {before}, b = {after};
  const Difference d = difference_of(build_model(a), build_model(b));
  EXPECT_EQ(d.changes.size(), 1u);
  return d.changes.at(0);
}

TEST(Compare, SlowerIsBeyondFivePercentAndTheOldSpread) {
  EXPECT_EQ(only_change(timed("r", 1, 1.02), timed("r", 1.04, 1.1)).verdict, Verdict::kSame);
  EXPECT_EQ(only_change(timed("r", 1, 1.02), timed("r", 1.06, 1.1)).verdict, Verdict::kSlower);
  EXPECT_EQ(only_change(timed("r", 1, 1.5), timed("r", 1.4, 1.6)).verdict, Verdict::kSame);
  EXPECT_EQ(only_change(timed("r", 1, 1.1), timed("r", 0.9, 0.95)).verdict, Verdict::kFaster);
  EXPECT_EQ(only_change(timed("r", 1, 1.1), timed("r", 0.9, 1.2)).verdict, Verdict::kSame);
  EXPECT_DOUBLE_EQ(only_change(timed("r", 2, 2), timed("r", 5, 5)).ratio, 2.5);
  EXPECT_EQ(only_change(timed("r", 0, 0), timed("r", 1, 1)).ratio, 0);  // of nothing there is none
}

TEST(Compare, MemoryIsComparedByItsBytes) {
  const Change c = only_change(memory("r", 1000), memory("r", 1020));
  EXPECT_EQ(c.verdict, Verdict::kSlower);
  EXPECT_DOUBLE_EQ(c.ratio, 1.02);
  EXPECT_EQ(only_change(memory("r", 1000), memory("r", 1005)).verdict, Verdict::kSame);
  const std::vector<Record> a = {memory("r", 1000)}, b = {memory("r", 2000)};
  const std::string text = to_text(difference_of(build_model(a), build_model(b)));
  EXPECT_NE(text.find("| more "), std::string::npos) << text;
}

TEST(Compare, WhatIsNotRightHasNoRatio) {
  EXPECT_EQ(only_change(timed("r", 1, 1), failed("r")).verdict, Verdict::kBroken);
  EXPECT_EQ(only_change(timed("r", 1, 1), failed("r")).ratio, 0);
  EXPECT_EQ(only_change(failed("r"), timed("r", 9, 9)).verdict, Verdict::kMended);
  EXPECT_EQ(only_change(failed("r"), failed("r")).verdict, Verdict::kSame);
}

TEST(Compare, TheMeanIsOfTimesThatAreRightInBoth) {
  const std::vector<Record> a = {timed("r1", 1, 1), timed("r2", 1, 1), failed("r3"),
                                 memory("r4", 1)};
  const std::vector<Record> b = {timed("r1", 2, 2), timed("r2", 8, 8), timed("r3", 1, 1),
                                 memory("r4", 99)};
  const Difference d = difference_of(build_model(a), build_model(b));
  EXPECT_DOUBLE_EQ(d.geometric_mean(), 4);
  EXPECT_EQ(d.count(Verdict::kSlower), 3u);
  EXPECT_EQ(d.changes[0].after->row, "r4");  // the worst first
}

TEST(Compare, MarkupOfAFileShowsAsText) {
  const std::string evil = "</title><script>alert(1)</script>";
  Record old = timed(evil, 1, 1), now = failed(evil), alone = timed(evil + "2", 1, 1);
  for (Record* r : {&old, &now, &alone}) {
    r->suite = r->impl = r->dtype = r->hardware = r->commit = evil;
  }
  now.reason = evil;
  const std::vector<Record> a = {old}, b = {now, alone};
  Difference d = difference_of(build_model(a), build_model(b));
  EXPECT_EQ(d.count(Verdict::kBroken), 1u);
  d.before_name = d.after_name = evil;
  const std::string page = render(d);
  EXPECT_EQ(page.find("<script"), std::string::npos);
  EXPECT_NE(page.find("&lt;script&gt;"), std::string::npos);
}

}  // namespace
}  // namespace annulus::bench::report
