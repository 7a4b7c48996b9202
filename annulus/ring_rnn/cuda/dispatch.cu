// Ring RNN on CUDA: which kernels run a call.

#include <cuda_runtime.h>

#include "annulus/core/backend.h"
#include "annulus/cuda/check.h"
#include "annulus/ring_rnn/cuda/arguments.cuh"
#include "annulus/ring_rnn/cuda/tensor.cuh"

namespace annulus::ring_rnn::cuda {

namespace {

template <int Rank>
Ref<Rank> ref(const TensorView& v) {
  Ref<Rank> r;
  if (!v.defined()) return r;
  r.data = v.data;
  for (int i = 0; i < Rank; ++i) r.stride[i] = v.stride[static_cast<std::size_t>(i)];
  r.wide = v.dtype == DType::kF32;
  return r;
}

Parameter parameter(const RingRnnParameter& p) {
  Parameter r;
  r.value = p.value;
  if (!p.tensor.defined()) return r;
  r.data = p.tensor.data;
  r.stride = p.tensor.rank == 0 ? 0 : p.tensor.stride[0];
  r.wide = p.tensor.dtype == DType::kF32;
  return r;
}

}  // namespace

Args make_args(const Plan& plan) {
  Args a;
  a.B = plan.B;
  a.T = plan.T;
  a.K = plan.K;
  a.N = plan.N;
  a.checkpoint = plan.checkpoint;
  a.activation = plan.activation;
  a.A = ref<3>(plan.in.A);
  a.Wa = ref<3>(plan.in.Wa);
  a.Wo = ref<2>(plan.in.Wo);
  a.r0 = ref<2>(plan.in.r0);
  a.J0 = parameter(plan.in.J0);
  a.J1 = parameter(plan.in.J1);
  a.alpha = parameter(plan.in.alpha);
  a.drive = ref<3>(plan.in.drive);
  a.reset = ref<2>(plan.in.reset);
  a.reset_state = ref<2>(plan.in.reset_state.defined() ? plan.in.reset_state : plan.in.r0);
  a.mask = ref<2>(plan.in.mask);
  a.out = ref<3>(plan.out.out);
  a.saved = ref<3>(plan.out.saved);
  a.h_n = ref<2>(plan.out.h_n);
  a.angle = ref<2>(plan.out.angle);
  a.amplitude = ref<2>(plan.out.amplitude);
  a.dout = ref<3>(plan.dout);
  a.dh_n = ref<2>(plan.dh_n);
  a.dA = ref<3>(plan.grad.dA);
  a.dWa = ref<3>(plan.grad.dWa);
  a.dWo = ref<2>(plan.grad.dWo);
  a.dr0 = ref<2>(plan.grad.dr0);
  a.dJ0 = ref<0>(plan.grad.dJ0);
  a.dJ1 = ref<0>(plan.grad.dJ1);
  a.dalpha = ref<1>(plan.grad.dalpha);
  if (plan.grad.dalpha.rank == 0) a.dalpha.stride[0] = 0;
  a.ddrive = ref<3>(plan.grad.ddrive);
  a.dreset_state = ref<2>(plan.grad.dreset_state);
  a.alpha_per_neuron = plan.alpha_per_neuron();
  return a;
}

namespace {

// Tensor cores run what is not f64 and has anything to multiply; the general path runs the rest. Their
// backward takes the states from `out`: beside 16-bit tensors they are rounded there, which is below the
// precision that two or three terms promise. The general path computes them again and, so that
// checkpoints change no bit, runs such forwards, too.
bool on_tensor_cores(const Plan& plan) {
  return (plan.dtype == DType::kF32 ||
          (plan.dtype != DType::kF64 && tensor::terms_of(plan.precision) == 1)) &&
         tensor::terms_of(plan.precision) > 0 && plan.N > 0;
}
bool has_steps(const Plan& plan) { return plan.B > 0 && plan.T > 0; }

}  // namespace

void forward(const Plan& plan, Context& context) {
  const annulus::cuda::DeviceGuard guard(plan.device.index);
  if (on_tensor_cores(plan) && has_steps(plan)) return tensor::forward(plan, context);
  general::forward(plan, context);
  ran_on(plan.op, DeviceType::kCUDA, "ordinary cores");
}
void backward(const Plan& plan, Context& context) {
  const annulus::cuda::DeviceGuard guard(plan.device.index);
  if (on_tensor_cores(plan) && has_steps(plan)) return tensor::backward(plan, context);
  general::backward(plan, context);
  ran_on(plan.op, DeviceType::kCUDA, "ordinary cores");
}
std::size_t forward_workspace(const Plan& plan) {
  const annulus::cuda::DeviceGuard guard(plan.device.index);
  return on_tensor_cores(plan) && has_steps(plan) ? tensor::forward_workspace(plan)
                                                  : general::forward_workspace(plan);
}
std::size_t backward_workspace(const Plan& plan) {
  const annulus::cuda::DeviceGuard guard(plan.device.index);
  return on_tensor_cores(plan) && has_steps(plan) ? tensor::backward_workspace(plan)
                                                  : general::backward_workspace(plan);
}
std::size_t pack_bytes(const Plan& plan) {
  return on_tensor_cores(plan) ? tensor::pack_bytes(plan) : general::pack_bytes(plan);
}
void pack(const Plan& plan, Context& context) {
  const annulus::cuda::DeviceGuard guard(plan.device.index);
  if (on_tensor_cores(plan)) return tensor::pack(plan, context);
  general::pack(plan, context);
}

// tf32 is a bound on the error, too: its products are made of two bf16 terms (bf16x3), which is
// right to 2^-16 where tf32 is to 2^-11.
const char* why_not(Precision) { return ""; }

Support support() { return general::support(); }

}  // namespace annulus::ring_rnn::cuda
