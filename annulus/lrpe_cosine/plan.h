// A checked call, in the form both backends read. The cosine form is the rotating form whose second
// component is zero, so one description serves both:
//     y1 = x1 cos - x2 sin,  y2 = x1 sin + x2 cos,   x2 = 0 in the cosine form
#pragma once

#include <cstddef>
#include <cstdint>

#include "annulus/core/context.h"
#include "annulus/core/info.h"
#include "annulus/core/tensor.h"
#include "annulus/lrpe_cosine/lrpe_cosine.h"

namespace annulus::lrpe_cosine {

// The pair of components (first, second) of a tensor, each indexed (b, h, t, c) with the same
// strides. The cosine form's x and dx have no second.
struct Operand {
  void* first = nullptr;
  void* second = nullptr;
  std::int64_t stride[4] = {};

  bool defined() const { return first != nullptr; }
};

// One tensor of the call: x, or q and k. Forward reads x and writes y; backward reads dy and, where
// needed, x, and writes dx where asked.
struct Side {
  std::int64_t heads = 0;
  std::int64_t heads_per_row = 1;  // heads that share a row of theta
  Operand x, y, dy, dx;
  // Partial rotary: the columns beyond the pairs, and where they go. Not defined where there are none, or in place.
  TensorView pass_from, pass_to;
};

struct Plan {
  const char* op = "lrpe_cosine";
  Device device;
  DType dtype = DType::kF32;
  bool rotate = false, backward = false;
  LrpeActivation activation = LrpeActivation::kNone;

  std::int64_t B = 0, L = 0;
  std::int64_t C = 0;  // columns that have a phase: D, or the pairs that turn
  std::int64_t E = 0, theta_rows = 0;
  int axes = 1;
  std::int64_t extent[LrpeGrid::kMaxAxes] = {1, 1, 1, 1};
  std::int64_t prefix = 0;
  std::int64_t offset = 0;
  TensorView offsets;  // (B,), or not defined
  // (B or 1, L, axes), or not defined: then in place of extent, prefix and offset, which are those of a shape (L). Its
  // stride[0] is 0 where there is one row. (Where B rows lie on top of each other they are still read as B: the order of
  // sums, and so the bits of dtheta, must not depend on strides.)
  TensorView position_ids;

  TensorView theta;
  TensorView dtheta;  // not defined: not asked for
  bool need_dtheta = false;

  int sides = 1;
  Side side[2];

  std::int64_t heads() const { return side[0].heads + (sides > 1 ? side[1].heads : 0); }
  // Whether sequences have positions, and so phases, of their own.
  bool own_positions() const {
    return offsets.defined() || (position_ids.defined() && position_ids.shape[0] != 1);
  }
  bool softmax() const {
    return activation == LrpeActivation::kSoftmaxFeatures ||
           activation == LrpeActivation::kSoftmaxTokens;
  }
};

namespace cpu {
void run(const Plan& plan, Context& context);
void pass(const Plan& plan, const Context& context);  // of pass_from; run() does the rest
std::size_t workspace(const Plan& plan);
}  // namespace cpu

namespace cuda {
void forward(const Plan& plan, Context& context);
void backward(const Plan& plan, Context& context);
std::size_t forward_workspace(const Plan& plan);
std::size_t backward_workspace(const Plan& plan);
Support support();
}  // namespace cuda

}  // namespace annulus::lrpe_cosine
