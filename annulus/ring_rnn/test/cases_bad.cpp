// Calls that break one rule of ring_rnn.h each, beyond those that the argument lists say.
#include <cmath>

#include "annulus/ring_rnn/test/cases.h"
#include "testing/bad_calls.h"

namespace annulus::testing {

namespace {

using Expect = BadCall::Expect;

// Good arguments of every function, with every optional tensor; a bad call spoils one.
class Attempt : public AttemptTensors {
 public:
  explicit Attempt(Device device) : AttemptTensors(device) {
    RingRnnProblem p{.B = 2, .T = 3, .K = 2, .N = 4};
    p.drive = p.reset = p.reset_state = p.mask = p.h_n = p.dh_n = p.readout = true;
    p.gradients = kRingAllGradients;
    const Case c = ring_rnn_case(p);
    const Call &forward = c.calls[0], &backward = c.calls[1];
    const auto make = [this](const std::vector<TensorSpec>& specs, auto as) {
      std::vector<TensorView> views;
      for (const TensorSpec& s : specs) {
        views.push_back((this->*as)(s.name.c_str(), s.shape, s.dtype));
      }
      return views;
    };
    const auto from = make(backward.inputs, &Attempt::input);
    in = ring_inputs(p, from, backward.inputs);
    out = ring_outputs(make(forward.outputs, &Attempt::output), forward.outputs);
    grad = ring_gradients(make(backward.outputs, &Attempt::output), backward.outputs);
    saved = ring_outputs(from, backward.inputs);
    dout = pick(from, backward.inputs, "dout");
    dh_n = pick(from, backward.inputs, "dh_n");
    alpha = input("alpha", {4});
    // Room for one element more than is asked for, and for a start that is not aligned.
    const std::int64_t words = ring_rnn_pack_size(in.Wa, in.Wo, options);
    block_ = Buffer(device, static_cast<std::size_t>(words + 256) * 4);
    const auto base = reinterpret_cast<std::uintptr_t>(block_.data());
    packed = contiguous(static_cast<std::byte*>(block_.data()) + (256 - base % 256) % 256,
                        DType::kI32, std::array{words}, device);
    in.packed_form = {DType::kF32, device.type, in.Wa.shape[0], in.Wa.shape[1],
                      device.type == DeviceType::kCPU ? Precision::kFp32 : Precision::kBf16x3};
  }

  void forward() { ring_rnn_forward(in, out, options, context); }
  void backward() {
    ring_rnn_backward(in, dout, dh_n, saved.out, saved.saved, grad, options, context);
  }
  void pack() { ring_rnn_pack(in.Wa, in.Wo, packed, options, context); }
  void leave_out_options() {
    in.drive = in.reset = in.reset_state = in.mask = {};
    out.h_n = out.angle = out.amplitude = out.saved = {};
  }

  RingRnnInputs in;
  RingRnnOutputs out, saved;  // what a forward writes, and what it wrote
  RingRnnGradients grad;
  TensorView dout, dh_n, alpha, packed;
  RingRnnOptions options;
  Context context;

