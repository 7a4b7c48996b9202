// One ring RNN problem as a Case: its tensors, its calls, its definition, and the naive program that the
// numeric policy compares us with.
#include "annulus/ring_rnn/test/cases.h"

#include <array>
#include <bit>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <numbers>
#include <optional>
#include <string>
#include <string_view>

#include "annulus/ring_rnn/ref.h"
#include "testing/memory/tensors.h"

namespace annulus::testing {

namespace {

using Parameter = RingRnnProblem::Parameter;

// In the order of RingGradient.
constexpr std::array<const char*, 9> kGradients = {"dA",  "dWa",    "dWo",    "dr0",         "dJ0",
                                                   "dJ1", "dalpha", "ddrive", "dreset_state"};

// f32, or f64 beside f64 tensors: h_n, saved, readouts, gradients of numbers.
DType state_of(DType dtype) { return dtype == DType::kF64 ? dtype : DType::kF32; }
DType own_or_f32(DType dtype, bool f32) {
  return size_of(dtype) > 2 ? dtype : f32 ? DType::kF32 : dtype;
}
// f64 tensors may stand beside f32 parameters, though not beside an f32 state.
DType parameter_dtype(const RingRnnProblem& p) { return p.f32_parameters ? DType::kF32 : p.dtype; }

unsigned asked(const RingRnnProblem& p) {
  unsigned g = p.gradients & kRingAllGradients;
  if (!p.drive) g &= ~static_cast<unsigned>(kRingDdrive);
  if (!p.reset || !p.reset_state) g &= ~static_cast<unsigned>(kRingDreset_state);
  return g;
}

// The precision a call asks for on a device.
Precision precision_on(const RingRnnProblem& p, Device device) {
  const bool cuda_only = p.precision == Precision::kTf32 || p.precision == Precision::kF16;
  return cuda_only && device.type == DeviceType::kCPU ? Precision::kFp32 : p.precision;
}

}  // namespace

Precision ring_resolved_precision(const RingRnnProblem& p, Device device) {
  const Precision asked_for = precision_on(p, device);
  if (p.dtype == DType::kF64) return Precision::kF64;
  const bool cuda = device.type == DeviceType::kCUDA;
  if (asked_for == Precision::kFp32 && cuda && p.dtype == DType::kF32) return Precision::kBf16x6;
  if (asked_for != Precision::kAuto) return asked_for;
  if (p.dtype == DType::kBF16) return Precision::kBf16;
  if (!cuda) return Precision::kFp32;
  return p.dtype == DType::kF16 ? Precision::kF16 : Precision::kBf16x3;
}

namespace {

// What the naive program rounds operands to. f16 tensors have f16's where a device may multiply so;
// asked for fp32, the CPU's default, they are held to an fp32 baseline.
Precision baseline_precision(const RingRnnProblem& p) {
  const bool f16 = ring_resolved_precision(p, cuda_device(0)) == Precision::kF16;
  return f16 ? Precision::kF16 : ring_resolved_precision(p, kCPU);
}

RingRnnOptions options_of(const RingRnnProblem& p, Precision precision) {
  RingRnnOptions o;
  o.activation = p.activation;
  o.precision = precision;
  o.checkpoint = p.checkpoint;
  return o;
}

std::string describe(const RingRnnProblem& p) {
  static constexpr const char* kActivations[] = {"relu", "gelu", "tanh", "silu"};
  static constexpr const char* kForms[] = {"", "(tensor)", "(N)"};
  static constexpr const char* kActions[] = {"dense",     "sparse",   "one-hot",
                                             "by-sample", "velocity", "zero"};
  const auto parameter = [&](const char* name, double v, Parameter form) {
    char text[48];
    std::snprintf(text, sizeof text, " %s=%.4g%s", name, v, kForms[static_cast<int>(form)]);
    return std::string(text);
  };
  std::string s = "B=" + std::to_string(p.B) + " T=" + std::to_string(p.T) +
                  " K=" + std::to_string(p.K) + " N=" + std::to_string(p.N) +
                  " dtype=" + name_of(p.dtype);
  if (size_of(p.dtype) == 2) s += p.f32_state ? " r0=f32" : " r0=own";
  s += std::string(" act=") + kActivations[static_cast<int>(p.activation)] +
       " precision=" + name_of(p.precision) + " checkpoint=" + std::to_string(p.checkpoint);
  s += parameter("J0", p.J0, p.J0_form) + parameter("J1", p.J1, p.J1_form) +
       parameter("alpha", p.alpha, p.alpha_form);
  s += std::string(" actions=") + kActions[static_cast<int>(p.actions)];
  if (p.live >= 0) s += " live=" + std::to_string(p.live);
  if (p.drive) s += " drive";
  if (p.reset) s += p.reset_state ? " reset+state" : " reset";
  if (p.mask) s += " mask";
  if (p.h_n) s += " h_n";
  if (p.readout) s += " readout";
  if (p.special) s += " special";
  if (asked(p) == 0) return s + " grads=none";
  s += " grads=";
  for (std::size_t i = 0; i < kGradients.size(); ++i) {
    if (asked(p) >> i & 1) s += std::string(s.back() == '=' ? "" : ",") + kGradients[i];
  }
  return s + (p.dout ? p.dh_n ? " of dout,dh_n" : " of dout" : p.dh_n ? " of dh_n" : " of nothing");
}

std::vector<TensorSpec> input_specs(const RingRnnProblem& p) {
  const DType state = own_or_f32(p.dtype, p.f32_state);
  std::vector<TensorSpec> specs = {{"A", p.dtype, {p.B, p.T, p.K}},
                                   {"Wa", p.dtype, {p.K, p.N, p.N}},
                                   {"Wo", p.dtype, {p.N, p.N}},
                                   {"r0", state, {p.B, p.N}}};
  if (p.J0_form != Parameter::kNumber) specs.push_back({"J0", parameter_dtype(p), {}});
  if (p.J1_form != Parameter::kNumber) specs.push_back({"J1", parameter_dtype(p), {}});
  if (p.alpha_form == Parameter::kTensor) specs.push_back({"alpha", parameter_dtype(p), {}});
  if (p.alpha_form == Parameter::kPerNeuron) specs.push_back({"alpha", parameter_dtype(p), {p.N}});
  if (p.drive) specs.push_back({"drive", p.dtype, {p.B, p.T, p.N}});
  if (p.reset) specs.push_back({"reset", DType::kBool, {p.B, p.T}});
  if (p.reset && p.reset_state) specs.push_back({"reset_state", state, {p.B, p.N}});
  if (p.mask) specs.push_back({"mask", DType::kBool, {p.B, p.T}});
  return specs;
}

}  // namespace

RingRnnInputs ring_inputs(const RingRnnProblem& p, Views in, const std::vector<TensorSpec>& specs) {
  const auto get = [&](std::string_view name) { return pick(in, specs, name); };
  const auto parameter = [&](std::string_view name, double value) {
    const TensorView v = get(name);
    return v.defined() ? RingRnnParameter(v) : RingRnnParameter(value);
  };
  return {.A = get("A"),
          .Wa = get("Wa"),
          .Wo = get("Wo"),
          .r0 = get("r0"),
          .J0 = parameter("J0", p.J0),
          .J1 = parameter("J1", p.J1),
          .alpha = parameter("alpha", p.alpha),
          .drive = get("drive"),
          .reset = get("reset"),
          .reset_state = get("reset_state"),
          .mask = get("mask"),
          .packed = {},
          .packed_form = {}};
}

RingRnnOutputs ring_outputs(Views out, const std::vector<TensorSpec>& specs) {
  const auto get = [&](std::string_view name) { return pick(out, specs, name); };
  return {get("out"), get("h_n"), get("angle"), get("amplitude"), get("saved")};
}

RingRnnGradients ring_gradients(Views out, const std::vector<TensorSpec>& specs) {
  const auto get = [&](std::size_t i) { return pick(out, specs, kGradients[i]); };
  return {get(0), get(1), get(2), get(3), get(4), get(5), get(6), get(7), get(8)};
}

namespace {

TensorSpec saved_spec(const RingRnnProblem& p) {
  const std::int64_t s = p.checkpoint;
  return {"saved", state_of(p.dtype), {s == 0 ? p.T : (p.T + s - 1) / s, p.B, p.N}};
}

double bytes_of(const std::vector<TensorSpec>& specs) {
  double bytes = 0;
  for (const TensorSpec& s : specs) bytes += static_cast<double>(numel_of(s) * size_of(s.dtype));
  return bytes;
}

// The products of one direction: 2 B (K + 1) N^2 T, K the channels that are not padding.
double product_flops(const RingRnnProblem& p) {
  return 2.0 * static_cast<double>(p.B) * static_cast<double>(ring_live_channels(p) + 1) *
         static_cast<double>(p.N) * static_cast<double>(p.N) * static_cast<double>(p.T);
}

// --- the naive program: the definition (ref.h) with sums in f32 (f64 for f64 tensors), the operands of every
// matrix product rounded as the precision says -------------------------------------------------------------

template <class C>
struct Naive {
  using Number = C;
  using Operand = C;
  static C operand(C v) { return v; }
  static void add_product(C& sum, C a, C b) { sum += a * b; }

