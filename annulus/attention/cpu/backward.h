// Backward on the CPU, as a piece of scratch and a call; ring attention changes its plan from part to part.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "annulus/attention/cpu/forward.h"
#include "annulus/core/scratch.h"

namespace annulus::attention::cpu {

class Backward {
 public:
  explicit Backward(const Plan& p);
  void lay_out(ScratchLayout& scratch);
  // All of the plan, or its part.
  void run(Context& context);
  // Of a plan with a part: its delta, <do, o> - dlse.
  void fill_delta(Context& context);

 private:
  struct Slot {
    // Packed: rows and columns of q and do (right operands), rows of k and v and columns of k (left); a panel of ds or p.
    std::byte *q_rows, *q_columns, *do_rows, *do_columns, *k_rows, *v_rows, *k_columns, *panel,
        *stage;
    float *p, *ds, *z;  // tiles of queries of the chunk: [key][query]
    std::uint16_t *narrow_p, *narrow_ds, *narrow_panel;  // the same rounded, and a panel of one
    float* dq;                                           // such tiles: [column][query]
    float* sums;                                         // dk or dv of a panel of keys
    float *lse, *delta, *row;
    std::int32_t *lo, *hi;
    std::uint8_t* keep;
  };

  const Plan& plan;
  const Tiles<float>& tiles;
  std::int64_t chunk_queries, tile_keys;
  std::int64_t tile_floats, dq_floats;  // from a tile of p, ds and z to the next; of dq
  int slots;
  std::int64_t parts;
  std::vector<Slot> of = {};
  // delta of all rows (b, h, t); with layers whose weights are constants, of one layer at a time. Or the part's.
  float* delta = nullptr;
  // Sums in f32: dq where there are layers; dk and dv always, once for each of `parts`. Or the part's.
  float *dq = nullptr, *dk = nullptr, *dv = nullptr;
  // Where layers are weighed as constants: one of them alone, with its o, and its forward.
  Plan alone = plan;
  std::byte* layer_o = nullptr;
  Forward layer_forward{alone};

  bool empty() const { return plan.B * plan.Hkv == 0; }
  bool wants_queries() const { return plan.part ? plan.part->dq != nullptr : plan.dq.defined(); }
  bool wants_keys() const { return plan.part ? plan.part->dk != nullptr : plan.dk.defined(); }
  void take_part();
  std::int64_t key_floats() const { return plan.B * plan.Hkv * plan.Tk * (plan.D + plan.Dv); }

  std::int64_t query_row(std::int64_t b, std::int64_t h, std::int64_t token) const {
    return (b * plan.H + h) * plan.Tq + token - first_query(plan);
  }
  std::int64_t key_row(std::int64_t part, std::int64_t b, std::int64_t hk,
                       std::int64_t token) const {
    return ((part * plan.B + b) * plan.Hkv + hk) * plan.Tk + token - first_key(plan);
  }
  static float lane_of(const TensorView& v, std::int64_t b, std::int64_t h, std::int64_t token) {
    return static_cast<const float*>(
        v.data)[b * v.stride[0] + h * v.stride[1] + token * v.stride[2]];
  }

  void fill_delta(const TensorView& o, int threads) const;
  template <class P>
  void layer(const P& pattern, int threads) const;
  template <class P>
  void fixed_cell(const P& pattern, std::int64_t b, std::int64_t hk, Range sweeps,
                  const Slot& s) const;
  template <class P>
  void chunk(const P& pattern, std::int64_t b, std::int64_t h, std::int64_t part,
             const Sweep& sweep, Range queries, const Slot& s) const;
  // To dk or dv (`sums`, from the call's first key on) of a tile of keys what `some` of the chunk's queries give, by tiles of weights
  // or their gradients.
  void sum_tiles(const std::byte* tiles_of_keys, const Panels& columns_of_queries,
                 std::int64_t columns, const Sweep& sweep, Range queries, Range some, Range tile,
                 const HeadRows& k, float* sums, const Slot& s) const;
};

}  // namespace annulus::attention::cpu
