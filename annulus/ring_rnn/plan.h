// A checked call, in the form both backends read.
#pragma once

#include <cstddef>
#include <cstdint>

#include "annulus/core/context.h"
#include "annulus/core/info.h"
#include "annulus/core/tensor.h"
#include "annulus/ring_rnn/ring_rnn.h"

namespace annulus::ring_rnn {

struct Plan {
  const char* op = "ring_rnn";
  Device device;
  DType dtype = DType::kF32;  // of A, Wa, Wo, drive, out
  RingRnnActivation activation = RingRnnActivation::kRelu;
  // Never kAuto; kF64 where dtype is f64, and nowhere else.
  Precision precision = Precision::kFp32;
  std::int64_t checkpoint = 0;
  std::int64_t B = 0, T = 0, K = 0, N = 0;

  // CUDA: a launch a part of a step instead of one for all steps. The bits are the same; it is what
  // runs where the GPU refuses a cooperative launch, and tests ask for it. Clusters need neither.
  bool stepwise = false;
  // CUDA: the kernels of compute capability 8.0 also where the GPU has better; for tests.
  bool portable = false;

  RingRnnInputs in;  // optional tensors that were left out are not defined()
  bool alpha_per_neuron() const { return in.alpha.tensor.defined() && in.alpha.tensor.rank == 1; }

  // Forward.
  RingRnnOutputs out;

  // Backward. out.out and out.saved hold what the forward wrote.
  TensorView dout, dh_n;  // not defined: zero
  RingRnnGradients grad;  // not defined: not asked for

  // Rows of out.saved.
  std::int64_t saved_steps() const {
    return checkpoint == 0 ? T : T / checkpoint + (T % checkpoint != 0 ? 1 : 0);
  }
  // A gradient that needs the weights' outer products.
  bool needs_dweights() const { return grad.dWa.defined() || grad.dWo.defined(); }
};

struct ReadoutPlan {
  const char* op = "ring_readout";
  Device device;
  std::int64_t B = 0, T = 0, N = 0;
  TensorView states, angle, amplitude;     // forward
  TensorView dangle, damplitude, dstates;  // backward; dangle, damplitude may be missing
};

// Each backend: the same functions.
#define ANNULUS_RING_BACKEND                                                       \
  void forward(const Plan& plan, Context& context);                                \
  void backward(const Plan& plan, Context& context);                               \
  std::size_t forward_workspace(const Plan& plan);                                 \
  std::size_t backward_workspace(const Plan& plan);                                \
  /* plan.in.Wa, Wo, dtype, precision, K, N, device count; in.packed is written */ \
  std::size_t pack_bytes(const Plan& plan);                                        \
  void pack(const Plan& plan, Context& context);                                   \
  void readout_forward(const ReadoutPlan& plan, Context& context);                 \
  void readout_backward(const ReadoutPlan& plan, Context& context);                \
  /* Why this precision cannot be had here; empty when it can. */                  \
  const char* why_not(Precision precision);

namespace cpu {
ANNULUS_RING_BACKEND
}
namespace cuda {
ANNULUS_RING_BACKEND
Support support();
}  // namespace cuda
#undef ANNULUS_RING_BACKEND

}  // namespace annulus::ring_rnn
