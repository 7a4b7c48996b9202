// The runner on an operator made up here, whose right, wrong and impossible versions are known.
#include "bench/runner.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <stdexcept>
#include <vector>

#include "annulus/core/errors.h"
#include "bench/ceilings.h"
#include "bench/problem.h"
#include "bench/statistics.h"

namespace annulus::bench {
namespace {

// y = factor * x, claimed to be y = 2 x.
testing::Case doubling(float factor, std::int64_t n) {
  testing::Case c;
  c.op = "doubling";
  c.params = "n=" + std::to_string(n);
  testing::Call call;
  call.name = "forward";
  call.inputs = {{"x", DType::kF32, {n / 8, 8}}};
  call.outputs = {{"y", DType::kF32, {n / 8, 8}}};
  call.run = [factor](testing::Views in, testing::Views out, Context&) {
    const auto* x = static_cast<const float*>(in[0].data);
    auto* y = static_cast<float*>(out[0].data);
    for (std::int64_t i = 0; i < in[0].numel(); ++i) y[i] = factor * x[i];
  };
  call.reference = [](testing::Views in, testing::Views out) {
    const auto* x = static_cast<const double*>(in[0].data);
    auto* y = static_cast<double*>(out[0].data);
    for (std::int64_t i = 0; i < in[0].numel(); ++i) y[i] = 2 * x[i];
  };
  call.flops = static_cast<double>(n);
  call.bytes = 8.0 * static_cast<double>(n);
  c.calls = {call};
  return c;
}

Row row_of(float factor, std::int64_t n) {
  Row row;
  row.name = "doubling";
  row.op = "doubling";
  row.problem = [=] { return doubling(factor, n); };
  row.error_problem = [=] { return doubling(factor, 64); };
  row.calls = {"forward"};
  return row;
}

class RunnerTest : public ::testing::Test {
 protected:
  static void SetUpTestSuite() {  // once: the ceilings take a second
    RunnerOptions options;
    options.repetitions = 3;
    runner_ = new Runner(options);
  }
  static void TearDownTestSuite() { delete runner_; }
  static Runner* runner_;
};
Runner* RunnerTest::runner_ = nullptr;

TEST_F(RunnerTest, MeasuresOursAndTheMoveBesideIt) {
  const auto records = runner_->measure("suite", row_of(2, 1 << 16));
  ASSERT_EQ(records.size(), 2u);
  const Record& ours = records[0];
  EXPECT_EQ(ours.status, Status::kOk) << ours.reason;
  EXPECT_EQ(ours.impl, "annulus");
  EXPECT_EQ(ours.time_ms->n, 3);
  EXPECT_GT(ours.time_ms->min, 0);
  EXPECT_EQ(ours.error->value, 0);
  EXPECT_EQ(*ours.zero_rows, 0);
  EXPECT_EQ(*ours.peak_bytes, 2 * 4 * (1 << 16));
  // Whichever of the two is larger here: a sanitizer slows multiplying more than copying.
  const double bandwidth = 8e-6 * (1 << 16) / ours.ceiling->copy_gbs;
  const double compute = 1e-6 * (1 << 16) / ours.ceiling->gemm_gflops;
  // The same bytes moved beside it may have been faster than the copy at the start.
  const double floor = compute > bandwidth ? compute : std::min(bandwidth, records[1].time_ms->min);
  EXPECT_NEAR(*ours.floor_ms, floor, 1e-12);
  EXPECT_EQ(*records[1].floor_ms, *ours.floor_ms);
  EXPECT_EQ(ours.floor_kind, compute > bandwidth ? FloorKind::kCompute : FloorKind::kBandwidth);
  EXPECT_EQ(records[1].impl, "move");
  EXPECT_EQ(records[1].status, Status::kOk) << records[1].reason;
  EXPECT_EQ(*records[1].bytes, 8 * (1 << 16));
  for (const Record& r : records) EXPECT_NO_THROW(parse_record(to_json_line(r)));
}

TEST_F(RunnerTest, OptionsWorkAndWhatWasSeenAreInTheRecord) {
  Row row = row_of(2, 1 << 10);
  row.with_move = false;
  row.impl = "annulus-split";
  row.work = {Precision::kBf16, 3, 4, 0};
  row.observe = [](const Problem& problem) {
    return Params{{"first", problem.values("y", 1)[0] / problem.values("x", 1)[0]}};
  };
  const auto records = runner_->measure("suite", row);
  ASSERT_EQ(records.size(), 1u);
  const Record& r = records[0];
  EXPECT_EQ(r.status, Status::kOk) << r.reason;
  EXPECT_EQ(r.impl, "annulus-split");
  EXPECT_EQ(std::get<double>(r.params.at("first")), 2);
  EXPECT_EQ(*r.flops_executed, 3 * 1024);
  EXPECT_EQ(r.ceiling->gemm, Precision::kBf16);
  EXPECT_EQ(r.ceiling->gemm_gflops, runner_->ceilings().gemm_gflops(Precision::kBf16));
}

TEST_F(RunnerTest, RowsThatSaySoShareOneReference) {
  int references = 0;
  Row row = row_of(2, 1 << 10);
  row.with_move = false;
  row.error_problem = [&references] {
    testing::Case c = doubling(2, 64);
    c.calls[0].reference = [&references, usual = c.calls[0].reference](testing::Views in,
                                                                       testing::Views out) {
      ++references;
      usual(in, out);
    };
    return c;
  };
  for (const char* same : {"a", "a", "b", "b", "b", "", ""}) {
    row.same_expected = same;
    EXPECT_EQ(runner_->measure("suite", row)[0].status, Status::kOk);
  }
  EXPECT_EQ(references, 4);
}

TEST_F(RunnerTest, AWrongResultFailsHoweverFast) {
  const auto records = runner_->measure("suite", row_of(2.1f, 1 << 10));
  EXPECT_EQ(records[0].status, Status::kFailed);
  EXPECT_NE(records[0].reason.find("forward y"), std::string::npos) << records[0].reason;
  const auto nan = runner_->measure("suite", row_of(std::nanf(""), 1 << 10));
  EXPECT_EQ(nan[0].status, Status::kFailed);
  const auto zeros = runner_->measure("suite", row_of(0, 1 << 10));
  EXPECT_EQ(*zeros[0].zero_rows, 1);
}

TEST_F(RunnerTest, WhatDoesNotFitIsSkippedWithTheNumbers) {
  const auto records = runner_->measure("suite", row_of(2, std::int64_t{1} << 48));
  ASSERT_EQ(records.size(), 1u);
  EXPECT_EQ(records[0].status, Status::kSkipped);
  EXPECT_NE(records[0].reason.find("GiB"), std::string::npos) << records[0].reason;
  EXPECT_FALSE(records[0].time_ms);
  EXPECT_NO_THROW(parse_record(to_json_line(records[0])));
}

TEST_F(RunnerTest, WhatThrowsBecomesARow) {
  Row row = row_of(2, 64);
  row.error_problem = []() -> testing::Case { throw NotSupported("no kernel here"); };
  EXPECT_EQ(runner_->measure("suite", row)[0].status, Status::kSkipped);
  row.error_problem = []() -> testing::Case { throw std::runtime_error("broken"); };
  EXPECT_EQ(runner_->measure("suite", row)[0].status, Status::kFailed);
}

// --- the numbers that repetitions are reduced to, and the floors they are held against ------------------

TEST(Statistics, MedianMinimumAndPercentile) {
  const TimeMs odd = summarize({3, 1, 2});
  EXPECT_EQ(odd.median, 2);
  EXPECT_EQ(odd.min, 1);
  EXPECT_EQ(odd.n, 3);
  EXPECT_EQ(summarize({4, 1, 2, 3}).median, 2.5);
  std::vector<double> hundred;
  for (int i = 0; i <= 100; ++i) hundred.push_back(i);
  EXPECT_DOUBLE_EQ(summarize(hundred).p95, 95);
  EXPECT_EQ(summarize({7}).p95, 7);
  EXPECT_THROW(summarize({}), std::invalid_argument);
}

TEST(Statistics, RelativeErrorIsAgainstTheLargestReference) {
  EXPECT_DOUBLE_EQ(max_relative_error({1, 2.5}, {1, 2}), 0.25);
  EXPECT_DOUBLE_EQ(max_relative_error({0.5}, {0}), 0.5);
  EXPECT_TRUE(std::isnan(max_relative_error({std::nan("")}, {1})));
  EXPECT_TRUE(std::isnan(max_relative_error({HUGE_VAL, 1}, {1, 1})));
  EXPECT_EQ(max_relative_error({}, {}), 0);
  EXPECT_THROW(max_relative_error({1}, {}), std::invalid_argument);
}

// 100 GB/s; 1 TFLOP/s in fp32, 8 in bf16, no tf32; a launch takes 2 us, a barrier 1 us, in a cluster
// 0.25 us; a cluster holds 2 MB, the chip 50 MB.
Ceilings ceilings() {
  Ceilings c;
  c.copy_gbs = 100;
  c.gemm[static_cast<std::size_t>(Precision::kFp32)] = 1000;
  c.gemm[static_cast<std::size_t>(Precision::kBf16)] = 8000;
  c.launch_ms = 0.002;
  c.barrier_ms = 0.001;
  c.small_barrier_ms = 0.00025;
  c.small_bytes = 2e6;
  c.on_chip_bytes = 50e6;
  return c;
}

TEST(Floor, IsTheLargestTermAndAStepsBarrierOnTop) {
  constexpr auto kBandwidth = FloorKind::kBandwidth, kCompute = FloorKind::kCompute,
                 kLatency = FloorKind::kLatency;
  constexpr Precision bf16 = Precision::kBf16;
  const struct {
    double bytes, flops;
    Work work;
    double ms;
    FloorKind kind;
  } rows[] = {
      {1e8, 1, {}, 1.0, kBandwidth},
      {1, 5e9, {}, 5.0, kCompute},
      {1, 1, {}, 0.002, kLatency},
      // What was not measured is no ceiling, and none is made up.
      {1e8, 1e15, {Precision::kTf32}, 1.0, kBandwidth},
      // The products of the mode.
      {1, 8e9, {bf16, 1}, 1.0, kCompute},
      {1, 8e9, {bf16, 3}, 3.0, kCompute},
      // Twenty barriers come on top of what is computed between them.
      {1, 8e9, {bf16, 1, 20, 10e6}, 1.02, kCompute},
      // Weights that a cluster holds need only the cluster's barrier.
      {1, 8e9, {bf16, 1, 20, 1e6}, 1.005, kCompute},
      {1, 8e6, {bf16, 1, 20, 1e6}, 0.006, kLatency},
      // Weights that the chip cannot hold: what is too much is read again in every step but the first.
      {60e6, 8e6, {bf16, 1, 20, 60e6}, 0.6 + 19 * 0.1 + 0.02, kBandwidth},
  };
  for (const auto& r : rows) {
    const Floor floor = floor_of(r.bytes, r.flops, r.work, ceilings());
    EXPECT_NEAR(floor.ms, r.ms, 1e-12) << r.bytes << " bytes, " << r.flops << " flops";
    EXPECT_EQ(floor.kind, r.kind) << r.bytes << " bytes, " << r.flops << " flops";
  }
}

TEST(Ceilings, OfRanksAreThoseOfTheirPlacesAsOftenAsTheyFindRoom) {
  const auto rank = [](std::uint64_t place, double at_most) {
    return RankCeilings{place, at_most, ceilings()};
  };
  const struct {
    std::vector<RankCeilings> ranks;
    double times;
  } rows[] = {
      {{rank(7, 1)}, 1},
      // Two cores, of which a rank has one, or both.
      {{rank(7, 2), rank(7, 2)}, 2},
      {{rank(7, 1), rank(7, 1)}, 1},
      {{rank(7, 2), rank(7, 2), rank(7, 2), rank(7, 2)}, 2},
      {{rank(7, 0.5), rank(7, 0.5)}, 1},
      // Two machines.
      {{rank(7, 1), rank(9, 1)}, 2},
      {{rank(7, 4), rank(9, 1), rank(7, 4), rank(9, 1)}, 3},
  };
  for (const auto& r : rows) {
    const Ceilings all = together(r.ranks);
    EXPECT_EQ(all.copy_gbs, r.times * ceilings().copy_gbs);
    EXPECT_EQ(all.gemm_gflops(Precision::kBf16),
              r.times * ceilings().gemm_gflops(Precision::kBf16));
    EXPECT_EQ(all.launch_ms, ceilings().launch_ms);
  }
}

}  // namespace
}  // namespace annulus::bench
