// One output tensor against its reference, by the policy of limits.h.
#pragma once

#include <functional>
#include <span>
#include <string>
#include <vector>

#include "testing/case.h"

namespace annulus::testing {

// Enough digits to tell neighbouring floats apart.
std::string format_number(double v);

struct Comparison {
  std::string fault;       // empty when within every limit
  double worst_ratio = 0;  // largest error / limit over all rules
};

struct CompareInput {
  DType dtype = DType::kF32;
  bool forward = true;
  std::span<const double> reference;
  std::span<const double> baseline;
  std::span<const double> ours;
  CaseLimits limits;
  Precision precision = Precision::kAuto;
  bool circular = false;
  // The baseline's largest error at neighbouring problems (see limits.h), asked for only when rule 1
  // fails without it; may be empty.
  std::function<double()> baseline_error;
  // Size of the terms of every element (see limits.h), asked for only when a rule fails without it;
  // empty where there is none.
  std::function<std::vector<double>()> term_size;
};

Comparison compare(const CompareInput& in);

// a - b, for angles the shorter way around.
double difference(double a, double b, bool circular);

}  // namespace annulus::testing
