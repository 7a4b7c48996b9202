#include "testing/case.h"

#include <cmath>
#include <numbers>
#include <utility>

namespace annulus::testing {

double Rng::normal() {
  const double u = 1.0 - uniform();  // (0, 1]: the logarithm stays finite
  const double v = uniform();
  return std::sqrt(-2.0 * std::log(u)) * std::cos(2.0 * std::numbers::pi * v);
}

TensorView pick(Views views, const std::vector<TensorSpec>& specs, std::string_view name) {
  for (std::size_t i = 0; i < specs.size(); ++i) {
    if (specs[i].name == name) return views[i];
  }
  return {};
}

namespace {

// A function-local static, because registrations run before main in no particular order.
std::vector<OperatorCases>& registry() {
  static std::vector<OperatorCases> cases;
  return cases;
}

}  // namespace

const std::vector<OperatorCases>& all_cases() { return registry(); }

CasesRegistration::CasesRegistration(OperatorCases cases) {
  registry().push_back(std::move(cases));
}

}  // namespace annulus::testing
