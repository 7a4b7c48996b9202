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
  static constexpr const char* kSpecials[] = {"", "nan_q", "nan_k", "nan_v", "inf_v"};
  flag(kSpecials[static_cast<int>(p.special)], p.special != Special::kNone);
  if (!p.lse) return s + " grads=none,no_lse";
  s += p.need_dq ? (p.need_dkv ? " grads=dq,dk,dv" : " grads=dq")
                 : (p.need_dkv ? " grads=dk,dv" : " grads=none");
  flag("dlse", p.dlse);
  return s;
}

// --- the integers of a problem, which are functions of it and of nothing drawn ---------------------------------

std::vector<std::int64_t> order_of(const AttentionProblem& p) {
  std::vector<std::int64_t> order(static_cast<std::size_t>(p.Tq));
  std::iota(order.begin(), order.end(), 0);
  Rng rng(p.seed ^ 0x04de4);
  for (std::size_t i = order.size(); i > 1; --i) {
    std::swap(order[i - 1],
              order[static_cast<std::size_t>(rng.below(static_cast<std::int64_t>(i)))]);
  }
  return order;
}

std::vector<std::int64_t> ends_of(const std::vector<std::int64_t>& lengths) {
  std::vector<std::int64_t> ends = {0};
  for (const std::int64_t n : lengths) ends.push_back(ends.back() + n);
  return ends;
}

struct NamedIntegers {
  const char* name;
  DType dtype;
  std::vector<std::int64_t> shape, values;
};

// In the order of the call's inputs, behind q, k and v.
std::vector<NamedIntegers> integers_of(const AttentionProblem& p) {
  const DType t = p.wide_integers ? DType::kI64 : DType::kI32;
  std::vector<NamedIntegers> all;
  const auto add = [&](const char* name, std::vector<std::int64_t> values) {
    all.push_back({name, t, {static_cast<std::int64_t>(values.size())}, std::move(values)});
  };
  if (p.form == Form::kVarlen) {
    add("cu_seqlens_q", ends_of(p.query_lengths));
    add("cu_seqlens_k", ends_of(p.packed_key_lengths));
  }
  if (p.form == Form::kBlocks) {
    Rng rng(p.seed ^ 0xb10c);
    const std::int64_t lists = p.shared_list ? 1 : p.H;
    const std::int64_t rows = (p.Tq + p.block_size - 1) / p.block_size;
    const std::int64_t columns = (p.Tk + p.block_size - 1) / p.block_size;
    std::vector<std::int64_t> row_ptr, col_idx;
    for (std::int64_t h = 0; h < lists; ++h) {
      for (std::int64_t x = 0; x < rows; ++x) {
        row_ptr.push_back(static_cast<std::int64_t>(col_idx.size()));
        for (std::int64_t c = 0; c < columns; ++c) {
          if (rng.uniform() < p.density) col_idx.push_back(c);
        }
      }
      row_ptr.push_back(static_cast<std::int64_t>(col_idx.size()));
    }
    all.push_back({"row_ptr", t, {lists, rows + 1}, row_ptr});
    const auto count = static_cast<std::int64_t>(col_idx.size());
    all.push_back({"col_idx", DType::kI32, {count}, std::move(col_idx)});
  }
  if (p.order) add("order", order_of(p));
  if (!p.key_lengths.empty()) add("key_lengths", p.key_lengths);
  return all;
}

// --- options ---------------------------------------------------------------------------------------------------

