// Ring RNN on CUDA: which kernels run a call.
#include "annulus/cuda/check.h"
#include "annulus/ring_rnn/cuda/arguments.cuh"
#include "annulus/ring_rnn/cuda/tensor.cuh"

namespace annulus::ring_rnn::cuda {

Args make_args(const Plan& plan) {
  const RingRnnInputs& in = plan.in;
  const RingRnnOutputs& out = plan.out;
  const RingRnnGradients& grad = plan.grad;
  return {.B = plan.B,
          .T = plan.T,
          .K = plan.K,
          .N = plan.N,
          .checkpoint = plan.checkpoint,
          .activation = plan.activation,
          .A = in.A,
          .Wa = in.Wa,
          .Wo = in.Wo,
          .r0 = in.r0,
          .J0 = in.J0,
          .J1 = in.J1,
          .alpha = in.alpha,
          .drive = in.drive,
          .reset = in.reset,
          .reset_state = in.reset_state.defined() ? in.reset_state : in.r0,
          .mask = in.mask,
          .out = out.out,
          .saved = out.saved,
          .h_n = out.h_n,
          .angle = out.angle,
          .amplitude = out.amplitude,
          .dout = plan.dout,
          .dh_n = plan.dh_n,
          .dA = grad.dA,
          .dWa = grad.dWa,
          .ddrive = grad.ddrive,
          .dWo = grad.dWo,
          .dr0 = grad.dr0,
          .dreset_state = grad.dreset_state,
          .dalpha = grad.dalpha,
          .dJ0 = grad.dJ0,
          .dJ1 = grad.dJ1,
          .alpha_per_neuron = plan.alpha_per_neuron()};
}

namespace {

// Tensor cores run what is not f64 and has anything to multiply; the general path runs the rest. Their
// backward takes the states from `out`: beside 16-bit tensors they are rounded there, which is below the
// precision that two or three terms promise. The general path computes them again and, so that
// checkpoints change no bit, runs such forwards, too.
bool packs_for_tensor_cores(const Plan& plan) {
  return (plan.dtype == DType::kF32 ||
          (plan.dtype != DType::kF64 && tensor::terms_of(plan.precision) == 1)) &&
         tensor::terms_of(plan.precision) > 0 && plan.N > 0;
}
bool on_tensor_cores(const Plan& plan) {
  return packs_for_tensor_cores(plan) && plan.B > 0 && plan.T > 0;
}

}  // namespace

void forward(const Plan& plan, Context& context) {
  const DeviceGuard guard(plan.device.index);
  if (on_tensor_cores(plan)) return tensor::forward(plan, context);
  general::forward(plan, context);
  context.ran_on(plan.op, DeviceType::kCUDA, "ordinary cores");
}
void backward(const Plan& plan, Context& context) {
  const DeviceGuard guard(plan.device.index);
  if (on_tensor_cores(plan)) return tensor::backward(plan, context);
  general::backward(plan, context);
  context.ran_on(plan.op, DeviceType::kCUDA, "ordinary cores");
}
std::size_t forward_workspace(const Plan& plan) {
  const DeviceGuard guard(plan.device.index);
  return (on_tensor_cores(plan) ? tensor::forward_workspace : general::forward_workspace)(plan);
}
std::size_t backward_workspace(const Plan& plan) {
  const DeviceGuard guard(plan.device.index);
  return (on_tensor_cores(plan) ? tensor::backward_workspace : general::backward_workspace)(plan);
}
std::size_t pack_bytes(const Plan& plan) {
  return (packs_for_tensor_cores(plan) ? tensor::pack_bytes : general::pack_bytes)(plan);
}
void pack(const Plan& plan, Context& context) {
  const DeviceGuard guard(plan.device.index);
  (packs_for_tensor_cores(plan) ? tensor::pack : general::pack)(plan, context);
}

// tf32 is a bound on the error, too: its products are made of two bf16 terms (bf16x3), which is
// right to 2^-16 where tf32 is to 2^-11.
const char* why_not(Precision) { return ""; }

Support support() { return general::support(); }

}  // namespace annulus::ring_rnn::cuda
