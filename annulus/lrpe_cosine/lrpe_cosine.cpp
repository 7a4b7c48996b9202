// Checks every argument once, then hands a Plan to the backend of the tensors' device.

#include "annulus/lrpe_cosine/lrpe_cosine.h"

#include <algorithm>
#include <string>

#include "annulus/core/checked.h"
#include "annulus/core/info.h"
#include "annulus/core/operator.h"
#include "annulus/cpu/features.h"
#include "annulus/lrpe_cosine/plan.h"

namespace annulus {

namespace {

using lrpe_cosine::Operand;
using lrpe_cosine::Plan;
using lrpe_cosine::Side;

constexpr std::int64_t kMaxPosition = std::int64_t{1} << 62;
const Few<DType, 4> kFloating = {DType::kF64, DType::kF32, DType::kF16, DType::kBF16};

// Every column has a frequency, and every axis has columns: but for those of a shape that are no longer than 1.
// `shape` is empty where there are position_ids.
void check_axes_have_columns(const Plan& plan, std::span<const std::int64_t> shape) {
  const auto per_axis = [&] {
    return "ceil(" + std::to_string(plan.C) + " / " + std::to_string(plan.axes) + ")";
  };
  if (checked_mul(plan.axes, plan.E, plan.op) < plan.C) {
    invalid(plan.op, "theta",
            "have at least " + per_axis() + " columns, so that every column has a frequency,",
            "has shape " + shape_string(plan.theta.sizes()));
  }
  for (int j = 0; j < plan.axes && plan.C > 0; ++j) {
    const bool needed = shape.empty() || shape[static_cast<std::size_t>(j)] > 1;
    if (needed && j * plan.E >= plan.C) {
      invalid(plan.op, "theta",
              std::string("leave a column to every axis ") +
                  (shape.empty() ? "of position_ids" : "longer than 1") + ": about " + per_axis() +
                  " columns",
              "has shape " + shape_string(plan.theta.sizes()) + ", so axis " +
                  std::to_string(j + 1) + " of " +
                  (shape.empty() ? "position_ids" : "shape " + shape_string(shape)) +
                  " is encoded nowhere");
    }
  }
}

// Tokens on a grid: shape, prefix, offset and offsets.
void check_grid(Plan& plan, const char* lead_name, const LrpePositions& p) {
  const char* op = plan.op;
  const LrpeGrid& grid = p.shape;
  if (grid.axes < 1 || grid.axes > LrpeGrid::kMaxAxes) {
    invalid(op, "shape", "have 1 to 4 axes", "has " + std::to_string(grid.axes));
  }
  plan.axes = grid.axes;
  const auto axes = static_cast<std::size_t>(grid.axes);
  const std::span<const std::int64_t> extents(grid.extent.data(), axes);
  std::int64_t tokens = 1;
  for (std::size_t j = 0; j < axes; ++j) {
    if (extents[j] < 0)
      invalid(op, "shape", "have no negative size", "is " + shape_string(extents));
    if (__builtin_mul_overflow(tokens, extents[j], &tokens))
      invalid(op, "shape", "have a product below 2^63", "is " + shape_string(extents));
    plan.extent[j] = extents[j];
  }
  if (p.prefix < 0) {
    invalid(op, "prefix", "be at least 0", "is " + std::to_string(p.prefix));
  }
  plan.prefix = p.prefix;
  if (checked_add(tokens, p.prefix, op) != plan.L) {
    invalid(
        op, "shape",
        "have prefix + product = " + std::to_string(plan.L) + ", the tokens of " + lead_name + ",",
        "is " + shape_string(extents) + " with prefix " + std::to_string(p.prefix));
  }
  check_axes_have_columns(plan, extents);

  if (grid.axes > 1 && p.offset != 0) {
    invalid(op, "offset", "be 0 for a shape of several axes", "is " + std::to_string(p.offset));
  }
  if (p.offset > kMaxPosition || p.offset < -kMaxPosition) {
    invalid(op, "offset", "lie within -2^62 .. 2^62", "is " + std::to_string(p.offset));
  }
  plan.offset = p.offset;
  if (p.offsets.defined()) {
    if (grid.axes > 1)
      invalid(op, "offsets", "be left out for a shape of several axes", "is given");
    plan.offsets = p.offsets;
  }
}

// Tokens that say where they are.
void check_position_ids(Plan& plan, const LrpePositions& p) {
  const char* op = plan.op;
  const char* rule = "be left out where position_ids is given";
  const std::span<const std::int64_t> extents(
      p.shape.extent.data(), static_cast<std::size_t>(std::clamp(p.shape.axes, 0, 4)));
  if (p.shape.axes != 0) invalid(op, "shape", rule, "is " + shape_string(extents));
  if (p.prefix != 0) invalid(op, "prefix", rule, "is " + std::to_string(p.prefix));
  if (p.offset != 0) invalid(op, "offset", rule, "is " + std::to_string(p.offset));
  if (p.offsets.defined()) invalid(op, "offsets", rule, "is given");

  const TensorView& ids = p.position_ids;
  const std::int64_t axes = ids.shape[2];
  if ((ids.shape[0] != plan.B && ids.shape[0] != 1) || ids.shape[1] != plan.L || axes < 1 ||
      axes > LrpeGrid::kMaxAxes) {
    invalid(op, "position_ids",
            "have shape (" + std::to_string(plan.B) + (plan.B == 1 ? ", " : " or 1, ") +
                std::to_string(plan.L) + ", 1 to 4)",
            "has " + shape_string(ids.sizes()));
  }
  plan.axes = static_cast<int>(axes);
  plan.extent[0] = plan.L;
  plan.position_ids = ids;
  if (ids.shape[0] == 1) plan.position_ids.stride[0] = 0;
  check_axes_have_columns(plan, {});
}

// Where the two components of a tensor with 2 C columns (or C, when `single`) lie.
enum class Layout { kSingle, kHalves, kInterleaved };
Operand operand(const TensorView& v, std::int64_t C, Layout layout) {
  Operand o;
  if (!v.defined()) return o;
  for (std::size_t i = 0; i < 4; ++i) o.stride[i] = v.stride[i];
  auto* base = static_cast<std::byte*>(v.data);
  o.first = base;
  const std::int64_t step = v.stride[3] * size_of(v.dtype);
  if (layout == Layout::kHalves) o.second = base + C * step;
  if (layout == Layout::kInterleaved) {
    o.second = base + step;
    o.stride[3] *= 2;
  }
  return o;
}

// Half the columns of a tensor; the list refuses one of another rank.
std::int64_t even_columns(const char* op, const char* name, const TensorView& v) {
  if (v.rank != 4) return 0;
  if (v.shape[3] % 2 != 0) {
    invalid(op, name, "have an even number of columns", "has shape " + shape_string(v.sizes()));
  }
  return v.shape[3] / 2;
}

void add_side(Plan& plan, int i, std::int64_t heads) {
  plan.sides = i + 1;
  plan.side[i].heads = heads;
  plan.side[i].heads_per_row = plan.theta_rows > 0 ? heads / plan.theta_rows : 1;
}

// Scratch is at most a few hundred bytes per element, 32 KiB per frequency and 1 MiB per column, padding
// included (an expanded tensor has elements without memory, so the tensors' own sizes do not bound it): checked
// here once, so that no count of either backend can wrap.
void check_scratch(const Plan& plan) {
  const auto at_least_1 = [](std::int64_t n) { return std::max<std::int64_t>(n, 1); };
  constexpr std::int64_t kBytes = 1024;
  (void)checked_product(plan.op, kBytes, at_least_1(plan.B), at_least_1(plan.heads()),
                        at_least_1(plan.L), at_least_1(plan.C));
  (void)checked_product(plan.op, kBytes * 32, at_least_1(plan.theta_rows), at_least_1(plan.E));
  (void)checked_product(plan.op, kBytes * 1024, at_least_1(plan.C));
}

// One tensor of a call, or q and k: x, or in a backward its dy.
struct Lead {
  const char* name;
  const TensorView& view;