 private:
  Buffer block_;
};

using BadCalls = BadCallsOf<Attempt>;

void add_shape_rules(BadCalls& b) {
  b.add("scratch whose size is beyond 2^63", "63 bits", [](Attempt& a) {
    const std::int64_t N = 1ll << 31;
    a.leave_out_options();
    a.in.A.shape[2] = 0;
    a.in.r0.shape = {2, N}, a.in.r0.stride = {0, 0};
    a.in.Wo.shape = {N, N}, a.in.Wo.stride = {0, 0};
    a.in.Wa.shape = {0, N, N};
    (void)ring_rnn_forward_workspace(a.in, a.out, a.options);
  });
  b.add("angle without amplitude", "amplitude",
        [](Attempt& a) { a.out.amplitude = {}, a.forward(); });
  b.add("amplitude without angle", "angle", [](Attempt& a) { a.out.angle = {}, a.forward(); });
  b.add("saved has a row for every step under checkpoints", "saved",
        [](Attempt& a) { a.options.checkpoint = 2, a.forward(); });
  b.add("reset_state without reset", "reset", [](Attempt& a) { a.in.reset = {}, a.forward(); });
  b.add("J0 is not a number", "J0", [](Attempt& a) { a.in.J0 = std::nan(""), a.forward(); });
  b.add("alpha is infinite", "alpha", [](Attempt& a) { a.in.alpha = INFINITY, a.forward(); });
  b.add("J0 is beyond f32", "J0", [](Attempt& a) { a.in.J0 = 1e300, a.forward(); });
  b.add("J1 is beyond f32", "J1", [](Attempt& a) { a.in.J1 = -1e39, a.backward(); });
  b.add("alpha is beyond f32", "alpha", [](Attempt& a) { a.in.alpha = 1e300, a.forward(); });
  b.add("dalpha has one dimension where alpha is a number", "dalpha",
        [](Attempt& a) { a.grad.dalpha = a.output("dalpha", {4}), a.backward(); });
  b.add("dalpha has rank 0 where alpha is (N,)", "dalpha",
        [](Attempt& a) { a.in.alpha = a.alpha, a.backward(); });
  b.add("ddrive without drive", "ddrive", [](Attempt& a) { a.in.drive = {}, a.backward(); });
  b.add("dreset_state without reset_state", "dreset_state",
        [](Attempt& a) { a.in.reset_state = {}, a.backward(); });
  b.add("packed weights in a backward", "packed",
        [](Attempt& a) { a.in.packed = a.packed, a.backward(); });
}

void add_option_rules(BadCalls& b) {
  b.add("negative checkpoint", "checkpoint",
        [](Attempt& a) { a.options.checkpoint = -1, a.forward(); });
  b.add("an activation that does not exist", "activation",
        [](Attempt& a) { a.options.activation = static_cast<RingRnnActivation>(77), a.forward(); });
  b.add("a precision that does not exist", "precision",
        [](Attempt& a) { a.options.precision = static_cast<Precision>(77), a.backward(); });
  b.add("f64 tensors in bf16", "precision", [](Attempt& a) {
    a.leave_out_options();
    for (TensorView* v : {&a.in.A, &a.in.Wa, &a.in.Wo, &a.in.r0, &a.out.out})
      v->dtype = DType::kF64;
    a.options.precision = Precision::kBf16;
    a.forward();
  });
  b.add("f32 tensors in f16", "precision",
        [](Attempt& a) { a.options.precision = Precision::kF16, a.forward(); });
  using Form = RingRnnPackedForm;
  for (const auto& [what, change] : std::initializer_list<std::pair<const char*, void (*)(Form&)>>{
           {"packed in another dtype", [](Form& f) { f.dtype = DType::kBF16; }},
           {"packed in another precision", [](Form& f) { f.precision = Precision::kBf16; }},
           {"packed on another kind of device",
            [](Form& f) {
              f.device = f.device == DeviceType::kCPU ? DeviceType::kCUDA : DeviceType::kCPU;
            }},
           {"packed with K and N in each other's place", [](Form& f) { std::swap(f.K, f.N); }},
           {"packed without its form", [](Form& f) { f = {}; }}}) {
    b.add(what, "packed", [change = change](Attempt& a) {
      change(a.in.packed_form), a.in.packed = a.packed, a.forward();
    });
  }
  b.add("packed one word too short", "packed",
        [](Attempt& a) { --a.packed.shape[0], a.in.packed = a.packed, a.forward(); });
  b.add("packed one word too long", "packed", [](Attempt& a) { ++a.packed.shape[0], a.pack(); });
  b.add("packed is not aligned to 256 bytes", "packed", [](Attempt& a) {
    a.packed.data = static_cast<std::byte*>(a.packed.data) + 4;
    a.in.packed = a.packed;
    a.forward();
  });
  b.add("packed is f32", "packed", [](Attempt& a) { a.packed.dtype = DType::kF32, a.pack(); });
  b.add("packed has 2 dimensions", "packed", [](Attempt& a) {
    set_shape(a.packed, {a.packed.shape[0], 1}), a.in.packed = a.packed, a.forward();
  });
  b.add("packed for another number of neurons", "packed", [](Attempt& a) {
    set_shape(a.in.Wa, {2, 0, 0}), set_shape(a.in.Wo, {0, 0}), a.pack();
  });
  b.add("pack: Wo has another size than Wa", "Wo",
        [](Attempt& a) { a.in.Wo.shape[0] = 3, a.pack(); });
}

void add_memory_rules(BadCalls& b) {
  b.add("rows of out overlap", "out", [](Attempt& a) { a.out.out.stride[1] = 2, a.forward(); });
  b.add("out overlaps Wo", "out",
        [](Attempt& a) { a.in.Wo.data = static_cast<float*>(a.out.out.data) + 5, a.forward(); });
  b.add("packed overlaps Wa", "packed", [](Attempt& a) { a.in.Wa.data = a.packed.data, a.pack(); });
  b.add("out overlaps packed", "out",
        [](Attempt& a) { a.in.packed = a.packed, a.out.out.data = a.packed.data, a.forward(); });
}

}  // namespace

std::vector<BadCall> ring_rnn_bad_calls(Device device) {
  BadCalls b;
  add_shape_rules(b);
  add_option_rules(b);
  add_memory_rules(b);
  if (device.type == DeviceType::kCPU) {
    b.add(
        "a precision that this device does not have", "precision",
        [](Attempt& a) { a.options.precision = Precision::kTf32, a.forward(); },
        Expect::kNotSupported);
  }
  return b.take();
}

}  // namespace annulus::testing