template <class Options>
void set_common(Options& o, const AttentionProblem& p) {
  o.causal = p.causal;
  o.softmax_scale = p.scale;
  o.dropout = p.dropout;
  o.dropout_seed = p.seed;
}
AttentionOptions dense_options(const AttentionProblem& p, const TensorView& order,
                               const TensorView& key_lengths) {
  AttentionOptions o;
  set_common(o, p);
  o.window_left = p.window_left;
  o.window_right = p.window_right;
  o.order = order;
  o.key_lengths = key_lengths;
  return o;
}
// Its spans are those of p.
DilatedAttentionOptions dilated_options(const AttentionProblem& p) {
  DilatedAttentionOptions o;
  set_common(o, p);
  o.segment_lengths = p.segments;
  o.dilation_rates = p.rates;
  o.mode = p.mode;
  o.offsets = p.offsets;
  o.unite = p.unite;
  o.stop_alpha_gradient = p.stop_alpha_gradient;
  o.remainder_last = p.remainder_last;
  return o;
}
BlockSparseAttentionOptions block_options(const AttentionProblem& p, const TensorView& row_ptr,
                                          const TensorView& col_idx, const TensorView& order) {
  BlockSparseAttentionOptions o;
  set_common(o, p);
  o.block_size = p.block_size;
  o.row_ptr = row_ptr;
  o.col_idx = col_idx;
  o.order = order;
  return o;
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
    return (backward ? of_backward : of_forward)(q, k, v, more...);
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
  call.run = [=, specs = call.inputs](Views in, Views out, Context& context) {
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
    call.outputs.push_back(s);
  }
  const std::vector<TensorSpec> out_specs = call.outputs;
  const auto to = [=](Views out, std::string_view name) { return pick(out, out_specs, name); };
  call.prepare = [=, specs = call.inputs](Views in, Context& context) {
    const Inputs all{in, specs};
    run_forward(p, all, all["o"], all["lse"], context);
  };
  call.run = [=, specs = call.inputs](Views in, Views out, Context& context) {
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

void draw(const AttentionProblem& p, Rng& rng, const TensorSpec& spec, std::span<double> values) {
  if (!is_floating(spec.dtype)) return;  // see refine
  // dlse as large as the <do, v> that it is added to: of a query with one key nothing but dlse is left, beside the roundings of
  // those.
  const double size = spec.name == "q"      ? p.q_size
                      : spec.name == "dlse" ? std::sqrt(static_cast<double>(p.Dv))
                                            : 1;
  for (double& v : values) v = size * rng.normal();
  const bool spoilt = (spec.name == "q" && p.special == Special::kNanQ) ||
                      (spec.name == "k" && p.special == Special::kNanK) ||
                      (spec.name == "v" && p.special >= Special::kNanV);
  if (!spoilt || values.empty()) return;
  // Everything that its head and sample make of it is NaN, so the others must prove the rest.
  const auto axes = spec.shape.size();
  const std::int64_t columns = spec.shape[axes - 1], heads = spec.shape[axes - 2],
                     rows = spec.shape[axes - 3];
  const auto all = static_cast<std::int64_t>(values.size());
  const std::int64_t last_head = all - rows * heads * columns + (heads - 1) * columns;
  const std::int64_t at = last_head + rng.below(rows) * heads * columns + rng.below(columns);
  values[static_cast<std::size_t>(at)] =
      p.special == Special::kInfinityV ? std::numeric_limits<double>::infinity() : std::nan("");
}

}  // namespace

// --- counts ----------------------------------------------------------------------------------------------------

namespace {

// f(sight) of a problem that has no tensors yet.
template <class F>
void with_sight(const AttentionProblem& p, F&& f) {
  std::vector<NamedIntegers> integers = integers_of(p);
  const auto view = [&](std::string_view name) {
    for (NamedIntegers& i : integers) {
      if (i.name == name) return contiguous(i.values.data(), DType::kI64, i.shape);
    }
    return TensorView{};
  };
  if (p.form == Form::kDilated) return f(attention::DilatedSight(p.Tq, p.H, dilated_options(p)));
  if (p.form == Form::kBlocks) {
    return f(attention::BlockSight(
        p.Tq, p.Tk, block_options(p, view("row_ptr"), view("col_idx"), view("order"))));
  }
  f(attention::DenseSight(p.Tq, p.Tk, dense_options(p, view("order"), view("key_lengths")),
                          view("cu_seqlens_q"), view("cu_seqlens_k")));
}

// Pairs of one sequence of this many queries and keys, of one head.
double band_pairs(const AttentionProblem& p, std::int64_t queries, std::int64_t keys) {
  double pairs = 0;
  for (std::int64_t i = 0; i < queries; ++i) {
    const std::int64_t at = i + keys - queries;
    const std::int64_t right = p.causal ? 0 : p.window_right;
    const std::int64_t first =
        p.window_left < 0 ? 0 : std::max<std::int64_t>(0, at - p.window_left);
    const std::int64_t last = right < 0 ? keys - 1 : std::min(keys - 1, at + right);
    pairs += static_cast<double>(std::max<std::int64_t>(0, last - first + 1));
  }
  return pairs;
}

double block_pairs(const AttentionProblem& p) {
  const std::vector<NamedIntegers> lists = integers_of(p);
  const std::vector<std::int64_t>&row_ptr = lists[0].values, &col_idx = lists[1].values;
  const std::int64_t rows = lists[0].shape[1] - 1, size = p.block_size;
  double pairs = 0;
  for (std::int64_t list = 0; list < lists[0].shape[0]; ++list) {
    for (std::int64_t x = 0; x < rows; ++x) {
      const auto ptr = static_cast<std::size_t>(list * (rows + 1) + x);
      for (std::int64_t c = row_ptr[ptr]; c < row_ptr[ptr + 1]; ++c) {
        const std::int64_t first = col_idx[static_cast<std::size_t>(c)] * size;
        const std::int64_t end = std::min(first + size, p.Tk);
        for (std::int64_t i = x * size; i < std::min((x + 1) * size, p.Tq); ++i) {
          const std::int64_t seen = p.causal ? std::min(end, i + p.Tk - p.Tq + 1) : end;
          pairs += static_cast<double>(std::max<std::int64_t>(0, seen - first));
        }
      }
    }
  }
  return pairs * static_cast<double>(p.shared_list ? p.H : 1);
}

// Of a segment of so many tokens.
double segment_pairs(const AttentionProblem& p, const attention::DilatedSight::Branch& b,
                     std::int64_t tokens) {
  const double keys =
      b.offset < tokens ? static_cast<double>((tokens - b.offset - 1) / b.rate + 1) : 0.0;
  if (p.mode != DilatedMode::kGroupedKv) return p.causal ? keys * (keys + 1) / 2 : keys * keys;
  if (!p.causal) return keys * static_cast<double>(tokens);
  // A key is seen from itself to the end.
  return keys * static_cast<double>(tokens - b.offset) -
         static_cast<double>(b.rate) * keys * (keys - 1) / 2;
}

double dilated_pairs(const AttentionProblem& p) {
  const attention::DilatedSight sight(p.Tq, p.H, dilated_options(p));
  double pairs = 0;
  for (std::int64_t h = 0; h < p.H; ++h) {
    for (int i = 0; i < sight.branches(); ++i) {
      const auto branch = sight.branch(i, h);
      const std::int64_t w = branch.length;
      pairs += static_cast<double>(p.Tq / w) * segment_pairs(p, branch, w) +
               segment_pairs(p, branch, p.Tq % w);
    }
  }
  return pairs;
}

// A union has no closed form: counted, at so many queries that it takes no second.
double united_pairs(const AttentionProblem& p) {
  const attention::DilatedSight sight(p.Tq, p.H, dilated_options(p));
  const double work = static_cast<double>(p.Tq) * static_cast<double>(p.Tq) *
                      static_cast<double>(p.H * sight.branches());
  const auto step = std::max<std::int64_t>(1, static_cast<std::int64_t>(work / 3e7));
  std::int64_t pairs = 0, counted = 0;
  for (std::int64_t h = 0; h < p.H; ++h) {
    for (std::int64_t i = h % step; i < p.Tq; i += step, ++counted) {
      for (std::int64_t j = 0; j < p.Tq; ++j) {
        bool seen = false;
        for (int part = 0; part < sight.branches() && !seen; ++part) {
          seen = sight.sees(part, 0, h, i, j);
        }
        pairs += seen;
      }
    }
  }
  if (counted == 0) return 0;
  return static_cast<double>(pairs) * static_cast<double>(p.H * p.Tq) /
         static_cast<double>(counted);
}

}  // namespace

double attention_pairs(const AttentionProblem& p) {
  const auto heads = static_cast<double>(p.H), batch = static_cast<double>(p.B);
  double pairs = 0;
  switch (p.form) {
    case Form::kDense:
      if (p.key_lengths.empty()) return batch * heads * band_pairs(p, p.Tq, p.Tk);
      for (const std::int64_t keys : p.key_lengths) pairs += heads * band_pairs(p, p.Tq, keys);
      return pairs;
    case Form::kVarlen:
      for (std::size_t s = 0; s < p.query_lengths.size(); ++s) {
        pairs += heads * band_pairs(p, p.query_lengths[s], p.packed_key_lengths[s]);
      }
      return pairs;
    case Form::kDilated:
      return batch * (p.unite ? united_pairs(p) : dilated_pairs(p));
    case Form::kBlocks:
      return batch * block_pairs(p);
  }
  return 0;
}

AttentionCensus attention_census(const AttentionProblem& p) {
  AttentionCensus census;
  if (p.H == 0) return census;
  const std::int64_t B = p.form == Form::kVarlen ? 1 : p.B;
  std::vector<bool> seen(static_cast<std::size_t>(B * p.Hkv * p.Tk));
  with_sight(p, [&](const auto& sight) {
    for (std::int64_t b = 0; b < B; ++b) {
      for (std::int64_t h = 0; h < p.H; ++h) {
        const std::int64_t first = (b * p.Hkv + h / (p.H / p.Hkv)) * p.Tk;
        for (std::int64_t i = 0; i < p.Tq; ++i) {
          std::int64_t distinct = 0;
          for (std::int64_t j = 0; j < p.Tk; ++j) {
            int times = 0;
            for (int part = 0; part < sight.branches(); ++part) {
              times += sight.sees(part, b, h, i, j);
            }
            if (times == 0) continue;
            ++distinct;
            census.pairs += sight.unite() ? 1 : times;
            seen[static_cast<std::size_t>(first + j)] = true;
          }
          ++census.queries;
          census.empty_queries += distinct == 0;
          census.single_queries += distinct == 1;
        }
      }
    }
  });
  census.keys = static_cast<std::int64_t>(seen.size());
  census.unseen_keys = std::count(seen.begin(), seen.end(), false);
  return census;
}

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
    std::size_t at = 3;
    for (const NamedIntegers& i : integers_of(p)) {
      inputs[at++].assign(i.values.begin(), i.values.end());
    }
  };
  return c;
}

}  // namespace annulus::testing
