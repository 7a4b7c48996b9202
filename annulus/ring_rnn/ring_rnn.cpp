// Checks every argument once, then hands a Plan to the backend of the tensors' device.

#include "annulus/ring_rnn/ring_rnn.h"

#include <cmath>
#include <string>
#include <utility>
#include <vector>

#include "annulus/core/backend.h"
#include "annulus/core/check.h"
#include "annulus/core/checked.h"
#include "annulus/core/info.h"
#include "annulus/cpu/features.h"
#include "annulus/ring_rnn/plan.h"

namespace annulus {

namespace {

using ring_rnn::Plan;
using ring_rnn::ReadoutPlan;

// The dtype the state, saved tensors and readouts have.
DType state_dtype(DType dtype) { return dtype == DType::kF64 ? DType::kF64 : DType::kF32; }

[[noreturn, maybe_unused]] void no_cuda(const char* op) {
  throw NotSupported("[" + std::string(op) +
                     "] device must be cpu: this build has no CUDA backend");
}

// One backend's function by the device of the plan.
#if ANNULUS_HAVE_CUDA
#define ANNULUS_RING_DISPATCH(plan, call) \
  ((plan).device.type == DeviceType::kCPU ? ring_rnn::cpu::call : ring_rnn::cuda::call)
#else
#define ANNULUS_RING_DISPATCH(plan, call)                       \
  ((plan).device.type == DeviceType::kCPU ? ring_rnn::cpu::call \
                                          : (no_cuda((plan).op), ring_rnn::cpu::call))
#endif

// An input of the floating dtypes `allowed`, of that shape, beside A.
void check_input(const Plan& plan, const char* name, const TensorView& v,
                 std::initializer_list<DType> allowed, std::initializer_list<std::int64_t> shape,
                 const char* lead_name, const TensorView& lead) {
  check_tensor(plan.op, name, v, static_cast<int>(shape.size()));
  check_dtype(plan.op, name, v, allowed);
  check_shape(plan.op, name, v, shape);
  check_device(plan.op, name, v, lead_name, lead);
}

void check_options(Plan& plan, const RingRnnOptions& options) {
  const char* op = plan.op;
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
  plan.activation = options.activation;
  plan.checkpoint = options.checkpoint;
  plan.precision = options.precision;
  if (plan.dtype == DType::kF64) {
    if (options.precision != Precision::kAuto) {
      invalid(op, "precision", "be auto for f64 tensors",
              std::string("is ") + name_of(options.precision));
    }
    plan.precision = Precision::kF64;
    return;
  }
  if (options.precision == Precision::kAuto) {
    const bool cuda = plan.device.type == DeviceType::kCUDA;
    plan.precision = plan.dtype == DType::kBF16  ? Precision::kBf16
                     : !cuda                     ? Precision::kFp32
                     : plan.dtype == DType::kF16 ? Precision::kF16
                                                 : Precision::kBf16x3;
  }
  if (plan.precision == Precision::kF16 && plan.dtype != DType::kF16) {
    invalid(op, "precision", "be f16 beside f16 tensors alone",
            std::string("is f16 beside ") + name_of(plan.dtype) + " tensors");
  }
  const char* why = ANNULUS_RING_DISPATCH(plan, why_not)(plan.precision);
  if (why != nullptr && *why != '\0') {
    throw NotSupported("[" + std::string(op) + "] precision " + name_of(plan.precision) +
                       " is not available on " + to_string(plan.device) + ": " + why);
  }
}

// J0, J1 or alpha: a finite number, or a tensor of one element (or, for alpha, N).
void check_parameter(const Plan& plan, const char* name, const RingRnnParameter& p,
                     bool per_neuron) {
  if (!p.tensor.defined()) {
    if (!std::isfinite(p.value)) {
      invalid(plan.op, name, "be a finite number", "is " + std::to_string(p.value));
    }
    return;
  }
  const TensorView& v = p.tensor;
  if (v.rank != 0 && !(per_neuron && v.rank == 1)) {
    invalid(plan.op, name,
            per_neuron ? "have rank 0 or shape (" + std::to_string(plan.N) + ",)" : "have rank 0",
            "has shape " + shape_string(v.sizes()));
  }
  check_tensor(plan.op, name, v, v.rank);
  if (plan.dtype == DType::kF32) {
    check_dtype(plan.op, name, v, {DType::kF32});
  } else {
    check_dtype(plan.op, name, v, {DType::kF32, plan.dtype});
  }
  if (v.rank == 1) check_shape(plan.op, name, v, {plan.N});
  check_device(plan.op, name, v, "A", plan.in.A);
}

void check_weights(Plan& plan, const TensorView& Wa, const TensorView& Wo, const char* lead_name,
                   const TensorView& lead) {
  const char* op = plan.op;
  check_tensor(op, "Wa", Wa, 3);
  check_tensor(op, "Wo", Wo, 2);
  check_dtype(op, "Wa", Wa, {plan.dtype});
  check_dtype(op, "Wo", Wo, {plan.dtype});
  check_shape(op, "Wo", Wo, {plan.N, plan.N});
  check_shape(op, "Wa", Wa, {plan.K, plan.N, plan.N});
  check_device(op, "Wa", Wa, lead_name, lead);
  check_device(op, "Wo", Wo, lead_name, lead);
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

void check_packed(const Plan& plan, const TensorView& packed) {
  const char* op = plan.op;
  check_tensor(op, "packed", packed, 1);
  check_dtype(op, "packed", packed, {DType::kI32});
  check_device(op, "packed", packed, "Wa", plan.in.Wa);
  const auto need =
      static_cast<std::int64_t>((ANNULUS_RING_DISPATCH(plan, pack_bytes)(plan) + 3) / 4);
  check_shape(op, "packed", packed, {need});
  if (need > 1 && packed.stride[0] != 1) {
    invalid(op, "packed", "be contiguous", "has stride " + std::to_string(packed.stride[0]));
  }
  if (reinterpret_cast<std::uintptr_t>(packed.data) % 256 != 0) {
    invalid(op, "packed", "be aligned to 256 bytes", "is not");
  }
}

using Named = std::pair<const char*, const TensorView*>;

std::vector<Named> named_inputs(const RingRnnInputs& in) {
  return {{"A", &in.A},
          {"Wa", &in.Wa},
          {"Wo", &in.Wo},
          {"r0", &in.r0},
          {"J0", &in.J0.tensor},
          {"J1", &in.J1.tensor},
          {"alpha", &in.alpha.tensor},
          {"drive", &in.drive},
          {"reset", &in.reset},
          {"reset_state", &in.reset_state},
          {"mask", &in.mask},
          {"packed", &in.packed}};
}

// Outputs have no two elements in one place, and share memory with nothing.
void check_outputs_apart(const char* op, const std::vector<Named>& inputs,
                         const std::vector<Named>& outputs) {
  for (std::size_t i = 0; i < outputs.size(); ++i) {
    const auto& [name, out] = outputs[i];
    if (!out->defined()) continue;
    check_output_layout(op, name, *out);
    for (const auto& [other, view] : inputs) check_no_overlap(op, name, *out, other, *view);
    for (std::size_t j = 0; j < i; ++j) {
      check_no_overlap(op, name, *out, outputs[j].first, *outputs[j].second);
    }
  }
}

// The leading tensor A and all inputs beside it.
Plan input_plan(const char* op, const RingRnnInputs& in, const RingRnnOptions& options) {
  Plan plan;
  plan.op = op;
  check_tensor(op, "A", in.A, 3);
  check_dtype(op, "A", in.A, {DType::kF64, DType::kF32, DType::kF16, DType::kBF16});
  plan.dtype = in.A.dtype;
  plan.device = in.A.device;
  plan.B = in.A.shape[0];
  plan.T = in.A.shape[1];
  plan.K = in.A.shape[2];
  check_tensor(op, "r0", in.r0, 2);
  plan.N = in.r0.shape[1];
  plan.in = in;
  const DType dtype = plan.dtype;
  // r0 is f32 beside 16-bit tensors where a stream carries its state on.
  const auto check_state = [&](const char* name, const TensorView& v) {
    if (size_of(dtype) > 2) {
      check_input(plan, name, v, {dtype}, {plan.B, plan.N}, "A", in.A);
    } else {
      check_input(plan, name, v, {dtype, DType::kF32}, {plan.B, plan.N}, "A", in.A);
    }
  };
  check_state("r0", in.r0);
  check_weights(plan, in.Wa, in.Wo, "A", in.A);
  if (in.drive.defined()) {
    check_input(plan, "drive", in.drive, {dtype}, {plan.B, plan.T, plan.N}, "A", in.A);
  }
  if (in.reset.defined()) {
    check_input(plan, "reset", in.reset, {DType::kBool}, {plan.B, plan.T}, "A", in.A);
  }
  if (in.reset_state.defined()) {
    if (!in.reset.defined()) invalid(op, "reset", "be given with reset_state", "is missing");
    check_state("reset_state", in.reset_state);
  }
  if (in.mask.defined()) {
    check_input(plan, "mask", in.mask, {DType::kBool}, {plan.B, plan.T}, "A", in.A);
  }
  check_parameter(plan, "J0", in.J0, false);
  check_parameter(plan, "J1", in.J1, false);
  check_parameter(plan, "alpha", in.alpha, true);
  check_scratch(plan);
  check_options(plan, options);
  return plan;
}

void check_saved(const Plan& plan, const TensorView& saved) {
  check_input(plan, "saved", saved, {state_dtype(plan.dtype)}, {plan.saved_steps(), plan.B, plan.N},
              "A", plan.in.A);
}

Plan forward_plan(const RingRnnInputs& in, const RingRnnOutputs& out,
                  const RingRnnOptions& options) {
  Plan plan = input_plan("ring_rnn", in, options);
  const DType state = state_dtype(plan.dtype);
  if (in.packed.defined()) check_packed(plan, in.packed);
  check_input(plan, "out", out.out, {plan.dtype}, {plan.B, plan.T, plan.N}, "A", in.A);
  if (out.h_n.defined()) {
    check_input(plan, "h_n", out.h_n, {state}, {plan.B, plan.N}, "A", in.A);
  }
  if (out.angle.defined() != out.amplitude.defined()) {
    invalid(plan.op, out.angle.defined() ? "amplitude" : "angle",
            "be given together with the other of angle and amplitude", "is missing");
  }
  if (out.angle.defined()) {
    check_input(plan, "angle", out.angle, {state}, {plan.B, plan.T}, "A", in.A);
    check_input(plan, "amplitude", out.amplitude, {state}, {plan.B, plan.T}, "A", in.A);
  }
  if (out.saved.defined()) check_saved(plan, out.saved);
  check_outputs_apart(plan.op, named_inputs(in),
                      {{"out", &out.out},
                       {"h_n", &out.h_n},
                       {"angle", &out.angle},
                       {"amplitude", &out.amplitude},
                       {"saved", &out.saved}});
  plan.out = out;
  return plan;
}

// The gradient of a parameter that is a number has the state's dtype.
void check_parameter_gradient(const Plan& plan, const char* name, const RingRnnParameter& p,
                              const TensorView& grad) {
  if (!grad.defined()) return;
  const bool tensor = p.tensor.defined();
  check_tensor(plan.op, name, grad, tensor ? p.tensor.rank : 0);
  check_dtype(plan.op, name, grad, {tensor ? p.tensor.dtype : state_dtype(plan.dtype)});
  if (tensor && p.tensor.rank == 1) check_shape(plan.op, name, grad, {plan.N});
  check_device(plan.op, name, grad, "A", plan.in.A);
}

void check_gradients(Plan& plan, const RingRnnGradients& grad) {
  const RingRnnInputs& in = plan.in;
  const auto like = [&](const char* name, const TensorView& g, const TensorView& x) {
    if (!g.defined()) return;
    check_tensor(plan.op, name, g, x.rank);
    check_dtype(plan.op, name, g, {x.dtype});
    if (g.shape != x.shape) {
      invalid(plan.op, name, "have shape " + shape_string(x.sizes()),
              "has " + shape_string(g.sizes()));
    }
    check_device(plan.op, name, g, "A", in.A);
  };
  like("dA", grad.dA, in.A);
  like("dWa", grad.dWa, in.Wa);
  like("dWo", grad.dWo, in.Wo);
  like("dr0", grad.dr0, in.r0);
  if (grad.ddrive.defined() && !in.drive.defined()) {
    invalid(plan.op, "ddrive", "be left out where drive is", "is given");
  }
  like("ddrive", grad.ddrive, in.drive);
  if (grad.dreset_state.defined() && !in.reset_state.defined()) {
    invalid(plan.op, "dreset_state", "be left out where reset_state is", "is given");
  }
  like("dreset_state", grad.dreset_state, in.reset_state);
  check_parameter_gradient(plan, "dJ0", in.J0, grad.dJ0);
  check_parameter_gradient(plan, "dJ1", in.J1, grad.dJ1);
  check_parameter_gradient(plan, "dalpha", in.alpha, grad.dalpha);
  plan.grad = grad;
}

// For a question about sizes no data is needed: an aligned address stands in for it.
void give_address(TensorView& v) {
  if (v.defined() && v.data == nullptr) v.data = reinterpret_cast<void*>(std::uintptr_t{4096});
}

RingRnnInputs sized(RingRnnInputs in) {
  for (TensorView* v : {&in.A, &in.Wa, &in.Wo, &in.r0, &in.J0.tensor, &in.J1.tensor,
                        &in.alpha.tensor, &in.drive, &in.reset, &in.reset_state, &in.mask}) {
    give_address(*v);
  }
  return in;
}

Plan pack_plan(const TensorView& Wa, const TensorView& Wo, const RingRnnOptions& options) {
  Plan plan;
  plan.op = "ring_rnn_pack";
  check_tensor(plan.op, "Wa", Wa, 3);
  check_dtype(plan.op, "Wa", Wa, {DType::kF64, DType::kF32, DType::kF16, DType::kBF16});
  plan.dtype = Wa.dtype;
  plan.device = Wa.device;
  plan.K = Wa.shape[0];
  plan.N = Wa.shape[1];
  check_weights(plan, Wa, Wo, "Wa", Wa);
  check_scratch(plan);
  check_options(plan, options);
  plan.in.Wa = Wa;
  plan.in.Wo = Wo;
  return plan;
}

}  // namespace

std::array<std::int64_t, 3> ring_rnn_saved_shape(const RingRnnInputs& inputs,
                                                 const RingRnnOptions& options) {
  const Plan plan = input_plan("ring_rnn", sized(inputs), options);
  return {plan.saved_steps(), plan.B, plan.N};
}

void ring_rnn_forward(const RingRnnInputs& inputs, const RingRnnOutputs& outputs,
                      const RingRnnOptions& options, Context& context) {
  const Plan plan = forward_plan(inputs, outputs, options);
  ANNULUS_RING_DISPATCH(plan, forward)(plan, context);
}

void ring_rnn_backward(const RingRnnInputs& inputs, const TensorView& dout, const TensorView& dh_n,
                       const TensorView& out, const TensorView& saved,
                       const RingRnnGradients& gradients, const RingRnnOptions& options,
                       Context& context) {
  constexpr const char* op = "ring_rnn_backward";
  Plan plan = input_plan(op, inputs, options);
  if (inputs.packed.defined()) invalid(op, "packed", "be left out of a backward", "is given");
  const auto full = {plan.B, plan.T, plan.N};
  if (dout.defined()) check_input(plan, "dout", dout, {plan.dtype}, full, "A", inputs.A);
  if (dh_n.defined()) {
    check_input(plan, "dh_n", dh_n, {state_dtype(plan.dtype)}, {plan.B, plan.N}, "A", inputs.A);
  }
  check_input(plan, "out", out, {plan.dtype}, full, "A", inputs.A);
  check_saved(plan, saved);
  check_gradients(plan, gradients);
  auto read = named_inputs(inputs);
  read.insert(read.end(), {{"dout", &dout}, {"dh_n", &dh_n}, {"out", &out}, {"saved", &saved}});
  check_outputs_apart(op, read,
                      {{"dA", &gradients.dA},
                       {"dWa", &gradients.dWa},
                       {"dWo", &gradients.dWo},
                       {"dr0", &gradients.dr0},
                       {"dJ0", &gradients.dJ0},
                       {"dJ1", &gradients.dJ1},
                       {"dalpha", &gradients.dalpha},
                       {"ddrive", &gradients.ddrive},
                       {"dreset_state", &gradients.dreset_state}});
  plan.dout = dout;
  plan.dh_n = dh_n;
  plan.out.out = out;
  plan.out.saved = saved;
  ANNULUS_RING_DISPATCH(plan, backward)(plan, context);
}

std::size_t ring_rnn_forward_workspace(const RingRnnInputs& inputs, const RingRnnOutputs& outputs,
                                       const RingRnnOptions& options) {
  Plan plan = input_plan("ring_rnn", sized(inputs), options);
  plan.out = outputs;
  return ANNULUS_RING_DISPATCH(plan, forward_workspace)(plan);
}

std::size_t ring_rnn_backward_workspace(const RingRnnInputs& inputs,
                                        const RingRnnGradients& gradients,
                                        const RingRnnOptions& options) {
  Plan plan = input_plan("ring_rnn_backward", sized(inputs), options);
  plan.grad = gradients;
  return ANNULUS_RING_DISPATCH(plan, backward_workspace)(plan);
}

std::int64_t ring_rnn_pack_size(const TensorView& Wa, const TensorView& Wo,
                                const RingRnnOptions& options) {
  TensorView a = Wa;
  TensorView o = Wo;
  give_address(a);
  give_address(o);
  const Plan plan = pack_plan(a, o, options);
  return static_cast<std::int64_t>((ANNULUS_RING_DISPATCH(plan, pack_bytes)(plan) + 3) / 4);
}

void ring_rnn_pack(const TensorView& Wa, const TensorView& Wo, const TensorView& packed,
                   const RingRnnOptions& options, Context& context) {
  Plan plan = pack_plan(Wa, Wo, options);
  check_packed(plan, packed);
  check_no_overlap(plan.op, "packed", packed, "Wa", Wa);
  check_no_overlap(plan.op, "packed", packed, "Wo", Wo);
  plan.in.packed = packed;
  ANNULUS_RING_DISPATCH(plan, pack)(plan, context);
}

namespace {

ReadoutPlan readout_plan(const char* op, const TensorView& states) {
  ReadoutPlan plan;
  plan.op = op;
  check_tensor(op, "states", states, 3);
  check_dtype(op, "states", states, {DType::kF64, DType::kF32, DType::kF16, DType::kBF16});
  plan.device = states.device;
  plan.B = states.shape[0];
  plan.T = states.shape[1];
  plan.N = states.shape[2];
  plan.states = states;
  return plan;
}

void check_readout(const ReadoutPlan& plan, const char* name, const TensorView& v) {
  check_tensor(plan.op, name, v, 2);
  check_dtype(plan.op, name, v, {state_dtype(plan.states.dtype)});
  check_shape(plan.op, name, v, {plan.B, plan.T});
  check_device(plan.op, name, v, "states", plan.states);
}

}  // namespace

void ring_readout_forward(const TensorView& states, const TensorView& angle,
                          const TensorView& amplitude, Context& context) {
  ReadoutPlan plan = readout_plan("ring_readout", states);
  check_readout(plan, "angle", angle);
  check_readout(plan, "amplitude", amplitude);
  check_outputs_apart(plan.op, {{"states", &states}},
                      {{"angle", &angle}, {"amplitude", &amplitude}});
  plan.angle = angle;
  plan.amplitude = amplitude;
  ANNULUS_RING_DISPATCH(plan, readout_forward)(plan, context);
  ran_on(plan.op, plan.device.type);
}

void ring_readout_backward(const TensorView& states, const TensorView& dangle,
                           const TensorView& damplitude, const TensorView& dstates,
                           Context& context) {
  ReadoutPlan plan = readout_plan("ring_readout_backward", states);
  if (dangle.defined()) check_readout(plan, "dangle", dangle);
  if (damplitude.defined()) check_readout(plan, "damplitude", damplitude);
  check_tensor(plan.op, "dstates", dstates, 3);
  check_dtype(plan.op, "dstates", dstates, {states.dtype});
  check_shape(plan.op, "dstates", dstates, {plan.B, plan.T, plan.N});
  check_device(plan.op, "dstates", dstates, "states", states);
  check_outputs_apart(plan.op,
                      {{"states", &states}, {"dangle", &dangle}, {"damplitude", &damplitude}},
                      {{"dstates", &dstates}});
  plan.dangle = dangle;
  plan.damplitude = damplitude;
  plan.dstates = dstates;
  ANNULUS_RING_DISPATCH(plan, readout_backward)(plan, context);
  ran_on(plan.op, plan.device.type);
}

namespace {

Support support(DeviceType device) {
  if (device == DeviceType::kCPU) return {true, cpu::simd_description()};
#if ANNULUS_HAVE_CUDA
  return ring_rnn::cuda::support();
#else
  return {false, "this build has no CUDA backend (ANNULUS_CUDA=OFF)"};
#endif
}

const std::vector<DType> kDTypes = {DType::kF64, DType::kF32, DType::kF16, DType::kBF16};
const OperatorRegistration kRingRnn(
    {.name = "ring_rnn",
     .summary = "ring-attractor RNN, recurrent matrix mixed from K action matrices",
     .dtypes = kDTypes,
     .gradients = {"A", "Wa", "Wo", "r0", "J0", "J1", "alpha", "drive", "reset_state"},
     .deterministic = true,
     .support = support,
     // RingRnnAccuracy.OverTwentyLiveSteps holds CPUs to these, and CUDA to bars of its own.
     .precisions = {{"fp32", "fp32 operands", 1.5e-7, 4.5e-7},
                    {"bf16x6", "three bf16 each, six products", 1.5e-7, 4.1e-7},
                    {"bf16x3", "two bf16 each, three products", 8.2e-7, 5.3e-6},
                    {"tf32", "made as bf16x3, whose errors these are; CUDA only", 8.2e-7, 5.3e-6},
                    {"bf16", "one bf16 each", 4.4e-4, 2.9e-3}},
     .precisions_measured_with =
         "20 live steps, gelu, alpha 0.15, B 24, K 8, N 96, on a CPU, relative L2"});
const OperatorRegistration kReadout({.name = "ring_readout",
                                     .summary = "angle and length of a ring's population vector",
                                     .dtypes = kDTypes,
                                     .gradients = {"states"},
                                     .deterministic = true,
                                     .support = support});

}  // namespace

}  // namespace annulus
