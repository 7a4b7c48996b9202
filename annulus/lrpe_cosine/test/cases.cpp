// One LRPE problem as a Case: its tensors, its calls, its definition, its values and its limits.
#include "annulus/lrpe_cosine/test/cases.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <string>
#include <string_view>

#include "annulus/core/values.h"
#include "testing/limits.h"

namespace annulus::testing {

namespace {

using Form = LrpeProblem::Form;

bool is_rotate(const LrpeProblem& p) {
  return p.form == Form::kRotateHalves || p.form == Form::kRotateInterleaved;
}

std::int64_t tokens_of(const LrpeProblem& p) {
  std::int64_t n = 1;
  for (int i = 0; i < p.shape.axes; ++i) n *= p.shape.extent[static_cast<std::size_t>(i)];
  return p.prefix + n;
}

bool needs_x(const LrpeProblem& p) {
  return p.need_dtheta || (!is_rotate(p) && p.activation != LrpeActivation::kNone);
}

const char* activation_name(LrpeActivation a) {
  switch (a) {
    case LrpeActivation::kNone:
      return "none";
    case LrpeActivation::kRelu:
      return "relu";
    case LrpeActivation::kSigmoid:
      return "sigmoid";
    case LrpeActivation::kSilu:
      return "silu";
    case LrpeActivation::kSoftmaxFeatures:
      return "softmax_features";
    case LrpeActivation::kSoftmaxTokens:
      return "softmax_tokens";
  }
  return "unknown";
}

std::string describe(const LrpeProblem& p) {
  static constexpr const char* kForms[] = {"cosine", "cosine_qk", "rotate_halves",
                                           "rotate_interleaved"};
  std::string s = std::string("form=") + kForms[static_cast<int>(p.form)] +
                  " B=" + std::to_string(p.B) + " H=" + std::to_string(p.H);
  if (p.form == Form::kCosineQk) s += " Hk=" + std::to_string(p.Hk);
  s += " L=";
  for (int i = 0; i < p.shape.axes; ++i) {
    s += (i > 0 ? "x" : "") + std::to_string(p.shape.extent[static_cast<std::size_t>(i)]);
  }
  s += "+" + std::to_string(p.prefix) + " D=" + std::to_string(p.D) + " E=" + std::to_string(p.E) +
       " dtype=" + name_of(p.dtype) + " theta=" + name_of(p.theta_dtype);
  if (!is_rotate(p)) s += std::string(" act=") + activation_name(p.activation);
  if (p.offset != 0) s += " offset=" + std::to_string(p.offset);
  if (p.offset_per_batch) s += " offsets=yes";
  if (p.ids != LrpeProblem::Ids::kNone) {
    static constexpr const char* kValues[] = {"packed", "far_runs", "near", "far"};
    s += p.ids == LrpeProblem::Ids::kShared ? " ids=shared," : " ids=own,";
    s += kValues[static_cast<int>(p.id_values)];
  }
  s += p.need_dx ? (p.need_dtheta ? " grads=dx,dtheta" : " grads=dx")
                 : (p.need_dtheta ? " grads=dtheta" : " grads=none");
  return s;
}

LrpePositions positions_of(const LrpeProblem& p, Views in, const std::vector<TensorSpec>& specs) {
  LrpePositions o;
  if (p.ids == LrpeProblem::Ids::kNone) o.shape = p.shape;
  o.prefix = p.prefix;
  o.offset = p.offset;
  o.offsets = pick(in, specs, "offsets");
  o.position_ids = pick(in, specs, "position_ids");
  return o;
}

template <class Options>
Options options_of(const LrpeProblem& p, const LrpePositions& positions) {
  Options o;
  static_cast<LrpePositions&>(o) = positions;
  if constexpr (requires { o.activation; }) {
    o.activation = p.activation;
  } else {
    o.interleaved = p.form == Form::kRotateInterleaved;
  }
  return o;
}

// One half of the qk form as a problem of its own: theta with its rows repeated for every head of a
// group. With one side only this is the identity, so reference and baseline treat all forms alike.
struct Side {
  LrpeProblem problem;
  std::string x, dx, y, dy;
  std::int64_t group = 1;
};

std::vector<Side> sides_of(const LrpeProblem& p) {
  if (p.form != Form::kCosineQk) return {{p, "x", "dx", "y", "dy", 1}};
  LrpeProblem q = p;
  LrpeProblem k = p;
  q.form = k.form = Form::kCosine;
  k.H = p.Hk;
  const std::int64_t rows = std::min(p.H, p.Hk);
  const auto group = [&](std::int64_t heads) { return rows == 0 ? 1 : heads / rows; };
  return {{q, "q", "dq", "yq", "dyq", group(q.H)}, {k, "k", "dk", "yk", "dyk", group(k.H)}};
}

// f(side, theta with its rows repeated, dtheta of that side): dtheta's rows are summed over sides and
// groups.
template <class F>
void for_each_side(const LrpeProblem& p, const TensorView& theta, const TensorView& dtheta, F&& f) {
  const std::int64_t rows = theta.shape[0], E = theta.shape[1];
  const std::vector<double> values = load_values<double>(theta);
  std::vector<double> sum(static_cast<std::size_t>(dtheta.numel()));
  for (const Side& side : sides_of(p)) {
    const auto own_row = [&](std::size_t i) {
      const auto at = static_cast<std::int64_t>(i);
      return static_cast<std::size_t>(at / E / side.group * E + at % E);
    };
    const std::array<std::int64_t, 2> shape = {rows * side.group, E};
    std::vector<double> repeated(static_cast<std::size_t>(shape[0] * E));
    for (std::size_t i = 0; i < repeated.size(); ++i) repeated[i] = values[own_row(i)];
    std::vector<double> storage(repeated.size() + 1),
        dstorage(repeated.size() + 1);  // of any dtype
    const TensorView theta_side = contiguous(storage.data(), theta.dtype, shape);
    store_values(theta_side, repeated);
    TensorView dtheta_side;
    if (dtheta.defined()) dtheta_side = contiguous(dstorage.data(), dtheta.dtype, shape);
    f(side, theta_side, dtheta_side);
    const std::vector<double> part = load_values<double>(dtheta_side);
    for (std::size_t i = 0; i < part.size(); ++i) sum[own_row(i)] += part[i];
  }
  store_values(dtheta, sum);
}

Call forward_call(const LrpeProblem& p, const std::vector<TensorSpec>& common) {
  Call call;
  call.name = "forward";
  const std::int64_t L = tokens_of(p);
  const std::int64_t width = is_rotate(p) ? p.D : 2 * p.D;
  for (const Side& s : sides_of(p)) {
    call.inputs.push_back({s.x, p.dtype, {p.B, s.problem.H, L, p.D}});
    call.outputs.push_back({s.y, p.dtype, {p.B, s.problem.H, L, width}});
  }
  call.inputs.insert(call.inputs.end(), common.begin(), common.end());
  const auto in_specs = call.inputs;
  const auto out_specs = call.outputs;

  call.run = [=](Views in, Views out, Context& context) {
    const auto get = [&](std::string_view n) { return pick(in, in_specs, n); };
    const LrpePositions at = positions_of(p, in, in_specs);
    if (p.form == Form::kCosineQk) {
      lrpe_cosine_qk_forward(in[0], in[1], get("theta"), out[0], out[1],
                             options_of<LrpeCosineOptions>(p, at), context);
    } else if (is_rotate(p)) {
      lrpe_rotate_forward(in[0], get("theta"), out[0], options_of<LrpeRotateOptions>(p, at),
                          context);
    } else {
      lrpe_cosine_forward(in[0], get("theta"), out[0], options_of<LrpeCosineOptions>(p, at),
                          context);
    }
  };
  call.workspace = [=](Views in, Views) {
    const auto get = [&](std::string_view n) { return pick(in, in_specs, n); };
    const LrpePositions at = positions_of(p, in, in_specs);
    if (p.form == Form::kCosineQk) {
      return lrpe_cosine_qk_forward_workspace(in[0], in[1], get("theta"),
                                              options_of<LrpeCosineOptions>(p, at));
    }
    return is_rotate(p) ? lrpe_rotate_forward_workspace(in[0], get("theta"),
                                                        options_of<LrpeRotateOptions>(p, at))
                        : lrpe_cosine_forward_workspace(in[0], get("theta"),
                                                        options_of<LrpeCosineOptions>(p, at));
  };
  const auto loops = [=](auto cosine, auto rotate) {
    return [=](Views in, Views out) {
      const LrpePositions at = positions_of(p, in, in_specs);
      const auto one_side = [&](const Side& s, const TensorView& theta, const TensorView&) {
        const TensorView x = pick(in, in_specs, s.x), y = pick(out, out_specs, s.y);
        if (is_rotate(p)) {
          rotate(x, theta, y, options_of<LrpeRotateOptions>(p, at));
        } else {
          cosine(x, theta, y, options_of<LrpeCosineOptions>(p, at));
        }
      };
      for_each_side(p, pick(in, in_specs, "theta"), {}, one_side);
    };
  };
  call.reference = loops(reference::lrpe_cosine_forward, reference::lrpe_rotate_forward);
  call.baseline = loops(baseline::lrpe_cosine_forward, baseline::lrpe_rotate_forward);
  const auto heads = static_cast<double>(p.H + (p.form == Form::kCosineQk ? p.Hk : 0));
  const double n = static_cast<double>(p.B * L * p.D) * heads;
  call.flops = n * (is_rotate(p) ? 3 : 2);
  call.bytes = n * static_cast<double>(size_of(p.dtype)) * (is_rotate(p) ? 2 : 3) +
               static_cast<double>(p.H * p.E * size_of(p.theta_dtype));
  return call;
}

// The gradients that are zero by definition, so that a reference of zeros says nothing of the draw.
// dtheta sums position * (...): no token stands behind the prefix, or every one at position 0.
bool dtheta_is_zero(const LrpeProblem& p) {
  if (tokens_of(p) == p.prefix) return true;
  if (p.offset != 0 || p.offset_per_batch || p.ids != LrpeProblem::Ids::kNone) return false;
  return tokens_of(p) - p.prefix == 1;
}
// A softmax over one value is 1 whatever it is.
bool dx_is_zero(const LrpeProblem& p) {
  return (p.activation == LrpeActivation::kSoftmaxFeatures && p.D == 1) ||
         (p.activation == LrpeActivation::kSoftmaxTokens && tokens_of(p) == 1);
}

Call backward_call(const LrpeProblem& p, const std::vector<TensorSpec>& common,
                   const Call& forward) {
  Call call;
  call.name = "backward";
  const auto sides = sides_of(p);
  for (std::size_t i = 0; i < sides.size(); ++i) {
    call.inputs.push_back({sides[i].dy, p.dtype, forward.outputs[i].shape});
    if (needs_x(p)) call.inputs.push_back(forward.inputs[i]);
    if (!p.need_dx) continue;
    call.outputs.push_back({sides[i].dx, p.dtype, forward.inputs[i].shape});
    call.outputs.back().zero = dx_is_zero(p);
  }
  call.inputs.insert(call.inputs.end(), common.begin(), common.end());
  if (p.need_dtheta) {
    call.outputs.push_back({"dtheta", p.theta_dtype, common[0].shape});
    call.outputs.back().zero = dtheta_is_zero(p);
  }
  const auto in_specs = call.inputs;
  const auto out_specs = call.outputs;

  call.run = [=](Views in, Views out, Context& context) {
    const auto get = [&](std::string_view n) { return pick(in, in_specs, n); };
    const auto to = [&](std::string_view n) { return pick(out, out_specs, n); };
    const LrpePositions at = positions_of(p, in, in_specs);
    if (p.form == Form::kCosineQk) {
      lrpe_cosine_qk_backward(get("dyq"), get("dyk"), get("q"), get("k"), get("theta"), to("dq"),
                              to("dk"), to("dtheta"), options_of<LrpeCosineOptions>(p, at),
                              context);
    } else if (is_rotate(p)) {
      lrpe_rotate_backward(get("dy"), get("x"), get("theta"), to("dx"), to("dtheta"),
                           options_of<LrpeRotateOptions>(p, at), context);
    } else {
      lrpe_cosine_backward(get("dy"), get("x"), get("theta"), to("dx"), to("dtheta"),
                           options_of<LrpeCosineOptions>(p, at), context);
    }
  };
  // The query reads device, dtype and shape of x, which the call itself may do without.
  call.workspace = [=](Views in, Views) {
    const auto get = [&](std::string_view n) { return pick(in, in_specs, n); };
    const LrpePositions at = positions_of(p, in, in_specs);
    const auto x_like = [&](const Side& s) {
      TensorView v = get(s.dy);
      v.shape[3] = p.D;
      return v;
    };
    if (p.form == Form::kCosineQk) {
      return lrpe_cosine_qk_backward_workspace(x_like(sides[0]), x_like(sides[1]), get("theta"),
                                               p.need_dtheta, options_of<LrpeCosineOptions>(p, at));
    }
    return is_rotate(p)
               ? lrpe_rotate_backward_workspace(x_like(sides[0]), get("theta"), p.need_dtheta,
                                                options_of<LrpeRotateOptions>(p, at))
               : lrpe_cosine_backward_workspace(x_like(sides[0]), get("theta"), p.need_dtheta,
                                                options_of<LrpeCosineOptions>(p, at));
  };
  const auto loops = [=](auto cosine, auto rotate) {
    return [=](Views in, Views out) {
      const LrpePositions at = positions_of(p, in, in_specs);
      const auto one_side = [&](const Side& s, const TensorView& theta, const TensorView& dtheta) {
        const TensorView dy = pick(in, in_specs, s.dy), x = pick(in, in_specs, s.x);
        const TensorView dx = pick(out, out_specs, s.dx);
        if (is_rotate(p)) {
          rotate(dy, x, theta, dx, dtheta, options_of<LrpeRotateOptions>(p, at));
        } else {
          cosine(dy, x, theta, dx, dtheta, options_of<LrpeCosineOptions>(p, at));
        }
      };
      for_each_side(p, pick(in, in_specs, "theta"), pick(out, out_specs, "dtheta"), one_side);
    };
  };
  call.reference = loops(reference::lrpe_cosine_backward, reference::lrpe_rotate_backward);
  call.baseline = loops(baseline::lrpe_cosine_backward, baseline::lrpe_rotate_backward);
  const double n = forward.flops / (is_rotate(p) ? 3 : 2);
  call.flops = n * 3 + (p.need_dtheta ? n * 4 : 0);
  call.bytes = n * static_cast<double>(size_of(p.dtype)) *
                   ((is_rotate(p) ? 1 : 2) + (p.need_dx ? 1 : 0) + (needs_x(p) ? 1 : 0)) +
               static_cast<double>(p.H * p.E * size_of(p.theta_dtype)) * (p.need_dtheta ? 2 : 1);
  return call;
}

double special_value(Rng& rng, const LrpeProblem& p) {
  const FloatFormat f = format_of(p.dtype);
  switch (rng.below(7)) {
    case 0:
      return 0.0;
    case 1:
      return -0.0;
    case 2:
      return std::ldexp(rng.uniform() - 0.5, f.min_exponent);
    case 3:  // dtheta multiplies by positions and sums: leave it room
      return p.need_dtheta ? (p.dtype == DType::kF16 ? 1e3 : 1e20) : f.max_finite;
    case 4:
      return std::numeric_limits<double>::quiet_NaN();
    case 5:
      return std::numeric_limits<double>::infinity();
    default:
      return -std::numeric_limits<double>::infinity();
  }
}

// dtheta sums over all tokens, so what is not finite would make all of it NaN, which proves little:
// where it is asked for, only one column of the last head has such values, and more of them.
void draw_specials(Rng& rng, const LrpeProblem& p, const TensorSpec& spec,
                   std::span<double> values) {
  if (values.empty()) return;
  const std::int64_t heads = spec.shape[1], tokens = spec.shape[2], width = spec.shape[3];
  const std::int64_t spoilt = rng.below(width);
  for (std::size_t i = 0; i < values.size(); ++i) {
    const auto at = static_cast<std::int64_t>(i);
    const bool any =
        !p.need_dtheta || (at % width == spoilt && at / (tokens * width) % heads == heads - 1);
    if (rng.below(p.need_dtheta && any ? 4 : 32) != 0) continue;
    const double v = special_value(rng, p);
    if (any || std::isfinite(v)) values[i] = v;
  }
}

void draw_theta(Rng& rng, const LrpeProblem& p, std::span<double> values) {
  const std::int64_t kind = rng.below(20);
  // Frequencies of hundreds are fine, but not together with positions of 2^31, where no step of a
  // finite difference is both small enough and representable.
  const bool near =
      std::abs(p.offset) < (1 << 20) && !p.offset_per_batch && p.ids == LrpeProblem::Ids::kNone;
  for (std::size_t i = 0; i < values.size(); ++i) {
    const auto k =
        static_cast<double>(static_cast<std::int64_t>(i) % std::max<std::int64_t>(p.E, 1));
    if (kind == 0) {
      values[i] = 0;
    } else if (kind < 6) {
      values[i] = std::pow(10000.0, -2.0 * k / static_cast<double>(p.D));
    } else {
      values[i] = rng.normal() * (kind < 8 && near ? 300 : 1);
    }
  }
}

void draw_ids(Rng& rng, const LrpeProblem& p, std::span<double> values) {
  using Kind = LrpeProblem::IdValues;
  const Kind kind = p.id_values;
  const auto axes = static_cast<std::size_t>(p.shape.axes);
  const auto far = static_cast<double>(rng.below((1ll << 31) - 1000));
  std::int64_t left = 0;
  for (std::size_t i = 0; i < values.size(); i += axes) {
    const std::span<double> token = values.subspan(i, axes);
    if ((kind == Kind::kPacked || kind == Kind::kFarRuns) && left > 0) {
      for (std::size_t j = 0; j + 1 < axes; ++j) token[j] = values[i - axes + j];
      token[axes - 1] = values[i - 1] + 1;
    } else {
      for (double& v : token) {
        v = kind == Kind::kNear
                ? static_cast<double>(rng.below(201) - 100)
                : (kind == Kind::kPacked ? 0.0 : far) + static_cast<double>(rng.below(50));
      }
      if (kind == Kind::kPacked) token[axes - 1] = 0;
      left = 1 + rng.below(60);
    }
    --left;
  }
}

}  // namespace

Case lrpe_case(const LrpeProblem& p) {
  Case c;
  c.op = "lrpe_cosine";
  c.params = describe(p);
  c.seed = p.seed;
  const std::int64_t rows = p.form == Form::kCosineQk ? std::min(p.H, p.Hk) : p.H;
  std::vector<TensorSpec> common = {{"theta", p.theta_dtype, {rows, p.E}}};
  if (p.offset_per_batch) {
    common.push_back({"offsets", p.seed % 2 ? DType::kI32 : DType::kI64, {p.B}});
  }
  if (p.ids != LrpeProblem::Ids::kNone) {
    const std::int64_t rows_of_ids = p.ids == LrpeProblem::Ids::kShared ? 1 : p.B;
    common.push_back({"position_ids",
                      p.seed % 2 ? DType::kI32 : DType::kI64,
                      {rows_of_ids, tokens_of(p), p.shape.axes}});
  }
  c.calls.push_back(forward_call(p, common));
  if (p.need_dx || p.need_dtheta) c.calls.push_back(backward_call(p, common, c.calls[0]));
  c.draw = [p](Rng& rng, const TensorSpec& spec, std::span<double> values) {
    if (spec.name == "theta") return draw_theta(rng, p, values);
    if (spec.name == "position_ids") return draw_ids(rng, p, values);
    if (spec.name == "offsets") {
      const bool far = rng.below(3) == 0;
      for (double& v : values) {
        v = static_cast<double>(far ? rng.below(1ll << 31) : rng.below(2001) - 1000);
      }
      return;
    }
    for (double& v : values) v = rng.normal();
    const bool is_x = spec.name == "x" || spec.name == "q" || spec.name == "k";
    if (is_x && Rng(p.seed ^ 0x59ec1a1).below(20) == 0) draw_specials(rng, p, spec, values);
  };
  const bool softmax = p.activation == LrpeActivation::kSoftmaxFeatures ||
                       p.activation == LrpeActivation::kSoftmaxTokens;
  c.limits = is_rotate(p) ? kLrpeRotateLimits : softmax ? kLrpeSoftmaxLimits : kLrpeProductLimits;
  return c;
}

}  // namespace annulus::testing
