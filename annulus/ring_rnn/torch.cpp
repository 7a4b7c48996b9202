// The ring RNN ops of torch. Autograd and fake kernels are in python/annulus/ring_rnn.py.
//
// A parameter (J0, J1, alpha) is a number and, where it is a tensor, the tensor, which then counts.
// An output of the forward that was not asked for comes back as a tensor of shape (0,); the backward
// returns only the gradients it was asked for, in the order of the inputs.
#include <array>
#include <cstdint>
#include <optional>
#include <string>
#include <tuple>
#include <vector>

#include "annulus/ring_rnn/ring_rnn.h"
#include "python/csrc/torch_glue.h"

namespace annulus::torch_glue {
namespace {

constexpr const char* kRnn = "ring_rnn";
constexpr const char* kPack = "ring_rnn_pack";
constexpr const char* kReadout = "ring_readout";

constexpr std::array<Choice<RingRnnActivation>, 4> kActivations{{
    {"relu", RingRnnActivation::kRelu},
    {"gelu", RingRnnActivation::kGelu},
    {"tanh", RingRnnActivation::kTanh},
    {"silu", RingRnnActivation::kSilu},
}};
// kAuto to kBf16, by the names of their table.
constexpr auto kChoices = [] {
  std::array<Choice<Precision>, 6> all{};
  for (std::size_t i = 0; i < all.size(); ++i) {
    all[i] = {kPrecisions[i].name, static_cast<Precision>(i)};
  }
  return all;
}();

RingRnnOptions options_of(const std::string& activation, const std::string& precision,
                          std::int64_t checkpoint) {
  return {.activation = chosen(kRnn, "activation", activation, kActivations),
          .precision = chosen(kRnn, "precision", precision, kChoices),
          .checkpoint = checkpoint};
}

RingRnnParameter parameter_of(const char* name, const OptionalTensor& tensor, double value) {
  if (tensor) return view_of(kRnn, name, *tensor);
  return value;
}

RingRnnInputs inputs_of(const Tensor& A, const Tensor& Wa, const Tensor& Wo, const Tensor& r0,
                        const OptionalTensor& J0_tensor, const OptionalTensor& J1_tensor,
                        const OptionalTensor& alpha_tensor, const OptionalTensor& drive,
                        const OptionalTensor& reset_state, const OptionalTensor& reset,
                        const OptionalTensor& mask, double J0, double J1, double alpha) {
  return {.A = view_of(kRnn, "A", A),
          .Wa = view_of(kRnn, "Wa", Wa),
          .Wo = view_of(kRnn, "Wo", Wo),
          .r0 = view_of(kRnn, "r0", r0),
          .J0 = parameter_of("J0", J0_tensor, J0),
          .J1 = parameter_of("J1", J1_tensor, J1),
          .alpha = parameter_of("alpha", alpha_tensor, alpha),
          .drive = view_of(kRnn, "drive", drive),
          .reset = view_of(kRnn, "reset", reset),
          .reset_state = view_of(kRnn, "reset_state", reset_state),
          .mask = view_of(kRnn, "mask", mask),
          .packed = {}};
}

// The dtype of the state, and of what is read out of it.
DType state_dtype(DType dtype) { return dtype == DType::kF64 ? DType::kF64 : DType::kF32; }

std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor> ring_rnn(
    const Tensor& A, const Tensor& Wa, const Tensor& Wo, const Tensor& r0,
    const OptionalTensor& J0_tensor, const OptionalTensor& J1_tensor,
    const OptionalTensor& alpha_tensor, const OptionalTensor& drive,
    const OptionalTensor& reset_state, const OptionalTensor& reset, const OptionalTensor& mask,
    double J0, double J1, double alpha, const std::string& activation, const std::string& precision,
    std::int64_t checkpoint, const OptionalTensor& packed, bool save, bool readout) {
  return typed_errors([&] {
    const RingRnnOptions options = options_of(activation, precision, checkpoint);
    RingRnnInputs in = inputs_of(A, Wa, Wo, r0, J0_tensor, J1_tensor, alpha_tensor, drive,
                                 reset_state, reset, mask, J0, J1, alpha);
    in.packed = view_of(kRnn, "packed", packed);
    const Device device = in.A.device;
    const DType state = state_dtype(in.A.dtype);
    const auto [B, T, N] = std::array{in.A.shape[0], in.A.shape[1], in.r0.shape[1]};
    RingRnnOutputs out{.out = dense(kRnn, {B, T, N}, in.A.dtype, device),
                       .h_n = dense(kRnn, {B, N}, state, device),
                       .angle = absent(state, device),
                       .amplitude = absent(state, device),
                       .saved = absent(state, device)};
    if (readout) out.angle = out.amplitude = dense(kRnn, {B, T}, state, device);
    if (save) {
      const auto [steps, samples, neurons] = ring_rnn_saved_shape(in, options);
      out.saved = dense(kRnn, {steps, samples, neurons}, state, device);
    }
    Call call(kRnn, device, ring_rnn_forward_workspace(in, out, options));
    Tensor tensor = allocate(kRnn, "out", out.out);
    Tensor h_n = allocate(kRnn, "h_n", out.h_n);
    Tensor saved = allocate(kRnn, "saved", out.saved);
    Tensor angle = allocate(kRnn, "angle", out.angle);
    Tensor amplitude = allocate(kRnn, "amplitude", out.amplitude);
    ring_rnn_forward(in, out, options, call.context);
    return std::make_tuple(tensor, h_n, saved, angle, amplitude);
  });
}

std::vector<Tensor> ring_rnn_backward(
    const OptionalTensor& dout, const OptionalTensor& dh_n, const Tensor& out, const Tensor& saved,
    const Tensor& A, const Tensor& Wa, const Tensor& Wo, const Tensor& r0,
    const OptionalTensor& J0_tensor, const OptionalTensor& J1_tensor,
    const OptionalTensor& alpha_tensor, const OptionalTensor& drive,
    const OptionalTensor& reset_state, const OptionalTensor& reset, const OptionalTensor& mask,
    double J0, double J1, double alpha, const std::string& activation, const std::string& precision,
    std::int64_t checkpoint, std::int64_t needed) {
  return typed_errors([&] {
    const RingRnnOptions options = options_of(activation, precision, checkpoint);
    const RingRnnInputs in = inputs_of(A, Wa, Wo, r0, J0_tensor, J1_tensor, alpha_tensor, drive,
                                       reset_state, reset, mask, J0, J1, alpha);
    // Bit i of `needed`: the gradient of tensor i, in the order of the arguments, is asked for.
    struct Gradient {
      const char* name;
      const TensorView& input;
      TensorView RingRnnGradients::*place;
    };
    const std::array<Gradient, 9> all{{
        {"dA", in.A, &RingRnnGradients::dA},
        {"dWa", in.Wa, &RingRnnGradients::dWa},
        {"dWo", in.Wo, &RingRnnGradients::dWo},
        {"dr0", in.r0, &RingRnnGradients::dr0},
        {"dJ0", in.J0.tensor, &RingRnnGradients::dJ0},
        {"dJ1", in.J1.tensor, &RingRnnGradients::dJ1},
        {"dalpha", in.alpha.tensor, &RingRnnGradients::dalpha},
        {"ddrive", in.drive, &RingRnnGradients::ddrive},
        {"dreset_state", in.reset_state, &RingRnnGradients::dreset_state},
    }};
    RingRnnGradients gradients;
    for (std::size_t i = 0; i < all.size(); ++i) {
      if ((needed >> i & 1) == 0) continue;
      if (!all[i].input.defined()) {
        throw InvalidArgument(argument(kRnn, all[i].name) +
                              " must not be asked for where its input is left out, but is");
      }
      gradients.*all[i].place = dense_like(kRnn, all[i].input);
    }
    Call call(kRnn, in.A.device, ring_rnn_backward_workspace(in, gradients, options));
    std::vector<Tensor> result;
    for (const Gradient& g : all) {
      TensorView& view = gradients.*g.place;
      if (view.defined()) result.push_back(allocate(kRnn, g.name, view));
    }
    annulus::ring_rnn_backward(in, view_of(kRnn, "dout", dout), view_of(kRnn, "dh_n", dh_n),
                               view_of(kRnn, "out", out), view_of(kRnn, "saved", saved), gradients,
                               options, call.context);
    return result;
  });
}

Tensor ring_rnn_pack(const Tensor& Wa, const Tensor& Wo, const std::string& precision) {
  return typed_errors([&] {
    const RingRnnOptions options{.precision = chosen(kPack, "precision", precision, kChoices)};
    const TensorView vWa = view_of(kPack, "Wa", Wa), vWo = view_of(kPack, "Wo", Wo);
    const std::int64_t size = ring_rnn_pack_size(vWa, vWo, options);
    // The library wants an aligned block, and torch aligns less on a CPU: the block is a part of a
    // larger tensor.
    Call call(kPack, vWa.device, 0);
    TensorView room =
        dense(kPack, {checked_add(size, kAlignment / 4, kPack)}, DType::kI32, vWa.device);
    const Tensor whole = allocate(kPack, "packed", room);
    TensorView packed = dense(kPack, {size}, DType::kI32, vWa.device);
    void* start = room.data;
    std::size_t bytes = static_cast<std::size_t>(room.shape[0]) * 4;
    packed.data = std::align(kAlignment, static_cast<std::size_t>(size) * 4, start, bytes);
    annulus::ring_rnn_pack(vWa, vWo, packed, options, call.context);
    AtenTensorHandle part = nullptr;
    TORCH_ERROR_CODE_CHECK(aoti_torch__reinterpret_tensor(
        whole.get(), 1, packed.shape.data(), packed.stride.data(),
        static_cast<std::int32_t*>(packed.data) - static_cast<std::int32_t*>(room.data), &part));
    return Tensor(part);
  });
}

std::tuple<Tensor, Tensor> ring_readout(const Tensor& states) {
  return typed_errors([&] {
    const TensorView v = view_of(kReadout, "states", states);
    Call call(kReadout, v.device, 0);
    TensorView angle = dense(kReadout, {v.shape[0], v.shape[1]}, state_dtype(v.dtype), v.device);
    TensorView amplitude = angle;
    Tensor first = allocate(kReadout, "angle", angle);
    Tensor second = allocate(kReadout, "amplitude", amplitude);
    ring_readout_forward(v, angle, amplitude, call.context);
    return std::make_tuple(first, second);
  });
}

Tensor ring_readout_backward(const OptionalTensor& dangle, const OptionalTensor& damplitude,
                             const Tensor& states) {
  return typed_errors([&] {
    const TensorView v = view_of(kReadout, "states", states);
    Call call(kReadout, v.device, 0);
    TensorView dstates = dense_like(kReadout, v);
    Tensor result = allocate(kReadout, "dstates", dstates);
    annulus::ring_readout_backward(v, view_of(kReadout, "dangle", dangle),
                                   view_of(kReadout, "damplitude", damplitude), dstates,
                                   call.context);
    return result;
  });
}

template <class Library>
void ring_rnn_kernels(Library& m) {
  m.impl("ring_rnn", TORCH_BOX(&ring_rnn));
  m.impl("ring_rnn_backward", TORCH_BOX(&ring_rnn_backward));
  m.impl("ring_rnn_pack", TORCH_BOX(&ring_rnn_pack));
  m.impl("ring_readout", TORCH_BOX(&ring_readout));
  m.impl("ring_readout_backward", TORCH_BOX(&ring_readout_backward));
}

}  // namespace
}  // namespace annulus::torch_glue

