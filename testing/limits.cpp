#include "testing/limits.h"

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <limits>
#include <numbers>

namespace annulus::testing {

FloatFormat format_of(DType t) {
  switch (t) {
    case DType::kF64:
      return {52, -1022, std::numeric_limits<double>::max()};
    case DType::kF32:
      return {23, -126, static_cast<double>(std::numeric_limits<float>::max())};
    case DType::kF16:
      return {10, -14, 65504.0};
    case DType::kBF16:
      return {7, -126, 0x1.fep127};
    default:
      return {0, 0, 0};
  }
}

double ulp_at(double v, DType t) {
  const FloatFormat f = format_of(t);
  int exponent = f.min_exponent;
  if (v != 0 && std::isfinite(v)) exponent = std::max(exponent, std::ilogb(v));
  return std::ldexp(1.0, exponent - f.mantissa_bits);
}

double ulp_at(double v, DType t, Precision p) {
  // What is left of an operand below bf16's least number is lost to every split into bf16 terms. (f16
  // has no such floor: the power of two in front of a row keeps its range.)
  const bool splits = v != 0 && facts_of(p).element == DType::kBF16;
  const double own = std::max(ulp_at(v, t), splits ? ulp_at(0, DType::kBF16) : 0);
  if (guard_of(p) == 0 || v == 0 || !std::isfinite(v)) return own;
  // The exponents of f32, which all of these have; an f16 output has a floor of its own.
  const int exponent = std::max(format_of(DType::kF32).min_exponent, std::ilogb(v));
  return std::max(own, std::ldexp(1.0, exponent - facts_of(p).mantissa_bits));
}

std::string format_number(double v) {
  char text[40];
  std::snprintf(text, sizeof text, "%.9g", v);
  return text;
}

double difference(double a, double b, bool circular) {
  return circular ? std::remainder(a - b, 2 * std::numbers::pi) : a - b;
}

namespace {

// NaN where NaN, infinity where infinity. A reference beyond the type's range counts as infinite;
// at the very edge of the range rounding decides, so both are right there.
bool same_class(double reference, double ours, DType t, bool forward) {
  if (!forward && !std::isfinite(reference)) return !std::isfinite(ours);
  if (std::isnan(reference) || std::isnan(ours)) return std::isnan(reference) == std::isnan(ours);
  const double max = format_of(t).max_finite;
  const double edge = 4 * ulp_at(max, t);
  if (std::isinf(ours)) {
    return (std::isinf(reference) || std::abs(reference) > max - edge) &&
           std::signbit(ours) == std::signbit(reference);
  }
  return std::abs(reference) <= max ||
         (std::isfinite(reference) && std::abs(reference) - max < edge);
}

// Root of the sum of squares, scaled by the largest so far: 1e200 squared is no longer a double,
// nor is 1e-200.
class Norm {
 public:
  void add(double magnitude) {
    if (magnitude <= scale_) {
      if (magnitude > 0 && std::isfinite(scale_)) {
        sum_ += (magnitude / scale_) * (magnitude / scale_);
      }
    } else {
      sum_ = 1 + sum_ * (scale_ / magnitude) * (scale_ / magnitude);
      scale_ = magnitude;
    }
  }
  double rms(double count) const { return scale_ * std::sqrt(sum_ / count); }

