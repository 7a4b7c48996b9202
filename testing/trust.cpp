#include "testing/trust.h"

#include <algorithm>
#include <cmath>

#include "testing/limits.h"
#include "testing/tensors.h"

namespace annulus::testing {

namespace {

bool is_trivial(double v) { return v == 0 || std::isnan(v); }

}  // namespace

std::vector<OutputTrust> trust_of(const Call& call, const Values& reference) {
  std::vector<OutputTrust> outputs;
  const auto empty = [](const TensorSpec& s) { return numel_of(s) == 0; };
  if (std::any_of(call.inputs.begin(), call.inputs.end(), empty)) return outputs;
  for (std::size_t o = 0; o < reference.size(); ++o) {
    if (reference[o].empty() || call.outputs[o].opaque || call.outputs[o].zero) continue;
    const auto trivial = std::count_if(reference[o].begin(), reference[o].end(), is_trivial);
    outputs.push_back({call.name + " " + call.outputs[o].name,
                       static_cast<double>(trivial) >
                           kPolicy.mistrusted_share * static_cast<double>(reference[o].size())});
  }
  return outputs;
}

std::string wrongly_zero(const Call& call, const Values& reference) {
  for (std::size_t o = 0; o < reference.size(); ++o) {
    if (call.outputs[o].zero &&
        !std::all_of(reference[o].begin(), reference[o].end(), is_trivial)) {
      return call.outputs[o].name + " is marked as zero by definition and is not";
    }
  }
  return {};
}

bool any_mistrusted(const std::vector<OutputTrust>& outputs) {
  return std::any_of(outputs.begin(), outputs.end(),
                     [](const OutputTrust& t) { return t.mistrusted; });
}

void TrustCounts::add(const std::vector<OutputTrust>& outputs) {
  for (const OutputTrust& t : outputs) {
    Count& count = outputs_[t.output];
    ++count.cases;
    count.mistrusted += t.mistrusted;
  }
}

std::string TrustCounts::excess() const {
  std::string text;
  for (const auto& [output, count] : outputs_) {
    if (count.cases < 100 || static_cast<double>(count.mistrusted) <=
                                 kPolicy.mistrusted_cases * static_cast<double>(count.cases)) {
      continue;
    }
    text += (text.empty() ? "" : ", ") + output + " in " + std::to_string(count.mistrusted) +
            " of " + std::to_string(count.cases) + " cases";
  }
  return text;
}

}  // namespace annulus::testing
