// Ring RNN: a leaky recurrent network whose recurrent matrix is mixed, per sample and per step, from
// K action matrices (a ring attractor when they are trained to turn a bump of activity).
//
//   Inputs   A  (B, T, K)   actions          Wa (K, N, N)  one recurrent matrix an action
//            r0 (B, N)      initial state    Wo (N, N)     the matrix that always acts
//            J0, J1, alpha  numbers, or tensors (then with gradients); alpha also one a neuron, (N,)
//            drive (B, T, N)        optional: added to y before the activation
//            reset (B, T) bool      optional: before step t the state becomes reset_state (r0 where
//            reset_state (B, N)     that is left out)
//            mask  (B, T) bool      optional: a step whose mask is false leaves the state as it is
//                                   (sequences of different lengths, padded)
//   Step     s = reset[b,t] ? reset_state[b] : r
//            y_i = J0 sum_j s_j + J1 sum_j Wo[i,j] s_j + sum_k A[b,t,k] sum_j Wa[k,i,j] s_j
//                  + drive[b,t,i]
//            r_i = mask[b,t] ? (1 - alpha_i) s_i + alpha_i F(y_i) : s_i
//   Outputs  out (B, T, N)  r after every step (r0 not included)     h_n (B, N)  r after the last
//   F        relu (derivative 0 at exactly 0), gelu (erf form), tanh, silu
//
// Per step this is one matrix product [c (x) s] [Wo; Wa]^T with c = (J1, A_t), whose left operand is
// never stored; nothing of size B N N ever exists. An action that is zero for a whole tile of
// samples costs nothing and changes no bit.
//
//   Backward, with l = dL/dr after step t (the incoming gradient included), g = alpha F'(y) l:
//            u_k[j] = sum_i Wa[k,i,j] g_i        (u_0 with Wo)
//            l  <- (1 - alpha) l + J0 sum(g) + J1 u_0 + sum_k A_k u_k   = dL/ds;  then dL/dr before
//                  the step, or dreset_state (dr0 where there is none) for a sample that was reset
//            dA_k = s . u_k     dWa_k += A_k g s^T    dWo += J1 g s^T     ddrive = g
//            dJ0 += sum(g) sum(s)     dJ1 += s . u_0     dalpha += l (F(y) - s)
//   A masked step passes l on and contributes nothing.
//
// Every tensor may have any strides and any size, zero included. dtypes: A is f64, f32, f16 or bf16;
// Wa, Wo, drive and out have A's. r0 and reset_state have A's dtype or f32; h_n, dh_n, saved, angle
// and amplitude are f32 (f64 where A is f64). J0, J1, alpha as tensors: f32, or A's dtype. A gradient
// has the dtype of its input. Inside a call the state is f32 (f64 for f64), so a sequence cut in
// pieces, h_n fed back as r0, gives the bits of one call. The caller owns every tensor; an output may
// overlap no other tensor. Deterministic on every device in every precision, bit-equal for every
// number of threads; no host-device synchronisation. Finite weights are expected: a weight that is
// infinite or NaN spoils the samples whose tile of the batch uses its matrix, not only its own.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>

#include "annulus/core/context.h"
#include "annulus/core/macros.h"
#include "annulus/core/precision.h"
#include "annulus/core/tensor.h"

namespace annulus {

enum class RingRnnActivation : std::uint8_t { kRelu, kGelu, kTanh, kSilu };

// A number, finite in f32 (in f64 where A is f64), or a tensor on the operator's device, which is read when the kernel
// runs, whatever is in it.
struct RingRnnParameter {
  double value = 0;
  TensorView tensor = {};  // rank 0, or (N,) for alpha; not defined: `value` counts

  RingRnnParameter(double v) : value(v) {}              // NOLINT: a number is a parameter
  RingRnnParameter(const TensorView& t) : tensor(t) {}  // NOLINT
};

// What packed weights were made for, which their bits do not say: a call of anything else refuses them.
struct RingRnnPackedForm {
  DType dtype = DType::kF32;
  DeviceType device = DeviceType::kCPU;
  std::int64_t K = -1, N = -1;
  Precision precision = Precision::kAuto;  // the one that was meant, where kAuto was asked for

