// One attention problem as a Case: its tensors, its calls, its definition, its values, and the naive program that the
// numeric policy compares us with.
#include "annulus/attention/test/cases.h"

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <limits>
#include <numeric>
#include <string>
#include <string_view>
#include <utility>

#include "annulus/attention/ref.h"
#include "annulus/attention/test/parts.h"
#include "annulus/core/dispatch.h"
#include "annulus/core/values.h"

namespace annulus::testing {

namespace {

using Form = AttentionProblem::Form;
using Special = AttentionProblem::Special;

std::string joined(const std::vector<std::int64_t>& values) {
  std::string s;
  for (const std::int64_t v : values) s += (s.empty() ? "" : ",") + std::to_string(v);
  return s;
}

std::string describe(const AttentionProblem& p) {
  static constexpr const char* kForms[] = {"dense", "varlen", "dilated", "blocks"};
  std::string s = std::string("form=") + kForms[static_cast<int>(p.form)];
  const auto number = [&](const char* name, std::int64_t v) {
    s += std::string(" ") + name + "=" + std::to_string(v);
  };
  const auto flag = [&](const char* name, bool is) {
    if (is) s += std::string(" ") + name;
  };
  const auto real = [&](const char* name, double v) {
    char text[48];
    std::snprintf(text, sizeof text, " %s=%.4g", name, v);
    s += text;
  };
  if (p.form == Form::kVarlen) {
    s += " q=" + joined(p.query_lengths) + " k=" + joined(p.packed_key_lengths);
  } else {
    number("B", p.B);
    number("Tq", p.Tq);
    number("Tk", p.Tk);
  }
  number("H", p.H);
  number("Hkv", p.Hkv);
  number("D", p.D);
  number("Dv", p.Dv);
  s += std::string(" dtype=") + name_of(p.dtype);
  flag("causal", p.causal);
  if (p.scale) real("scale", *p.scale);
  if (p.dropout > 0) real("dropout", p.dropout);
  flag("deterministic", p.deterministic);
  flag("portable", p.portable);
  if (p.window_left >= 0) number("left", p.window_left);
  if (p.window_right >= 0) number("right", p.window_right);
  if (!p.key_lengths.empty()) s += " key_lengths=" + joined(p.key_lengths);
  flag("order", p.order);
  if (p.form == Form::kDilated) {
    static constexpr const char* kModes[] = {"longnet", "grouped", "grouped_kv"};
    s += std::string(" mode=") + kModes[static_cast<int>(p.mode)] + " w=" + joined(p.segments) +
         " r=" + joined(p.rates);
    flag("offsets=block", p.offsets == DilatedOffsets::kBlock);
    flag("unite", p.unite);
    flag("stop_alpha", p.stop_alpha_gradient);
    flag("remainder_last", p.remainder_last);
  }
  if (p.form == Form::kBlocks) {
    number("block", p.block_size);
    real("density", p.density);
    flag("shared_list", p.shared_list);
  }
  static constexpr const char* kSpecials[] = {"",       "nan_q",  "nan_k", "nan_v", "inf_v",
                                              "nan_do", "inf_do", "inf_q", "inf_k"};
  flag(kSpecials[static_cast<int>(p.special)], p.special != Special::kNone);
  if (!p.lse) return s + " grads=none,no_lse";
  s += p.need_dq ? (p.need_dkv ? " grads=dq,dk,dv" : " grads=dq")
                 : (p.need_dkv ? " grads=dk,dv" : " grads=none");
  flag("dlse", p.dlse);
  return s;
}

// --- the functions of the four forms ---------------------------------------------------------------------------

// The inputs of a call by name.
struct Inputs {
  Views views;
  const std::vector<TensorSpec>& specs;
  TensorView operator[](std::string_view name) const { return pick(views, specs, name); }
};

AttentionOptions dense_options(const AttentionProblem& p, const Inputs& in) {
  return dense_options(p, in["order"], in["key_lengths"]);
}
BlockSparseAttentionOptions block_options(const AttentionProblem& p, const Inputs& in) {
  return block_options(p, in["row_ptr"], in["col_idx"], in["order"]);
}

void run_forward(const AttentionProblem& p, const Inputs& in, const TensorView& o,
                 const TensorView& lse, Context& context) {
  const TensorView q = in["q"], k = in["k"], v = in["v"];
  switch (p.form) {
    case Form::kDense:
      return attention_forward(q, k, v, o, lse, dense_options(p, in), context);
    case Form::kVarlen:
      return attention_varlen_forward(q, k, v, in["cu_seqlens_q"], in["cu_seqlens_k"], o, lse,
                                      dense_options(p, in), context);
    case Form::kDilated:
      return dilated_attention_forward(q, k, v, o, lse, dilated_options(p), context);
    case Form::kBlocks:
      return block_sparse_attention_forward(q, k, v, o, lse, block_options(p, in), context);
  }
}

void run_backward(const AttentionProblem& p, const Inputs& in, const TensorView& dq,
                  const TensorView& dk, const TensorView& dv, Context& context) {
  const TensorView q = in["q"], k = in["k"], v = in["v"], o = in["o"], lse = in["lse"];
  const TensorView d_o = in["do"], dlse = in["dlse"];
  switch (p.form) {
    case Form::kDense:
      return attention_backward(d_o, dlse, q, k, v, o, lse, dq, dk, dv, dense_options(p, in),
                                context);
    case Form::kVarlen:
      return attention_varlen_backward(d_o, dlse, q, k, v, in["cu_seqlens_q"], in["cu_seqlens_k"],
                                       o, lse, dq, dk, dv, dense_options(p, in), context);
    case Form::kDilated:
      return dilated_attention_backward(d_o, dlse, q, k, v, o, lse, dq, dk, dv, dilated_options(p),
                                        context);
    case Form::kBlocks:
      return block_sparse_attention_backward(d_o, dlse, q, k, v, o, lse, dq, dk, dv,
                                             block_options(p, in), context);
  }
}

std::size_t workspace_of(const AttentionProblem& p, const Inputs& in, bool backward) {
  const TensorView q = in["q"], k = in["k"], v = in["v"];
  const auto either = [&](auto* of_forward, auto* of_backward, const auto&... more) {
    return backward ? of_backward(q, k, v, more..., p.deterministic) : of_forward(q, k, v, more...);
  };
  switch (p.form) {
    case Form::kDense:
      return either(attention_forward_workspace, attention_backward_workspace,
                    dense_options(p, in));
    case Form::kVarlen:
      return either(attention_varlen_forward_workspace, attention_varlen_backward_workspace,
                    in["cu_seqlens_q"], in["cu_seqlens_k"], dense_options(p, in));
    case Form::kDilated:
      return either(dilated_attention_forward_workspace, dilated_attention_backward_workspace,
                    dilated_options(p));
    case Form::kBlocks:
      return either(block_sparse_attention_forward_workspace,
                    block_sparse_attention_backward_workspace, block_options(p, in));
  }
  return 0;
}

template <class Arithmetic, class F>
void define(const AttentionProblem& p, const Inputs& in, F&& f) {
  using attention::with_definition;
  const TensorView q = in["q"], k = in["k"], v = in["v"];
  if (p.form == Form::kDilated) {
    return with_definition<Arithmetic>(q, k, v, dilated_options(p), f);
  }
  if (p.form == Form::kBlocks) {
    return with_definition<Arithmetic>(q, k, v, block_options(p, in), f);
  }
  with_definition<Arithmetic>(q, k, v, dense_options(p, in), in["cu_seqlens_q"], in["cu_seqlens_k"],
                              f);
}

// The naive program: sums in fp32, and T where it writes P, dS or o.
template <class T>
struct Naive {
  using Number = float;
  static float stored(float x) { return static_cast<float>(T(x)); }
  // Last term first. <do, v> is a part of a matrix product and <do, o> is not, so that no program has both in the same order;
  // one that did would be right by luck where a query has one key, and both are the same number.
  static float row_sum(const float* a, const float* b, std::int64_t n) {
    float sum = 0;
    while (n-- > 0) sum += a[n] * b[n];
    return sum;
  }
};

// f.operator()<Arithmetic>(in, out).
template <class F>
void set_judges(Call& call, const AttentionProblem& p, F f) {
  call.reference = [f](Views in, Views out) { f.template operator()<attention::Exact>(in, out); };
  call.baseline = [f, t = p.dtype](Views in, Views out) {
    visit_floating(t, [&]<class T>() {
      if constexpr (sizeof(T) <= sizeof(float)) f.template operator()<Naive<T>>(in, out);
    });
  };
}

// --- calls -----------------------------------------------------------------------------------------------------

std::vector<std::int64_t> shape_of(const AttentionProblem& p, std::int64_t rows, std::int64_t heads,
                                   std::int64_t columns) {
  if (p.form == Form::kVarlen) return {rows, heads, columns};
  return {p.B, rows, heads, columns};
}
TensorSpec o_spec(const AttentionProblem& p, const char* name) {
  return {name, p.dtype, shape_of(p, p.Tq, p.H, p.Dv)};
}
TensorSpec lse_spec(const AttentionProblem& p, const char* name) {
  if (p.form == Form::kVarlen) return {name, DType::kF32, {p.H, p.Tq}};
  return {name, DType::kF32, {p.B, p.H, p.Tq}};
}

double bytes_of(const std::vector<TensorSpec>& specs) {
  double bytes = 0;
  for (const TensorSpec& s : specs) bytes += static_cast<double>(numel_of(s) * size_of(s.dtype));
  return bytes;
}

// How products are made is the header's word; those of 16-bit tensors are judged by their dtype, and lse beside them as f32.
Precision precision_of(const AttentionProblem& p, Device device) {
  if (p.dtype != DType::kF32) return Precision::kAuto;
  return device.type == DeviceType::kCUDA ? Precision::kBf16x3 : Precision::kFp32;
}

Call forward_call(const AttentionProblem& p) {
  Call call;
  call.name = "forward";
  call.inputs = {{"q", p.dtype, shape_of(p, p.Tq, p.H, p.D)},
                 {"k", p.dtype, shape_of(p, p.Tk, p.Hkv, p.D)},
                 {"v", p.dtype, shape_of(p, p.Tk, p.Hkv, p.Dv)}};
  for (const NamedIntegers& i : integers_of(p)) call.inputs.push_back({i.name, i.dtype, i.shape});
  call.outputs = {o_spec(p, "o")};
  if (p.lse) {
    call.outputs.push_back(lse_spec(p, "lse"));
    call.outputs.back().unpaired = !p.dlse;
  }
  const auto lse_of = [](Views out) { return out.size() > 1 ? out[1] : TensorView{}; };
  // Hopper's kernels take whole vectors.
  call.kernels_by_layout = !p.portable && p.dtype != DType::kF32 && p.D <= 128 && p.Dv <= 128 &&
                           p.D % 8 == 0 && p.Dv % 8 == 0 && p.dropout == 0 && !p.unite;
  call.run = [=, specs = call.inputs](Views in, Views out, Context& context) {
    context.portable = p.portable;
    run_forward(p, {in, specs}, out[0], lse_of(out), context);
  };
  call.workspace = [=, specs = call.inputs](Views in, Views) {
    return workspace_of(p, {in, specs}, false);
  };
  set_judges(call, p, [=, specs = call.inputs]<class Arithmetic>(Views in, Views out) {
    define<Arithmetic>(p, {in, specs},
                       [&](const auto& definition) { definition.forward(out[0], lse_of(out)); });
  });
  call.precision = [=](Device device) { return precision_of(p, device); };
  call.terms = {"q", "k", "v"};
  call.flops = attention_pairs(p) * static_cast<double>(2 * p.D + 2 * p.Dv);
  call.bytes = bytes_of(call.inputs) + bytes_of(call.outputs);
  return call;
}

// Finite differences of lse say nothing where a query without a key has -inf. They are made of small problems only.
bool is_lse_infinite(const AttentionProblem& p, const Call& forward) {
  std::int64_t elements = 0;
  for (const TensorSpec& s : forward.inputs) elements += numel_of(s);
  return elements <= 1 << 13 && attention_census(p).empty_queries > 0;
}

Call backward_call(const AttentionProblem& p, const Call& forward) {
  Call call;
  call.name = "backward";
  call.inputs = forward.inputs;
  call.inputs.push_back(o_spec(p, "do"));
  if (p.dlse) call.inputs.push_back(lse_spec(p, "dlse"));
  for (TensorSpec s : {o_spec(p, "o"), lse_spec(p, "lse")}) {
    s.derived = true;
    call.inputs.push_back(s);
  }
  const bool unlike = p.dlse && is_lse_infinite(p, forward);
  for (std::size_t i = 0; i < 3; ++i) {
    if (i == 0 ? !p.need_dq : !p.need_dkv) continue;
    TensorSpec s = forward.inputs[i];
    s.name = "d" + s.name;
    // With a constant alpha dq and dk are no derivatives of the forward.
    s.unpaired = (p.stop_alpha_gradient && i < 2) || unlike;
    s.reordered = i == 0 && !p.deterministic && p.dtype != DType::kF32;
    call.outputs.push_back(s);
  }
  const std::vector<TensorSpec> out_specs = call.outputs;
  const auto to = [=](Views out, std::string_view name) { return pick(out, out_specs, name); };
  call.prepare = [=, specs = call.inputs](Views in, Context& context) {
    const Inputs all{in, specs};
    context.portable = p.portable;
    run_forward(p, all, all["o"], all["lse"], context);
  };
  call.kernels_by_layout = forward.kernels_by_layout;
  call.run = [=, specs = call.inputs](Views in, Views out, Context& context) {
    context.deterministic = p.deterministic;
    context.portable = p.portable;
    run_backward(p, {in, specs}, to(out, "dq"), to(out, "dk"), to(out, "dv"), context);
  };
  call.workspace = [=, specs = call.inputs](Views in, Views) {
    return workspace_of(p, {in, specs}, true);
  };
  set_judges(call, p, [=, specs = call.inputs]<class Arithmetic>(Views in, Views out) {
    const Inputs all{in, specs};
    define<Arithmetic>(p, all, [&](const auto& definition) {
      definition.backward(all["do"], all["dlse"], to(out, "dq"), to(out, "dk"), to(out, "dv"));
    });
  });
  call.precision = forward.precision;
  call.terms = {"q", "k", "v", "do", "dlse"};
  // S again, dP, dV, and dQ and dK.
  const double of_dq = p.need_dq ? 2 : 0, of_dkv = p.need_dkv ? 2 : 0;
  call.flops = attention_pairs(p) * ((2 + of_dq + of_dkv) * static_cast<double>(p.D) +
                                     (2 + of_dkv) * static_cast<double>(p.Dv));
  call.bytes = bytes_of(call.inputs) + bytes_of(call.outputs);
  return call;
}

// --- values ----------------------------------------------------------------------------------------------------

struct Spoilt {
  std::string_view tensor;
  double value = 0;
};
Spoilt spoilt_of(Special special) {
  const double nan = std::nan(""), infinity = std::numeric_limits<double>::infinity();
  const Spoilt kAll[] = {
      {},          {"q", nan},       {"k", nan},      {"v", nan},     {"v", infinity},
      {"do", nan}, {"do", infinity}, {"q", infinity}, {"k", infinity}};
  return kAll[static_cast<std::size_t>(special)];
}

void draw(const AttentionProblem& p, Rng& rng, const TensorSpec& spec, std::span<double> values) {
  if (!is_floating(spec.dtype)) return;  // see refine
  // dlse as large as the <do, v> that it is added to: of a query with one key nothing but dlse is left, beside the roundings of
  // those.
  const double size = spec.name == "q"      ? p.q_size
                      : spec.name == "dlse" ? std::sqrt(static_cast<double>(p.Dv))
                                            : 1;
  for (double& v : values) v = size * rng.normal();
  const Spoilt spoilt = spoilt_of(p.special);
  if (spec.name != spoilt.tensor || values.empty()) return;
  // Everything that its head and sample make of it is NaN, so the others must prove the rest.
  const auto axes = spec.shape.size();
  const std::int64_t columns = spec.shape[axes - 1], heads = spec.shape[axes - 2],
                     rows = spec.shape[axes - 3];
  const auto all = static_cast<std::int64_t>(values.size());
  const std::int64_t last_head = all - rows * heads * columns + (heads - 1) * columns;
  const std::int64_t at = last_head + rng.below(rows) * heads * columns + rng.below(columns);
  values[static_cast<std::size_t>(at)] = spoilt.value;
}

// Products of f32 are bf16x3 on CUDA, which makes a NaN of an infinity. A score that is +inf is one by definition, and one
// that is -inf is not: where q or k has an infinity, the other's numbers that it meets are positive.
void make_positive_beside(const AttentionProblem& p, std::vector<std::vector<double>>& inputs) {
  const std::size_t own = p.special == Special::kInfinityQ ? 0 : 1;
  const auto columns = static_cast<std::size_t>(p.D);
  const auto at =
      std::find_if(inputs[own].begin(), inputs[own].end(), [](double x) { return std::isinf(x); });
  if (at == inputs[own].end()) return;
  auto& other = inputs[1 - own];
  for (std::size_t i = static_cast<std::size_t>(at - inputs[own].begin()) % columns;
       i < other.size(); i += columns) {
    other[i] = std::abs(other[i]);
  }
}

}  // namespace

AttentionProblem attention_totals(AttentionProblem p) {
  if (p.form != Form::kVarlen) return p;
  const auto sum = [](const auto& v) { return std::reduce(v.begin(), v.end(), std::int64_t{0}); };
  p.B = 1, p.Tq = sum(p.query_lengths), p.Tk = sum(p.packed_key_lengths);
  return p;
}

Case attention_case(AttentionProblem p) {
  static constexpr const char* kOps[] = {"attention", "attention", "dilated_attention",
                                         "block_sparse_attention"};
  p = attention_totals(std::move(p));
  Case c;
  c.op = kOps[static_cast<int>(p.form)];
  c.params = describe(p);
  c.seed = p.seed;
  c.calls.push_back(forward_call(p));
  if (p.lse && (p.need_dq || p.need_dkv)) c.calls.push_back(backward_call(p, c.calls[0]));
  c.draw = [p](Rng& rng, const TensorSpec& spec, std::span<double> values) {
    draw(p, rng, spec, values);
  };
  // Here and not in the draw, which repeats the first entry of a short tensor for every sample now and then.
  c.refine = [p](std::vector<std::vector<double>>& inputs) {
    const bool of_scores = p.special == Special::kInfinityQ || p.special == Special::kInfinityK;
    if (of_scores && p.dtype == DType::kF32) make_positive_beside(p, inputs);
    std::size_t at = 3;
    for (const NamedIntegers& i : integers_of(p)) {
      inputs[at++].assign(i.values.begin(), i.values.end());
    }
  };
  return c;
}

}  // namespace annulus::testing
