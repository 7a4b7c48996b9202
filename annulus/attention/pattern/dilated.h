// Segments of a sequence, thinned by a rate: one branch of LongNet, or a branch a group of heads.
#pragma once

#include <cstdint>

#include "annulus/attention/attention.h"
#include "annulus/attention/pattern.h"
#include "annulus/core/macros.h"

namespace annulus::attention {

struct Dilated {
  static constexpr int kMost = static_cast<int>(kMaxDilatedBranches);

  DilatedMode mode = DilatedMode::kLongNet;
  DilatedOffsets offsets = DilatedOffsets::kMod;
  bool causal = false, unite = false, remainder_last = false;
  std::int64_t tokens = 0, heads = 1, heads_per_key = 1;
  int branches = 0;
  std::int64_t length[kMost] = {}, rate[kMost] = {};  // w at most `tokens`, or 1
  // LongNet: the branch that this pattern is; all of them make the operator, one after the other.
  int branch = 0;
  // Whether queries of no branch have sweeps, without keys: where nothing else would write their zeros.
  bool covers_all = true;

  ANNULUS_HD int branch_of(std::int64_t h) const {
    return mode == DilatedMode::kLongNet ? branch : group_of(h);
  }
  // Groups have heads / branches heads, and the remainder goes one each to the first, or to the last.
  ANNULUS_HD int group_of(std::int64_t h) const {
    const std::int64_t each = heads / branches, more = heads % branches;
    if (remainder_last) {
      const std::int64_t small = (branches - more) * each;
      return static_cast<int>(h < small ? h / each : branches - more + (h - small) / (each + 1));
    }
    const std::int64_t large = more * (each + 1);
    return static_cast<int>(h < large ? h / (each + 1) : more + (h - large) / each);
  }
  ANNULUS_HD std::int64_t offset_of(int i, std::int64_t h) const {
    if (mode != DilatedMode::kLongNet) return i % rate[i];
    if (offsets == DilatedOffsets::kMod) return h % rate[i];
    return h / ((heads + rate[i] - 1) / rate[i]);
  }

  // A sweep a residue of a segment (of the longest list that a head has); where others write the zeros, of the one residue
  // that has keys.
  ANNULUS_HD std::int64_t residues() const {
    if (mode == DilatedMode::kGroupedKv || !covers_all) return 1;
    std::int64_t most = 1;
    for (int i = 0; i < branches; ++i) {
      const bool here = mode != DilatedMode::kLongNet || i == branch;
      const std::int64_t n = !here ? 0 : rate[i] < length[i] ? rate[i] : length[i];
      if (n > most) most = n;
    }
    return most;
  }
  ANNULUS_HD std::int64_t segments() const {
    std::int64_t most = 0;
    for (int i = 0; i < branches; ++i) {
      const bool here = mode != DilatedMode::kLongNet || i == branch;
      const std::int64_t n = here ? (tokens + length[i] - 1) / length[i] : 0;
      if (n > most) most = n;
    }
    return most;
  }
  ANNULUS_HD std::int64_t sweeps() const { return segments() * residues(); }
  ANNULUS_HD std::int64_t longest() const {
    std::int64_t most = 0;
    for (int i = 0; i < branches; ++i) {
      const bool here = mode != DilatedMode::kLongNet || i == branch;
      const std::int64_t step = mode == DilatedMode::kGroupedKv ? 1 : rate[i];
      const std::int64_t n = here ? (length[i] - 1) / step + 1 : 0;
      if (n > most) most = n;
    }
    return most;
  }
  // A segment is a cell, unless heads whose segments differ share keys.
  ANNULUS_HD std::int64_t per_cell() const {
    // (Without tokens there is no sweep.)
    return mode != DilatedMode::kLongNet && heads_per_key > 1 && sweeps() > 0 ? sweeps()
                                                                              : residues();
  }

  ANNULUS_HD Sweep sweep(std::int64_t b, std::int64_t h, std::int64_t i) const {
    return sweep_of(branch_of(h), b, h, i);
  }
  // The same of branch `at`, for those who have all branches of LongNet at once.
  ANNULUS_HD Sweep sweep_of(int at, std::int64_t b, std::int64_t h, std::int64_t i) const {
    Sweep s;
    s.sample = b;
    const std::int64_t lines = residues(), w = length[at], r = rate[at];
    const std::int64_t begin = i / lines * w;
    if (begin >= tokens) return s;
    const std::int64_t end = begin + w < tokens ? begin + w : tokens;
    const std::int64_t offset = offset_of(at, h);
    const Line own = thinned(begin + offset, r, end);
    if (mode == DilatedMode::kGroupedKv) {
      s.queries = {begin, 1, end - begin};
      s.keys = own;
    } else if (!covers_all) {
      s.queries = s.keys = own;
    } else {
      const std::int64_t residue = i % lines;
      if (residue >= r) return s;
      s.queries = thinned(begin + residue, r, end);
      if (residue == offset) s.keys = own;
    }
    if (causal) s.band.highest = 0;
    return s;
  }

  // LongNet's union: a key counts in the first branch that gives it to the query.
  ANNULUS_HD bool counts(std::int64_t h, std::int64_t query, std::int64_t key) const {
    return counts_in(branch, h, query, key);
  }
  ANNULUS_HD bool counts_in(int at, std::int64_t h, std::int64_t query, std::int64_t key) const {
    if (!unite) return true;
    for (int i = 0; i < at; ++i) {
      const std::int64_t w = length[i];
      if (query / w != key / w) continue;
      const std::int64_t offset = offset_of(i, h);
      if (query % w % rate[i] == offset && key % w % rate[i] == offset) return false;
    }
    return true;
  }
  static constexpr bool kIntervals = false;

 private:
  ANNULUS_HD static Line thinned(std::int64_t first, std::int64_t step, std::int64_t end) {
    return {first, step, first < end ? (end - first + step - 1) / step : 0};
  }
};

}  // namespace annulus::attention
