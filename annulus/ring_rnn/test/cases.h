// The problems of the ring RNN and of its readout, for tests, checks, fuzzing and benchmarks.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "annulus/ring_rnn/ring_rnn.h"
#include "testing/case.h"

namespace annulus::testing {

// Which gradients a backward is asked for.
enum RingGradient : unsigned {
  kRingDA = 1u << 0,
  kRingDWa = 1u << 1,
  kRingDWo = 1u << 2,
  kRingDr0 = 1u << 3,
  kRingDJ0 = 1u << 4,
  kRingDJ1 = 1u << 5,
  kRingDalpha = 1u << 6,
  kRingDdrive = 1u << 7,        // counts where there is a drive
  kRingDreset_state = 1u << 8,  // counts where there is a reset_state
  kRingAllGradients = (1u << 9) - 1,
};

struct RingRnnProblem {
  std::int64_t B = 1, T = 1, K = 1, N = 1;
  DType dtype = DType::kF32;
  bool f32_state = true;       // beside 16-bit tensors: r0 and reset_state are f32, else as A
  bool f32_parameters = true;  // parameters that are tensors are f32, else as A
  RingRnnActivation activation = RingRnnActivation::kTanh;
  // tf32 exists on CUDA only; on the CPU such a problem runs in fp32.
  Precision precision = Precision::kAuto;
  std::int64_t checkpoint = 0;

  enum class Parameter : std::uint8_t { kNumber, kTensor, kPerNeuron };  // the last: alpha only
  Parameter J0_form = Parameter::kNumber;
  Parameter J1_form = Parameter::kNumber;
  Parameter alpha_form = Parameter::kNumber;
  double J0 = -0.1, J1 = 0.1, alpha = 0.15;

  bool drive = false, reset = false, reset_state = false, mask = false;
  bool h_n = false;      // asked for by the forward
  bool readout = false;  // angle and amplitude, fused
  unsigned gradients = 0;
  bool dout = true, dh_n = false;  // incoming gradients

  enum class Actions : std::uint8_t {
    kDense,     // normal
    kSparse,    // six in ten exactly zero
    kOneHot,    // one channel of every sample and step is 1
    kBySample,  // channel k acts on every K-th sample only
    kVelocity,  // relu(v linspace(-1, 1, K)), v = 0 more often than not: the original's benchmark
    kZero,
  } actions = Actions::kDense;
  std::int64_t live = -1;  // channels from this one on are zero (padding); -1: none is
  // Size of the recurrent matrix, J0 apart: its elements have a standard deviation of gain /
  // sqrt(N), so that at 1 a state of tanh units neither dies nor explodes.
  double gain = 0.9;
  bool special = false;  // NaN and huge values in a sample or two
  std::uint64_t seed = 0;
};

// calls: "forward", and "backward" where a gradient is asked for. Inputs are named as in the
// header. The forward of a problem with gradients also writes `saved`; the backward reads it, and
// `out`, as a forward left them (Call::prepare).
Case ring_rnn_case(const RingRnnProblem& problem);

// The arguments of a call among tensors of these names.
RingRnnInputs ring_inputs(const RingRnnProblem& p, Views in, const std::vector<TensorSpec>& specs);
RingRnnOutputs ring_outputs(Views out, const std::vector<TensorSpec>& specs);
RingRnnGradients ring_gradients(Views out, const std::vector<TensorSpec>& specs);

// A random problem: the same for a seed on every machine.
RingRnnProblem ring_rnn_fuzz_problem(std::uint64_t seed);
// Hand-picked problems: every edge and every defect of the original implementation.
std::vector<Case> ring_rnn_named_cases();
std::vector<BadCall> ring_rnn_bad_calls(Device device);

// What `auto` stands for on a device, tf32 on the CPU being fp32; and the row of the numeric policy
// that a precision is judged by.
Precision ring_resolved_precision(const RingRnnProblem& p, Device device);
// Channels that are not padding.
std::int64_t ring_live_channels(const RingRnnProblem& p);

// Values of one input. Also good for the first values of a tensor alone.
void ring_rnn_draw(const RingRnnProblem& p, Rng& rng, const TensorSpec& spec,
                   std::span<double> values);
// A last look at the drawn inputs (those of the forward, in its order), which keeps units off the
// places where two right programs disagree:
// - relu has no slope at 0. Pushes the drive of units whose y is nearly 0 away from it, by several
//   times what the precision can move y.
// - tanh' = 1 - tanh^2 is a difference of equal numbers where all units of a state are saturated.
//   Makes weights and drive smaller until no state is.
void ring_rnn_refine(const RingRnnProblem& p, std::vector<std::vector<double>>& inputs);
// Share of all units and steps with y > 0, in the definition: a dead network has none.
double ring_active_share(const RingRnnProblem& p);

// What a straightforward programmer writes: the definition in f32 (f64 for f64 tensors).
void ring_readout_baseline_forward(const TensorView& states, const TensorView& angle,
                                   const TensorView& amplitude);
void ring_readout_baseline_backward(const TensorView& states, const TensorView& dangle,
                                    const TensorView& damplitude, const TensorView& dstates);

struct RingReadoutProblem {
  std::int64_t B = 1, T = 1, N = 1;
  DType dtype = DType::kF32;
  bool dangle = true, damplitude = true;
  bool backward = true;
  std::uint64_t seed = 0;
};

// calls: "forward", and "backward" where it is asked for.
Case ring_readout_case(const RingReadoutProblem& problem);
RingReadoutProblem ring_readout_fuzz_problem(std::uint64_t seed);
std::vector<Case> ring_readout_named_cases();

}  // namespace annulus::testing
