// Checks every argument once, then hands a Plan to the backend of the tensors' device.

#include "annulus/lrpe_cosine/lrpe_cosine.h"

#include <algorithm>
#include <string>

#include "annulus/core/checked.h"
#include "annulus/core/info.h"
#include "annulus/core/operator.h"
#include "annulus/cpu/features.h"
#include "annulus/lrpe_cosine/plan.h"
#include "annulus/lrpe_cosine/positions.h"

namespace annulus {

namespace {

using lrpe_cosine::Operand;
using lrpe_cosine::Plan;
using lrpe_cosine::Side;

constexpr std::int64_t kMaxPosition = std::int64_t{1} << 62;
const Few<DType, 4> kFloating = {DType::kF64, DType::kF32, DType::kF16, DType::kBF16};

// Every column has a frequency, or turns no further than there are some; every frequency has a column (one that has none
// would be a mistake about E that nothing else shows); and every axis has columns: but for those of a shape that are no
// longer than 1. `shape` is empty where there are position_ids.
void check_axes_have_columns(Plan& plan, std::span<const std::int64_t> shape) {
  if (plan.C > 0 && plan.E > plan.C) {
    invalid(plan.op, "theta",
            "have at most " + std::to_string(plan.C) + " columns, so that every frequency is used,",
            "has shape " + shape_string(plan.theta.sizes()));
  }
  if (plan.rotate && plan.C > 0) {
    if (plan.E == 0) {
      invalid(plan.op, "theta", "have at least 1 column",
              "has shape " + shape_string(plan.theta.sizes()));
    }
    plan.C = std::min(plan.C, checked_mul(plan.axes, plan.E, plan.op));
  }
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
  const std::span<const std::int64_t> extents = grid.extents();
  std::copy(extents.begin(), extents.end(), plan.extent);
  std::int64_t tokens = 1;
  for (const std::int64_t n : extents) {
    if (n < 0) invalid(op, "shape", "have no negative size", "is " + shape_string(extents));
    if (__builtin_mul_overflow(tokens, n, &tokens))
      invalid(op, "shape", "have a product below 2^63", "is " + shape_string(extents));
  }
  if (p.prefix < 0) invalid(op, "prefix", "be at least 0", "is " + std::to_string(p.prefix));
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
  if (p.offsets.defined() && grid.axes > 1) {
    invalid(op, "offsets", "be left out for a shape of several axes", "is given");
  }
  plan.offsets = p.offsets;
}

// Tokens that say where they are.
void check_position_ids(Plan& plan, const LrpePositions& p) {
  const char* op = plan.op;
  const char* rule = "be left out where position_ids is given";
  if (p.shape.axes != 0) invalid(op, "shape", rule, "is " + shape_string(p.shape.extents()));
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

// Where columns from `first` on have to be copied.
void pass_on(Side& side, const TensorView& from, const TensorView& to, std::int64_t first) {
  if (to.numel() == 0 || from.data == to.data || first == to.shape[3]) return;
  const auto rest = [&](TensorView v) {
    v.data = static_cast<std::byte*>(v.data) + first * v.stride[3] * size_of(v.dtype);
    v.shape[3] -= first;
    return v;
  };
  side.pass_from = rest(from);
  side.pass_to = rest(to);
}

// The options of either form.
struct Form {
  LrpePositions positions;
  LrpeActivation activation = LrpeActivation::kNone;
  bool rotate = false;
  Layout x = Layout::kSingle, y = Layout::kHalves;  // and of their gradients
};
Form form_of(const LrpeCosineOptions& options) {
  return {positions_of(options), options.activation};
}
Form form_of(const LrpeRotateOptions& options) {
  const Layout pairs = options.interleaved ? Layout::kInterleaved : Layout::kHalves;
  return {positions_of(options), LrpeActivation::kNone, true, pairs, pairs};
}

// A tensor, and what errors call it.
struct Named {
  const char* name = "";
  TensorView view = {};
};

// The tensors of one side of a call, which are those of x, of q or of k: a forward leads with x and has y come out,
// a backward leads with dy, has dx come out, and reads x where it is needed.
struct SideTensors {
  Named lead, out = {}, x = {};

  // The shape of a tensor beside the leading one.
  Few<std::int64_t, kMaxRank> like(std::int64_t columns) const {
    const auto& s = lead.view.shape;
    return {s[0], s[1], s[2], columns};
  }
};
using Sides = std::initializer_list<SideTensors>;

// Half the columns of a tensor; the list refuses one of another rank.
std::int64_t even_columns(const char* op, const Named& v) {
  if (v.view.rank != 4) return 0;
  if (v.view.shape[3] % 2 != 0) {
    invalid(op, v.name, "have an even number of columns",
            "has shape " + shape_string(v.view.sizes()));
  }
  return v.view.shape[3] / 2;
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

// What every call begins with: the leading tensor, theta and the positions; k beside q, whose heads come in whole
// groups, which plan_of() makes sure of.
Arguments lead_list(const char* op, Sides sides, const TensorView& theta, const LrpePositions& p) {
  const Named& lead = sides.begin()->lead;
  const DType dtype = lead.view.dtype;
  const auto& s = lead.view.shape;
  Few<DType, 4> of_theta = {DType::kF32};
  if (dtype != DType::kF32) of_theta = {DType::kF32, dtype};
  Arguments list(op);
  list.input(lead.name, lead.view, kFloating, {kAny, kAny, kAny, kAny});
  list.input("theta", theta, of_theta, {kAny, kAny});
  list.optional_input("offsets", p.offsets, {DType::kI32, DType::kI64}, {s[0]});
  list.optional_input("position_ids", p.position_ids, {DType::kI32, DType::kI64},
                      {kAny, kAny, kAny});
  for (const SideTensors& k : std::span(sides).subspan(1)) {
    list.input(k.lead.name, k.lead.view, {dtype}, {s[0], kAny, s[2], s[3]});
  }
  return list;
}

// Rules that no list says, once the list is checked; the plan but for its operands. `columns` are
// those with a phase, at most.
Plan plan_of(const char* op, Sides sides, std::int64_t columns, const TensorView& theta,
             const Form& form) {
  const Named &lead = sides.begin()->lead, &last = (sides.end() - 1)->lead;
  Plan plan;
  plan.op = op;
  plan.dtype = lead.view.dtype;
  plan.device = lead.view.device;
  plan.B = lead.view.shape[0];
  plan.L = lead.view.shape[2];
  plan.C = columns;
  const auto [low, high] = std::minmax({lead.view.shape[1], last.view.shape[1]});
  if (low == 0 ? high != 0 : high % low != 0) {
    invalid(
        op, last.name,
        "have a head count that divides that of " + std::string(lead.name) + " or is a multiple",
        "has " + std::to_string(last.view.shape[1]) + " heads beside " +
            std::to_string(lead.view.shape[1]));
  }
  if (theta.shape[0] != low && theta.shape[0] != 1) {
    invalid(op, "theta", "have " + std::to_string(low) + " rows, one per head, or 1",
            "has shape " + shape_string(theta.sizes()));
  }
  plan.theta = theta;
  plan.theta_rows = theta.shape[0];
  plan.E = theta.shape[1];
  plan.rotate = form.rotate;
  if (form.positions.position_ids.defined()) {
    check_position_ids(plan, form.positions);
  } else {
    check_grid(plan, lead.name, form.positions);
  }
  if (form.activation > LrpeActivation::kSoftmaxTokens) {
    invalid(op, "activation",
            "be none, relu, sigmoid, silu, softmax over features or softmax over tokens",
            "has value " + std::to_string(static_cast<int>(form.activation)));
  }
  plan.activation = form.activation;
  plan.sides = 0;
  for (const SideTensors& s : sides) {
    Side& side = plan.side[plan.sides++];
    side.heads = s.lead.view.shape[1];
    side.heads_per_row = low > 0 ? side.heads / plan.theta_rows : 1;
  }
  check_scratch(plan);
  return plan;
}

void run(const Plan& plan, Context& context) {
  dispatch(
      plan.op, plan.device,
      [&] {
        lrpe_cosine::cpu::run(plan, context);
        lrpe_cosine::cpu::pass(plan, context);
      },
      [&] {
        plan.backward ? lrpe_cosine::cuda::backward(plan, context)
                      : lrpe_cosine::cuda::forward(plan, context);
      });
  context.ran_on(plan.op, plan.device.type, cpu::simd_text(), "ordinary cores");
}

void forward(const char* op, Sides sides, const TensorView& theta, const Form& form,
             Context& context) {
  const Named& x = sides.begin()->lead;
  const std::int64_t columns = form.rotate ? even_columns(op, x) : x.view.shape[3];
  const std::int64_t width = form.rotate ? x.view.shape[3] : checked_mul(2, columns, op);
  Arguments list = lead_list(op, sides, theta, form.positions);
  for (const SideTensors& s : sides) {
    list.add({.name = s.out.name,
              .view = s.out.view,
              .dtypes = {x.view.dtype},
              .shape = s.like(width),
              .output = true,
              .same_as = form.rotate ? s.lead.name : ""});
  }
  list.check(context);
  Plan plan = plan_of(op, sides, columns, theta, form);
  for (Side* side = plan.side; const SideTensors& s : sides) {
    side->x = operand(s.lead.view, plan.C, form.x);
    side->y = operand(s.out.view, plan.C, form.y);
    if (form.rotate) pass_on(*side, s.lead.view, s.out.view, 2 * plan.C);
    ++side;
  }
  run(plan, context);
}

void backward(const char* op, Sides sides, const TensorView& theta, const TensorView& dtheta,
              const Form& form, Context& context) {
  const Named& dy = sides.begin()->lead;
  const std::int64_t columns = even_columns(op, dy);
  const std::int64_t width = form.rotate ? dy.view.shape[3] : columns;
  const bool needs_x = form.activation != LrpeActivation::kNone || dtheta.defined();
  Arguments list = lead_list(op, sides, theta, form.positions);
  for (const SideTensors& s : sides) {
    if (needs_x) list.input(s.x.name, s.x.view, {dy.view.dtype}, s.like(width));
  }
  list.optional_output("dtheta", dtheta, {theta.dtype}, theta.sizes());
  for (const SideTensors& s : sides) {
    list.add({.name = s.out.name,
              .view = s.out.view,
              .dtypes = {dy.view.dtype},
              .shape = s.like(width),
              .output = true,
              .optional = true,
              .same_as = form.rotate && !dtheta.defined() ? s.lead.name : ""});
  }
  list.check(context);
  Plan plan = plan_of(op, sides, columns, theta, form);
  plan.backward = true;
  plan.dtheta = dtheta;
  plan.need_dtheta = dtheta.defined();
  for (Side* side = plan.side; const SideTensors& s : sides) {
    side->dy = operand(s.lead.view, plan.C, form.y);
    if (needs_x) side->x = operand(s.x.view, plan.C, form.x);
    side->dx = operand(s.out.view, plan.C, form.x);
    if (form.rotate) pass_on(*side, s.lead.view, s.out.view, 2 * plan.C);
    ++side;
  }
  run(plan, context);
}

// A question about sizes: the sides lead with x here, in a backward too.
std::size_t scratch(const char* op, Sides sides, const TensorView& theta, const Form& form,
                    bool backward, bool need_dtheta = false) {
  lead_list(op, sides, theta, form.positions).check_sizes();
  const Named& x = sides.begin()->lead;
  Plan plan = plan_of(op, sides, form.rotate ? even_columns(op, x) : x.view.shape[3], theta, form);
  plan.backward = backward;
  plan.need_dtheta = need_dtheta;
  return dispatch(
      op, plan.device, [&] { return lrpe_cosine::cpu::workspace(plan); },
      [&] {
        return backward ? lrpe_cosine::cuda::backward_workspace(plan)
                        : lrpe_cosine::cuda::forward_workspace(plan);
      });
}

}  // namespace

void lrpe_cosine_forward(const TensorView& x, const TensorView& theta, const TensorView& y,
                         const LrpeCosineOptions& options, Context& context) {
  forward("lrpe_cosine", {{{"x", x}, {"y", y}}}, theta, form_of(options), context);
}

void lrpe_cosine_backward(const TensorView& dy, const TensorView& x, const TensorView& theta,
                          const TensorView& dx, const TensorView& dtheta,
                          const LrpeCosineOptions& options, Context& context) {
  backward("lrpe_cosine_backward", {{{"dy", dy}, {"dx", dx}, {"x", x}}}, theta, dtheta,
           form_of(options), context);
}

void lrpe_cosine_qk_forward(const TensorView& q, const TensorView& k, const TensorView& theta,
                            const TensorView& yq, const TensorView& yk,
                            const LrpeCosineOptions& options, Context& context) {
  forward("lrpe_cosine_qk", {{{"q", q}, {"yq", yq}}, {{"k", k}, {"yk", yk}}}, theta,
          form_of(options), context);
}

void lrpe_cosine_qk_backward(const TensorView& dyq, const TensorView& dyk, const TensorView& q,
                             const TensorView& k, const TensorView& theta, const TensorView& dq,
                             const TensorView& dk, const TensorView& dtheta,
                             const LrpeCosineOptions& options, Context& context) {
  backward("lrpe_cosine_qk_backward",
           {{{"dyq", dyq}, {"dq", dq}, {"q", q}}, {{"dyk", dyk}, {"dk", dk}, {"k", k}}}, theta,
           dtheta, form_of(options), context);
}

void lrpe_rotate_forward(const TensorView& x, const TensorView& theta, const TensorView& y,
                         const LrpeRotateOptions& options, Context& context) {
  forward("lrpe_rotate", {{{"x", x}, {"y", y}}}, theta, form_of(options), context);
}

void lrpe_rotate_backward(const TensorView& dy, const TensorView& x, const TensorView& theta,
                          const TensorView& dx, const TensorView& dtheta,
                          const LrpeRotateOptions& options, Context& context) {
  backward("lrpe_rotate_backward", {{{"dy", dy}, {"dx", dx}, {"x", x}}}, theta, dtheta,
           form_of(options), context);
}

void lrpe_rotate_qk_forward(const TensorView& q, const TensorView& k, const TensorView& theta,
                            const TensorView& yq, const TensorView& yk,
                            const LrpeRotateOptions& options, Context& context) {
  forward("lrpe_rotate_qk", {{{"q", q}, {"yq", yq}}, {{"k", k}, {"yk", yk}}}, theta,
          form_of(options), context);
}

void lrpe_rotate_qk_backward(const TensorView& dyq, const TensorView& dyk, const TensorView& q,
                             const TensorView& k, const TensorView& theta, const TensorView& dq,
                             const TensorView& dk, const TensorView& dtheta,
                             const LrpeRotateOptions& options, Context& context) {
  backward("lrpe_rotate_qk_backward",
           {{{"dyq", dyq}, {"dq", dq}, {"q", q}}, {{"dyk", dyk}, {"dk", dk}, {"k", k}}}, theta,
           dtheta, form_of(options), context);
}

std::size_t lrpe_cosine_forward_workspace(const TensorView& x, const TensorView& theta,
                                          const LrpeCosineOptions& options) {
  return scratch("lrpe_cosine", {{{"x", x}}}, theta, form_of(options), false);
}

std::size_t lrpe_cosine_backward_workspace(const TensorView& x, const TensorView& theta,
                                           bool need_dtheta, const LrpeCosineOptions& options) {
  return scratch("lrpe_cosine_backward", {{{"x", x}}}, theta, form_of(options), true, need_dtheta);
}

std::size_t lrpe_cosine_qk_forward_workspace(const TensorView& q, const TensorView& k,
                                             const TensorView& theta,
                                             const LrpeCosineOptions& options) {
  return scratch("lrpe_cosine_qk", {{{"q", q}}, {{"k", k}}}, theta, form_of(options), false);
}

std::size_t lrpe_cosine_qk_backward_workspace(const TensorView& q, const TensorView& k,
                                              const TensorView& theta, bool need_dtheta,
                                              const LrpeCosineOptions& options) {
  return scratch("lrpe_cosine_qk_backward", {{{"q", q}}, {{"k", k}}}, theta, form_of(options), true,
                 need_dtheta);
}

std::size_t lrpe_rotate_forward_workspace(const TensorView& x, const TensorView& theta,
                                          const LrpeRotateOptions& options) {
  return scratch("lrpe_rotate", {{{"x", x}}}, theta, form_of(options), false);
}

std::size_t lrpe_rotate_backward_workspace(const TensorView& x, const TensorView& theta,
                                           bool need_dtheta, const LrpeRotateOptions& options) {
  return scratch("lrpe_rotate_backward", {{{"x", x}}}, theta, form_of(options), true, need_dtheta);
}

std::size_t lrpe_rotate_qk_forward_workspace(const TensorView& q, const TensorView& k,
                                             const TensorView& theta,
                                             const LrpeRotateOptions& options) {
  return scratch("lrpe_rotate_qk", {{{"q", q}}, {{"k", k}}}, theta, form_of(options), false);
}

std::size_t lrpe_rotate_qk_backward_workspace(const TensorView& q, const TensorView& k,
                                              const TensorView& theta, bool need_dtheta,
                                              const LrpeRotateOptions& options) {
  return scratch("lrpe_rotate_qk_backward", {{{"q", q}}, {{"k", k}}}, theta, form_of(options), true,
                 need_dtheta);
}

namespace {

Support support(DeviceType device) {
  if (device == DeviceType::kCPU) return {true, cpu::simd_description()};
  return cuda_support([] { return lrpe_cosine::cuda::support(); });
}

OperatorInfo info(const char* name, const char* summary) {
  return {.name = name,
          .summary = summary,
          .dtypes = {kFloating.all().begin(), kFloating.all().end()},
          .gradients = {"x", "theta"},
          .deterministic = true,
          .support = support};
}
const OperatorRegistration kCosine(info("lrpe_cosine",
                                        "multi-axis relative positional encoding, D -> 2D"));
const OperatorRegistration kRotate(
    info("lrpe_rotate", "the same positions as a rotation (RoPE), whole or partial, in place"));

}  // namespace

}  // namespace annulus
