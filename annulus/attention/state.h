// The softmax state of a query row, in fp32: the largest score m so far, l = sum exp(s - m) and acc = sum exp(s - m) v. Parts
// of a row's keys (tiles, branches, ranks) are summed by themselves and merged in any order, exactly but for roundings; o and
// lse are made of it once, at the end.
//
//   merge:  m' = max(m, n),   l' = l exp(m - m') + k exp(n - m'),   acc alike       end:  o = acc / l,   lse = m + log l
//
// A row without a key has m = -inf, l = 0, and stays so: o = 0, lse = -inf.
#pragma once

#include <cmath>

#include "annulus/core/macros.h"

namespace annulus::attention {

inline constexpr float kNoScore = -__builtin_huge_valf();

struct RowState {
  float m = kNoScore, l = 0;
};

// What exponents are counted from: m, but a number that can be subtracted where there is no score yet.
ANNULUS_HD inline float origin_of(float m) { return m == kNoScore ? 0.0f : m; }

// The larger of both, and NaN where the second is: a score that is no number must reach its row.
ANNULUS_HD inline float larger_score(float m, float s) { return s <= m ? m : s; }

ANNULUS_HD inline float reciprocal_of(RowState s) { return s.l == 0 ? 0.0f : 1.0f / s.l; }

}  // namespace annulus::attention
