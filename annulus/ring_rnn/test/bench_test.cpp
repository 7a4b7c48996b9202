// The suite says what the original said, its dynamics are alive, and its work is what the mathematics
// asks for.
#include <gtest/gtest.h>

#include <set>
#include <stdexcept>

#include "bench/problem.h"
#include "bench/suite.h"

namespace annulus::bench {
namespace {

std::vector<Row> rows_of(Size size, DeviceType device = DeviceType::kCPU,
                         std::size_t memory = std::size_t{64} << 30) {
  for (const Suite& s : all_suites()) {
    if (s.name == "ring-rnn") return s.rows({size, device, memory});
  }
  throw std::logic_error("suite ring-rnn is not registered");
}

Row find_row(const std::vector<Row>& rows, const std::string& name, DType dtype) {
  for (const Row& row : rows) {
    if (row.name == name && row.dtype == dtype && row.impl == "annulus") return row;
  }
  throw std::logic_error("no row " + name);
}

double flops_of(const Row& row) {
  const testing::Case problem = row.problem();
  double flops = 0;
  for (const std::string& call : row.calls) flops += find_call(problem, call).flops;
  return flops;
}

// The share of active units that the row's record would state, seen on its error problem.
double active(const Row& row) {
  Problem problem(row.error_problem(), {"forward"}, kCPU);
  problem.run();
  return std::get<double>(row.observe(problem).at("active"));
}

// Figures read off the source by eye.
TEST(RingRnnOriginal, HoldsTheSourcesFigures) {
  const auto rows = rows_of(Size::kFull);
  const auto original = [&](const char* name) {
    return *find_row(rows, name, DType::kBF16).original;
  };
  EXPECT_EQ(original("fwd-b256-n128-k16-t20").value, 0.282);
  EXPECT_EQ(original("fwd-b256-n128-k16-t20").hardware, "RTX PRO 6000 Blackwell");
  EXPECT_EQ(original("fwd-b256-n2048-k64-t20").value, 62.792);
  EXPECT_EQ(original("fwd-b256-n2048-k64-t20").columns.size(), 3u);  // torch.sum was out of memory
  EXPECT_EQ(original("fwd-b256-n1024-k3-t20").value, 10.129);        // no tensor cores
  EXPECT_EQ(original("fwd-b256-n1024-k16-t20").columns[0].second, 755.812);
}

TEST(RingRnnSuite, FullHasAllRowsOfTheOriginal) {
  for (const DeviceType device : {DeviceType::kCPU, DeviceType::kCUDA}) {
    std::set<std::string> names, originals;
    for (const Row& row : rows_of(Size::kFull, device)) {
      EXPECT_TRUE(names.insert(row.name + annulus::name_of(row.dtype) + row.impl).second)
          << row.name;
      if (row.original && !row.params.contains("variant")) originals.insert(row.name);
    }
    EXPECT_EQ(originals.size(), 12u);
    EXPECT_EQ(names.contains("fwd-b256-n2048-k16-t20f32annulus-tf32"), device == DeviceType::kCUDA);
  }
}

// The GFLOP of the original's rows, counted by hand: 2 B T (K + 1) N^2, three times that with gradients.
TEST(RingRnnSuite, WorkIsThatOfTheMathematics) {
  const auto rows = rows_of(Size::kFull);
  EXPECT_NEAR(flops_of(find_row(rows, "fwd-b256-n2048-k16-t20", DType::kBF16)), 730.1e9, 0.1e9);
  EXPECT_NEAR(flops_of(find_row(rows, "fwd-b256-n1024-k2-t20", DType::kF32)), 32.2e9, 0.1e9);
  const Row both = find_row(rows, "fwdbwd-b256-n1024-k16-t20", DType::kBF16);
  EXPECT_NEAR(flops_of(both), 3 * 182.5e9, 0.2e9);
  EXPECT_EQ(both.work.steps, 40);
  // Precision with a zero action are not needed: three matrices of 17, or 22 % of sixteen and Wo.
  EXPECT_NEAR(flops_of(find_row(rows, "fwd-b256-n1024-k16-t20-live2", DType::kBF16)),
              182.5e9 * 3 / 17, 0.1e9);
  EXPECT_NEAR(flops_of(find_row(rows, "fwd-b256-n1024-k16-t20-actions", DType::kBF16)),
              182.5e9 * 4.52 / 17, 0.1e9);
}

TEST(RingRnnSuite, PrecisionsUseTheirUnits) {
  for (const Row& row : rows_of(Size::kFull, DeviceType::kCUDA)) {
    if (row.name != "fwd-b256-n1024-k16-t20") continue;
    const Work& w = row.work;
    const double n2 = 17.0 * 1024 * 1024;
    if (size_of(row.dtype) == 2) {
      EXPECT_TRUE(w.products == Precision::kBf16 && w.passes == 1 && w.step_bytes == 2 * n2);
    } else if (row.impl == "annulus") {
      EXPECT_TRUE(w.products == Precision::kBf16 && w.passes == 3 && w.step_bytes == 4 * n2);
      EXPECT_EQ(to_string(row.params.at("precision")), "bf16x3");
    } else if (row.impl == "annulus-bf16x6" || row.impl == "annulus-fp32") {  // made alike
      EXPECT_TRUE(w.products == Precision::kBf16 && w.passes == 6 && w.step_bytes == 6 * n2);
    } else {
      EXPECT_EQ(row.impl, "annulus-tf32");
      EXPECT_TRUE(w.products == Precision::kTf32 && w.passes == 1);
    }
    EXPECT_EQ(w.steps, 20);
  }
}

// What the original's benchmark was not: a kernel that forgets the products would be seen.
TEST(RingRnnSuite, RowsAreAliveAndTheOriginalsOwnIsDead) {
  for (const Row& row : rows_of(Size::kQuick)) {
    if (row.calls.size() != 1 || row.dtype != DType::kF32) continue;
    EXPECT_GT(active(row), 0.2) << row.name;
    EXPECT_LT(active(row), 0.8) << row.name;
  }
  const Row dead = find_row(rows_of(Size::kFull), "fwd-b256-n1024-k16-t20-dead", DType::kF32);
  EXPECT_EQ(active(dead), 0);
}

TEST(RingRnnSuite, MachineKeepsWhatFits) {
  const std::size_t memory = std::size_t{2} << 30;
  const auto rows = rows_of(Size::kMachine, DeviceType::kCPU, memory);
  EXPECT_GT(rows.size(), 10u);
  for (const Row& row : rows) {
    EXPECT_LE(peak_bytes_of(row.problem(), row.calls, kCPU), memory) << row.name;
    EXPECT_LE(flops_of(row), 2e11) << row.name;
  }
}

}  // namespace
}  // namespace annulus::bench
