// Outputs that prove little: where nearly all of a reference is zero or NaN, nearly any program
// passes. Counted for every output by itself, for a gradient of zeros is no better for standing
// beside one that is full.
#pragma once

#include <cstdint>
#include <map>
#include <string>
#include <vector>

#include "testing/case.h"
#include "testing/reference.h"

namespace annulus::testing {

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

}  // namespace annulus::testing
