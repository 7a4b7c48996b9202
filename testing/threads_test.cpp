// Every operator called by eight host threads at once: the bits are those of one thread alone.
#include <gtest/gtest.h>

#include <cstdint>
#include <string>
#include <vector>

#include "testing/concurrent.h"
#include "testing/each_operator.h"

namespace annulus::testing {
namespace {

class OperatorThreads : public EachOperator {};
ANNULUS_EACH_OPERATOR(OperatorThreads);

// Small cases of many kinds: what threads share is tables, plans and scratch, not sizes.
TEST_P(OperatorThreads, EightAtOnceEqualOneAlone) {
  constexpr std::size_t kCases = 24;
  constexpr std::int64_t kMostElements = 20000;
  std::vector<Case> cases;
  for (std::uint64_t seed = 0; cases.size() < kCases && seed < 1000; ++seed) {
    Case c = op().fuzz(seed);
    std::int64_t elements = 0;
    for (const Call& call : c.calls) {
      for (const TensorSpec& s : call.inputs) elements += numel_of(s);
    }
    if (elements > 0 && elements <= kMostElements) cases.push_back(std::move(c));
  }
  ASSERT_EQ(cases.size(), kCases);
  expect_equal_bits_at_once(cases, device());
}

}  // namespace
}  // namespace annulus::testing
