// Size arithmetic that cannot wrap: sizes come from callers and files, so every product is checked.
#pragma once

#include <cstdint>
#include <string>

#include "annulus/core/errors.h"

namespace annulus {

inline std::int64_t checked_mul(std::int64_t a, std::int64_t b, const char* op) {
  std::int64_t r = 0;
  if (__builtin_mul_overflow(a, b, &r)) {
    throw InvalidArgument("[" + std::string(op) + "] a size must fit in 63 bits but " +
                          std::to_string(a) + " * " + std::to_string(b) + " does not");
  }
  return r;
}

inline std::int64_t checked_add(std::int64_t a, std::int64_t b, const char* op) {
  std::int64_t r = 0;
  if (__builtin_add_overflow(a, b, &r)) {
    throw InvalidArgument("[" + std::string(op) + "] a size must fit in 63 bits but " +
                          std::to_string(a) + " + " + std::to_string(b) + " does not");
  }
  return r;
}

// a * b * ... of counts none of which is negative.
template <class... Rest>
std::int64_t checked_product(const char* op, std::int64_t a, Rest... rest) {
  ((a = checked_mul(a, static_cast<std::int64_t>(rest), op)), ...);
  return a;
}

constexpr std::int64_t ceil_div(std::int64_t a, std::int64_t b) { return a / b + (a % b != 0); }
constexpr std::int64_t round_up(std::int64_t a, std::int64_t multiple) {
  return ceil_div(a, multiple) * multiple;
}

}  // namespace annulus