 private:
  double scale_ = 0;
  double sum_ = 0;
};

struct Errors {
  double max = 0, max_baseline = 0, max_reference = 0;
  Norm norm, norm_reference;
  std::size_t count = 0, at = 0;
};

Errors measure(const CompareInput& in) {
  Errors e;
  for (std::size_t i = 0; i < in.reference.size(); ++i) {
    const double r = in.reference[i];
    if (!std::isfinite(r) || !std::isfinite(in.ours[i])) continue;
    const double error = std::abs(difference(in.ours[i], r, in.circular));
    if (error > e.max) e.max = error, e.at = i;
    e.max_reference = std::max(e.max_reference, std::abs(r));
    e.norm.add(error);
    e.norm_reference.add(std::abs(r));
    ++e.count;
    if (std::isfinite(in.baseline[i])) {
      e.max_baseline =
          std::max(e.max_baseline, std::abs(difference(in.baseline[i], r, in.circular)));
    }
  }
  return e;
}

}  // namespace

Comparison compare(const CompareInput& in) {
  Comparison result;
  // The first element that is wrong whatever the limits are.
  const auto refuse = [&](auto&& is_wrong, auto&& text) {
    for (std::size_t i = 0; i < in.reference.size(); ++i) {
      if (!is_wrong(i)) continue;
      result.fault = "element " + std::to_string(i) + " is " + format_number(in.ours[i]) + text(i);
      result.worst_ratio = INFINITY;
      return true;
    }
    return false;
  };
  if (refuse([&](auto i) { return !same_class(in.reference[i], in.ours[i], in.dtype, in.forward); },
             [&](auto i) { return " where the reference is " + format_number(in.reference[i]); })) {
    return result;
  }
  const double most = std::numbers::pi + ulp_at(std::numbers::pi, in.dtype);
  if (in.circular && refuse([&](auto i) { return std::abs(in.ours[i]) > most; },
                            [](auto) { return ", an angle outside of [-pi, pi]"; })) {
    return result;
  }
  if (!is_floating(in.dtype)) {
    refuse([&](auto i) { return in.ours[i] != in.reference[i]; },
           [&](auto i) { return " and not " + format_number(in.reference[i]); });
    return result;
  }

  Errors e = measure(in);
  if (e.count == 0) return result;
  const auto judge = [&](const char* rule, double error, double limit, std::size_t at) {
    if (error == 0) return;
    const double ratio = limit > 0 ? error / limit : INFINITY;
    result.worst_ratio = std::max(result.worst_ratio, ratio);
    if (ratio <= 1 || !result.fault.empty()) return;
    result.fault = std::string(rule) + ": error " + format_number(error) + " above its limit " +
                   format_number(limit) + " (element " + std::to_string(at) + ": " +
                   format_number(in.ours[at]) + ", reference " + format_number(in.reference[at]) +
                   ", baseline " + format_number(in.baseline[at]) + ")";
  };

  const double n = static_cast<double>(e.count);
  const double rms = e.norm.rms(n);
  const double c = in.forward ? kPolicy.ratio_forward : kPolicy.ratio_backward;
  const double g =
      guard_of(in.dtype, in.precision) * (in.forward ? 1 : kPolicy.guard_backward_factor);
  double scale_max = e.max_reference;
  double scale_rms = e.norm_reference.rms(n);
  const auto ratio_limit = [&] {
    return c * e.max_baseline + kPolicy.slack_ulps * ulp_at(scale_max, in.dtype, in.precision);
  };
  // Values among the subnormals carry no relative precision: half their spacing is the best there
  // is.
  const auto guard_limit = [&] {
    const double least = std::min(scale_max, std::numeric_limits<double>::min());
    return std::max(g * scale_rms, ulp_at(least, in.dtype, in.precision));
  };
  if ((e.max > ratio_limit() || rms > guard_limit()) && in.term_size) {
    const std::vector<double> terms = in.term_size();
    Norm norm;
    for (std::size_t i = 0; i < terms.size(); ++i) {
      if (!std::isfinite(terms[i]) || !std::isfinite(in.reference[i])) continue;
      scale_max = std::max(scale_max, terms[i]);
      norm.add(terms[i]);
    }
    scale_rms = std::max(scale_rms, norm.rms(n));
  }
  if (in.dtype != DType::kF64 && e.max > ratio_limit() && in.baseline_error) {
    e.max_baseline = std::max(e.max_baseline, in.baseline_error());
  }
  if (in.dtype != DType::kF64) judge("ratio to baseline", e.max, ratio_limit(), e.at);
  judge("relative rms", rms, guard_limit(), e.at);
  if (!in.forward) return result;

  const bool half = in.dtype == DType::kF16 || in.dtype == DType::kBF16;
  if (half && in.limits.ulp_f16_bf16 > 0) {
    for (std::size_t i = 0; i < in.reference.size(); ++i) {
      if (!std::isfinite(in.reference[i]) || !std::isfinite(in.ours[i])) continue;
      judge("ulps of the exact value", std::abs(in.ours[i] - in.reference[i]),
            in.limits.ulp_f16_bf16 * ulp_at(in.reference[i], in.dtype) +
                in.limits.cancelled_f16_bf16 * e.max_reference,
            i);
    }
  }
  const double relative = in.dtype == DType::kF32   ? in.limits.relative_f32
                          : in.dtype == DType::kF64 ? in.limits.relative_f64
                                                    : 0;
  if (relative > 0) {
    judge("relative maximum", e.max, std::max(relative * e.max_reference, ulp_at(0, in.dtype)),
          e.at);
  }
  return result;
}

}  // namespace annulus::testing