#define ANNULUS_RING_RNN_INPUTS                                                       \
  "Tensor A, Tensor Wa, Tensor Wo, Tensor r0, Tensor? J0_tensor, Tensor? J1_tensor, " \
  "Tensor? alpha_tensor, Tensor? drive, Tensor? reset_state, Tensor? reset, Tensor? " \
  "mask, float J0, float J1, float alpha, str activation, str precision, SymInt checkpoint"

STABLE_TORCH_LIBRARY_FRAGMENT(annulus, m) {
  m.def("ring_rnn(" ANNULUS_RING_RNN_INPUTS
        ", Tensor? packed, bool save, bool readout) -> (Tensor, Tensor, Tensor, Tensor, Tensor)");
  m.def(
      "ring_rnn_backward(Tensor? dout, Tensor? dh_n, Tensor out, Tensor "
      "saved, " ANNULUS_RING_RNN_INPUTS ", int needed) -> Tensor[]");
  m.def("ring_rnn_pack(Tensor Wa, Tensor Wo, str precision) -> Tensor");
  m.def("ring_readout(Tensor states) -> (Tensor, Tensor)");
  m.def("ring_readout_backward(Tensor? dangle, Tensor? damplitude, Tensor states) -> Tensor");
}
ANNULUS_TORCH_KERNELS(annulus::torch_glue::ring_rnn_kernels)
