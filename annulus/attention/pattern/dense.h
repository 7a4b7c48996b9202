// Every key, but for causality, windows and the ends of sequences: one sweep, or one a packed sequence.
#pragma once

#include <cstdint>

#include "annulus/attention/pattern.h"
#include "annulus/core/macros.h"

namespace annulus::attention {

// i32 or i64 numbers `stride` apart in the memory of the call's device; none where data is nullptr.
struct Integers {
  const void* data = nullptr;
  bool wide = false;
  std::int64_t stride = 1;

  ANNULUS_HD bool defined() const { return data != nullptr; }
  ANNULUS_HD std::int64_t at(std::int64_t i) const {
    return wide ? static_cast<const std::int64_t*>(data)[i * stride]
                : static_cast<const std::int32_t*>(data)[i * stride];
  }
  // Never outside 0..most, whatever it says.
  ANNULUS_HD std::int64_t at(std::int64_t i, std::int64_t most) const {
    const std::int64_t v = at(i);
    return v < 0 ? 0 : v > most ? most : v;
  }
};

struct Dense {
  std::int64_t queries = 0, keys = 0;      // rows of the tensors
  std::int64_t left = kFar, right = kFar;  // of the window; 0 to the right where causal
  Integers cu_queries, cu_keys;            // packed sequences
  std::int64_t sequences = 1;
  Integers key_lengths;

  ANNULUS_HD std::int64_t sweeps() const { return sequences; }
  ANNULUS_HD std::int64_t longest() const { return queries; }
  ANNULUS_HD std::int64_t per_cell() const { return 1; }

  ANNULUS_HD Sweep sweep(std::int64_t b, std::int64_t /*h*/, std::int64_t i) const {
    Sweep s;
    s.sample = b;
    s.queries = {0, 1, queries};
    s.keys = {0, 1, keys};
    if (cu_queries.defined()) {
      s.sample = i;
      s.queries = between(cu_queries, i, queries);
      s.keys = between(cu_keys, i, keys);
    } else if (key_lengths.defined()) {
      s.keys.count = key_lengths.at(b, keys);
    }
    s.first_query = s.queries.first;
    s.first_key = s.keys.first;
    // The last query stands at the last key.
    const std::int64_t shift = (s.keys.first + s.keys.count) - (s.queries.first + s.queries.count);
    if (left < kFar) s.band.lowest = shift - left;
    if (right < kFar) s.band.highest = shift + right;
    return s;
  }

  ANNULUS_HD bool counts(std::int64_t, std::int64_t, std::int64_t) const { return true; }
  static constexpr bool kIntervals = true;  // counts() is always true

 private:
  ANNULUS_HD static Line between(const Integers& ends, std::int64_t i, std::int64_t most) {
    const std::int64_t first = ends.at(i, most), end = ends.at(i + 1, most);
    return {first, 1, end > first ? end - first : 0};
  }
};

}  // namespace annulus::attention
