// Runs all cases of an operator: named, fuzzed and bad calls, over several host threads. What
// `annulus check` prints and what the tests assert.
#pragma once

#include <cstdint>
#include <functional>
#include <map>
#include <string>
#include <vector>

#include "testing/runner.h"

namespace annulus::testing {

// How many cases an output counted in, and how many of them prove too little.
class TrustCounts {
 public:
  struct Count {
    std::int64_t cases = 0;
    std::int64_t mistrusted = 0;
  };

  void add(const std::vector<OutputTrust>& outputs);
  const std::map<std::string, Count>& outputs() const { return outputs_; }

  // The outputs of which more cases are mistrusted than the policy allows, or nothing. Below a
  // hundred cases of an output, where one is more than a percent, it says nothing.
  std::string excess() const;

 private:
  std::map<std::string, Count> outputs_;
};

struct SuiteRow {
  std::string op;
  std::string kind;  // "named", "fuzz", "bad calls"
  std::int64_t cases = 0;
  std::int64_t mistrusted = 0;  // cases with an output that proves little
  TrustCounts outputs = {};
  double worst_ratio = 0;  // largest error / limit
  std::vector<Failure> failures;

  // More of the cases prove little of some output than the policy allows. Named cases are chosen,
  // not drawn, so it does not apply to them; nor does it below a hundred cases of that output.
  bool too_many_mistrusted() const;
  bool passed() const { return failures.empty() && !too_many_mistrusted(); }
};

// More would only cost memory.
inline constexpr int kMostJobs = 256;

struct SuiteOptions {
  Device device = kCPU;
  int jobs = 1;  // host threads, at most kMostJobs; cases are independent
  // Which named cases run, by what describes them; all where there is none.
  std::function<bool(const std::string& params)> wants = {};
  // Called after each case with how many are done, from any thread but never from two at once.
  std::function<void(std::int64_t done, std::int64_t all)> progress = {};
  // Asked before each case, from any thread: true leaves out those that are not begun.
  std::function<bool()> stop = {};
};

SuiteRow run_named(const OperatorCases& op, const SuiteOptions& options);
SuiteRow run_fuzz(const OperatorCases& op, std::uint64_t first_seed, std::int64_t count,
                  const SuiteOptions& options);
SuiteRow run_bad_calls(const OperatorCases& op, const SuiteOptions& options);

// How many cases of an operator to fuzz, from "2000" or "10000,lrpe_cosine=2000": a number for all, and
// those of operators that have their own. Throws std::invalid_argument where it says anything else.
std::int64_t cases_asked_for(const std::string& text, const std::string& op);

// The operator of that name; throws std::invalid_argument, which says those there are.
const OperatorCases& find_cases(const std::string& op);

// "lrpe_cosine seed=17 device=cpu", "lrpe_cosine case=3", "lrpe_cosine bad=5": runs that one case
// again, with every oracle that it had. Throws std::invalid_argument when the text names none.
struct Repro {
  const OperatorCases* op = nullptr;
  std::string kind;  // "seed", "case" or "bad"
  std::uint64_t number = 0;
  Device device = kCPU;
};
Repro parse_repro(const std::string& text);
SuiteRow run_repro(const Repro& repro);

}  // namespace annulus::testing
