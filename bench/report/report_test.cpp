// The page: escaped, self-contained, small, and right in what it says first.
#include <gtest/gtest.h>

#include <string>

#include "bench/report/model.h"
#include "bench/statistics.h"
#include "draw/html.h"

namespace annulus::bench::report {
namespace {

Record record(const std::string& row, const std::string& impl, double ms, double floor) {
  Record r;
  r.suite = "a-suite";
  r.row = row;
  r.op = "op";
  r.impl = impl;
  r.device = "cpu";
  r.dtype = "f32";
  r.hardware = "a CPU";
  r.time_ms = TimeMs{ms, ms, ms, 9};
  r.error = ErrorFigure{"max", 1e-7};
  r.floor_ms = floor;
  return r;
}

std::size_t count(const std::string& page, const std::string& word) {
  std::size_t n = 0;
  for (auto at = page.find(word); at != std::string::npos; at = page.find(word, at + 1)) ++n;
  return n;
}

std::string page_of(const std::vector<Record>& records) { return render(build_model(records)); }

TEST(Model, MergesPeersByRowAndKeepsTheLaterOfTwo) {
  const std::vector<Record> records = {record("r1", "annulus", 2, 1), record("r2", "annulus", 8, 2),
                                       record("r1", "eager", 20, 1), record("r2", "eager", 16, 2),
                                       record("r1", "annulus", 4, 1)};
  const Model m = build_model(records);
  ASSERT_EQ(m.places.size(), 1u);
  ASSERT_EQ(m.places[0].time.size(), 2u);
  EXPECT_EQ(m.places[0].time[0].find("annulus")->time_ms->median, 4);
  const Comparison c = compare(m.places[0], "annulus", "eager");
  EXPECT_EQ(c.rows, 2u);
  EXPECT_DOUBLE_EQ(c.low, 2);
  EXPECT_DOUBLE_EQ(c.high, 5);
  EXPECT_NEAR(c.geometric_mean, 3.1622776601, 1e-9);
  const FloorSpread f = floor_spread(m.places[0], "annulus");
  EXPECT_DOUBLE_EQ(f.best, 4);
  EXPECT_DOUBLE_EQ(f.worst, 4);
}

TEST(Model, OnlyOkRowsCount) {
  Record wrong = record("r1", "annulus", 0.001, 1);
  wrong.status = Status::kFailed;
  wrong.reason = "error 1 is above the limit";
  wrong.original = OriginalFigure{7, "ms", "A800", {{"Triton", 7}}};
  Record skipped = record("r2", "eager", 0.001, 1);
  skipped.status = Status::kSkipped;
  skipped.reason = "not enough memory";
  const std::vector<Record> records = {wrong, skipped, record("r1", "eager", 4, 1),
                                       record("r2", "annulus", 2, 1)};
  const Model m = build_model(records);
  const Place& place = m.places[0];
  EXPECT_EQ(place.time[0].find("annulus"), nullptr);
  EXPECT_EQ(compare(place, "annulus", "eager").rows, 0u);
  EXPECT_EQ(floor_spread(place, "annulus").rows, 1u);
  EXPECT_DOUBLE_EQ(floor_spread(place, "annulus").best, 2);
  EXPECT_EQ(place.failed, 1u);
  const std::string page = render(m);
  EXPECT_EQ(count(page, "0.00×"), 0u);             // neither a tile nor a cell
  EXPECT_EQ(count(page, "7000×"), 0u);             // nor beside the original
  EXPECT_EQ(count(page, "annulus 0.001 ms"), 0u);  // nor a mark of the chart
  EXPECT_EQ(count(page, "failed: error 1 is above the limit"),
            2u);  // by problem and in the long table
  EXPECT_EQ(count(page, "skipped: not enough memory"), 1u);
  EXPECT_LT(page.find("<b>1 row failed</b>"), page.find("<h2>"));  // on the first screen
}

TEST(Model, AFailedMemoryRowIsMarkedAndHasNoRatio) {
  Record wrong = record("memory-r1", "annulus", 1, 1);
  wrong.measures = Measures::kMemory;
  wrong.status = Status::kFailed;
  wrong.reason = "wrong result";
  wrong.peak_bytes = 1 << 20;
  wrong.original = OriginalFigure{3, "MiB", "A800", {}};
  const std::string page = page_of({wrong});
  EXPECT_EQ(count(page, "failed: wrong result"), 1u);
  EXPECT_EQ(count(page, "3.00×"), 0u);
}

TEST(Model, OfARowMeasuredTwiceTheNewerCountsWhateverTheOrderOfTheFiles) {
  std::vector<Record> records = {record("r1", "annulus", 2, 1), record("r1", "annulus", 4, 1)};
  records[0].date = "2025-02-01T00:00:00Z";
  records[1].date = "2025-01-01T00:00:00Z";
  const Model m = build_model(records);
  EXPECT_EQ(m.places[0].time[0].find("annulus")->time_ms->median, 2);
  EXPECT_EQ(m.superseded, 1u);
  EXPECT_EQ(m.records, 1u);
}

TEST(Page, SaysOneRunOnlyWhereItIsOne) {
  std::vector<Record> records = {record("r1", "annulus", 2, 1), record("r2", "annulus", 2, 1)};
  for (Record& r : records) r.ceiling = Ceiling{100, 400e3, Precision::kTf32, 0};
  EXPECT_EQ(count(page_of(records), "measured in the same run"), 1u);
  records[1].ceiling->copy_gbs = 101;
  EXPECT_EQ(count(page_of(records), "measured in the same run"), 0u);
  EXPECT_EQ(count(page_of(records), "one of several runs"), 1u);

  std::vector<Record> peers = {record("r1", kOursInTorch, 2, 1), record("r1", "eager", 4, 1)};
  for (Record& r : peers) r.date = "2025-01-01T00:00:00Z";
  EXPECT_EQ(count(page_of(peers), ", same run"), 1u);
  peers[1].date = "2025-01-02T00:00:00Z";
  EXPECT_EQ(count(page_of(peers), ", same run"), 0u);
}

Record bandwidth_row(const std::string& impl, double ms, double floor, double bytes) {
  Record r = record("bwd-n1", impl, ms, floor);
  r.floor_kind = FloorKind::kBandwidth;
  r.bytes = bytes;
  return r;
}

// A row that reads more than it writes is faster than a copy of as many bytes.
TEST(Model, AMoveThatBeatsTheCopyIsTheCeiling) {
  std::vector<Record> records = {bandwidth_row("annulus", 0.9, 1, 1000),
                                 bandwidth_row("move", 0.8, 1, 2000)};
  records[1].time_ms->min = 0.7;
  const Model m = build_model(records);
  const ProblemGroup& g = m.places[0].time[0];
  // 2000 bytes in 0.7 ms at the fastest: 1000 in 0.35.
  EXPECT_DOUBLE_EQ(*floor_of(g, *g.find("annulus")), 0.35);
  EXPECT_DOUBLE_EQ(*over_floor(g, *g.find("annulus")), 0.9 / 0.35);
  EXPECT_EQ(floor_source(g, *g.find("annulus")), "move");
  EXPECT_TRUE(below_floor(m.places[0]).empty());
  records[0].floor_kind = FloorKind::kCompute;  // bytes say nothing of products
  const Model compute = build_model(records);
  EXPECT_DOUBLE_EQ(*floor_of(compute.places[0].time[0], records[0]), 1);
  EXPECT_EQ(floor_source(compute.places[0].time[0], records[0]), "products");
  // A move that went wrong is no ceiling.
  records[0].floor_kind = FloorKind::kBandwidth;
  records[1].status = Status::kFailed;
  records[1].reason = "the bytes did not arrive";
  const Model failed = build_model(records);
  EXPECT_DOUBLE_EQ(*floor_of(failed.places[0].time[0], records[0]), 1);
  EXPECT_EQ(floor_source(failed.places[0].time[0], records[0]), "copy");
}

TEST(Page, ARowBelowItsFloorIsNamedWithTheReason) {
  const std::vector<Record> records = {bandwidth_row("annulus", 0.82, 1, 1 << 20),
                                       record("bwd-n2", "annulus", 2, 1)};
  const std::string page = page_of(records);
  EXPECT_EQ(count(page, "least"), 0u);  // nothing claims that it cannot be beaten
  EXPECT_EQ(count(page, "<b>bwd-n1 f32</b> annulus at 0.82× (no move of its own 1.0 MiB was timed"),
            1u);
  EXPECT_EQ(count(page, "; 1 below, with the reason"), 1u);  // in the card
  EXPECT_EQ(count(page_of({records[1]}), "Below their floor"), 0u);
}

TEST(Page, TheFirstScreenIsAChartASuiteAndAtMostFourCards) {
  std::vector<Record> records;
  for (const char* suite : {"one", "two", "three"}) {
    for (const int n : {64, 128, 256, 512}) {
      for (const char* impl : {"annulus", "annulus-torch", "eager", "compiled"}) {
        Record r = record("fwd-n" + std::to_string(n) + "-b2", impl, n, n / 2.0);
        r.suite = suite;
        records.push_back(r);
      }
    }
  }
  const std::string page = page_of(records);
  const std::string first = page.substr(0, page.find("<h2>"));
  EXPECT_EQ(count(first, "<svg class=\"fig\""), 3u);
  EXPECT_EQ(count(first, "class=\"tile"), 1u + 4u);  // their grid is called "tiles"
  // Rows are named where they stand: what differs under the axis, what does not below it.
  for (const char* label : {">n64<", ">n128<", ">n256<", ">n512<", ">fwd-…-b2<", ">floor<"}) {
    EXPECT_EQ(count(first, label), 3u) << label;
  }
  EXPECT_LT(first.find(">n64<"), first.find(">n512<"));
}

TEST(Page, RowsWithoutAFamilyStandInOrderOfTheirSize) {
  std::vector<Record> records = {record("fwd-2d-n64-l0", "annulus", 2, 1),
                                 record("fwd-1d-n9-l10", "annulus", 1, 1)};
  records[0].bytes = 2000;
  records[1].bytes = 1000;
  const std::string page = page_of(records);
  EXPECT_LT(page.find(">1d-n9-l10<"), page.find(">2d-n64-l0<"));
  EXPECT_EQ(count(page, ">fwd-…<"), 2u);  // in the chart of the suite and of the place
}

TEST(Page, RowsAreNamedByWhatNotAllHave) {
  std::vector<Record> records = {record("fwd-dense-b1-h8-d64-n1024", "annulus", 2, 1),
                                 record("fwd-dense-b1-h8-d64-n1024-causal", "annulus", 1, 1),
                                 record("fwd-blocks10-b1-h8-d64-n4096", "annulus", 1, 1)};
  const std::string page = page_of(records);
  for (const char* label : {">dense-n1024<", ">dense-n1024-causal<", ">blocks10-n4096<"}) {
    EXPECT_EQ(count(page, label), 2u) << label;
  }
}

TEST(Page, ExplainsEveryImplementationAndSaysWhichItCannot) {
  const std::vector<Record> records = {record("r1", "annulus", 1, 1),
                                       record("r1", "torch-odd", 2, 1)};
  const Words words = {
      {"a-suite", {{"annulus", "the <kernel>"}, {"torch-odd", "every second one"}}}};
  const std::string page = render(build_model(records), words);
  EXPECT_EQ(count(page, "the &lt;kernel&gt;"), 1u);
  EXPECT_EQ(count(page, "every second one"), 1u);
  EXPECT_EQ(count(page, "not explained"), 0u);
  EXPECT_EQ(count(render(build_model(records)), "not explained"), 2u);
}

TEST(Page, WhatATorchUserGetsStandsBesideTheKernel) {
  const std::string page =
      page_of({record("r1", "annulus", 1.25, 1), record("r1", "annulus-torch", 3.5, 1),
               record("r1", "torch-eager", 7, 1), record("r2", "annulus", 1, 1)});
  EXPECT_EQ(count(page, "from torch, 2.00× to 2.00× over 1 row<"), 1u);
  const auto table = page.find("Every problem");
  ASSERT_NE(table, std::string::npos);
  const std::string row = page.substr(page.find(">r1<", table), 600);
  EXPECT_LT(row.find("1.250"), row.find("3.500"));
  EXPECT_LT(row.find("3.500"), row.find("torch-eager 7.000"));
  EXPECT_LT(row.find("torch-eager 7.000"), row.find("2.00×"));  // against ours from torch
  EXPECT_EQ(
      count(page,
            "<div class=\"v\">2.80×</div><div class=\"k\">the bare kernel, called from torch"),
      1u);
}

TEST(Page, EveryLineOfTheLongTableCarriesItsRow) {
  const std::string page =
      page_of({record("the-row", "annulus", 1, 1), record("the-row", "eager", 2, 1)});
  EXPECT_EQ(count(page.substr(page.find("<details>")), ">the-row<"), 2u);
}

TEST(Page, NamesOfManyDashesAreNotCutAtEach) {
  std::vector<Record> records;
  for (int i = 0; i < 200; ++i) {
    std::string name;
    while (name.size() < 60000) name += "n" + std::to_string(i) + "-";
    records.push_back(record(name, "annulus", 1, 1));
  }
  EXPECT_LE(page_of(records).size(), draw::kMaxPageBytes);  // in time, above all
}

TEST(Page, AHundredThousandImplementationsOfOneProblemTakeNoMinute) {
  std::vector<Record> records = {record("r", "move", 1, 1)};
  for (int i = 0; i < 100000; ++i) records.push_back(record("r", "i" + std::to_string(i), 2, 1));
  const double ms = milliseconds([&] { EXPECT_LE(page_of(records).size(), draw::kMaxPageBytes); });
  EXPECT_LT(ms, 3e4);  // 1300 on a small machine; searching all of them for each takes 80 000
}

TEST(Model, OtherHardwareIsAnotherPlace) {
  Record elsewhere = record("r1", "annulus", 1, 1);
  elsewhere.hardware = "another CPU";
  EXPECT_EQ(build_model({record("r1", "annulus", 1, 1), elsewhere}).places.size(), 2u);
}

TEST(Model, OptionsOfOursFollowOursAndAreNoPeers) {
  std::vector<Record> records = {
      record("r1", "torch-gemm", 4, 1), record("r1", "annulus-tf32", 3, 1),
      record("r1", "annulus-torch", 2, 1), record("r1", "annulus", 2, 1)};
  records[1].ceiling = Ceiling{100, 400e3, Precision::kTf32, 0.9};
  records[3].ceiling = Ceiling{100, 800e3, Precision::kBf16, 0.9};
  const Model m = build_model(records);
  EXPECT_EQ(m.places[0].impls,
            (std::vector<std::string>{"annulus", "annulus-tf32", "annulus-torch", "torch-gemm"}));
  EXPECT_EQ(m.places[0].ceilings.size(), 2u);
  const std::string page = page_of(records);
  // Two of the same dtype: from torch 2 ms against 4. Ours with an option is no peer of ours.
  EXPECT_EQ(
      count(page, "<div class=\"v\">2.00×</div><div class=\"k\">faster than the fastest peer"), 1u);
  EXPECT_EQ(count(page, "bf16 GEMM 800 TFLOP/s, tf32 GEMM 400 TFLOP/s"), 1u);
  EXPECT_EQ(count(page, "0.9 µs between two steps"), 1u);
}

TEST(Page, ShowsMarkupAsText) {
  const std::string evil = "</title></style><script>alert(1)</script><img src=x onerror=alert(1)>";
  Record r = record(evil, "annulus", 1, 1);
  r.suite = r.hardware = r.commit = r.date = r.dtype = r.device = evil;
  r.error->metric = evil;
  r.original = OriginalFigure{1, "ms", evil, {{evil, 1}}};
  Record peer = r;
  peer.impl = evil;
  Record skipped = r;
  skipped.row = "skipped";
  skipped.time_ms.reset();
  skipped.status = Status::kSkipped;
  skipped.reason = evil;
  Record memory = r;
  memory.measures = Measures::kMemory;
  memory.peak_bytes = 1;
  const std::string page = page_of({r, peer, skipped, memory});
  EXPECT_EQ(count(page, "<script"), 0u);
  EXPECT_EQ(count(page, "<img"), 0u);
  EXPECT_EQ(count(page, "</style>"), 1u);
  EXPECT_EQ(count(page, "</title></style>"), 0u);
  EXPECT_GT(count(page, "&lt;script&gt;"), 0u);
}

TEST(Page, IsSelfContained) {
  const std::string page = page_of({record("r1", "annulus", 2, 1), record("r1", "move", 1.5, 1)});
  for (const char* word :
       {"http:", "https:", "src=", "href=", "url(", "@import", "<script", "<link"}) {
    EXPECT_EQ(count(page, word), 0u) << word;
  }
  EXPECT_EQ(count(page, "default-src 'none'; style-src 'unsafe-inline'; img-src data:"), 1u);
  EXPECT_EQ(count(page, "<svg"), count(page, "</svg>"));
}

TEST(Page, EveryPanelIsADrawingOfItsOwnWithItsAxis) {
  std::vector<Record> records = {record("fwd", "annulus", 2, 1), record("bwd", "annulus", 3, 1)};
  records[0].params["direction"] = std::string("fwd");
  records[1].params["direction"] = std::string("bwd");
  const std::string page = page_of(records);
  // Two, so that they wrap where the page is narrow, and the suite's own above.
  EXPECT_EQ(count(page, "<svg class=\"fig\""), 3u);
  const auto second = page.rfind("<svg class=\"fig\"");
  EXPECT_GT(count(page.substr(second), "text-anchor=\"end\""), 0u);
}

TEST(Page, StaysUnderAMegabyteAndSaysWhatItLeftOut) {
  std::vector<Record> records;
  for (int i = 0; i < 20000; ++i) {
    Record r = record("row-" + std::to_string(i), i % 2 ? "annulus" : "peer", 1 + i * 0.01, 1);
    r.original = OriginalFigure{1, "ms", "A800", {{"Triton", 1}, {"Torch", 2}}};
    records.push_back(r);
  }
  const std::string page = page_of(records);
  EXPECT_LE(page.size(), draw::kMaxPageBytes);
  EXPECT_GT(count(page, "more rows are in the result files"), 0u);
}

TEST(Page, StaysUnderAMegabyteWithThousandsOfPlacesAndLongNames) {
  std::vector<Record> records;
  for (int i = 0; i < 5000; ++i) {
    Record r = record(std::string(5000, '&') + std::to_string(i), "impl" + std::to_string(i), 1, 1);
    r.suite = "suite" + std::to_string(i % 700);
    r.hardware = std::string(3000, '<');
    records.push_back(r);
  }
  EXPECT_LE(page_of(records).size(), draw::kMaxPageBytes);
}

TEST(Page, OneRowIsNotRows) {
  const std::string page = page_of({record("r1", "annulus", 2, 1), record("r1", "move", 1, 1)});
  EXPECT_EQ(count(page, " 1 rows"), 0u);
  EXPECT_EQ(count(page, "over 1 row<"), 1u);
  EXPECT_EQ(count(page_of({record("r1", "annulus", 2, 1)}), ">1 row, 1 place."), 1u);
}

TEST(Page, CopesWithNumbersAtTheEdges) {
  Record zero = record("zero", "annulus", 0, 0);
  Record huge = record("huge", "annulus", 1e12, 1e-12);
  huge.error->value = __builtin_nan("");
  huge.original = OriginalFigure{0, "ms", "", {}};
  const std::string page = page_of({zero, huge});
  EXPECT_EQ(count(page, "\"nan"), 0u);
  EXPECT_EQ(count(page, "\"inf"), 0u);
  EXPECT_EQ(count(page, "NaN"), 2u);  // the error figure of both tables, shown as what it is
}

}  // namespace
}  // namespace annulus::bench::report
