// Calls that break one rule of ring_rnn.h each, beyond those that the argument lists say.
#include <cmath>

#include "annulus/ring_rnn/test/cases.h"
#include "testing/bad_calls.h"

namespace annulus::testing {

namespace {

using Expect = BadCall::Expect;

// Good arguments of every function, B = 2, T = 3, K = 2, N = 4; a bad call spoils one.
class Attempt : public AttemptTensors {
 public:
  explicit Attempt(Device device) : AttemptTensors(device) {
    in.A = input("A", {2, 3, 2});
    in.Wa = input("Wa", {2, 4, 4});
    in.Wo = input("Wo", {4, 4});
    in.r0 = input("r0", {2, 4});
    drive = input("drive", {2, 3, 4});
    reset = input("reset", {2, 3}, DType::kBool);
    reset_state = input("reset_state", {2, 4});
    mask = input("mask", {2, 3}, DType::kBool);
    number = input("a number", {});
    alpha = input("alpha", {4});
    dout = input("dout", {2, 3, 4});
    dh_n = input("dh_n", {2, 4});
    read_out = input("out", {2, 3, 4});
    read_saved = input("saved", {3, 2, 4});
    out.out = output("out", {2, 3, 4});
    out.h_n = output("h_n", {2, 4});
    out.angle = output("angle", {2, 3});
    out.amplitude = output("amplitude", {2, 3});
    out.saved = output("saved", {3, 2, 4});
    grad.dA = output("dA", {2, 3, 2});
    grad.dWa = output("dWa", {2, 4, 4});
    grad.dWo = output("dWo", {4, 4});
    grad.dr0 = output("dr0", {2, 4});
    grad.dJ0 = output("dJ0", {});
    grad.dJ1 = output("dJ1", {});
    grad.dalpha = output("dalpha", {});
    ddrive = output("ddrive", {2, 3, 4});
    dreset_state = output("dreset_state", {2, 4});
    // Room for one element more than is asked for, and for a start that is not aligned.
    const std::int64_t words = ring_rnn_pack_size(in.Wa, in.Wo, options);
    block_ = Buffer(device, static_cast<std::size_t>(words + 256) * 4);
    const auto base = reinterpret_cast<std::uintptr_t>(block_.data());
    packed = contiguous(static_cast<std::byte*>(block_.data()) + (256 - base % 256) % 256,
                        DType::kI32, std::array{words}, device);
  }

  void forward() { ring_rnn_forward(in, out, options, context); }
  void backward() {
    ring_rnn_backward(in, dout, dh_n, read_out, read_saved, grad, options, context);
  }
  void pack() { ring_rnn_pack(in.Wa, in.Wo, packed, options, context); }
  // With every optional input.
  void give_all() {
    in.drive = drive;
    in.reset = reset;
    in.reset_state = reset_state;
    in.mask = mask;
    grad.ddrive = ddrive;
    grad.dreset_state = dreset_state;
  }

  RingRnnInputs in;
  RingRnnOutputs out;
  RingRnnGradients grad;
  TensorView drive, reset, reset_state, mask, number, alpha, packed;
  TensorView dout, dh_n, read_out, read_saved, ddrive, dreset_state;
  RingRnnOptions options;
  Context context;

 private:
  Buffer block_;
};

using BadCalls = BadCallsOf<Attempt>;

void add_tensor_rules(BadCalls& b) {
  b.add("scratch whose size is beyond 2^63", "63 bits", [](Attempt& a) {
    const std::int64_t N = 1ll << 31;
    a.in.A.shape[2] = 0;
    a.in.r0.shape = {2, N}, a.in.r0.stride = {0, 0};
    a.in.Wo.shape = {N, N}, a.in.Wo.stride = {0, 0};
    a.in.Wa.shape = {0, N, N};
    (void)ring_rnn_forward_workspace(a.in, a.out, a.options);
  });
}

void add_shape_rules(BadCalls& b) {
  b.add("out is (T, B, N), as the original wrote it", "out", [](Attempt& a) {
    set_shape(a.out.out, {3, 2, 4}), a.forward();
  });
  b.add("angle without amplitude", "amplitude",
        [](Attempt& a) { a.out.amplitude = {}, a.forward(); });
  b.add("amplitude without angle", "angle", [](Attempt& a) { a.out.angle = {}, a.forward(); });
  b.add("saved has a row for every step under checkpoints", "saved",
        [](Attempt& a) { a.options.checkpoint = 2, a.forward(); });
  b.add("reset_state without reset", "reset",
        [](Attempt& a) { a.give_all(), a.in.reset = {}, a.forward(); });
  b.add("alpha has 2 dimensions", "alpha", [](Attempt& a) {
    set_shape(a.alpha, {2, 2}), a.in.alpha = a.alpha, a.forward();
  });
  b.add("J0 has one dimension", "J0", [](Attempt& a) { a.in.J0 = a.alpha, a.forward(); });
  b.add("J0 is not a number", "J0", [](Attempt& a) { a.in.J0 = std::nan(""), a.forward(); });
  b.add("alpha is infinite", "alpha", [](Attempt& a) { a.in.alpha = INFINITY, a.forward(); });
  b.add("dalpha has one dimension where alpha is a number", "dalpha",
        [](Attempt& a) { a.grad.dalpha = a.output("dalpha", {4}), a.backward(); });
  b.add("dalpha has rank 0 where alpha is (N,)", "dalpha",
        [](Attempt& a) { a.in.alpha = a.alpha, a.backward(); });
  b.add("ddrive without drive", "ddrive",
        [](Attempt& a) { a.grad.ddrive = a.ddrive, a.backward(); });
  b.add("dreset_state without reset_state", "dreset_state",
        [](Attempt& a) { a.grad.dreset_state = a.dreset_state, a.backward(); });
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
    a.out = {.out = a.out.out, .h_n = {}, .angle = {}, .amplitude = {}, .saved = {}};
    for (TensorView* v : {&a.in.A, &a.in.Wa, &a.in.Wo, &a.in.r0, &a.out.out})
      v->dtype = DType::kF64;
    a.options.precision = Precision::kBf16;
    a.forward();
  });
  b.add("f32 tensors in f16", "precision",
        [](Attempt& a) { a.options.precision = Precision::kF16, a.forward(); });
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
  add_tensor_rules(b);
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
