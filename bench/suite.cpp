#include "bench/suite.h"

#include <algorithm>
#include <map>
#include <utility>

#include "bench/problem.h"

namespace annulus::bench {
namespace {

std::vector<Suite>& registry() {
  static std::vector<Suite> suites;
  return suites;
}

}  // namespace

const std::vector<Suite>& all_suites() {
  auto& suites = registry();
  std::sort(suites.begin(), suites.end(),
            [](const Suite& a, const Suite& b) { return a.name < b.name; });
  return suites;
}

SuiteRegistration::SuiteRegistration(Suite suite) { registry().push_back(std::move(suite)); }

std::size_t peak_bytes_of(const testing::Case& problem, const std::vector<std::string>& calls,
                          Device device) {
  std::map<std::string, std::size_t> tensors;
  std::size_t scratch = 0;
  for (const std::string& name : calls) {
    const testing::Call& call = find_call(problem, name);
    for (const auto* specs : {&call.inputs, &call.outputs}) {
      for (const auto& spec : *specs) tensors[spec.name] = bytes_of(spec);
    }
    scratch = std::max(scratch, workspace_of(call, device));
  }
  std::size_t total = scratch;
  for (const auto& [name, bytes] : tensors) total += bytes;
  return total;
}

}  // namespace annulus::bench
