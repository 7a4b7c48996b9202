// A checked call, in the form both backends read: all tensors as (batch, rows, heads, columns), and a pattern.
#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <variant>

#include "annulus/attention/dropout.h"
#include "annulus/attention/pattern/blocks.h"
#include "annulus/attention/pattern/dense.h"
#include "annulus/attention/pattern/dilated.h"
#include "annulus/attention/state.h"
#include "annulus/core/context.h"
#include "annulus/core/info.h"
#include "annulus/core/tensor.h"

namespace annulus::attention {

using Pattern = std::variant<Dense, Dilated, Blocks>;

// A part of a call: some queries and some keys, which follow each other, and what is carried from part to part in fp32, by the
// rows of this part: state and delta (B, H, Tq), acc (B, H, Tq, Dv), dq (B, H, Tq, D), dk (B, Hkv, Tk, D), dv (B, Hkv, Tk, Dv). A
// part adds to those of them that are given; dk and dv go together.
//
// On CUDA state is all m and then all l, acc, dq, dk and dv have rows of whole vectors (cuda::part_columns), the latter three with
// heads inside of tokens: (B, Tq, H, D).
struct Part {
  std::int64_t first_query = 0, first_key = 0;  // rows of the pattern that row 0 of q and of k are
  int layer = 0;
  // Sums are taken in tiles at fixed rows of the pattern, from first to last: their bits are those of any other division into
  // parts that lets all tiles whole.
  bool fixed = false;
  RowState* state = nullptr;
  float *acc = nullptr, *delta = nullptr, *dq = nullptr, *dk = nullptr, *dv = nullptr;
  // CUDA's, for a backward: a number of scratch, and how far delta's heads lie apart (0: as many as there are queries).
  int* flag = nullptr;
  std::int64_t delta_rows = 0;
};

struct Plan {
  const char* op = "attention";
  Device device;
  DType dtype = DType::kF32;

  // Packed sequences are one batch of many sweeps.
  std::int64_t B = 0, Tq = 0, Tk = 0, H = 0, Hkv = 0, D = 0, Dv = 0;
  TensorView q, k, v, o;  // (B, T, H or Hkv, D or Dv)
  TensorView lse;         // (B, H, Tq) f32; in a forward it may be undefined
  // Backward. dlse may be undefined, and so may dq, and dk and dv.
  TensorView do_, dlse, dq, dk, dv;

  double scale = 1;
  TensorView
      order;  // (T,) i32 or i64, or undefined: rows of a pattern are ranks r, which are tokens order[r]
  Dropout dropout;
  Pattern pattern;
  // Of a pattern that is one of several to be merged (LongNet's branches): layer i is layer(i).
  int layers = 1;
  bool deterministic = false;  // Context's; what is not is only CUDA's backward
  bool portable = false;       // Context's
  // Gradients take the weights of layers as constants.
  bool stop_alpha_gradient = false;
  std::optional<Part> part = {};

  std::int64_t heads_per_key() const { return Hkv > 0 ? H / Hkv : 1; }
};

// f(pattern of layer i), as the type it is.
template <class F>
decltype(auto) visit_layer(const Plan& plan, int i, F&& f) {
  return std::visit(
      [&](auto pattern) {
        if constexpr (requires { pattern.branch; }) {
          pattern.covers_all = plan.layers == 1 && !plan.part;
          pattern.branch = i;
        }
        return f(pattern);
      },
      plan.pattern);
}

// Sweep i of a pattern, or what a part has of it.
template <class P>
Sweep sweep_of(const Plan& plan, const P& pattern, std::int64_t b, std::int64_t h, std::int64_t i) {
  Sweep s = pattern.sweep(b, h, i);
  if (plan.part) {
    s.queries = s.queries.cut(plan.part->first_query, plan.part->first_query + plan.Tq);
    s.keys = s.keys.cut(plan.part->first_key, plan.part->first_key + plan.Tk);
  }
  return s;
}

namespace cpu {
void forward(const Plan& plan, Context& context);
void backward(const Plan& plan, Context& context);
std::size_t forward_workspace(const Plan& plan);
std::size_t backward_workspace(const Plan& plan);
const char* how(const Plan& plan);  // "f32 8x8"
}  // namespace cpu

namespace cuda {
void forward(const Plan& plan, Context& context);
void backward(const Plan& plan, Context& context);
std::size_t forward_workspace(const Plan& plan);
std::size_t backward_workspace(const Plan& plan);
const char* how(const Plan& plan);
Support support();

// Parts. Before the first all of state and acc, or of dq, dk and dv, are zero: a state whose l is 0 has seen nothing.
void forward_part(const Plan& plan, Context& context);
void end_parts(const Plan& plan, Context& context);      // o and lse
void delta_of_part(const Plan& plan, Context& context);  // <do, o> - dlse
void backward_part(const Plan& plan, Context& context);
// dq, dk or dv of parts, rounded.
void sums_to(const Plan& plan, const float* sums, const TensorView& to, Context& context);
// Floats of a row that is carried.
inline std::int64_t part_columns(std::int64_t columns) { return (columns + 3) / 4 * 4; }
// Rows that fixed parts have at once: their bits are those of any other division into parts that has whole cells of so many.
inline constexpr std::int64_t kPartCell = 1024;
}  // namespace cuda

}  // namespace annulus::attention
