// Runs a Case: the numbers against the definition, and the oracles that need no reference (layouts,
// threads, workspace, failing allocations). Runs all cases of an operator: named, fuzzed and bad calls,
// over several host threads. What `annulus check` prints and what the tests assert.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "annulus/core/device.h"
#include "testing/case.h"

namespace annulus::testing {

// Under AddressSanitizer everything takes ten times as long: less is asked of each case, and of what is alike one in
// kOneIn runs.
#ifdef __SANITIZE_ADDRESS__
inline constexpr bool kSanitized = true;
#else
inline constexpr bool kSanitized = false;
#endif
inline constexpr std::size_t kOneIn = kSanitized ? 8 : 1;

// --- one case ---------------------------------------------------------------------------------------

// What a case that ran is asked, beyond that it writes its outputs and nothing else.
enum Oracle : unsigned {
  kLayoutsOracle = 1u << 0,     // all layouts, and one that differs by tensor: equal bits
  kThreadsOracle = 1u << 1,     // threads 1, 2, 4, 8 (on CUDA: repeated launches), equal bits
  kWorkspaceOracle = 1u << 2,   // the workspace query is exact: that size works, a byte less throws
  kAllocationOracle = 1u << 3,  // every allocation fails once; the next call is right
  kNumbersOracle = 1u << 4,     // the numbers against the definition
  kAllOracles = (1u << 5) - 1,
};

struct Failure {
  std::string where;  // "backward dtheta", "forward, layout packed"
  std::string detail;
  std::string repro;  // annulus check --repro "lrpe_cosine seed=17 device=cpu"
  std::string params;
};

// Outputs that prove little: where nearly all of a reference is zero or NaN, nearly any program
// passes. Counted for every output by itself, for a gradient of zeros is no better for standing
// beside one that is full.
struct OutputTrust {
  std::string output;  // "backward dtheta"
  bool mistrusted = false;
};

// The outputs of a call that count. Those without an element do not, nor those that only their
// reader judges, nor those that the problem makes zero (TensorSpec::zero), nor any of a call with an
// empty input: sums over nothing are zero by definition, which is what such a case is for.
std::vector<OutputTrust> trust_of(const Call& call, const Values& reference);

// Names an output that is marked as zero and is not, or nothing.
std::string wrongly_zero(const Call& call, const Values& reference);

bool any_mistrusted(const std::vector<OutputTrust>& outputs);

struct CaseResult {
  std::vector<Failure> failures;
  double worst_ratio = 0;            // largest error / limit
  std::vector<OutputTrust> outputs;  // which of them prove little
};

// `variant` chooses layout and thread count of the plain run, so that fuzzed cases differ in them
// too.
CaseResult run_case(const Case& c, Device device, unsigned oracles, std::uint64_t variant,
                    const std::string& repro);

// What a fuzzed case is asked: its numbers, and one or two others chosen by the seed, so that ten
// thousand cases stay a matter of minutes.
unsigned fuzz_oracles(std::uint64_t seed);

// The text has `word` in it with no letter, digit or underscore on either side: "dx" names no x.
bool names_word(const std::string& text, const std::string& word);

// A case that is judged by its definition once. Whatever is called in between, it must then give the same
// bits again (or, of TensorSpec::reordered, the same numbers).
class GoodCase {
 public:
  GoodCase(Case c, Device device);
  // Runs it again, from any thread. Empty where it is as good as it was.
  std::string fault() const;

 private:
  struct Judged;
  std::shared_ptr<const Judged> judged_;
};

// Runs the bad call, and where one is given a good case after it. Empty when everything is as promised.
std::string run_bad_call(const BadCall& bad, Device device, const GoodCase* good);

// --- all cases of an operator -----------------------------------------------------------------------

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