  // The shape of a tensor beside it.
  Few<std::int64_t, kMaxRank> like(std::int64_t columns) const {
    return {view.shape[0], view.shape[1], view.shape[2], columns};
  }
};

// What every call begins with: the leading tensor, theta and the positions.
Arguments lead_list(const char* op, const Lead& lead, const TensorView& theta,
                    const LrpePositions& p) {
  const DType dtype = lead.view.dtype;
  Few<DType, 4> of_theta = {DType::kF32};
  if (dtype != DType::kF32) of_theta = {DType::kF32, dtype};
  Arguments list(op);
  list.input(lead.name, lead.view, kFloating, {kAny, kAny, kAny, kAny});
  list.input("theta", theta, of_theta, {kAny, kAny});
  list.optional_input("offsets", p.offsets, {DType::kI32, DType::kI64}, {lead.view.shape[0]});
  list.optional_input("position_ids", p.position_ids, {DType::kI32, DType::kI64},
                      {kAny, kAny, kAny});
  return list;
}

// k beside q; their heads come in whole groups, which complete() makes sure of.
void add_pair(Arguments& list, const Lead& q, const Lead& k) {
  const auto& s = q.view.shape;
  list.input(k.name, k.view, {q.view.dtype}, {s[0], kAny, s[2], s[3]});
}

// Rules that no list says, once the list is checked; the plan but for its operands. `columns` are
// those with a phase, `second` is k where there is one.
Plan plan_of(const char* op, const Lead& lead, std::int64_t columns, const Lead* second,
             const TensorView& theta, const LrpePositions& p, LrpeActivation activation) {
  Plan plan;
  plan.op = op;
  plan.dtype = lead.view.dtype;
  plan.device = lead.view.device;
  plan.B = lead.view.shape[0];
  plan.L = lead.view.shape[2];
  plan.C = columns;
  const std::int64_t heads = lead.view.shape[1];
  const std::int64_t other = second != nullptr ? second->view.shape[1] : heads;
  const std::int64_t low = std::min(heads, other), high = std::max(heads, other);
  if (low == 0 ? high != 0 : high % low != 0) {
    invalid(
        op, second->name,
        "have a head count that divides that of " + std::string(lead.name) + " or is a multiple",
        "has " + std::to_string(other) + " heads beside " + std::to_string(heads));
  }
  if (theta.shape[0] != low) {
    invalid(op, "theta", "have " + std::to_string(low) + " rows, one per head,",
            "has shape " + shape_string(theta.sizes()));
  }
  plan.theta = theta;
  plan.theta_rows = low;
  plan.E = theta.shape[1];
  if (p.position_ids.defined()) {
    check_position_ids(plan, p);
  } else {
    check_grid(plan, lead.name, p);
  }
  if (activation > LrpeActivation::kSoftmaxTokens) {
    invalid(op, "activation",
            "be none, relu, sigmoid, silu, softmax over features or softmax over tokens",
            "has value " + std::to_string(static_cast<int>(activation)));
  }
  plan.activation = activation;
  add_side(plan, 0, heads);
  if (second != nullptr) add_side(plan, 1, other);
  check_scratch(plan);
  return plan;
}

void run_forward(const Plan& plan, Context& context) {
  dispatch(
      plan.op, plan.device, [&] { lrpe_cosine::cpu::forward(plan, context); },
      [&] { lrpe_cosine::cuda::forward(plan, context); });
  context.ran_on(plan.op, plan.device.type, cpu::simd_text(), "ordinary cores");
}

void run_backward(const Plan& plan, Context& context) {
  dispatch(
      plan.op, plan.device, [&] { lrpe_cosine::cpu::backward(plan, context); },
      [&] { lrpe_cosine::cuda::backward(plan, context); });
  context.ran_on(plan.op, plan.device.type, cpu::simd_text(), "ordinary cores");
}

std::size_t forward_scratch(const Plan& plan) {
  return dispatch(
      plan.op, plan.device, [&] { return lrpe_cosine::cpu::forward_workspace(plan); },
      [&] { return lrpe_cosine::cuda::forward_workspace(plan); });
}

std::size_t backward_scratch(Plan plan, bool need_dtheta) {
  plan.need_dtheta = need_dtheta;
  return dispatch(
      plan.op, plan.device, [&] { return lrpe_cosine::cpu::backward_workspace(plan); },
      [&] { return lrpe_cosine::cuda::backward_workspace(plan); });
}

// A backward reads x where there is an activation or dtheta is asked for.
bool needs_x(LrpeActivation activation, const TensorView& dtheta) {
  return activation != LrpeActivation::kNone || dtheta.defined();
}

// One side of a backward: dy -> dx, with x where it is needed.
struct Backward {
  Lead dy;
  const char* x_name;
  const TensorView& x;
  const char* dx_name;
  const TensorView& dx;
};
void add_inputs(Arguments& list, const Backward& b, std::int64_t columns, bool needs_x) {
  if (needs_x) list.input(b.x_name, b.x, {b.dy.view.dtype}, b.dy.like(columns));
}
void add_dtheta(Arguments& list, const TensorView& theta, const TensorView& dtheta) {
  list.optional_output("dtheta", dtheta, {theta.dtype}, theta.sizes());
}
void add_outputs(Arguments& list, const Backward& b, std::int64_t columns, bool in_place) {
  list.add({.name = b.dx_name,
            .view = b.dx,
            .dtypes = {b.dy.view.dtype},
            .shape = b.dy.like(columns),
            .output = true,
            .optional = true,
            .same_as = in_place ? b.dy.view : TensorView{}});
}
void set_side(Plan& plan, int i, const Backward& b, bool needs_x, Layout in, Layout out) {
  Side& side = plan.side[i];
  side.dy = operand(b.dy.view, plan.C, out);
  if (needs_x) side.x = operand(b.x, plan.C, in);
  side.dx = operand(b.dx, plan.C, in);
}
void set_dtheta(Plan& plan, const TensorView& dtheta) {
  plan.dtheta = dtheta;
  plan.need_dtheta = dtheta.defined();
}

Layout layout_of(const LrpeRotateOptions& options) {
  return options.interleaved ? Layout::kInterleaved : Layout::kHalves;
}

// The plan of a question about sizes.
Plan sized_cosine(const char* op, const TensorView& x, const TensorView& theta,
                  const LrpeCosineOptions& options) {
  const Lead lead{"x", x};
  lead_list(op, lead, theta, options).check_sizes();
  return plan_of(op, lead, x.shape[3], nullptr, theta, options, options.activation);
}
Plan sized_qk(const char* op, const TensorView& q, const TensorView& k, const TensorView& theta,
              const LrpeCosineOptions& options) {
  const Lead lead{"q", q}, second{"k", k};
  Arguments list = lead_list(op, lead, theta, options);
  add_pair(list, lead, second);
  list.check_sizes();
  return plan_of(op, lead, q.shape[3], &second, theta, options, options.activation);
}
Plan sized_rotate(const char* op, const TensorView& x, const TensorView& theta,
                  const LrpeRotateOptions& options) {
  const Lead lead{"x", x};
  lead_list(op, lead, theta, options).check_sizes();
  Plan plan =
      plan_of(op, lead, even_columns(op, "x", x), nullptr, theta, options, LrpeActivation::kNone);
  plan.rotate = true;
  return plan;
}

}  // namespace

void lrpe_cosine_forward(const TensorView& x, const TensorView& theta, const TensorView& y,
                         const LrpeCosineOptions& options, Context& context) {
  constexpr const char* op = "lrpe_cosine";
  const Lead lead{"x", x};
  Arguments list = lead_list(op, lead, theta, options);
  list.output("y", y, {x.dtype}, lead.like(checked_mul(2, x.shape[3], op)));
  list.check();
  Plan plan = plan_of(op, lead, x.shape[3], nullptr, theta, options, options.activation);
  plan.side[0].x = operand(x, plan.C, Layout::kSingle);
  plan.side[0].y = operand(y, plan.C, Layout::kHalves);
  run_forward(plan, context);
}

void lrpe_cosine_backward(const TensorView& dy, const TensorView& x, const TensorView& theta,
                          const TensorView& dx, const TensorView& dtheta,
                          const LrpeCosineOptions& options, Context& context) {
  constexpr const char* op = "lrpe_cosine_backward";
  const Backward b{{"dy", dy}, "x", x, "dx", dx};
  const std::int64_t columns = even_columns(op, "dy", dy);
  const bool with_x = needs_x(options.activation, dtheta);
  Arguments list = lead_list(op, b.dy, theta, options);
  add_inputs(list, b, columns, with_x);
  add_dtheta(list, theta, dtheta);
  add_outputs(list, b, columns, false);
  list.check();
  Plan plan = plan_of(op, b.dy, columns, nullptr, theta, options, options.activation);
  set_dtheta(plan, dtheta);
  set_side(plan, 0, b, with_x, Layout::kSingle, Layout::kHalves);
  run_backward(plan, context);
}

void lrpe_cosine_qk_forward(const TensorView& q, const TensorView& k, const TensorView& theta,
                            const TensorView& yq, const TensorView& yk,
                            const LrpeCosineOptions& options, Context& context) {
  constexpr const char* op = "lrpe_cosine_qk";
  const Lead lead{"q", q}, second{"k", k};
  const std::int64_t twice = checked_mul(2, q.shape[3], op);
  Arguments list = lead_list(op, lead, theta, options);
  add_pair(list, lead, second);
  list.output("yq", yq, {q.dtype}, lead.like(twice));
  list.output("yk", yk, {q.dtype}, second.like(twice));
  list.check();
  Plan plan = plan_of(op, lead, q.shape[3], &second, theta, options, options.activation);
  plan.side[0].x = operand(q, plan.C, Layout::kSingle);
  plan.side[0].y = operand(yq, plan.C, Layout::kHalves);
  plan.side[1].x = operand(k, plan.C, Layout::kSingle);
  plan.side[1].y = operand(yk, plan.C, Layout::kHalves);
  run_forward(plan, context);
}

void lrpe_cosine_qk_backward(const TensorView& dyq, const TensorView& dyk, const TensorView& q,
                             const TensorView& k, const TensorView& theta, const TensorView& dq,
                             const TensorView& dk, const TensorView& dtheta,
                             const LrpeCosineOptions& options, Context& context) {
  constexpr const char* op = "lrpe_cosine_qk_backward";
  const Backward of_q{{"dyq", dyq}, "q", q, "dq", dq}, of_k{{"dyk", dyk}, "k", k, "dk", dk};
  const std::int64_t columns = even_columns(op, "dyq", dyq);
  const bool with_x = needs_x(options.activation, dtheta);
  Arguments list = lead_list(op, of_q.dy, theta, options);
  add_pair(list, of_q.dy, of_k.dy);
  add_inputs(list, of_q, columns, with_x);
  add_inputs(list, of_k, columns, with_x);
  add_dtheta(list, theta, dtheta);
  add_outputs(list, of_q, columns, false);
  add_outputs(list, of_k, columns, false);
  list.check();
  Plan plan = plan_of(op, of_q.dy, columns, &of_k.dy, theta, options, options.activation);
  set_dtheta(plan, dtheta);
  set_side(plan, 0, of_q, with_x, Layout::kSingle, Layout::kHalves);
  set_side(plan, 1, of_k, with_x, Layout::kSingle, Layout::kHalves);
  run_backward(plan, context);
}

void lrpe_rotate_forward(const TensorView& x, const TensorView& theta, const TensorView& y,
                         const LrpeRotateOptions& options, Context& context) {
  constexpr const char* op = "lrpe_rotate";
  const Lead lead{"x", x};
  const std::int64_t pairs = even_columns(op, "x", x);
  Arguments list = lead_list(op, lead, theta, options);
  list.add({.name = "y",
            .view = y,
            .dtypes = {x.dtype},
            .shape = lead.like(x.shape[3]),
            .output = true,
            .same_as = x});
  list.check();
  Plan plan = plan_of(op, lead, pairs, nullptr, theta, options, LrpeActivation::kNone);
  plan.rotate = true;
  plan.side[0].x = operand(x, plan.C, layout_of(options));
  plan.side[0].y = operand(y, plan.C, layout_of(options));
  run_forward(plan, context);
}

void lrpe_rotate_backward(const TensorView& dy, const TensorView& x, const TensorView& theta,
                          const TensorView& dx, const TensorView& dtheta,
                          const LrpeRotateOptions& options, Context& context) {
  constexpr const char* op = "lrpe_rotate_backward";
  const Backward b{{"dy", dy}, "x", x, "dx", dx};
  const std::int64_t pairs = even_columns(op, "dy", dy);
  const bool with_x = needs_x(LrpeActivation::kNone, dtheta);
  Arguments list = lead_list(op, b.dy, theta, options);
  add_inputs(list, b, dy.shape[3], with_x);
  add_dtheta(list, theta, dtheta);
  add_outputs(list, b, dy.shape[3], !dtheta.defined());
  list.check();
  Plan plan = plan_of(op, b.dy, pairs, nullptr, theta, options, LrpeActivation::kNone);
  plan.rotate = true;
  set_dtheta(plan, dtheta);
  set_side(plan, 0, b, with_x, layout_of(options), layout_of(options));
  run_backward(plan, context);
}

std::size_t lrpe_cosine_forward_workspace(const TensorView& x, const TensorView& theta,
                                          const LrpeCosineOptions& options) {
  return forward_scratch(sized_cosine("lrpe_cosine", x, theta, options));
}

std::size_t lrpe_cosine_backward_workspace(const TensorView& x, const TensorView& theta,
                                           bool need_dtheta, const LrpeCosineOptions& options) {
  return backward_scratch(sized_cosine("lrpe_cosine_backward", x, theta, options), need_dtheta);
}

std::size_t lrpe_cosine_qk_forward_workspace(const TensorView& q, const TensorView& k,
                                             const TensorView& theta,
                                             const LrpeCosineOptions& options) {
  return forward_scratch(sized_qk("lrpe_cosine_qk", q, k, theta, options));
}

std::size_t lrpe_cosine_qk_backward_workspace(const TensorView& q, const TensorView& k,
                                              const TensorView& theta, bool need_dtheta,
                                              const LrpeCosineOptions& options) {
  return backward_scratch(sized_qk("lrpe_cosine_qk_backward", q, k, theta, options), need_dtheta);
}

std::size_t lrpe_rotate_forward_workspace(const TensorView& x, const TensorView& theta,
                                          const LrpeRotateOptions& options) {
  return forward_scratch(sized_rotate("lrpe_rotate", x, theta, options));
}

std::size_t lrpe_rotate_backward_workspace(const TensorView& x, const TensorView& theta,
                                           bool need_dtheta, const LrpeRotateOptions& options) {
  return backward_scratch(sized_rotate("lrpe_rotate_backward", x, theta, options), need_dtheta);
}

namespace {

Support support(DeviceType device) {
  if (device == DeviceType::kCPU) return {true, cpu::simd_description()};
  return cuda_support([] { return lrpe_cosine::cuda::support(); });
}

const std::vector<DType> kDTypes = {DType::kF64, DType::kF32, DType::kF16, DType::kBF16};
const OperatorRegistration kCosine({.name = "lrpe_cosine",
                                    .summary = "multi-axis relative positional encoding, D -> 2D",
                                    .dtypes = kDTypes,
                                    .gradients = {"x", "theta"},
                                    .deterministic = true,
                                    .support = support});
const OperatorRegistration kRotate({.name = "lrpe_rotate",
                                    .summary = "the same positions as a rotation (RoPE), in place",
                                    .dtypes = kDTypes,
                                    .gradients = {"x", "theta"},
                                    .deterministic = true,
                                    .support = support});

}  // namespace

}  // namespace annulus
