// Forward on the CPU, as a piece of scratch and a call: the backward has one inside it, where branches are weighed as constants,
// and ring attention one whose plan it changes from part to part.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "annulus/attention/cpu/work.h"
#include "annulus/attention/state.h"
#include "annulus/core/scratch.h"

namespace annulus::attention::cpu {

class Forward {
 public:
  explicit Forward(const Plan& plan);
  void lay_out(ScratchLayout& scratch);
  // All of the plan, or its part.
  void run(Context& context);
  // Of a plan with a part: nothing was seen yet; and o and lse of its queries.
  void begin();
  void end(Context& context);

 private:
  // Scratch of one work item.
  struct Slot {
    std::byte *queries, *keys, *values, *weights, *stage;
    float *scores, *acc, *m, *l, *norm, *factor, *row, *z;
    std::int32_t *lo, *hi;
    std::uint8_t* keep;
  };

  bool empty() const { return plan_.B * plan_.H * plan_.Tq == 0; }
  // Rows (b, h, t) wait in memory for more keys: of other layers, or of other parts.
  bool carries() const { return plan_.layers > 1 || plan_.part; }
  std::int64_t state_row(std::int64_t b, std::int64_t h, std::int64_t token) const {
    return (b * plan_.H + h) * plan_.Tq + token - first_query(plan_);
  }
  void take_part();
  template <class P>
  void layer(const P& pattern, int threads) const;
  template <class P>
  void chunk(const P& pattern, std::int64_t b, std::int64_t h, const Sweep& sweep, Range queries,
             const Slot& s) const;
  // o and lse of a row.
  void close(std::int64_t b, std::int64_t h, std::int64_t token, RowState s, const float* sums,
             float* row) const;

  const Plan& plan_;
  const Tiles<float>& tiles_;
  std::int64_t keys_;        // of a tile
  std::int64_t chunk_;       // queries of a work item
  std::int64_t value_rows_;  // Dv, in whole tiles
  std::vector<Slot> slots_;
  // Where rows are carried: in scratch, or the part's.
  RowState* state_ = nullptr;
  float* acc_ = nullptr;
};

}  // namespace annulus::attention::cpu
