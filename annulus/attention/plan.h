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
// part adds to those of them that are given; dk and dv go together. (The CPU's alone.)
struct Part {
  std::int64_t first_query = 0, first_key = 0;  // rows of the pattern that row 0 of q and of k are
  int layer = 0;
  // Sums are taken in tiles at fixed rows of the pattern, from first to last: their bits are those of any other division into
  // parts that lets all tiles whole.
  bool fixed = false;
  RowState* state = nullptr;
  float *acc = nullptr, *delta = nullptr, *dq = nullptr, *dk = nullptr, *dv = nullptr;
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
}  // namespace cuda

}  // namespace annulus::attention
