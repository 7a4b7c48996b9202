// Runs a Case: the numbers against the definition, and the oracles that need no reference (layouts,
// threads, workspace, failing allocations). GoogleTest, `annulus check` and the fuzzer all call
// run_case.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "annulus/core/device.h"
#include "testing/case.h"

namespace annulus::testing {

// The numbers are always checked; these come on top.
enum Oracle : unsigned {
  kLayoutsOracle = 1u << 0,     // six layouts, and one that differs by tensor: equal bits
  kThreadsOracle = 1u << 1,     // threads 1, 2, 4, 8 (on CUDA: repeated launches), equal bits
  kWorkspaceOracle = 1u << 2,   // the workspace query is exact: that size works, a byte less throws
  kAllocationOracle = 1u << 3,  // every allocation fails once; the next call is right
  kAllOracles = (1u << 4) - 1,
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

// What a fuzzed case gets beyond the numbers: one or two oracles, chosen by the seed, so that ten
// thousand cases stay a matter of minutes.
unsigned fuzz_oracles(std::uint64_t seed);

// The text has `word` in it with no letter, digit or underscore on either side: "dx" names no x.
bool names_word(const std::string& text, const std::string& word);

// Runs the bad call, and a good call after it. Empty when everything is as promised.
std::string run_bad_call(const BadCall& bad, Device device, const Case& good);

}  // namespace annulus::testing
