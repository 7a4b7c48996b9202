// Every operator by its cases: named, fuzzed, bad calls. ANNULUS_FUZZ_CASES sets how many are fuzzed, for
// all operators or one by one ("10000,lrpe_cosine=2000"; 2000 when it is not set); how they are judged no
// variable can change.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstdlib>
#include <stdexcept>
#include <string>
#include <thread>
#include <tuple>
#include <vector>

#include "testing/dense.h"
#include "testing/reference.h"
#include "testing/suite.h"

namespace annulus::testing {
namespace {

constexpr int kShards = 8;

// Below this, the share of cases that prove little is not judged: one more of a rare output would decide.
constexpr std::int64_t kJudgedCases = 2000;

std::int64_t fuzz_cases(const OperatorCases& op) {
  const char* text = std::getenv("ANNULUS_FUZZ_CASES");
  const std::int64_t asked =
      text != nullptr && *text != '\0' ? cases_asked_for(text, op.op) : kJudgedCases;
  return std::max<std::int64_t>(asked / op.one_in, std::min<std::int64_t>(asked, 1));
}

// CUDA's cases share one device.
int jobs_on(Device device) {
  if (device.type == DeviceType::kCUDA) return 1;
  return std::max(1, static_cast<int>(std::thread::hardware_concurrency()));
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

class Operators : public EachOperator {};
ANNULUS_EACH_OPERATOR(Operators);

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

// Whatever is left out of a whole run here.
TEST(Suite, RunsAnyNamedCaseAgainByItsNumber) {
  const OperatorCases& op = all_cases().front();
  const std::size_t count = op.named().size();
  const SuiteRow row = run_repro(parse_repro(op.op + " case=" + std::to_string(count - 1)));
  expect_passed(row);
  EXPECT_EQ(row.cases, 1);
  EXPECT_THROW(run_repro(parse_repro(op.op + " case=" + std::to_string(count))),
               std::invalid_argument);
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

TEST(Suite, TheNumberOfCasesMayDifferByOperator) {
  const std::string first = all_cases().front().op, last = all_cases().back().op;
  EXPECT_EQ(cases_asked_for("70", first), 70);
  EXPECT_EQ(cases_asked_for("70," + last + "=5", first), 70);
  EXPECT_EQ(cases_asked_for("70," + last + "=5", last), 5);
  EXPECT_EQ(cases_asked_for(last + "=0,70", last), 0);
  for (const std::string& bad : {std::string("many"), std::string(""), std::string("70,nothing=5"),
                                 first + "=5", std::string("-1"), std::string("70,,")}) {
    EXPECT_THROW(cases_asked_for(bad, first), std::invalid_argument) << bad;
  }
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
  const SuiteRow row = run_bad_calls(op(), {.device = device()});
  EXPECT_GE(row.cases, 25);
  expect_passed(row);
}

// One test of all cases, which has as many threads as there are processors: only all of them together say
// how many prove little.
TEST_P(Operators, Fuzzed) {
  const std::int64_t cases = fuzz_cases(op());
  if (cases == 0) GTEST_SKIP() << "ANNULUS_FUZZ_CASES asks for none";
  const SuiteRow row = run_fuzz(op(), 0, cases, {.device = device(), .jobs = jobs_on(device())});
  expect_passed(row);
  if (cases >= kJudgedCases) {
    EXPECT_EQ(row.outputs.excess(), "")
        << "outputs of which too many cases are zero or NaN; `annulus check --repro` shows one";
  }
  for (const auto& [output, count] : row.outputs.outputs()) {
    RecordProperty(output, std::to_string(count.mistrusted) + " of " + std::to_string(count.cases));
  }
}

// The definitions themselves: what the fuzzed and named cases are judged by, and what no device changes.
class References : public EachOperator {};
INSTANTIATE_TEST_SUITE_P(All, References, ::testing::ValuesIn(targets_on({kCPU})),
                         ::testing::PrintToStringParamName());

// Every named case and a fixed set of fuzzed ones (one in eight under a sanitizer): more would say the same again.
TEST_P(References, HaveTheGradientsOfFiniteDifferences) {
  constexpr std::uint64_t kSeeds = 1000;
  std::vector<Case> cases = op().named();
  for (std::uint64_t seed = 0; seed < kSeeds; ++seed) cases.push_back(op().fuzz(seed));
  std::size_t compared = 0;
  for (std::size_t i = 0; i < cases.size(); i += kOneIn) {
    const Case& c = cases[i];
    const GradientCheck check = check_reference_gradients(c);
    compared += check.compared;
    EXPECT_EQ(check.fault, "") << c.op << " " << c.params << " seed " << c.seed;
  }
  EXPECT_GE(compared, 250u / kOneIn) << "of " << cases.size() << " cases, most of them too large";
  RecordProperty("compared", std::to_string(compared) + " of " + std::to_string(cases.size()));
}

class Cases : public ::testing::TestWithParam<std::tuple<Target, int>> {};
INSTANTIATE_TEST_SUITE_P(All, Cases,
                         ::testing::Combine(::testing::ValuesIn(all_targets()),
                                            ::testing::Range(0, kShards)),
                         [](const auto& info) {
                           return ::testing::PrintToString(std::get<0>(info.param)) + "_" +
                                  std::to_string(std::get<1>(info.param));
                         });

TEST_P(Cases, Named) {
  const auto& [target, index] = GetParam();
  skip_without(target.device);
  if (IsSkipped()) return;
  // Every eighth: neighbours are alike, and alike slow.
  const auto own = [shard = index, n = 0](const std::string&) mutable {
    return n++ % kShards == shard;
  };
  expect_passed(run_named(*target.op, {.device = target.device, .wants = own}));
}

}  // namespace
}  // namespace annulus::testing