  bool operator==(const RingRnnPackedForm&) const = default;
};

struct RingRnnInputs {
  TensorView A = {}, Wa = {}, Wo = {}, r0 = {};
  RingRnnParameter J0 = -0.1;
  RingRnnParameter J1 = 0.1;
  RingRnnParameter alpha = 0.15;
  TensorView drive = {}, reset = {}, reset_state = {}, mask = {};  // optional
  // Optional: what ring_rnn_pack made of Wa and Wo, which are then not read (forward only), and what it returned.
  TensorView packed = {};
  RingRnnPackedForm packed_form = {};
};

struct RingRnnOutputs {
  TensorView out = {};  // required
  TensorView h_n = {};  // optional
  // optional, (B, T), both or neither: ring_readout of the state before rounding
  TensorView angle = {}, amplitude = {};
  TensorView saved = {};  // optional: what the backward needs, of shape ring_rnn_saved_shape
};

// The gradients a backward writes; leave out (an undefined TensorView) what is not needed. dJ0 and
// dJ1 have rank 0, dalpha the shape of alpha; they are f32 (f64 where A is f64) where the parameter
// is a number, else of the parameter's dtype.
struct RingRnnGradients {
  TensorView dA = {}, dWa = {}, dWo = {}, dr0 = {}, dJ0 = {}, dJ1 = {}, dalpha = {}, ddrive = {},
             dreset_state = {};
};

struct RingRnnOptions {
  RingRnnActivation activation = RingRnnActivation::kGelu;
  // How the matrix products are made; J0 sum(s) is exact f32 in every way, and f64 tensors have f64
  // alone (kAuto). kAuto: bf16 for bf16 tensors; for f32 and f16, fp32 on the CPU, and on CUDA bf16x3 for f32
  // and f16 for f16. kFp32 is the fastest way that is as exact as f32 products: on CUDA bf16x6 for f32
  // tensors, which loses terms of operands below 1e-35 and has none above 3.39e38. kTf32 is CUDA's, and so
  // is kF16, for f16 tensors alone. ring_rnn.md has the measured error of each.
  Precision precision = Precision::kAuto;
  // 0: the forward saves y of every step. s > 0: it saves the state before every s-th step, and the
  // backward computes the steps in between again, to the same bits.
  std::int64_t checkpoint = 0;
};

// (T, B, N), or (ceil(T / s), B, N) with checkpoint = s.
ANNULUS_API std::array<std::int64_t, 3> ring_rnn_saved_shape(const RingRnnInputs& inputs,
                                                             const RingRnnOptions& options);

ANNULUS_API void ring_rnn_forward(const RingRnnInputs& inputs, const RingRnnOutputs& outputs,
                                  const RingRnnOptions& options, Context& context);

// dout (B, T, N) and dh_n (B, N), either of which may be left out (it is then zero); `out` and
// `saved` as the forward with the same inputs and options wrote them.
ANNULUS_API void ring_rnn_backward(const RingRnnInputs& inputs, const TensorView& dout,
                                   const TensorView& dh_n, const TensorView& out,
                                   const TensorView& saved, const RingRnnGradients& gradients,
                                   const RingRnnOptions& options, Context& context);

// Exact scratch bytes of a call with these arguments; only devices, dtypes, shapes and which
// optional tensors are there count.
ANNULUS_API std::size_t ring_rnn_forward_workspace(const RingRnnInputs& inputs,
                                                   const RingRnnOutputs& outputs,
                                                   const RingRnnOptions& options);
ANNULUS_API std::size_t ring_rnn_backward_workspace(const RingRnnInputs& inputs,
                                                    const RingRnnGradients& gradients,
                                                    const RingRnnOptions& options);

// For many calls with the same weights (a stream, one step at a time): the weights in the form the
// kernels read, made once. `packed` is a contiguous i32 tensor of ring_rnn_pack_size elements on
// the weights' device, aligned to 256 bytes; with the form that is returned it is good for every B, T and
// set of optional inputs, with the same dtype, N, K and precision.
ANNULUS_API std::int64_t ring_rnn_pack_size(const TensorView& Wa, const TensorView& Wo,
                                            const RingRnnOptions& options);
ANNULUS_API RingRnnPackedForm ring_rnn_pack(const TensorView& Wa, const TensorView& Wo,
                                            const TensorView& packed, const RingRnnOptions& options,
                                            Context& context);

// The population vector of a state over preferred angles 2 pi i / N:
//   X = sum_i r_i cos(2 pi i / N),  Y = sum_i r_i sin(2 pi i / N)
//   angle = atan2(Y, X) in [-pi, pi],  amplitude = sqrt(X^2 + Y^2)
// states (B, T, N) f64, f32, f16, bf16; angle and amplitude (B, T), f32 (f64 for f64). At amplitude
// 0 the angle is 0 and both gradients are 0.
ANNULUS_API void ring_readout_forward(const TensorView& states, const TensorView& angle,
                                      const TensorView& amplitude, Context& context);
// dangle, damplitude (either may be left out) -> dstates, which is overwritten.
ANNULUS_API void ring_readout_backward(const TensorView& states, const TensorView& dangle,
                                       const TensorView& damplitude, const TensorView& dstates,
                                       Context& context);

// The definition: plain loops in double over f64 tensors on the CPU, same arguments, same meaning.
namespace reference {
ANNULUS_API void ring_rnn_forward(const RingRnnInputs& inputs, const RingRnnOutputs& outputs,
                                  const RingRnnOptions& options);
// Needs neither `out` nor `saved`: it computes the states again.
ANNULUS_API void ring_rnn_backward(const RingRnnInputs& inputs, const TensorView& dout,
                                   const TensorView& dh_n, const RingRnnGradients& gradients,
                                   const RingRnnOptions& options);
ANNULUS_API void ring_readout_forward(const TensorView& states, const TensorView& angle,
                                      const TensorView& amplitude);
ANNULUS_API void ring_readout_backward(const TensorView& states, const TensorView& dangle,
                                       const TensorView& damplitude, const TensorView& dstates);
}  // namespace reference

}  // namespace annulus
