// Every operator by its cases: named, fuzzed, bad calls. ANNULUS_FUZZ_CASES sets how many are
// fuzzed (1000 when it is not set); how they are judged no variable can change.
#include <gtest/gtest.h>

#include <algorithm>
#include <cstdlib>
#include <ostream>
#include <string>
#include <vector>

#include "annulus/cuda/memory.h"
#include "testing/suite.h"

namespace annulus::testing {
namespace {

constexpr int kShards = 8;

std::int64_t fuzz_cases() {
  const char* text = std::getenv("ANNULUS_FUZZ_CASES");
  return text != nullptr && *text != '\0' ? std::stoll(text) : 1000;
}

struct Target {
  const OperatorCases* op;
  Device device;
};

std::vector<Target> targets() {
  std::vector<Target> all;
  for (const OperatorCases& op : all_cases()) {
    all.push_back({&op, kCPU});
    all.push_back({&op, cuda_device(0)});
  }
  return all;
}

// The names of parameters, in GoogleTest's listings and in ctest's.
std::ostream& operator<<(std::ostream& out, const Target& t) {
  return out << t.op->op << (t.device.type == DeviceType::kCPU ? "_cpu" : "_cuda");
}

void expect_passed(const SuiteRow& row) {
  EXPECT_GT(row.cases, 0);
  EXPECT_FALSE(row.too_many_mistrusted()) << row.mistrusted << " of " << row.cases;
  for (std::size_t i = 0; i < row.failures.size() && i < 10; ++i) {
    const Failure& f = row.failures[i];
    ADD_FAILURE() << f.params << "\n  " << f.where << ": " << f.detail << "\n  " << f.repro;
  }
  EXPECT_TRUE(row.failures.empty())
      << row.failures.size() << " failures in " << row.cases << " cases; the first ten are above";
  ::testing::Test::RecordProperty("worst_ratio", std::to_string(row.worst_ratio));
}

#define ANNULUS_SKIP_WITHOUT_DEVICE(device)                                     \
  if ((device).type == DeviceType::kCUDA && !cuda::why_unavailable().empty()) { \
    GTEST_SKIP() << "no CUDA device: " << cuda::why_unavailable();              \
  }

class Operators : public ::testing::TestWithParam<Target> {};

TEST(Suite, RunsTheNamedCasesThatAreWanted) {
  const OperatorCases& op = all_cases().front();
  const std::vector<Case> cases = op.named();
  const std::string wanted = cases.back().params;
  const SuiteRow row =
      run_named(op, {.wants = [&](const std::string& params) { return params == wanted; }});
  expect_passed(row);
  EXPECT_EQ(row.cases, std::count_if(cases.begin(), cases.end(),
                                     [&](const Case& c) { return c.params == wanted; }));
  EXPECT_LT(row.cases, static_cast<std::int64_t>(cases.size()));
}

TEST_P(Operators, BadCalls) {
  ANNULUS_SKIP_WITHOUT_DEVICE(GetParam().device);
  const SuiteRow row = run_bad_calls(*GetParam().op, {.device = GetParam().device});
  EXPECT_GE(row.cases, 25);
  expect_passed(row);
}

INSTANTIATE_TEST_SUITE_P(All, Operators, ::testing::ValuesIn(targets()),
                         ::testing::PrintToStringParamName());

struct Shard {
  Target target;
  int index;
};

std::ostream& operator<<(std::ostream& out, const Shard& s) {
  return out << s.target << "_" << s.index;
}

std::vector<Shard> shards() {
  std::vector<Shard> all;
  for (const Target& t : targets()) {
    for (int i = 0; i < kShards; ++i) all.push_back({t, i});
  }
  return all;
}

class Cases : public ::testing::TestWithParam<Shard> {};

TEST_P(Cases, Named) {
  const auto& [target, index] = GetParam();
  ANNULUS_SKIP_WITHOUT_DEVICE(target.device);
  // Every eighth: neighbours are alike, and alike slow.
  const auto own = [shard = index, n = 0](const std::string&) mutable {
    return n++ % kShards == shard;
  };
  expect_passed(run_named(*target.op, {.device = target.device, .wants = own}));
}

TEST_P(Cases, Fuzzed) {
  const auto& [target, index] = GetParam();
  ANNULUS_SKIP_WITHOUT_DEVICE(target.device);
  const std::int64_t all = fuzz_cases();
  const std::int64_t first = all * index / kShards;
  const std::int64_t last = all * (index + 1) / kShards;
  if (first == last) GTEST_SKIP() << "ANNULUS_FUZZ_CASES leaves none for this shard";
  expect_passed(run_fuzz(*target.op, static_cast<std::uint64_t>(first), last - first,
                         {.device = target.device}));
}

INSTANTIATE_TEST_SUITE_P(All, Cases, ::testing::ValuesIn(shards()),
                         ::testing::PrintToStringParamName());

}  // namespace
}  // namespace annulus::testing
