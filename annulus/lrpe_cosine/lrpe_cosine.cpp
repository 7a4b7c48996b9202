// Checks every argument once, then hands a Plan to the backend of the tensors' device.

#include "annulus/lrpe_cosine/lrpe_cosine.h"

#include <algorithm>
#include <string>

#include "annulus/core/backend.h"
#include "annulus/core/check.h"
#include "annulus/core/checked.h"
#include "annulus/core/info.h"
#include "annulus/cpu/features.h"
#include "annulus/lrpe_cosine/plan.h"

namespace annulus {

namespace {

using lrpe_cosine::Operand;
using lrpe_cosine::Plan;
using lrpe_cosine::Side;

constexpr std::int64_t kMaxPosition = std::int64_t{1} << 62;

// Shape, dtype and device of an input or output beside the tensor that leads the call.
void check_like(const char* op, const char* name, const TensorView& v, const char* lead_name,
                const TensorView& lead, std::int64_t columns) {
  check_tensor(op, name, v, 4);
  check_dtype(op, name, v, {lead.dtype});
  check_shape(op, name, v, {lead.shape[0], lead.shape[1], lead.shape[2], columns});
  check_device(op, name, v, lead_name, lead);
}

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
void check_grid(Plan& plan, const char* lead_name, const TensorView& lead, const LrpePositions& p) {
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
    check_tensor(op, "offsets", p.offsets, 1);
    check_dtype(op, "offsets", p.offsets, {DType::kI32, DType::kI64});
    check_shape(op, "offsets", p.offsets, {plan.B});
    check_device(op, "offsets", p.offsets, lead_name, lead);
    plan.offsets = p.offsets;
  }
}

// Tokens that say where they are.
void check_position_ids(Plan& plan, const char* lead_name, const TensorView& lead,
                        const LrpePositions& p) {
  const char* op = plan.op;
  const char* rule = "be left out where position_ids is given";
  const std::span<const std::int64_t> extents(
      p.shape.extent.data(), static_cast<std::size_t>(std::clamp(p.shape.axes, 0, 4)));
  if (p.shape.axes != 0) invalid(op, "shape", rule, "is " + shape_string(extents));
  if (p.prefix != 0) invalid(op, "prefix", rule, "is " + std::to_string(p.prefix));
  if (p.offset != 0) invalid(op, "offset", rule, "is " + std::to_string(p.offset));
  if (p.offsets.defined()) invalid(op, "offsets", rule, "is given");

  const TensorView& ids = p.position_ids;
  check_tensor(op, "position_ids", ids, 3);
  check_dtype(op, "position_ids", ids, {DType::kI32, DType::kI64});
  check_device(op, "position_ids", ids, lead_name, lead);
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

// Everything that does not depend on the direction: the leading tensor x (or dy, with its columns
// halved), theta and the positions.
Plan check_positions(const char* op, const char* lead_name, const TensorView& lead,
                     std::int64_t columns, std::int64_t theta_rows, const TensorView& theta,
                     const LrpePositions& p) {
  Plan plan;
  plan.op = op;
  check_dtype(op, lead_name, lead, {DType::kF64, DType::kF32, DType::kF16, DType::kBF16});
  plan.dtype = lead.dtype;
  plan.device = lead.device;
  plan.B = lead.shape[0];
  plan.L = lead.shape[2];
  plan.C = columns;

  check_tensor(op, "theta", theta, 2);
  if (lead.dtype == DType::kF32) {
    check_dtype(op, "theta", theta, {DType::kF32});
  } else {
    check_dtype(op, "theta", theta, {DType::kF32, lead.dtype});
  }
  check_device(op, "theta", theta, lead_name, lead);
  if (theta.shape[0] != theta_rows) {
    invalid(op, "theta", "have " + std::to_string(theta_rows) + " rows, one per head,",
            "has shape " + shape_string(theta.sizes()));
  }
  plan.theta = theta;
  plan.theta_rows = theta_rows;
  plan.E = theta.shape[1];

  if (p.position_ids.defined()) {
    check_position_ids(plan, lead_name, lead, p);
  } else {
    check_grid(plan, lead_name, lead, p);
  }
  return plan;
}

void check_apart_from_positions(const Plan& plan, const char* name, const TensorView& output) {
  check_no_overlap(plan.op, name, output, "offsets", plan.offsets);
  check_no_overlap(plan.op, name, output, "position_ids", plan.position_ids);
}

void check_dtheta(Plan& plan, const TensorView& dtheta) {
  if (!dtheta.defined()) return;
  const TensorView& theta = plan.theta;
  check_tensor(plan.op, "dtheta", dtheta, 2);
  check_dtype(plan.op, "dtheta", dtheta, {theta.dtype});
  check_shape(plan.op, "dtheta", dtheta, {theta.shape[0], theta.shape[1]});
  check_device(plan.op, "dtheta", dtheta, "theta", theta);
  check_output_layout(plan.op, "dtheta", dtheta);
  check_no_overlap(plan.op, "dtheta", dtheta, "theta", theta);
  check_apart_from_positions(plan, "dtheta", dtheta);
  plan.dtheta = dtheta;
  plan.need_dtheta = true;
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

[[noreturn, maybe_unused]] void no_cuda(const char* op) {
  throw NotSupported("[" + std::string(op) +
                     "] device must be cpu: this build has no CUDA backend");
}

void run_forward(const Plan& plan, Context& context) {
  if (plan.device.type == DeviceType::kCPU) {
    lrpe_cosine::cpu::forward(plan, context);
  } else {
#if ANNULUS_HAVE_CUDA
    lrpe_cosine::cuda::forward(plan, context);
#else
    no_cuda(plan.op);
#endif
  }
  ran_on(plan.op, plan.device.type);
}

void run_backward(const Plan& plan, Context& context) {
  if (plan.device.type == DeviceType::kCPU) {
    lrpe_cosine::cpu::backward(plan, context);
  } else {
#if ANNULUS_HAVE_CUDA
    lrpe_cosine::cuda::backward(plan, context);
#else
    no_cuda(plan.op);
#endif
  }
  ran_on(plan.op, plan.device.type);
}

std::size_t forward_scratch(const Plan& plan) {
  if (plan.device.type == DeviceType::kCPU) return lrpe_cosine::cpu::forward_workspace(plan);
#if ANNULUS_HAVE_CUDA
  return lrpe_cosine::cuda::forward_workspace(plan);
#else
  no_cuda(plan.op);
#endif
}

std::size_t backward_scratch(const Plan& plan) {
  if (plan.device.type == DeviceType::kCPU) return lrpe_cosine::cpu::backward_workspace(plan);
#if ANNULUS_HAVE_CUDA
  return lrpe_cosine::cuda::backward_workspace(plan);
#else
  no_cuda(plan.op);
#endif
}

std::int64_t even_columns(const char* op, const char* name, const TensorView& v) {
  if (v.shape[3] % 2 != 0) {
    invalid(op, name, "have an even number of columns", "has shape " + shape_string(v.sizes()));
  }
  return v.shape[3] / 2;
}

// q and k of one call: same batch, tokens, columns, dtype and device; heads in whole groups.
std::int64_t check_pair(const char* op, const char* q_name, const TensorView& q, const char* k_name,
                        const TensorView& k) {
  check_tensor(op, q_name, q, 4);
  check_tensor(op, k_name, k, 4);
  check_dtype(op, k_name, k, {q.dtype});
  check_device(op, k_name, k, q_name, q);
  const std::int64_t low = std::min(q.shape[1], k.shape[1]);
  const std::int64_t high = std::max(q.shape[1], k.shape[1]);
  check_shape(op, k_name, k, {q.shape[0], k.shape[1], q.shape[2], q.shape[3]});
  if (low == 0 ? high != 0 : high % low != 0) {
    invalid(op, k_name,
            "have a head count that divides that of " + std::string(q_name) + " or is a multiple",
            "has " + std::to_string(k.shape[1]) + " heads beside " + std::to_string(q.shape[1]));
  }
  return low;
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

void set_activation(Plan& plan, LrpeActivation activation) {
  if (activation > LrpeActivation::kSoftmaxTokens) {
    invalid(plan.op, "activation",
            "be none, relu, sigmoid, silu, softmax over features or softmax over tokens",
            "has value " + std::to_string(static_cast<int>(activation)));
  }
  plan.activation = activation;
}

bool needs_x(const Plan& plan) {
  return plan.activation != LrpeActivation::kNone || plan.need_dtheta;
}

// The backward's tensors of one side; x counts only where it is needed.
void check_gradients(Plan& plan, int i, const char* dy_name, const TensorView& dy,
                     const char* x_name, const TensorView& x, const char* dx_name,
                     const TensorView& dx, Layout in, Layout out) {
  const std::int64_t columns = in == Layout::kSingle ? plan.C : 2 * plan.C;
  Side& side = plan.side[i];
  side.dy = operand(dy, plan.C, out);
  if (needs_x(plan)) {
    check_like(plan.op, x_name, x, dy_name, dy, columns);
    if (plan.need_dtheta) check_no_overlap(plan.op, "dtheta", plan.dtheta, x_name, x);
    side.x = operand(x, plan.C, in);
  }
  if (dx.defined()) {
    check_like(plan.op, dx_name, dx, dy_name, dy, columns);
    check_output_layout(plan.op, dx_name, dx);
    if (needs_x(plan)) check_no_overlap(plan.op, dx_name, dx, x_name, x);
    check_no_overlap(plan.op, dx_name, dx, "theta", plan.theta);
    check_apart_from_positions(plan, dx_name, dx);
    if (plan.need_dtheta) check_no_overlap(plan.op, dx_name, dx, "dtheta", plan.dtheta);
    side.dx = operand(dx, plan.C, in);
  }
  if (plan.need_dtheta) check_no_overlap(plan.op, "dtheta", plan.dtheta, dy_name, dy);
}

bool same_view(const TensorView& a, const TensorView& b) {
  return a.data == b.data && a.stride == b.stride;
}

Plan cosine_plan(const char* op, const char* lead_name, const TensorView& lead,
                 std::int64_t columns, const TensorView& theta, const LrpeCosineOptions& options) {
  Plan plan = check_positions(op, lead_name, lead, columns, lead.shape[1], theta, options);
  set_activation(plan, options.activation);
  add_side(plan, 0, lead.shape[1]);
  check_scratch(plan);
  return plan;
}

Plan rotate_plan(const char* op, const char* lead_name, const TensorView& lead,
                 const TensorView& theta, const LrpeRotateOptions& options) {
  check_tensor(op, lead_name, lead, 4);
  const std::int64_t pairs = even_columns(op, lead_name, lead);
  Plan plan = check_positions(op, lead_name, lead, pairs, lead.shape[1], theta, options);
  plan.rotate = true;
  add_side(plan, 0, lead.shape[1]);
  check_scratch(plan);
  return plan;
}

Plan qk_plan(const char* op, const char* q_name, const TensorView& q, const char* k_name,
             const TensorView& k, std::int64_t columns, const TensorView& theta,
             const LrpeCosineOptions& options) {
  const std::int64_t rows = check_pair(op, q_name, q, k_name, k);
  Plan plan = check_positions(op, q_name, q, columns, rows, theta, options);
  set_activation(plan, options.activation);
  add_side(plan, 0, q.shape[1]);
  add_side(plan, 1, k.shape[1]);
  check_scratch(plan);
  return plan;
}

void check_forward_output(Plan& plan, int i, const char* x_name, const TensorView& x,
                          const char* y_name, const TensorView& y) {
  check_like(plan.op, y_name, y, x_name, x, checked_mul(2, x.shape[3], plan.op));
  check_output_layout(plan.op, y_name, y);
  check_no_overlap(plan.op, y_name, y, x_name, x);
  check_no_overlap(plan.op, y_name, y, "theta", plan.theta);
  check_apart_from_positions(plan, y_name, y);
  plan.side[i].x = operand(x, plan.C, Layout::kSingle);
  plan.side[i].y = operand(y, plan.C, Layout::kHalves);
}

}  // namespace

void lrpe_cosine_forward(const TensorView& x, const TensorView& theta, const TensorView& y,
                         const LrpeCosineOptions& options, Context& context) {
  constexpr const char* op = "lrpe_cosine";
  check_tensor(op, "x", x, 4);
  Plan plan = cosine_plan(op, "x", x, x.shape[3], theta, options);
  check_forward_output(plan, 0, "x", x, "y", y);
  run_forward(plan, context);
}

void lrpe_cosine_backward(const TensorView& dy, const TensorView& x, const TensorView& theta,
                          const TensorView& dx, const TensorView& dtheta,
                          const LrpeCosineOptions& options, Context& context) {
  constexpr const char* op = "lrpe_cosine_backward";
  check_tensor(op, "dy", dy, 4);
  Plan plan = cosine_plan(op, "dy", dy, even_columns(op, "dy", dy), theta, options);
  check_dtheta(plan, dtheta);
  check_gradients(plan, 0, "dy", dy, "x", x, "dx", dx, Layout::kSingle, Layout::kHalves);
  check_no_overlap(op, "dx", dx, "dy", dy);
  run_backward(plan, context);
}

void lrpe_cosine_qk_forward(const TensorView& q, const TensorView& k, const TensorView& theta,
                            const TensorView& yq, const TensorView& yk,
                            const LrpeCosineOptions& options, Context& context) {
  constexpr const char* op = "lrpe_cosine_qk";
  check_tensor(op, "q", q, 4);
  Plan plan = qk_plan(op, "q", q, "k", k, q.shape[3], theta, options);
  check_forward_output(plan, 0, "q", q, "yq", yq);
  check_forward_output(plan, 1, "k", k, "yk", yk);
  check_no_overlap(op, "yq", yq, "yk", yk);
  check_no_overlap(op, "yq", yq, "k", k);
  check_no_overlap(op, "yk", yk, "q", q);
  run_forward(plan, context);
}

void lrpe_cosine_qk_backward(const TensorView& dyq, const TensorView& dyk, const TensorView& q,
                             const TensorView& k, const TensorView& theta, const TensorView& dq,
                             const TensorView& dk, const TensorView& dtheta,
                             const LrpeCosineOptions& options, Context& context) {
  constexpr const char* op = "lrpe_cosine_qk_backward";
  check_tensor(op, "dyq", dyq, 4);
  Plan plan = qk_plan(op, "dyq", dyq, "dyk", dyk, even_columns(op, "dyq", dyq), theta, options);
  check_dtheta(plan, dtheta);
  check_gradients(plan, 0, "dyq", dyq, "q", q, "dq", dq, Layout::kSingle, Layout::kHalves);
  check_gradients(plan, 1, "dyk", dyk, "k", k, "dk", dk, Layout::kSingle, Layout::kHalves);
  check_no_overlap(op, "dq", dq, "dyq", dyq);
  check_no_overlap(op, "dq", dq, "dyk", dyk);
  check_no_overlap(op, "dk", dk, "dyq", dyq);
  check_no_overlap(op, "dk", dk, "dyk", dyk);
  check_no_overlap(op, "dq", dq, "dk", dk);
  if (needs_x(plan)) {
    check_no_overlap(op, "dq", dq, "k", k);
    check_no_overlap(op, "dk", dk, "q", q);
  }
  run_backward(plan, context);
}

void lrpe_rotate_forward(const TensorView& x, const TensorView& theta, const TensorView& y,
                         const LrpeRotateOptions& options, Context& context) {
  constexpr const char* op = "lrpe_rotate";
  Plan plan = rotate_plan(op, "x", x, theta, options);
  check_like(op, "y", y, "x", x, x.shape[3]);
  check_output_layout(op, "y", y);
  if (!same_view(x, y)) check_no_overlap(op, "y", y, "x", x);
  check_no_overlap(op, "y", y, "theta", theta);
  check_apart_from_positions(plan, "y", y);
  const Layout layout = options.interleaved ? Layout::kInterleaved : Layout::kHalves;
  plan.side[0].x = operand(x, plan.C, layout);
  plan.side[0].y = operand(y, plan.C, layout);
  run_forward(plan, context);
}

void lrpe_rotate_backward(const TensorView& dy, const TensorView& x, const TensorView& theta,
                          const TensorView& dx, const TensorView& dtheta,
                          const LrpeRotateOptions& options, Context& context) {
  constexpr const char* op = "lrpe_rotate_backward";
  Plan plan = rotate_plan(op, "dy", dy, theta, options);
  check_dtheta(plan, dtheta);
  const Layout layout = options.interleaved ? Layout::kInterleaved : Layout::kHalves;
  check_gradients(plan, 0, "dy", dy, "x", x, "dx", dx, layout, layout);
  if (plan.need_dtheta || !same_view(dx, dy)) check_no_overlap(op, "dx", dx, "dy", dy);
  run_backward(plan, context);
}

namespace {

// For a question about sizes no data is needed: any aligned address stands in for it.
TensorView sized(TensorView v) {
  if (v.data == nullptr) v.data = reinterpret_cast<void*>(std::uintptr_t{4096});
  return v;
}
template <class Options>
Options sized(Options options) {
  if (options.offsets.defined()) options.offsets = sized(options.offsets);
  if (options.position_ids.defined()) options.position_ids = sized(options.position_ids);
  return options;
}

}  // namespace

std::size_t lrpe_cosine_forward_workspace(const TensorView& x, const TensorView& theta,
                                          const LrpeCosineOptions& options) {
  check_tensor("lrpe_cosine", "x", sized(x), 4);
  return forward_scratch(
      cosine_plan("lrpe_cosine", "x", sized(x), x.shape[3], sized(theta), sized(options)));
}

std::size_t lrpe_cosine_backward_workspace(const TensorView& x, const TensorView& theta,
                                           bool need_dtheta, const LrpeCosineOptions& options) {
  check_tensor("lrpe_cosine_backward", "x", sized(x), 4);
  Plan plan =
      cosine_plan("lrpe_cosine_backward", "x", sized(x), x.shape[3], sized(theta), sized(options));
  plan.need_dtheta = need_dtheta;
  return backward_scratch(plan);
}

std::size_t lrpe_cosine_qk_forward_workspace(const TensorView& q, const TensorView& k,
                                             const TensorView& theta,
                                             const LrpeCosineOptions& options) {
  check_tensor("lrpe_cosine_qk", "q", sized(q), 4);
  return forward_scratch(qk_plan("lrpe_cosine_qk", "q", sized(q), "k", sized(k), q.shape[3],
                                 sized(theta), sized(options)));
}

std::size_t lrpe_cosine_qk_backward_workspace(const TensorView& q, const TensorView& k,
                                              const TensorView& theta, bool need_dtheta,
                                              const LrpeCosineOptions& options) {
  check_tensor("lrpe_cosine_qk_backward", "q", sized(q), 4);
  Plan plan = qk_plan("lrpe_cosine_qk_backward", "q", sized(q), "k", sized(k), q.shape[3],
                      sized(theta), sized(options));
  plan.need_dtheta = need_dtheta;
  return backward_scratch(plan);
}

std::size_t lrpe_rotate_forward_workspace(const TensorView& x, const TensorView& theta,
                                          const LrpeRotateOptions& options) {
  return forward_scratch(rotate_plan("lrpe_rotate", "x", sized(x), sized(theta), sized(options)));
}

std::size_t lrpe_rotate_backward_workspace(const TensorView& x, const TensorView& theta,
                                           bool need_dtheta, const LrpeRotateOptions& options) {
  Plan plan = rotate_plan("lrpe_rotate_backward", "x", sized(x), sized(theta), sized(options));
  plan.need_dtheta = need_dtheta;
  return backward_scratch(plan);
}

namespace {

Support support(DeviceType device) {
  if (device == DeviceType::kCPU) return {true, cpu::simd_description()};
#if ANNULUS_HAVE_CUDA
  return lrpe_cosine::cuda::support();
#else
  return {false, "this build has no CUDA backend (ANNULUS_CUDA=OFF)"};
#endif
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
