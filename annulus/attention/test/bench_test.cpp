// The suites say what the originals said, their problems are legal and alive, and their work is what the mathematics asks for.
#include <gtest/gtest.h>

#include <cmath>
#include <set>
#include <stdexcept>
#include <string>

#include "annulus/attention/bench_original.h"
#include "annulus/core/errors.h"
#include "bench/problem.h"
#include "bench/suite.h"

namespace annulus::bench {
namespace {

constexpr const char* kSuites[] = {"attention", "extreme-sequences", "memory-scaling",
                                   "ring-attention-comprehensive", "ring-attention-single"};

std::vector<Row> rows_of(const std::string& suite, Size size, DeviceType device = DeviceType::kCPU,
                         std::size_t memory = std::size_t{64} << 30) {
  for (const Suite& s : all_suites()) {
    if (s.name == suite) return s.rows({size, device, memory});
  }
  throw std::logic_error("suite " + suite + " is not registered");
}

Row find_row(const std::vector<Row>& rows, const std::string& name, DType dtype) {
  for (const Row& row : rows) {
    if (row.name == name && row.dtype == dtype) return row;
  }
  throw std::logic_error("no row " + name);
}

double gflop_of(const Row& row) {
  const testing::Case problem = row.problem();
  double flops = 0;
  for (const std::string& call : row.calls) flops += find_call(problem, call).flops;
  return flops / 1e9;
}

bool is_skipped(const Row& row) { return row.op == "ring_attention"; }

double ms_of(const Row& row) { return row.original ? row.original->value : 0; }
double mib_of(const Row& row) { return row.memory_original ? row.memory_original->value : 0; }

// Figures read off the sources by eye.
TEST(AttentionOriginal, HoldsTheSourcesFigures) {
  const auto rows = rows_of("ring-attention-comprehensive", Size::kFull, DeviceType::kCUDA);
  const Row improved = find_row(rows, "ImprovedDilated-n8192", DType::kF16);
  EXPECT_EQ(ms_of(improved), 57.90);
  EXPECT_EQ(mib_of(improved), 0.078 * 1024);
  EXPECT_EQ(improved.original->hardware, "GTX 1080");
  EXPECT_EQ(ms_of(find_row(rows, "RingDilatedV2-n4096", DType::kF16)), 15.60);
  EXPECT_EQ(ms_of(find_row(rows, "Production_NoCP-n2048", DType::kF16)), 2.52);
  EXPECT_EQ(mib_of(find_row(rows, "Production_CP-n8192", DType::kF16)), 0.454 * 1024);

  const auto ring4 = kRingOriginalClasses[5];
  EXPECT_STREQ(ring4.name, "Production_Ring4");
  EXPECT_EQ(ring4.rows[0].ms, 0.30);
  EXPECT_EQ(ring4.rows[0].zero_rows, 1);
  EXPECT_EQ(ring4.rows[3].ms, 167.79);

  // 304,971 tokens a second of 2 x 1024, and so on.
  const auto single = rows_of("ring-attention-single", Size::kFull, DeviceType::kCUDA);
  EXPECT_NEAR(ms_of(find_row(single, "Hilbert-n1024", DType::kF16)), 6.715, 0.001);
  EXPECT_NEAR(ms_of(find_row(single, "Distributed-n2048", DType::kF16)), 33.987, 0.001);
  EXPECT_NEAR(ms_of(find_row(single, "Standard-n4096", DType::kF16)), 382.52, 0.01);
  EXPECT_FALSE(
      find_row(single, "Standard-n1024", DType::kF16).original);  // it names the best alone

  // KB a token at 512 tokens.
  const auto memory = rows_of("memory-scaling", Size::kQuick);
  EXPECT_NEAR(mib_of(find_row(memory, "Hilbert-n512", DType::kF16)), 10.5155, 1e-3);
  EXPECT_NEAR(mib_of(find_row(memory, "BlockSparse-n512", DType::kF16)), 21.531 / 2, 1e-9);
  EXPECT_NEAR(mib_of(find_row(memory, "Standard-n512", DType::kF16)), 37.281 / 2, 1e-9);
  const auto extreme = rows_of("extreme-sequences", Size::kFull, DeviceType::kCUDA);
  EXPECT_EQ(mib_of(find_row(extreme, "fwd-LongNet-n100000", DType::kBF16)), 298 * 1024);
}

TEST(AttentionSuites, EveryClassOfTheOriginalHasItsRows) {
  for (const Size size : {Size::kQuick, Size::kFull}) {
    std::set<std::string> names;
    for (const Row& row : rows_of("ring-attention-comprehensive", size)) names.insert(row.name);
    for (const RingOriginalClass& c : kRingOriginalClasses) {
      for (const RingOriginalRow& r : c.rows) {
        EXPECT_TRUE(names.contains(c.name + std::string("-n") + std::to_string(r.n))) << c.name;
      }
    }
  }
}

TEST(AttentionSuites, NamesAreUnique) {
  for (const char* suite : kSuites) {
    for (const Size size : {Size::kQuick, Size::kMachine, Size::kFull}) {
      for (const DeviceType device : {DeviceType::kCPU, DeviceType::kCUDA}) {
        if (size == Size::kMachine && device == DeviceType::kCUDA) continue;  // asks the device
        std::set<std::string> names;
        for (const Row& row : rows_of(suite, size, device)) {
          EXPECT_TRUE(names.insert(row.name + annulus::name_of(row.dtype)).second)
              << suite << " " << row.name;
        }
        EXPECT_FALSE(names.empty()) << suite;
      }
    }
  }
}

// A ring of several ranks runs over as many on the CPU, and says why it does not on CUDA.
TEST(AttentionSuites, RingsAreOverRanks) {
  for (const DeviceType device : {DeviceType::kCPU, DeviceType::kCUDA}) {
    int seen = 0;
    for (const Row& row : rows_of("ring-attention-comprehensive", Size::kQuick, device)) {
      if (row.name.find("Ring4") == std::string::npos) continue;
      ++seen;
      EXPECT_EQ(std::get<std::int64_t>(row.params.at("ranks")), 4) << row.name;
      EXPECT_EQ(row.problem().op, "ring_attention") << row.name;
    }
    EXPECT_EQ(seen, 2 * 4 * 2);
  }
}

TEST(AttentionSuites, FloorsArePositiveAndErrorProblemsSmall) {
  const Ceilings ceilings = [] {
    Ceilings c;
    c.copy_gbs = 20;
    c.rate(Precision::kFp32) = 80;
    c.rate(Precision::kBf16) = 300;
    return c;
  }();
  for (const char* suite : kSuites) {
    for (const Row& row : rows_of(suite, Size::kFull)) {
      if (is_skipped(row)) continue;
      const testing::Case problem = row.problem();
      double bytes = 0, flops = 0;
      for (const std::string& call : row.calls) {
        bytes += find_call(problem, call).bytes;
        flops += find_call(problem, call).flops;
      }
      EXPECT_GT(flops, 0) << row.name;
      EXPECT_GT(bytes, 0) << row.name;
      EXPECT_GT(floor_of(bytes, flops, row.work, ceilings).ms, 0) << row.name;
      // Whole tiles are more than what is needed, but not by much: the shortest lines here are of 80 keys.
      ASSERT_TRUE(row.flops_executed) << row.name;
      EXPECT_GE(*row.flops_executed, 0.999 * flops) << row.name;
      EXPECT_LE(*row.flops_executed, 1.3 * flops) << row.name;
      double small = 0;
      const testing::Case error_problem = row.error_problem();
      for (const std::string& call : row.calls) small += find_call(error_problem, call).flops;
      EXPECT_LE(small, 1.1e9) << row.name;
      EXPECT_EQ(error_problem.op, problem.op);
    }
  }
}

// The GFLOP of the originals' rows, counted by hand: 4 H D n times what a query sees.
TEST(AttentionSuites, WorkIsThatOfTheMathematics) {
  const auto rows = rows_of("ring-attention-comprehensive", Size::kFull);
  const auto check = [&](const char* name, double gflop) {
    EXPECT_NEAR(gflop_of(find_row(rows, name, DType::kF16)), gflop, 0.001 * gflop) << name;
  };
  check("RingDilatedV2-n1024", 1.0737);
  check("Production_NoCP-n1024", 0.8053);
  check("LongNet-n1024", 1.6106);
  check("ImprovedDilated-n4096", 5.3687);
  check("RingDilatedV2-n8192", 17.18);
  check("Production_CP-n8192", 9.1268);
  check("LongNet-n8192", 30.065);
  const auto single = rows_of("ring-attention-single", Size::kFull);
  EXPECT_NEAR(gflop_of(find_row(single, "Standard-n4096", DType::kF16)), 68.72, 0.01);
  const auto engine = rows_of("attention", Size::kFull);
  const double forward =
      gflop_of(find_row(engine, "fwd-dense-b1-h8-d64-n4096-causal", DType::kBF16));
  EXPECT_NEAR(forward, 17.18, 0.01);
  // Backward: S again, dP, dV, dQ and dK.
  EXPECT_NEAR(gflop_of(find_row(engine, "fwdbwd-dense-b1-h8-d64-n4096-causal", DType::kBF16)),
              3.5 * forward, 0.01);
  EXPECT_NEAR(gflop_of(find_row(engine, "fwd-blocks10-b1-h8-d64-n4096", DType::kBF16)), 3.44, 0.1);
}

// Lists and orders arrive where a problem is timed, not only where it is judged.
TEST(AttentionSuites, TimedProblemsHaveTheirListsAndOrders) {
  const auto rows = rows_of("ring-attention-single", Size::kQuick);
  const Row sparse = find_row(rows, "BlockSparse-n1024", DType::kF32);
  Problem blocks(sparse.problem(), sparse.calls, kCPU);
  blocks.run();
  const std::vector<double> row_ptr = blocks.values("row_ptr", 17), o = blocks.values("o", 64);
  EXPECT_GE(row_ptr[16], 16);
  for (std::size_t x = 0; x < 16; ++x) EXPECT_GT(row_ptr[x + 1], row_ptr[x]);
  EXPECT_NE(o[0], 0);

  const Row ordered = find_row(rows, "Hilbert-window-n1024", DType::kF32);
  Problem hilbert(ordered.problem(), ordered.calls, kCPU);
  hilbert.run();  // throws where it is no permutation
  const std::vector<double> order = hilbert.values("order", 1024);
  for (std::size_t r = 1; r < order.size(); ++r) {
    const double step = std::abs(order[r] - order[r - 1]);
    EXPECT_TRUE(step == 1 || step == 32) << r;  // neighbours in a picture of 32 x 32
  }
}

// Grouped attention has zero rows where its definition says so, and LongNet and dense attention have none.
TEST(AttentionSuites, ZeroRowsAreThoseOfTheDefinition) {
  const auto rows = rows_of("ring-attention-comprehensive", Size::kQuick);
  const auto share = [&](const char* name) {
    const Row row = find_row(rows, name, DType::kF32);
    const testing::Case c = row.error_problem();
    return measure_accuracy(c, row.calls, kCPU, expected_of(c, row.calls)).zero_rows;
  };
  EXPECT_DOUBLE_EQ(share("ImprovedDilated-n1024"), 0.25);
  EXPECT_DOUBLE_EQ(share("Production_NoCP-n8192"), 0.46875);
  EXPECT_DOUBLE_EQ(share("RingDilatedV2-n1024"), 0);
  EXPECT_DOUBLE_EQ(share("LongNet-n4096"), 0);
}

// Queries without keys have an lse of -inf, which is right and no error.
TEST(AttentionSuites, RowsWithoutKeysAreRight) {
  const Row row =
      find_row(rows_of("attention", Size::kQuick), "fwdbwd-grouped-b1-h8-d64-n4096", DType::kF32);
  const testing::Case c = row.error_problem();
  const Accuracy a = measure_accuracy(c, row.calls, kCPU, expected_of(c, row.calls));
  EXPECT_LE(a.guard_ratio, 1);  // NaN is not
  EXPECT_LE(a.max_relative, 1e-5);
}

// Four tensors and lse, and scratch that does not grow with n for a dense forward.
TEST(AttentionSuites, MemoryGrowsWithTokens) {
  const auto rows = rows_of("memory-scaling", Size::kFull);
  const Row row = find_row(rows, "Standard-n32768", DType::kF16);
  const double per_token =
      static_cast<double>(peak_bytes_of(row.problem(), row.calls, kCPU)) / 32768 / 1024;
  EXPECT_GE(per_token, 4.03);
  EXPECT_LE(per_token, 4.3);
  const Row short_row = find_row(rows, "Standard-n512", DType::kF16);
  Problem problem(short_row.problem(), short_row.calls, kCPU);
  const Params seen = short_row.observe(problem);
  EXPECT_LE(std::get<double>(seen.at("peak_exponent")), 1.01);
  // Scratch is that of tiles, which grow with few tokens (a chunk has up to 1024 queries) and with many not at all.
  const auto scratch_kib = [&](int tokens) {
    const Row own = find_row(rows, "Standard-n" + std::to_string(tokens), DType::kF16);
    Problem of(own.problem(), own.calls, kCPU);
    return std::get<double>(own.observe(of).at("workspace_kib_per_token")) * tokens;
  };
  for (const int tokens : {8192, 16384, 32768}) {
    EXPECT_NEAR(scratch_kib(tokens), scratch_kib(4096), 0.0005 * (tokens + 4096)) << tokens;
  }
  EXPECT_LE(std::get<double>(seen.at("peak_kib_per_token")), 21.031);
}

}  // namespace
}  // namespace annulus::bench
