// Checks every argument once, then hands a Plan to the backend of the tensors' device.
#include "annulus/ring_rnn/ring_rnn.h"

#include <cfloat>
#include <cmath>
#include <string>
#include <utility>
#include <vector>

#include "annulus/core/checked.h"
#include "annulus/core/info.h"
#include "annulus/core/operator.h"
#include "annulus/cpu/features.h"
#include "annulus/ring_rnn/plan.h"

namespace annulus {

namespace {

using ring_rnn::Plan;
using ring_rnn::ReadoutPlan;

const Few<DType, 4> kFloating = {DType::kF64, DType::kF32, DType::kF16, DType::kBF16};

// The dtype the state, saved tensors and readouts have.
DType state_dtype(DType dtype) { return dtype == DType::kF64 ? DType::kF64 : DType::kF32; }

// The function of the plan's device. (Functions of a backend that is not built may be named all the same.)
template <auto cpu, auto cuda, class P, class... More>
auto run(const P& plan, More&... more) {
  return dispatch(
      plan.op, plan.device, [&] { return cpu(plan, more...); },
      [&] { return cuda(plan, more...); });
}

std::int64_t pack_words(const Plan& p) {
  const std::size_t bytes = run<ring_rnn::cpu::pack_bytes, ring_rnn::cuda::pack_bytes>(p);
  return static_cast<std::int64_t>((bytes + 3) / 4);
}

// --- options -------------------------------------------------------------------------------------

// Those that depend on no tensor.
void check_options(const char* op, const RingRnnOptions& options) {
  if (options.activation > RingRnnActivation::kSilu) {
    invalid(op, "activation", "be relu, gelu, tanh or silu",
            "has value " + std::to_string(static_cast<int>(options.activation)));
  }
  if (options.precision > Precision::kF16) {
    invalid(op, "precision", "be auto, fp32, bf16x6, bf16x3, tf32, bf16 or f16",
            "has value " + std::to_string(static_cast<int>(options.precision)));
  }
  if (options.checkpoint < 0) {
    invalid(op, "checkpoint", "be at least 0", "is " + std::to_string(options.checkpoint));
  }
}

// What kAuto means for these tensors, and whether their device has what is asked for.
void resolve_precision(Plan& plan, Precision asked) {
  plan.precision = asked;
  if (plan.dtype == DType::kF64) {
    if (asked != Precision::kAuto) {
      invalid(plan.op, "precision", "be auto for f64 tensors", std::string("is ") + name_of(asked));
    }
    plan.precision = Precision::kF64;
  } else if (asked == Precision::kAuto) {
    const bool cuda = plan.device.type == DeviceType::kCUDA;
    plan.precision = plan.dtype == DType::kBF16  ? Precision::kBf16
                     : !cuda                     ? Precision::kFp32
                     : plan.dtype == DType::kF16 ? Precision::kF16
                                                 : Precision::kBf16x3;
  }
  if (plan.precision == Precision::kF16 && plan.dtype != DType::kF16) {
    invalid(plan.op, "precision", "be f16 beside f16 tensors alone",
            std::string("is f16 beside ") + name_of(plan.dtype) + " tensors");
  }
  // As exact as f32 products, and several times as fast. (Beside 16-bit tensors CUDA multiplies in f32:
  // its tensor cores take the states of a backward from `out`, where they are rounded.)
  if (plan.precision == Precision::kFp32 && plan.dtype == DType::kF32 &&
      plan.device.type == DeviceType::kCUDA) {
    plan.precision = Precision::kBf16x6;
  }
  const char* why = dispatch(
      plan.op, plan.device, [&] { return ring_rnn::cpu::why_not(plan.precision); },
      [&] { return ring_rnn::cuda::why_not(plan.precision); });
  if (why != nullptr && *why != '\0') {
    throw NotSupported("[" + std::string(plan.op) + "] precision " + name_of(plan.precision) +
                       " is not available on " + to_string(plan.device) + ": " + why);
  }
}

// Scratch is at most some copies of the weights, of the state of every step and of the actions:
// checked here once, so that no count of a backend can wrap.
void check_scratch(const Plan& plan) {
  constexpr std::int64_t kBytes = 256;
  const auto some = [](std::int64_t n) { return n + 256; };  // tiles are padded
  (void)checked_product(plan.op, kBytes, some(plan.K), some(plan.N), some(plan.N));
  (void)checked_product(plan.op, kBytes, some(plan.B), some(plan.T), some(plan.N));
  (void)checked_product(plan.op, kBytes, some(plan.B), some(plan.T), some(plan.K));
}

// --- arguments -----------------------------------------------------------------------------------

// The plan of these inputs; their sizes mean something once the list was checked.
Plan plan_of(const char* op, const RingRnnInputs& in, const RingRnnOptions& options) {
  check_options(op, options);
  Plan plan;
  plan.op = op;
  plan.device = in.A.device;
  plan.dtype = in.A.dtype;
  plan.activation = options.activation;
  plan.checkpoint = options.checkpoint;
  plan.B = in.A.shape[0], plan.T = in.A.shape[1], plan.K = in.A.shape[2], plan.N = in.r0.shape[1];
  plan.in = in;
  return plan;
}

// J0, J1 and alpha: a tensor of one element (or, for alpha, N) where there is one.
Argument parameter(const Plan& plan, const char* name, const RingRnnParameter& p) {
  Argument a{.name = name, .view = p.tensor, .dtypes = {DType::kF32}, .optional = true};
  if (plan.dtype != DType::kF32) a.dtypes = {DType::kF32, plan.dtype};
  return a;
}

Arguments input_list(const Plan& plan) {
  const RingRnnInputs& in = plan.in;
  const auto [B, T, K, N] = std::array{plan.B, plan.T, plan.K, plan.N};
  const DType dtype = plan.dtype;
  // r0 is f32 beside 16-bit tensors where a stream carries its state on.
  Few<DType, 4> state = {dtype};
  if (size_of(dtype) == 2) state = {dtype, DType::kF32};
  Arguments list(plan.op);
  list.input("A", in.A, kFloating, {kAny, kAny, kAny});
  list.input("r0", in.r0, state, {B, kAny});
  list.input("Wo", in.Wo, {dtype}, {N, N});
  list.input("Wa", in.Wa, {dtype}, {K, N, N});
  list.optional_input("drive", in.drive, {dtype}, {B, T, N});
  list.optional_input("reset", in.reset, {DType::kBool}, {B, T});
  list.optional_input("reset_state", in.reset_state, state, {B, N});
  list.optional_input("mask", in.mask, {DType::kBool}, {B, T});
  list.add(parameter(plan, "J0", in.J0));
  list.add(parameter(plan, "J1", in.J1));
  Argument alpha = parameter(plan, "alpha", in.alpha);
  alpha.shape = {N};
  alpha.scalar_too = true;
  list.add(alpha);
  list.optional_input("packed", in.packed, {DType::kI32}, {kAny});
  return list;
}

// Rules of the inputs that no list says, and the precision.
void complete(Plan& plan, const RingRnnOptions& options) {
  const RingRnnInputs& in = plan.in;
  if (in.reset_state.defined() && !in.reset.defined()) {
    invalid(plan.op, "reset", "be given with reset_state", "is missing");
  }
  const bool f64 = plan.dtype == DType::kF64;
  const double most = f64 ? DBL_MAX : FLT_MAX;
  for (const auto& [name, p] : {std::pair{"J0", in.J0}, {"J1", in.J1}, {"alpha", in.alpha}}) {
    if (p.tensor.defined() || std::abs(p.value) <= most) continue;
    const char* is = std::isfinite(p.value) ? "is beyond it" : "is not finite";
    invalid(plan.op, name, f64 ? "be a finite number" : "be a finite number in f32", is);
  }
  check_scratch(plan);
  resolve_precision(plan, options.precision);
}

Plan sized_plan(const char* op, const RingRnnInputs& in, const RingRnnOptions& options) {
  Plan plan = plan_of(op, in, options);
  input_list(plan).check_sizes();
  complete(plan, options);
  return plan;
}

RingRnnPackedForm form_of(const Plan& plan) {
  return {plan.dtype, plan.device.type, plan.K, plan.N, plan.precision};
}
std::string text_of(const RingRnnPackedForm& form) {
  if (form.N < 0) return "nothing: packed_form was not set";
  return std::string(name_of(form.dtype)) + ", K " + std::to_string(form.K) + ", N " +
         std::to_string(form.N) + ", precision " + facts_of(form.precision).name + " on " +
         (form.device == DeviceType::kCPU ? "cpu" : "cuda");
}

void check_packed(const Plan& plan, const TensorView& packed) {
  check_shape(plan.op, "packed", packed, {pack_words(plan)});
  if (packed.shape[0] > 1 && packed.stride[0] != 1) {
    invalid(plan.op, "packed", "be contiguous", "has stride " + std::to_string(packed.stride[0]));
  }
  if (reinterpret_cast<std::uintptr_t>(packed.data) % 256 != 0) {
    invalid(plan.op, "packed", "be aligned to 256 bytes", "is not");
  }
}

// Of ring_rnn_pack, and of a question about its size, which needs no data.
Plan pack_plan(const TensorView& Wa, const TensorView& Wo, const RingRnnOptions& options,
               const TensorView* packed = nullptr, const Context* context = nullptr) {
  check_options("ring_rnn_pack", options);
  Plan plan;
  plan.op = "ring_rnn_pack";
  plan.dtype = Wa.dtype;
  plan.device = Wa.device;
  plan.K = Wa.shape[0];
  plan.N = Wa.shape[1];
  plan.in.Wa = Wa;
  plan.in.Wo = Wo;
  Arguments list(plan.op);
  list.input("Wa", Wa, kFloating, {kAny, kAny, plan.N});
  list.input("Wo", Wo, {plan.dtype}, {plan.N, plan.N});
  if (packed != nullptr) {
    list.output("packed", *packed, {DType::kI32}, {kAny});
    list.check(*context);
    plan.in.packed = *packed;
  } else {
    list.check_sizes();
  }
  check_scratch(plan);
  resolve_precision(plan, options.precision);
  return plan;
}

}  // namespace

std::array<std::int64_t, 3> ring_rnn_saved_shape(const RingRnnInputs& inputs,
                                                 const RingRnnOptions& options) {
  const Plan plan = sized_plan("ring_rnn", inputs, options);
  return {plan.saved_steps(), plan.B, plan.N};
}

void ring_rnn_forward(const RingRnnInputs& inputs, const RingRnnOutputs& outputs,
                      const RingRnnOptions& options, Context& context) {
  Plan plan = plan_of("ring_rnn", inputs, options);
  const auto [B, T, N] = std::array{plan.B, plan.T, plan.N};
  const DType state = state_dtype(plan.dtype);
  Arguments list = input_list(plan);
  list.output("out", outputs.out, {plan.dtype}, {B, T, N});
  list.optional_output("h_n", outputs.h_n, {state}, {B, N});
  list.optional_output("angle", outputs.angle, {state}, {B, T});
  list.optional_output("amplitude", outputs.amplitude, {state}, {B, T});
  list.optional_output("saved", outputs.saved, {state}, {plan.saved_steps(), B, N});
  list.check(context);
  complete(plan, options);
  if (outputs.angle.defined() != outputs.amplitude.defined()) {
    invalid(plan.op, outputs.angle.defined() ? "amplitude" : "angle",
            "be given together with the other of angle and amplitude", "is missing");
  }
  if (inputs.packed.defined()) {
    if (inputs.packed_form != form_of(plan)) {
      invalid(plan.op, "packed", "be made for " + text_of(form_of(plan)),
              "is made for " + text_of(inputs.packed_form));
    }
    check_packed(plan, inputs.packed);
  }
  plan.out = outputs;
  run<ring_rnn::cpu::forward, ring_rnn::cuda::forward>(plan, context);
}

void ring_rnn_backward(const RingRnnInputs& inputs, const TensorView& dout, const TensorView& dh_n,
                       const TensorView& out, const TensorView& saved,
                       const RingRnnGradients& gradients, const RingRnnOptions& options,
                       Context& context) {
  Plan plan = plan_of("ring_rnn_backward", inputs, options);
  const auto [B, T, N] = std::array{plan.B, plan.T, plan.N};
  const DType state = state_dtype(plan.dtype);
  Arguments list = input_list(plan);
  list.optional_input("dout", dout, {plan.dtype}, {B, T, N});
  list.optional_input("dh_n", dh_n, {state}, {B, N});
  list.input("out", out, {plan.dtype}, {B, T, N});
  list.input("saved", saved, {state}, {plan.saved_steps(), B, N});
  // A gradient has its input's dtype and shape; that of a parameter which is a number, the state's.
  const auto gradient = [&](const char* name, const TensorView& grad, const TensorView& x) {
    if (x.defined()) {
      list.optional_output(name, grad, {x.dtype}, x.sizes());
    } else {
      list.optional_output(name, grad, {state}, {});
    }
  };
  gradient("dA", gradients.dA, inputs.A);
  gradient("dWa", gradients.dWa, inputs.Wa);
  gradient("dWo", gradients.dWo, inputs.Wo);
  gradient("dr0", gradients.dr0, inputs.r0);
  gradient("dJ0", gradients.dJ0, inputs.J0.tensor);
  gradient("dJ1", gradients.dJ1, inputs.J1.tensor);
  gradient("dalpha", gradients.dalpha, inputs.alpha.tensor);
  const auto left_out = [&](const char* name, const TensorView& v, const char* rule) {
    if (v.defined()) invalid(plan.op, name, rule, "is given");
  };
  if (!inputs.drive.defined()) left_out("ddrive", gradients.ddrive, "be left out where drive is");
  if (!inputs.reset_state.defined()) {
    left_out("dreset_state", gradients.dreset_state, "be left out where reset_state is");
  }
  gradient("ddrive", gradients.ddrive, inputs.drive);
  gradient("dreset_state", gradients.dreset_state, inputs.reset_state);
  list.check(context);
  left_out("packed", inputs.packed, "be left out of a backward");
  complete(plan, options);
  plan.dout = dout;
  plan.dh_n = dh_n;
  plan.out.out = out;
  plan.out.saved = saved;
  plan.grad = gradients;
  run<ring_rnn::cpu::backward, ring_rnn::cuda::backward>(plan, context);
}

std::size_t ring_rnn_forward_workspace(const RingRnnInputs& inputs, const RingRnnOutputs& outputs,
                                       const RingRnnOptions& options) {
  Plan plan = sized_plan("ring_rnn", inputs, options);
  plan.out = outputs;
  return run<ring_rnn::cpu::forward_workspace, ring_rnn::cuda::forward_workspace>(plan);
}

std::size_t ring_rnn_backward_workspace(const RingRnnInputs& inputs,
                                        const RingRnnGradients& gradients,
                                        const RingRnnOptions& options) {
  Plan plan = sized_plan("ring_rnn_backward", inputs, options);
  plan.grad = gradients;
  return run<ring_rnn::cpu::backward_workspace, ring_rnn::cuda::backward_workspace>(plan);
}

std::int64_t ring_rnn_pack_size(const TensorView& Wa, const TensorView& Wo,
                                const RingRnnOptions& options) {
  return pack_words(pack_plan(Wa, Wo, options));
}

RingRnnPackedForm ring_rnn_pack(const TensorView& Wa, const TensorView& Wo,
                                const TensorView& packed, const RingRnnOptions& options,
                                Context& context) {
  const Plan plan = pack_plan(Wa, Wo, options, &packed, &context);
  check_packed(plan, packed);
  run<ring_rnn::cpu::pack, ring_rnn::cuda::pack>(plan, context);
  return form_of(plan);
}

static ReadoutPlan readout_plan(const char* op, const TensorView& states) {
  ReadoutPlan plan;
  plan.op = op;
  plan.device = states.device;
  plan.B = states.shape[0], plan.T = states.shape[1], plan.N = states.shape[2];
  plan.states = states;
  return plan;
}

void ring_readout_forward(const TensorView& states, const TensorView& angle,
                          const TensorView& amplitude, Context& context) {
  ReadoutPlan plan = readout_plan("ring_readout", states);
  const DType state = state_dtype(states.dtype);
  Arguments list(plan.op);
  list.input("states", states, kFloating, {kAny, kAny, kAny});
  list.output("angle", angle, {state}, {plan.B, plan.T});
  list.output("amplitude", amplitude, {state}, {plan.B, plan.T});
  list.check(context);
  plan.angle = angle;
  plan.amplitude = amplitude;
  run<ring_rnn::cpu::readout_forward, ring_rnn::cuda::readout_forward>(plan, context);
  context.ran_on(plan.op, plan.device.type, cpu::simd_text(), "ordinary cores");
}

void ring_readout_backward(const TensorView& states, const TensorView& dangle,
                           const TensorView& damplitude, const TensorView& dstates,
                           Context& context) {
  ReadoutPlan plan = readout_plan("ring_readout_backward", states);
  const DType state = state_dtype(states.dtype);
  Arguments list(plan.op);
  list.input("states", states, kFloating, {kAny, kAny, kAny});
  list.optional_input("dangle", dangle, {state}, {plan.B, plan.T});
  list.optional_input("damplitude", damplitude, {state}, {plan.B, plan.T});
  list.output("dstates", dstates, {states.dtype}, {plan.B, plan.T, plan.N});
  list.check(context);
  plan.dangle = dangle;
  plan.damplitude = damplitude;
  plan.dstates = dstates;
  run<ring_rnn::cpu::readout_backward, ring_rnn::cuda::readout_backward>(plan, context);
  context.ran_on(plan.op, plan.device.type, cpu::simd_text(), "ordinary cores");
}

namespace {

Support support(DeviceType device) {
  if (device == DeviceType::kCPU) return {true, cpu::simd_description()};
  return cuda_support([] { return ring_rnn::cuda::support(); });
}

const std::vector<DType> kDTypes = {DType::kF64, DType::kF32, DType::kF16, DType::kBF16};
const OperatorRegistration kRingRnn(
    {.name = "ring_rnn",
     .summary = "ring-attractor RNN, recurrent matrix mixed from K action matrices",
     .dtypes = kDTypes,
     .gradients = {"A", "Wa", "Wo", "r0", "J0", "J1", "alpha", "drive", "reset_state"},
     .deterministic = true,
     .support = support,
     // RingRnn.OverTwentyLiveSteps holds both devices to these.
     .precisions = {{"fp32", "fp32 operands; on CUDA made as bf16x6", 1.5e-7, 4.5e-7},
                    {"bf16x6", "three bf16 each, six products", 1.5e-7, 4.1e-7},
                    {"bf16x3", "two bf16 each, three products", 8.2e-7, 5.3e-6},
                    {"tf32", "made as bf16x3, whose errors these are; CUDA only", 8.2e-7, 5.3e-6},
                    {"bf16", "one bf16 each", 4.4e-4, 2.9e-3},
                    {"f16", "one f16 each, f16 tensors with their rounding; CUDA only", 2.1e-4,
                     3.8e-4}},
     .precisions_measured_with =
         "20 live steps, gelu, alpha 0.15, B 24, K 8, N 96, on a CPU (f16: an H200), relative L2"});
const OperatorRegistration kReadout({.name = "ring_readout",
                                     .summary = "angle and length of a ring's population vector",
                                     .dtypes = kDTypes,
                                     .gradients = {"states"},
                                     .deterministic = true,
                                     .support = support});

}  // namespace

}  // namespace annulus
