// The ring RNN ops of torch. Autograd and fake kernels are in python/annulus/ring_rnn.py.
//
// A parameter (J0, J1, alpha) is a number and, where it is a tensor, the tensor, which then counts.
// An output of the forward that was not asked for comes back as a tensor of shape (0,).
#include <algorithm>
#include <array>
#include <cstdint>
#include <string_view>
#include <tuple>
#include <vector>

#include "annulus/ring_rnn/ring_rnn.h"
#include "python/csrc/torch_op.h"

namespace annulus::torch_glue {
namespace {

constexpr const char* kRnn = "ring_rnn";
constexpr const char* kPack = "ring_rnn_pack";
constexpr const char* kReadout = "ring_readout";

#define ANNULUS_RING_RNN_INPUTS                                                          \
  "Tensor A, Tensor Wa, Tensor Wo, Tensor r0, Tensor? J0_tensor, Tensor? J1_tensor, "    \
  "Tensor? alpha_tensor, Tensor? drive, Tensor? reset_state, float J0, float J1, float " \
  "alpha, Tensor? reset, Tensor? mask, str activation, str precision, SymInt checkpoint"

constexpr std::array<Choice<RingRnnActivation>, 4> kActivations{{
    {"relu", RingRnnActivation::kRelu},
    {"gelu", RingRnnActivation::kGelu},
    {"tanh", RingRnnActivation::kTanh},
    {"silu", RingRnnActivation::kSilu},
}};
// kAuto to kBf16, by the names of their table.
constexpr auto kChoices = [] {
  std::array<Choice<Precision>, 7> all{};
  for (std::size_t i = 0; i < all.size(); ++i) {
    all[i] = {kPrecisions[i].name, static_cast<Precision>(i)};
  }
  return all;
}();

template <class Op>
RingRnnOptions options_of(const Arguments<Op>& a) {
  return {.activation = chosen(kRnn, "activation", a.template get<"activation">(), kActivations),
          .precision = chosen(kRnn, "precision", a.template get<"precision">(), kChoices),
          .checkpoint = a.template get<"checkpoint">()};
}

RingRnnParameter parameter_of(const char* name, const OptionalTensor& tensor, double value) {
  return tensor ? RingRnnParameter(view_of(kRnn, name, *tensor)) : value;
}

template <class Op>
RingRnnInputs inputs_of(const Arguments<Op>& a) {
  return {
      .A = a.template view<"A">(),
      .Wa = a.template view<"Wa">(),
      .Wo = a.template view<"Wo">(),
      .r0 = a.template view<"r0">(),
      .J0 = parameter_of("J0", a.template get<"J0_tensor">(), a.template get<"J0">()),
      .J1 = parameter_of("J1", a.template get<"J1_tensor">(), a.template get<"J1">()),
      .alpha = parameter_of("alpha", a.template get<"alpha_tensor">(), a.template get<"alpha">()),
      .drive = a.template view<"drive">(),
      .reset = a.template view<"reset">(),
      .reset_state = a.template view<"reset_state">(),
      .mask = a.template view<"mask">(),
      .packed = {},
      .packed_form = {}};
}

// The form of packed weights as Python keeps it: (dtype, device, K, N, precision), or nothing.
RingRnnPackedForm form_of(const std::vector<std::int64_t>& f) {
  if (f.size() != 5) return {};
  return {static_cast<DType>(f[0]), static_cast<DeviceType>(f[1]), f[2], f[3],
          static_cast<Precision>(f[4])};
}
std::array<std::int64_t, 5> numbers_of(const RingRnnPackedForm& f) {
  return {static_cast<std::int64_t>(f.dtype), static_cast<std::int64_t>(f.device), f.K, f.N,
          static_cast<std::int64_t>(f.precision)};
}

// The dtype of the state, and of what is read out of it.
DType state_dtype(DType dtype) { return dtype == DType::kF64 ? DType::kF64 : DType::kF32; }

struct RingRnn {
  static constexpr const char* op = kRnn;
  static constexpr std::string_view schema =
      "ring_rnn(" ANNULUS_RING_RNN_INPUTS
      ", Tensor? packed, int[] packed_form, bool save, bool readout) -> "
      "(Tensor out, Tensor h_n, Tensor angle, Tensor amplitude, Tensor saved)";

  static auto run(const Arguments<RingRnn>& a) {
    const RingRnnOptions options = options_of(a);
    RingRnnInputs in = inputs_of(a);
    in.packed = a.view<"packed">();
    in.packed_form = form_of(a.get<"packed_form">());
    const Device device = in.A.device;
    const DType state = state_dtype(in.A.dtype);
    const auto [B, T, N] = std::array{in.A.shape[0], in.A.shape[1], in.r0.shape[1]};
    RingRnnOutputs out{.out = dense(op, {B, T, N}, in.A.dtype, device),
                       .h_n = dense(op, {B, N}, state, device),
                       .angle = absent(state, device),
                       .amplitude = absent(state, device),
                       .saved = absent(state, device)};
    if (a.get<"readout">()) out.angle = out.amplitude = dense(op, {B, T}, state, device);
    if (a.get<"save">()) {
      const auto [steps, samples, neurons] = ring_rnn_saved_shape(in, options);
      out.saved = dense(op, {steps, samples, neurons}, state, device);
    }
    Call call(op, device, ring_rnn_forward_workspace(in, out, options));
    std::tuple result{allocate(op, "out", out.out), allocate(op, "h_n", out.h_n),
                      allocate(op, "angle", out.angle), allocate(op, "amplitude", out.amplitude),
                      allocate(op, "saved", out.saved)};
    ring_rnn_forward(in, out, options, call.context);
    return result;
  }
};

struct RingRnnBackward {
  static constexpr const char* op = kRnn;
  static constexpr std::string_view schema =
      "ring_rnn_backward(Tensor? dout, Tensor? dh_n, Tensor out, Tensor "
      "saved, " ANNULUS_RING_RNN_INPUTS ", int needed) -> Tensor[]";

