// The numeric policy: the one table of limits for all operators. Everything here is constexpr, so
// neither an environment variable nor a flag can change it (limits_test.cpp and scripts/lint hold it to that).
//
// Reference: the operator's definition in fp64 on inputs already rounded to their dtype.
// Baseline:  the naive program in the call's own dtype with fp32 sums.
// For every output tensor, positions of NaN and infinity agree first (in a gradient that is not
// finite, a sum over infinite terms, NaN and infinity count as the same: it is the order of
// summation that decides between them); then, over the finite elements,
//   1. ratio   max|ours - ref| <= c * max|baseline - ref| + 2 ulp(max|ref|),  c = 2 forward, 3 backward;
//              not for f64 outputs: there the reference rounds as much as we do, and rule 2 holds.
//              A baseline that is right by luck is measured at eight neighbouring problems too;
//   2. guard   rms(ours - ref) <= g * rms(ref), g by dtype, doubled backward: a bad baseline cannot
//              excuse us;
//   3. the operator's own CaseLimits, forward only, which stand with it, in its test/cases.h:
//      ulp_f16_bf16   elementwise |ours - ref| <= n * ulp of the output type at the exact value,
//                     the ulp of the smallest subnormals being the floor,
//                     + cancelled_f16_bf16 * max|ref|, which only outputs that are differences have;
//      relative_f32, relative_f64   max|ours - ref| <= r * max|ref|.
//
// Precision: a call that multiplies in a narrower form than its tensors have is judged as that form is:
// the ulp of rule 1 and the guard of rule 2 are the larger ones of the dtype and of the precision, and
// the baseline rounds the operands of its products in the same way. core/precision.h has their table.
//
// Sums may cancel: a single dtheta of 1e-9 that is the difference of two terms of size 1 is right
// to 1e-7 at best. Gradients are linear in the incoming gradient dy, so the size of the terms is how far
// the reference moves, in units of h, when every dy is scaled by 1 +- h with random signs. Where that is
// larger than the reference itself it takes its place in the ulp of rule 1 and in the rms of rule 2.
// Only dy is moved, never a parameter or a position, so a wrong phase finds no excuse here. An operator
// that sums products with its parameters names those too (Call::terms): a product rounded by one part in
// 1/h is the exact product of a weight moved by as much, so this is the distance that the roundings of
// any program move the result, whatever the recurrence makes of them afterwards.
#pragma once

#include <cstdint>
#include <functional>
#include <span>
#include <string>
#include <vector>

#include "annulus/core/dtype.h"
#include "annulus/core/precision.h"

namespace annulus::testing {

struct NumericPolicy {
  double ratio_forward = 2;
  double ratio_backward = 3;
  double slack_ulps = 2;
  int baseline_draws = 8;
  // Relative rms, forward.
  double guard_f64 = 1e-12;
  double guard_f32 = 1e-6;
  double guard_f16 = 2e-3;
  double guard_bf16 = 1e-2;
  double guard_backward_factor = 2;
  // Share of the reference that may be zero or NaN before a case proves too little to count.
  double mistrusted_share = 0.9;
  double mistrusted_cases = 0.01;
  // Gradients of the reference against central differences, relative to the size of the terms.
  double finite_difference = 1e-6;
};

inline constexpr NumericPolicy kPolicy{};

constexpr double guard_of(DType t) {
  switch (t) {
    case DType::kF64:
      return kPolicy.guard_f64;
    case DType::kF32:
      return kPolicy.guard_f32;
    case DType::kF16:
      return kPolicy.guard_f16;
    case DType::kBF16:
      return kPolicy.guard_bf16;
    default:
      return 0;  // integers and booleans are exact
  }
}

// Of a precision that keeps less than f32 has; 0: the dtype's guard alone counts. bf16x3 keeps 8 + 8
// significant bits of an operand; one product is right to about 5e-6 (rms), and a guard of twice that
// leaves room for a recurrence of gain 1, not for a lost part, which costs 1e-3. tf32 has the mantissa
// of f16, so it has f16's guard.
constexpr double guard_of(Precision p) {
  switch (p) {
    case Precision::kBf16:
      return kPolicy.guard_bf16;
    case Precision::kTf32:
    case Precision::kF16:
      return kPolicy.guard_f16;
    case Precision::kBf16x3:
      return 1e-5;
    default:
      return 0;
  }
}

// The guard of an output of type t whose products were made in precision p.
constexpr double guard_of(DType t, Precision p) {
  const double own = guard_of(t), other = guard_of(p);
  return own > other ? own : other;
}

// Rule 3, of forward outputs; 0 = none.
struct CaseLimits {
  double ulp_f16_bf16 = 0;
  double cancelled_f16_bf16 = 0;
  double relative_f32 = 0;
  double relative_f64 = 0;
};

struct FloatFormat {
  int mantissa_bits;
  int min_exponent;  // of the smallest normal number
  double max_finite;
};
FloatFormat format_of(DType t);

// The distance between neighbours of type t around v, never below that of the subnormals.
double ulp_at(double v, DType t);
// The larger of that and of the spacing of what an operand of precision p is rounded to.
double ulp_at(double v, DType t, Precision p);

// --- one output tensor against its reference ---------------------------------------------------------

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
