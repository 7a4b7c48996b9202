// What the hand-picked problems of attention are made with.
#pragma once

#include <array>
#include <cstdint>
#include <string>
#include <utility>
#include <vector>

#include "annulus/attention/test/cases.h"

namespace annulus::testing {

inline constexpr std::array kAllDTypes = {DType::kF32, DType::kF16, DType::kBF16};

class NamedCases {
 public:
  Case& add(const std::string& name, AttentionProblem p) {
    p.seed = 1000 + cases_.size();
    p.wide_integers = p.seed % 2 == 0;
    cases_.push_back(attention_case(p));
    cases_.back().params = "'" + name + "' " + cases_.back().params;
    return cases_.back();
  }
  void add_dtypes(const std::string& name, AttentionProblem p) {
    for (const DType t : kAllDTypes) {
      p.dtype = t;
      add(name, p);
    }
  }
  std::vector<Case> take() { return std::move(cases_); }

 private:
  std::vector<Case> cases_;
};

// Rows that fill the tiles of every kernel: whole vectors, hundreds of tokens.
inline AttentionProblem long_rows(std::int64_t D, DType t) {
  return {.Tq = 400, .Tk = 400, .H = 2, .Hkv = 2, .D = D, .Dv = D, .dtype = t};
}

// cases_named_values.cpp: NaN and infinity in q, k and do, in rows that fill tiles.
void add_not_finite(NamedCases& b);

}  // namespace annulus::testing