  static std::vector<Tensor> run(const Arguments<RingRnnBackward>& a) {
    const RingRnnOptions options = options_of(a);
    const RingRnnInputs in = inputs_of(a);
    RingRnnGradients gradients;
    Gradients wanted(op, a.get<"needed">());
    const auto add = [&](const char* name, TensorView& place, const TensorView& input) {
      wanted.add(name, place, dense_like(op, input));
    };
    add("dA", gradients.dA, in.A);
    add("dWa", gradients.dWa, in.Wa);
    add("dWo", gradients.dWo, in.Wo);
    add("dr0", gradients.dr0, in.r0);
    add("dJ0", gradients.dJ0, in.J0.tensor);
    add("dJ1", gradients.dJ1, in.J1.tensor);
    add("dalpha", gradients.dalpha, in.alpha.tensor);
    add("ddrive", gradients.ddrive, in.drive);
    add("dreset_state", gradients.dreset_state, in.reset_state);
    Call call(op, in.A.device, ring_rnn_backward_workspace(in, gradients, options));
    std::vector<Tensor> result = wanted.allocate();
    ring_rnn_backward(in, a.view<"dout">(), a.view<"dh_n">(), a.view<"out">(), a.view<"saved">(),
                      gradients, options, call.context);
    return result;
  }
};

struct RingRnnPack {
  static constexpr const char* op = kPack;
  static constexpr std::string_view schema =
      "ring_rnn_pack(Tensor Wa, Tensor Wo, str precision) -> (Tensor packed, Tensor form)";

  static auto run(const Arguments<RingRnnPack>& a) {
    const RingRnnOptions options{.precision =
                                     chosen(op, "precision", a.get<"precision">(), kChoices)};
    const TensorView Wa = a.view<"Wa">(), Wo = a.view<"Wo">();
    const std::int64_t size = ring_rnn_pack_size(Wa, Wo, options);
    // The library wants an aligned block, and torch aligns less on a CPU: the block is a part of a
    // larger tensor.
    Call call(op, Wa.device, 0);
    TensorView room = dense(op, {checked_add(size, kAlignment / 4, op)}, DType::kI32, Wa.device);
    const Tensor whole = allocate(op, "packed", room);
    TensorView packed = dense(op, {size}, DType::kI32, Wa.device);
    void* start = room.data;
    std::size_t bytes = static_cast<std::size_t>(room.shape[0]) * 4;
    packed.data = std::align(kAlignment, static_cast<std::size_t>(size) * 4, start, bytes);
    const auto numbers = numbers_of(ring_rnn_pack(Wa, Wo, packed, options, call.context));
    TensorView form = dense(op, {std::ssize(numbers)}, DType::kI64, kCPU);
    Tensor kept = allocate(op, "form", form);
    std::copy(numbers.begin(), numbers.end(), static_cast<std::int64_t*>(form.data));
    AtenTensorHandle part = nullptr;
    TORCH_ERROR_CODE_CHECK(aoti_torch__reinterpret_tensor(
        whole.get(), 1, packed.shape.data(), packed.stride.data(),
        static_cast<std::int32_t*>(packed.data) - static_cast<std::int32_t*>(room.data), &part));
    return std::tuple{Tensor(part), kept};
  }
};

struct RingReadout {
  static constexpr const char* op = kReadout;
  static constexpr std::string_view schema =
      "ring_readout(Tensor states) -> (Tensor angle, Tensor amplitude)";

  static auto run(const Arguments<RingReadout>& a) {
    const TensorView states = a.view<"states">();
    Call call(op, states.device, 0);
    TensorView angle =
        dense(op, {states.shape[0], states.shape[1]}, state_dtype(states.dtype), states.device);
    TensorView amplitude = angle;
    std::tuple result{allocate(op, "angle", angle), allocate(op, "amplitude", amplitude)};
    ring_readout_forward(states, angle, amplitude, call.context);
    return result;
  }
};

struct RingReadoutBackward {
  static constexpr const char* op = kReadout;
  static constexpr std::string_view schema =
      "ring_readout_backward(Tensor? dangle, Tensor? damplitude, Tensor states, int needed) -> "
      "Tensor[]";

  static std::vector<Tensor> run(const Arguments<RingReadoutBackward>& a) {
    const TensorView states = a.view<"states">();
    Call call(op, states.device, 0);
    TensorView dstates;
    Gradients wanted(op, a.get<"needed">());
    wanted.add("dstates", dstates, dense_like(op, states));
    std::vector<Tensor> result = wanted.allocate();
    ring_readout_backward(states, a.view<"dangle">(), a.view<"damplitude">(), dstates,
                          call.context);
    return result;
  }
};

ANNULUS_TORCH_OPS(RingRnn, RingRnnBackward, RingRnnPack, RingReadout, RingReadoutBackward)

}  // namespace
}  // namespace annulus::torch_glue
