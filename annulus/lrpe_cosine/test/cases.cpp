// One LRPE problem as a Case: its tensors, its calls, its definition, its values and its limits.
#include "annulus/lrpe_cosine/test/cases.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <functional>
#include <limits>
#include <numeric>
#include <string>
#include <string_view>
#include <type_traits>

#include "annulus/core/values.h"
#include "annulus/lrpe_cosine/positions.h"
#include "annulus/lrpe_cosine/ref.h"
#include "testing/limits.h"

namespace annulus::testing {

namespace {

using Form = LrpeProblem::Form;

bool needs_x(const LrpeProblem& p) {
  return p.need_dtheta || (!is_rotate(p.form) && p.activation != LrpeActivation::kNone);
}

std::string describe(const LrpeProblem& p) {
  static constexpr const char* kForms[] = {"cosine",           "cosine_qk",
                                           "rotate_halves",    "rotate_interleaved",
                                           "rotate_qk_halves", "rotate_qk_interleaved"};
  static constexpr const char* kActivations[] = {
      "none", "relu", "sigmoid", "silu", "softmax_features", "softmax_tokens"};
  std::string s = std::string("form=") + kForms[static_cast<int>(p.form)] +
                  " B=" + std::to_string(p.B) + " H=" + std::to_string(p.H);
  if (is_qk(p.form)) s += " Hk=" + std::to_string(p.Hk);
  s += " L=";
  for (const std::int64_t n : p.shape.extents()) s += std::to_string(n) + "x";
  s.back() = '+';
  s += std::to_string(p.prefix) + " D=" + std::to_string(p.D) + " E=" + std::to_string(p.E) +
       " dtype=" + name_of(p.dtype) + " theta=" + name_of(p.theta_dtype);
  if (p.one_row) s += ",one_row";
  if (!is_rotate(p.form)) s += std::string(" act=") + kActivations[static_cast<int>(p.activation)];
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

// f(options of p's form).
template <class F>
decltype(auto) with_options(const LrpeProblem& p, Views in, const std::vector<TensorSpec>& specs,
                            F&& f) {
  LrpePositions at;
  if (p.ids == LrpeProblem::Ids::kNone) at.shape = p.shape;
  at.prefix = p.prefix;
  at.offset = p.offset;
  at.offsets = pick(in, specs, "offsets");
  at.position_ids = pick(in, specs, "position_ids");
  if (is_rotate(p.form)) {
    return f(rotate_options(
        at, p.form == Form::kRotateInterleaved || p.form == Form::kRotateQkInterleaved));
  }
  return f(cosine_options(at, p.activation));
}
template <class Options>
constexpr bool kRotates = std::is_same_v<Options, LrpeRotateOptions>;
// The function of a form.
template <bool kRotate, class Cosine, class Rotate>
constexpr auto pick_form(Cosine* cosine, Rotate* rotate) {
  if constexpr (kRotate) {
    return rotate;
  } else {
    return cosine;
  }
}

// The naive program the numeric policy compares us with: f32 (f64 for f64 tensors), float(position) * theta, std::cos.
template <class C>
struct Naive {
  using Number = C;
  using Frequency = C;
  static C frequency(C theta) { return theta; }
  static lrpe_cosine::SinCos<C> turned(C theta, std::int64_t position) {
    const C phi = static_cast<C>(position) * theta;
    return {std::sin(phi), std::cos(phi)};
  }
};

// One tensor of the call, of which the qk forms have two.
struct Side {
  std::int64_t heads;
  std::string x, dx, y, dy;
};

std::vector<Side> sides_of(const LrpeProblem& p) {
  if (!is_qk(p.form)) return {{p.H, "x", "dx", "y", "dy"}};
  return {{p.H, "q", "dq", "yq", "dyq"}, {p.Hk, "k", "dk", "yk", "dyk"}};
}

std::int64_t rows_of(const LrpeProblem& p) {
  return p.one_row ? 1 : is_qk(p.form) ? std::min(p.H, p.Hk) : p.H;
}

// f(side, dtheta of that side), the sum of which is dtheta.
template <class F>
void for_each_side(const LrpeProblem& p, const TensorView& dtheta, F&& f) {
  std::vector<double> sum(static_cast<std::size_t>(dtheta.numel()));
  for (const Side& side : sides_of(p)) {
    std::vector<double> storage(sum.size() + 1);  // of any dtype
    TensorView part;
    if (dtheta.defined()) part = contiguous(storage.data(), dtheta.dtype, dtheta.sizes());
    f(side, part);
    const std::vector<double> values = load_values<double>(part);
    for (std::size_t i = 0; i < values.size(); ++i) sum[i] += values[i];
  }
  store_values(dtheta, sum);
}

// Both are the definition (ref.h), in one arithmetic or another: loops.operator()<Arithmetic>(in, out).
template <class Loops>
void set_judges(Call& call, const LrpeProblem& p, Loops loops) {
  call.reference = [=](Views in, Views out) {
    loops.template operator()<lrpe_cosine::Exact>(in, out);
  };
  visit_bool(p.dtype == DType::kF64, [&]<bool kDouble>() {
    call.baseline = [=](Views in, Views out) {
      loops.template operator()<Naive<std::conditional_t<kDouble, double, float>>>(in, out);
    };
  });
}

Call forward_call(const LrpeProblem& p, const std::vector<TensorSpec>& common) {
  Call call;
  call.name = "forward";
  const std::int64_t L = tokens_of(p);
  const std::int64_t width = is_rotate(p.form) ? p.D : 2 * p.D;
  for (const Side& s : sides_of(p)) {
    call.inputs.push_back({s.x, p.dtype, {p.B, s.heads, L, p.D}});
    call.outputs.push_back({s.y, p.dtype, {p.B, s.heads, L, width}});
  }
  call.inputs.insert(call.inputs.end(), common.begin(), common.end());
  const auto in_specs = call.inputs;
  const auto out_specs = call.outputs;

  call.run = [=](Views in, Views out, Context& context) {
    const TensorView theta = pick(in, in_specs, "theta");
    with_options(p, in, in_specs, [&]<class Options>(const Options& options) {
      constexpr bool kRotate = kRotates<Options>;
      if (is_qk(p.form)) {
        constexpr auto run = pick_form<kRotate>(lrpe_cosine_qk_forward, lrpe_rotate_qk_forward);
        run(in[0], in[1], theta, out[0], out[1], options, context);
      } else {
        constexpr auto run = pick_form<kRotate>(lrpe_cosine_forward, lrpe_rotate_forward);
        run(in[0], theta, out[0], options, context);
      }
    });
  };
  call.workspace = [=](Views in, Views) {
    const TensorView theta = pick(in, in_specs, "theta");
    return with_options(p, in, in_specs, [&]<class Options>(const Options& options) {
      constexpr bool kRotate = kRotates<Options>;
      constexpr auto one =
          pick_form<kRotate>(lrpe_cosine_forward_workspace, lrpe_rotate_forward_workspace);
      constexpr auto two =
          pick_form<kRotate>(lrpe_cosine_qk_forward_workspace, lrpe_rotate_qk_forward_workspace);
      return is_qk(p.form) ? two(in[0], in[1], theta, options) : one(in[0], theta, options);
    });
  };
  set_judges(call, p, [=]<class Arithmetic>(Views in, Views out) {
    with_options(p, in, in_specs, [&](const auto& options) {
      for (const Side& s : sides_of(p)) {
        lrpe_cosine::define_forward<Arithmetic>(pick(in, in_specs, s.x),
                                                pick(in, in_specs, "theta"),
                                                pick(out, out_specs, s.y), options);
      }
    });
  });
  const auto heads = static_cast<double>(p.H + (is_qk(p.form) ? p.Hk : 0));
  const double n = static_cast<double>(p.B * L * p.D) * heads;
  call.flops = n * (is_rotate(p.form) ? 3 : 2);
  call.bytes = n * static_cast<double>(size_of(p.dtype)) * (is_rotate(p.form) ? 2 : 3) +
               static_cast<double>(rows_of(p) * p.E * size_of(p.theta_dtype));
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
    const TensorView theta = get("theta"), dtheta = to("dtheta");
    with_options(p, in, in_specs, [&]<class Options>(const Options& options) {
      constexpr bool kRotate = kRotates<Options>;
      if (is_qk(p.form)) {
        constexpr auto run = pick_form<kRotate>(lrpe_cosine_qk_backward, lrpe_rotate_qk_backward);
        run(get("dyq"), get("dyk"), get("q"), get("k"), theta, to("dq"), to("dk"), dtheta, options,
            context);
      } else {
        constexpr auto run = pick_form<kRotate>(lrpe_cosine_backward, lrpe_rotate_backward);
        run(get("dy"), get("x"), theta, to("dx"), dtheta, options, context);
      }
    });
  };
  // The query reads device, dtype and shape of x, which the call itself may do without.
  call.workspace = [=](Views in, Views) {
    const TensorView theta = pick(in, in_specs, "theta");
    const auto x_of = [&](const Side& s) {
      TensorView v = pick(in, in_specs, s.dy);
      v.shape[3] = p.D;
      return v;
    };
    const TensorView x = x_of(sides.front()), k = x_of(sides.back());
    return with_options(p, in, in_specs, [&]<class Options>(const Options& options) {
      constexpr bool kRotate = kRotates<Options>;
      constexpr auto one =
          pick_form<kRotate>(lrpe_cosine_backward_workspace, lrpe_rotate_backward_workspace);
      constexpr auto two =
          pick_form<kRotate>(lrpe_cosine_qk_backward_workspace, lrpe_rotate_qk_backward_workspace);
      return is_qk(p.form) ? two(x, k, theta, p.need_dtheta, options)
                           : one(x, theta, p.need_dtheta, options);
    });
  };
  set_judges(call, p, [=]<class Arithmetic>(Views in, Views out) {
    with_options(p, in, in_specs, [&](const auto& options) {
      for_each_side(p, pick(out, out_specs, "dtheta"),
                    [&](const Side& s, const TensorView& dtheta) {
                      lrpe_cosine::define_backward<Arithmetic>(
                          pick(in, in_specs, s.dy), pick(in, in_specs, s.x),
                          pick(in, in_specs, "theta"), pick(out, out_specs, s.dx), dtheta, options);
                    });
    });
  });
  const double n = forward.flops / (is_rotate(p.form) ? 3 : 2);
  call.flops = n * 3 + (p.need_dtheta ? n * 4 : 0);
  call.bytes =
      n * static_cast<double>(size_of(p.dtype)) *
          ((is_rotate(p.form) ? 1 : 2) + (p.need_dx ? 1 : 0) + (needs_x(p) ? 1 : 0)) +
      static_cast<double>(rows_of(p) * p.E * size_of(p.theta_dtype)) * (p.need_dtheta ? 2 : 1);
  return call;
}

double special_value(Rng& rng, const LrpeProblem& p) {
  constexpr double kInfinity = std::numeric_limits<double>::infinity();
  const FloatFormat f = format_of(p.dtype);
  const auto kind = static_cast<std::size_t>(rng.below(7));
  if (kind == 2) return std::ldexp(rng.uniform() - 0.5, f.min_exponent);
  // dtheta multiplies by positions and sums: leave it room.
  const double large = !p.need_dtheta ? f.max_finite : p.dtype == DType::kF16 ? 1e3 : 1e20;
  return std::array{0.0, -0.0, 0.0, large, std::nan(""), kInfinity, -kInfinity}[kind];
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

std::int64_t tokens_of(const LrpeProblem& p) {
  const auto extents = p.shape.extents();
  return p.prefix + std::reduce(extents.begin(), extents.end(), std::int64_t{1}, std::multiplies());
}

Case lrpe_case(LrpeProblem p) {
  // A list over all forms says E of the cosine's, and a pair has one frequency for two columns.
  if (p.D > 0) p.E = std::min(p.E, is_rotate(p.form) ? p.D / 2 : p.D);
  Case c;
  c.op = "lrpe_cosine";
  c.params = describe(p);
  c.seed = p.seed;
  std::vector<TensorSpec> common = {{"theta", p.theta_dtype, {rows_of(p), p.E}}};
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
  c.limits = is_rotate(p.form) ? kLrpeRotateLimits
             : softmax         ? kLrpeSoftmaxLimits
                               : kLrpeProductLimits;
  return c;
}

}  // namespace annulus::testing
