// Every operator by its cases: named, fuzzed, bad calls. ANNULUS_FUZZ_CASES sets how many are
// fuzzed (1000 when it is not set); how they are judged no variable can change.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstdlib>
#include <ostream>
#include <stdexcept>
#include <string>
#include <vector>

#include "annulus/cuda/memory.h"
#include "testing/suite.h"
#include "testing/trust.h"

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

// An operator whose cases cannot even be made.
TEST(Suite, AFaultOfTheCaseHasAReproLine) {
  const OperatorCases broken{.op = "broken",
                             .named = {},
                             .fuzz = [](std::uint64_t) -> Case { throw std::runtime_error("no"); },
                             .bad_calls = {}};
  const SuiteRow row = run_fuzz(broken, 7, 2, {.jobs = 100000});
  ASSERT_EQ(row.failures.size(), 2u);
  EXPECT_EQ(row.failures[1].repro, "annulus check --repro \"broken seed=8 device=cpu\"");
}

TEST(Suite, WhatTheProgressThrowsEndsTheRun) {
  const OperatorCases& op = all_cases().front();
  const auto stop = [](std::int64_t, std::int64_t) { throw std::runtime_error("enough"); };
  EXPECT_THROW(run_fuzz(op, 0, 8, {.jobs = 4, .progress = stop}), std::runtime_error);
}

TEST(Suite, AMessageNamesWholeWords) {
  EXPECT_TRUE(names_word("x must have 4 dimensions", "x"));
  EXPECT_TRUE(names_word("must not overlap x", "x"));
  EXPECT_TRUE(names_word("dx must not overlap x in memory", "x"));
  EXPECT_FALSE(names_word("dx must not overlap dtheta", "x"));
  EXPECT_FALSE(names_word("h_n must be f32", "h"));
  EXPECT_FALSE(names_word("offsets must have rank 1", "offset"));
  EXPECT_FALSE(names_word("", "x"));
}

// The share is counted by output: one that is full does not hide one of zeros.
TEST(Suite, MistrustIsCountedByOutput) {
  Call call;
  call.name = "backward";
  call.inputs = {{"dy", DType::kF32, {2}}};
  call.outputs = {
      {"dx", DType::kF32, {4}}, {"dtheta", DType::kF32, {2}}, {"none", DType::kF32, {0}}};
  const Values reference = {{1, 2, 3, 4}, {0, std::nan("")}, {}};
  TrustCounts counts;
  for (int i = 0; i < 100; ++i) counts.add(trust_of(call, reference));
  EXPECT_EQ(counts.excess(), "backward dtheta in 100 of 100 cases");
  EXPECT_EQ(counts.outputs().size(), 2u);
  call.outputs[1].zero = true;
  EXPECT_FALSE(any_mistrusted(trust_of(call, reference)));
  EXPECT_EQ(wrongly_zero(call, reference), "");
  call.outputs[0].zero = true;
  EXPECT_NE(wrongly_zero(call, reference), "");
  call.inputs[0].shape = {0};
  EXPECT_TRUE(trust_of(call, reference).empty());
}

TEST_P(Operators, BadCalls) {
  ANNULUS_SKIP_WITHOUT_DEVICE(GetParam().device);
  const SuiteRow row = run_bad_calls(*GetParam().op, {.device = GetParam().device});
  EXPECT_GE(row.cases, 25);
  expect_passed(row);
}

// All cases that the shards fuzz, and never fewer than tell a percent of the rarer outputs: a shard of them
// may be too small for that. It takes only the references, which are the same on every device.
class References : public ::testing::TestWithParam<const OperatorCases*> {};

TEST_P(References, FewAreTrivial) {
  const std::int64_t cases = std::max<std::int64_t>(2000, fuzz_cases());
  TrustCounts counts;
  std::string which;
  for (std::int64_t seed = 0; seed < cases; ++seed) {
    const Case c = GetParam()->fuzz(static_cast<std::uint64_t>(seed));
    const std::vector<OutputTrust> outputs = trust_of(c);
    for (const OutputTrust& t : outputs) {
      if (t.mistrusted)
        which += "\n  " + t.output + " seed=" + std::to_string(seed) + " " + c.params;
    }
    counts.add(outputs);
  }
  EXPECT_EQ(counts.excess(), "") << "all that are mistrusted:" << which;
  for (const auto& [output, count] : counts.outputs()) {
    RecordProperty(output, std::to_string(count.mistrusted) + " of " + std::to_string(count.cases));
  }
}

INSTANTIATE_TEST_SUITE_P(All, Operators, ::testing::ValuesIn(targets()),
                         ::testing::PrintToStringParamName());

std::vector<const OperatorCases*> operators() {
  std::vector<const OperatorCases*> all;
  for (const OperatorCases& op : all_cases()) all.push_back(&op);
  return all;
}
INSTANTIATE_TEST_SUITE_P(All, References, ::testing::ValuesIn(operators()),
                         [](const auto& info) { return info.param->op; });

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
  // What share of the cases is mistrusted, References.FewAreTrivial judges over all shards.
  expect_passed(run_fuzz(*target.op, static_cast<std::uint64_t>(first), last - first,
                         {.device = target.device}));
}

INSTANTIATE_TEST_SUITE_P(All, Cases, ::testing::ValuesIn(shards()),
                         ::testing::PrintToStringParamName());

}  // namespace
}  // namespace annulus::testing