  static C normal_distribution(C y) {
    return C(0.5) * (1 + std::erf(y / std::numbers::sqrt2_v<C>));
  }
  static C tanh_slope(C y) { return 1 - std::tanh(y) * std::tanh(y); }
  static ring_rnn::Direction<C> direction(std::int64_t i, std::int64_t N) {
    const C phase = 2 * std::numbers::pi_v<C> * static_cast<C>(i) / static_cast<C>(N);
    return {std::cos(phase), std::sin(phase)};
  }
};

// Ten bits of mantissa; f16 has as many, and its range is kept by scales.
struct Tf32 : Naive<float> {
  static float operand(float v) {
    if (!std::isfinite(v)) return v;
    std::uint32_t bits = std::bit_cast<std::uint32_t>(v);
    bits += 0xfffu + (bits >> 13 & 1u);  // to nearest even at bit 13
    return std::bit_cast<float>(bits & ~0x1fffu);
  }
};

struct Bf16 : Naive<float> {
  static float operand(float v) { return static_cast<float>(bfloat16(v)); }
};

struct Bf16x3 : Naive<float> {
  struct Operand {
    float high, low;
  };
  static Operand operand(float v) {
    const float high = static_cast<float>(bfloat16(v));
    return {high, static_cast<float>(bfloat16(v - high))};
  }
  static void add_product(float& sum, Operand a, Operand b) {
    sum += a.high * b.high;
    sum += a.high * b.low;
    sum += a.low * b.high;
  }
};

template <class F>
void with_naive(const RingRnnInputs& in, const RingRnnOptions& options, F&& f) {
  using ring_rnn::Definition;
  if (in.A.dtype == DType::kF64) return f(Definition<Naive<double>>(in, options));
  switch (options.precision) {
    case Precision::kTf32:
    case Precision::kF16:
      return f(Definition<Tf32>(in, options));
    case Precision::kBf16:
      return f(Definition<Bf16>(in, options));
    case Precision::kBf16x3:
      return f(Definition<Bf16x3>(in, options));
    default:
      return f(Definition<Naive<float>>(in, options));
  }
}

void baseline_forward(const RingRnnInputs& in, const RingRnnOutputs& out,
                      const RingRnnOptions& options) {
  with_naive(in, options, [&](const auto& naive) { naive.forward(out); });
}
void baseline_backward(const RingRnnInputs& in, const TensorView& dout, const TensorView& dh_n,
                       const RingRnnGradients& gradients, const RingRnnOptions& options) {
  with_naive(in, options, [&](const auto& naive) { naive.backward(dout, dh_n, gradients); });
}

// --- calls -------------------------------------------------------------------------------------------------

Call forward_call(const RingRnnProblem& p) {
  Call call;
  call.name = "forward";
  call.inputs = input_specs(p);
  call.outputs = {{"out", p.dtype, {p.B, p.T, p.N}}};
  if (p.h_n || p.dh_n) call.outputs.push_back({"h_n", state_of(p.dtype), {p.B, p.N}});
  if (p.readout) {
    call.outputs.push_back({"angle", state_of(p.dtype), {p.B, p.T}});
    call.outputs.back().circular = true;
    call.outputs.push_back({"amplitude", state_of(p.dtype), {p.B, p.T}});
  }
  if (asked(p) != 0) {
    call.outputs.push_back(saved_spec(p));
    call.outputs.back().opaque = true;
  }
  for (TensorSpec& s : call.outputs) {
    const bool incoming = (s.name == "out" && p.dout) || (s.name == "h_n" && p.dh_n);
    s.unpaired = !incoming;
  }
  // f on the tensors of a call; in the precision asked for, or in this one.
  const auto on = [p, in_specs = call.inputs, out_specs = call.outputs](
                      auto f, std::optional<Precision> precision = {}) {
    return [=](Views in, Views out, auto&... context) {
      return f(ring_inputs(p, in, in_specs), ring_outputs(out, out_specs),
               options_of(p, precision.value_or(precision_on(p, in[0].device))), context...);
    };
  };
  call.run = on(ring_rnn_forward);
  call.workspace = on(ring_rnn_forward_workspace);
  call.reference = on(reference::ring_rnn_forward, Precision::kAuto);
  call.baseline = on(baseline_forward, baseline_precision(p));
  call.precision = [=](Device device) { return ring_resolved_precision(p, device); };
  call.terms = {"A", "Wa", "Wo", "r0", "drive", "reset_state"};
  call.flops = product_flops(p);
  call.bytes = bytes_of(call.inputs) + bytes_of(call.outputs);
  return call;
}

Call backward_call(const RingRnnProblem& p, const Call& forward) {
  Call call;
  call.name = "backward";
  call.inputs = forward.inputs;
  call.inputs.push_back({"out", p.dtype, {p.B, p.T, p.N}});
  call.inputs.back().derived = true;
  call.inputs.push_back(saved_spec(p));
  call.inputs.back().derived = true;
  if (p.dout) call.inputs.push_back({"dout", p.dtype, {p.B, p.T, p.N}});
  if (p.dh_n) call.inputs.push_back({"dh_n", state_of(p.dtype), {p.B, p.N}});
  for (std::size_t i = 0; i < kGradients.size(); ++i) {
    if (!(asked(p) >> i & 1)) continue;
    TensorSpec spec{kGradients[i], state_of(p.dtype), {}};
    spec.unpaired = true;  // of a number, unless there is a tensor of that name
    for (const TensorSpec& s : forward.inputs) {
      if ("d" + s.name == spec.name) spec = {spec.name, s.dtype, s.shape};
    }
    call.outputs.push_back(spec);
  }
  const auto in_specs = call.inputs;
  const auto out_specs = call.outputs;
  const auto get = [in_specs](Views in, std::string_view name) { return pick(in, in_specs, name); };
  const auto own_options = [p](Views in) { return options_of(p, precision_on(p, in[0].device)); };
  call.prepare = [=](Views in, Context& context) {
    ring_rnn_forward(ring_inputs(p, in, in_specs), ring_outputs(in, in_specs), own_options(in),
                     context);
  };
  call.run = [=](Views in, Views out, Context& context) {
    ring_rnn_backward(ring_inputs(p, in, in_specs), get(in, "dout"), get(in, "dh_n"),
                      get(in, "out"), get(in, "saved"), ring_gradients(out, out_specs),
                      own_options(in), context);
  };
  call.workspace = [=](Views in, Views out) {
    return ring_rnn_backward_workspace(ring_inputs(p, in, in_specs), ring_gradients(out, out_specs),
                                       own_options(in));
  };
  const auto defined_by = [=](auto f, Precision precision) {
    return [=](Views in, Views out) {
      f(ring_inputs(p, in, in_specs), get(in, "dout"), get(in, "dh_n"),
        ring_gradients(out, out_specs), options_of(p, precision));
    };
  };
  call.reference = defined_by(reference::ring_rnn_backward, Precision::kAuto);
  call.baseline = defined_by(baseline_backward, baseline_precision(p));
  call.precision = forward.precision;
  call.terms = forward.terms;
  call.terms.insert(call.terms.end(), {"dout", "dh_n"});
  const bool weights = (asked(p) & (kRingDWa | kRingDWo)) != 0;
  call.flops = product_flops(p) * (weights ? 2 : 1);
  call.bytes = bytes_of(call.inputs) + bytes_of(call.outputs);
  return call;
}

}  // namespace

Case ring_rnn_case(const RingRnnProblem& p) {
  Case c;
  c.op = "ring_rnn";
  c.params = describe(p);
  c.seed = p.seed;
  c.calls.push_back(forward_call(p));
  if (asked(p) != 0) c.calls.push_back(backward_call(p, c.calls[0]));
  c.draw = [p](Rng& rng, const TensorSpec& spec, std::span<double> values) {
    ring_rnn_draw(p, rng, spec, values);
  };
  c.refine = [p](std::vector<std::vector<double>>& inputs) { ring_rnn_refine(p, inputs); };
  return c;
}

void ring_readout_baseline_forward(const TensorView& states, const TensorView& angle,
                                   const TensorView& amplitude) {
  visit_bool(states.dtype == DType::kF64, [&]<bool Double>() {
    using C = std::conditional_t<Double, double, float>;
    ring_rnn::define_readout_forward<Naive<C>>(states, angle, amplitude);
  });
}

void ring_readout_baseline_backward(const TensorView& states, const TensorView& dangle,
                                    const TensorView& damplitude, const TensorView& dstates) {
  visit_bool(states.dtype == DType::kF64, [&]<bool Double>() {
    using C = std::conditional_t<Double, double, float>;
    ring_rnn::define_readout_backward<Naive<C>>(states, dangle, damplitude, dstates);
  });
}

}  // namespace annulus::testing
