// Calls that break one rule of ring_rnn.h each.
#include <cmath>

#include "annulus/cuda/memory.h"
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
  b.add("A is missing", "A", [](Attempt& a) { a.in.A = {}, a.forward(); });
  b.add("Wa is missing", "Wa", [](Attempt& a) { a.in.Wa = {}, a.forward(); });
  b.add("Wo is missing", "Wo", [](Attempt& a) { a.in.Wo = {}, a.forward(); });
  b.add("r0 is missing", "r0", [](Attempt& a) { a.in.r0 = {}, a.forward(); });
  b.add("out is missing", "out", [](Attempt& a) { a.out.out = {}, a.forward(); });
  b.add("out of the forward is missing in the backward", "out",
        [](Attempt& a) { a.read_out = {}, a.backward(); });
  b.add("saved is missing in the backward", "saved",
        [](Attempt& a) { a.read_saved = {}, a.backward(); });
  b.add("A has 2 dimensions", "A", [](Attempt& a) { set_shape(a.in.A, {6, 2}), a.forward(); });
  b.add("Wa has 2 dimensions", "Wa", [](Attempt& a) { set_shape(a.in.Wa, {8, 4}), a.forward(); });
  b.add("Wo has 3 dimensions", "Wo", [](Attempt& a) {
    set_shape(a.in.Wo, {1, 4, 4}), a.forward();
  });
  b.add("r0 has 1 dimension", "r0", [](Attempt& a) { set_shape(a.in.r0, {8}), a.forward(); });
  b.add("out has 2 dimensions", "out", [](Attempt& a) {
    set_shape(a.out.out, {6, 4}), a.forward();
  });
  b.add("A is i32", "A", [](Attempt& a) { a.in.A.dtype = DType::kI32, a.forward(); });
  b.add("Wa has another dtype than A", "Wa",
        [](Attempt& a) { a.in.Wa.dtype = DType::kBF16, a.forward(); });
  b.add("Wo has another dtype than A", "Wo",
        [](Attempt& a) { a.in.Wo.dtype = DType::kF16, a.forward(); });
  b.add("r0 is bf16 beside f32 tensors", "r0",
        [](Attempt& a) { a.in.r0.dtype = DType::kBF16, a.forward(); });
  b.add("out has another dtype than A", "out",
        [](Attempt& a) { a.out.out.dtype = DType::kBF16, a.forward(); });
  b.add("h_n is bf16", "h_n", [](Attempt& a) { a.out.h_n.dtype = DType::kBF16, a.forward(); });
  b.add("saved is bf16", "saved",
        [](Attempt& a) { a.out.saved.dtype = DType::kBF16, a.forward(); });
  b.add("reset is f32", "reset",
        [](Attempt& a) { a.give_all(), a.in.reset.dtype = DType::kF32, a.forward(); });
  b.add("mask is i32", "mask",
        [](Attempt& a) { a.give_all(), a.in.mask.dtype = DType::kI32, a.forward(); });
  b.add("drive is f16 beside f32 tensors", "drive",
        [](Attempt& a) { a.give_all(), a.in.drive.dtype = DType::kF16, a.forward(); });
  b.add("dWa has another dtype than Wa", "dWa",
        [](Attempt& a) { a.grad.dWa.dtype = DType::kBF16, a.backward(); });
  b.add("dJ0 of a number is bf16", "dJ0",
        [](Attempt& a) { a.grad.dJ0.dtype = DType::kBF16, a.backward(); });
  b.add("Wa on another device", "Wa",
        [](Attempt& a) { a.in.Wa.device = a.other_device(), a.forward(); });
  b.add("out on another device", "out",
        [](Attempt& a) { a.out.out.device = a.other_device(), a.forward(); });
  b.add("mask on another device", "mask",
        [](Attempt& a) { a.give_all(), a.in.mask.device = a.other_device(), a.forward(); });
  b.add("alpha on another device", "alpha",
        [](Attempt& a) { a.alpha.device = a.other_device(), a.in.alpha = a.alpha, a.forward(); });
  b.add("dr0 on another device", "dr0",
        [](Attempt& a) { a.grad.dr0.device = a.other_device(), a.backward(); });
  b.add("A is a null pointer", "A", [](Attempt& a) { a.in.A.data = nullptr, a.forward(); });
  b.add("out is a null pointer", "out", [](Attempt& a) { a.out.out.data = nullptr, a.forward(); });
  b.add("drive is a null pointer", "drive",
        [](Attempt& a) { a.give_all(), a.in.drive.data = nullptr, a.forward(); });
  b.add("J0 is a null pointer", "J0",
        [](Attempt& a) { a.number.data = nullptr, a.in.J0 = a.number, a.forward(); });
  b.add("saved is a null pointer", "saved",
        [](Attempt& a) { a.read_saved.data = nullptr, a.backward(); });
  b.add("negative batch size", "A", [](Attempt& a) { a.in.A.shape[0] = -2, a.forward(); });
  b.add("negative number of neurons", "r0", [](Attempt& a) { a.in.r0.shape[1] = -4, a.forward(); });
  b.add("Wa is not aligned to its elements", "Wa",
        [](Attempt& a) { a.in.Wa.data = static_cast<std::byte*>(a.in.Wa.data) + 2, a.forward(); });
  b.add("sizes whose product is beyond 2^63", "A", [](Attempt& a) {
    a.in.A.shape = {1ll << 40, 1ll << 40, 2}, a.forward();
  });
  b.add("scratch whose size is beyond 2^63", "63 bits", [](Attempt& a) {
    const std::int64_t N = 1ll << 31;
    a.in.A.shape[2] = 0;
    a.in.r0.shape = {2, N}, a.in.r0.stride = {0, 0};
    a.in.Wo.shape = {N, N}, a.in.Wo.stride = {0, 0};
    a.in.Wa.shape = {0, N, N};
    a.forward();
  });
}

void add_shape_rules(BadCalls& b) {
  b.add("r0 has another batch size", "r0", [](Attempt& a) { a.in.r0.shape[0] = 1, a.forward(); });
  b.add("Wo is not square", "Wo", [](Attempt& a) { a.in.Wo.shape[1] = 3, a.forward(); });
  b.add("Wa has another number of actions than A", "Wa",
        [](Attempt& a) { a.in.Wa.shape[0] = 1, a.forward(); });
  b.add("Wa has another number of neurons", "Wa",
        [](Attempt& a) { a.in.Wa.shape[2] = 3, a.forward(); });
  b.add("out is (T, B, N), as the original wrote it", "out", [](Attempt& a) {
    set_shape(a.out.out, {3, 2, 4}), a.forward();
  });
  b.add("h_n has the wrong shape", "h_n", [](Attempt& a) { a.out.h_n.shape[1] = 3, a.forward(); });
  b.add("angle without amplitude", "amplitude",
        [](Attempt& a) { a.out.amplitude = {}, a.forward(); });
  b.add("amplitude without angle", "angle", [](Attempt& a) { a.out.angle = {}, a.forward(); });
  b.add("angle has the wrong shape", "angle",
        [](Attempt& a) { a.out.angle.shape[1] = 2, a.forward(); });
  b.add("saved is (B, T, N)", "saved", [](Attempt& a) {
    set_shape(a.out.saved, {2, 3, 4}), a.forward();
  });
  b.add("saved has a row for every step under checkpoints", "saved",
        [](Attempt& a) { a.options.checkpoint = 2, a.forward(); });
  b.add("saved of the backward has the wrong number of rows", "saved",
        [](Attempt& a) { a.read_saved.shape[0] = 2, a.backward(); });
  b.add("drive has the wrong shape", "drive",
        [](Attempt& a) { a.give_all(), a.in.drive.shape[2] = 3, a.forward(); });
  b.add("reset has the wrong shape", "reset",
        [](Attempt& a) { a.give_all(), a.in.reset.shape[1] = 2, a.forward(); });
  b.add("reset_state without reset", "reset",
        [](Attempt& a) { a.give_all(), a.in.reset = {}, a.forward(); });
  b.add("reset_state has the wrong shape", "reset_state",
        [](Attempt& a) { a.give_all(), a.in.reset_state.shape[1] = 3, a.forward(); });
  b.add("mask has the wrong shape", "mask",
        [](Attempt& a) { a.give_all(), a.in.mask.shape[0] = 1, a.forward(); });
  b.add("alpha has another length than N", "alpha",
        [](Attempt& a) { a.alpha.shape[0] = 3, a.in.alpha = a.alpha, a.forward(); });
  b.add("alpha has 2 dimensions", "alpha", [](Attempt& a) {
    set_shape(a.alpha, {2, 2}), a.in.alpha = a.alpha, a.forward();
  });
  b.add("J0 has one dimension", "J0", [](Attempt& a) { a.in.J0 = a.alpha, a.forward(); });
  b.add("J1 is i32", "J1",
        [](Attempt& a) { a.number.dtype = DType::kI32, a.in.J1 = a.number, a.forward(); });
  b.add("J0 is not a number", "J0", [](Attempt& a) { a.in.J0 = std::nan(""), a.forward(); });
  b.add("alpha is infinite", "alpha", [](Attempt& a) { a.in.alpha = INFINITY, a.forward(); });
  b.add("dout has the wrong shape", "dout", [](Attempt& a) { a.dout.shape[1] = 2, a.backward(); });
  b.add("dh_n has the wrong shape", "dh_n", [](Attempt& a) { a.dh_n.shape[1] = 3, a.backward(); });
  b.add("dA has the wrong shape", "dA", [](Attempt& a) { a.grad.dA.shape[2] = 1, a.backward(); });
  b.add("dWo has the wrong shape", "dWo",
        [](Attempt& a) { a.grad.dWo.shape[0] = 3, a.backward(); });
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
    for (TensorView* v : {&a.in.A, &a.in.Wa, &a.in.Wo, &a.in.r0}) v->dtype = DType::kF64;
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
  b.add("out has stride 0", "out", [](Attempt& a) { a.out.out.stride[0] = 0, a.forward(); });
  b.add("rows of out overlap", "out", [](Attempt& a) { a.out.out.stride[1] = 2, a.forward(); });
  b.add("h_n has stride 0", "h_n", [](Attempt& a) { a.out.h_n.stride[0] = 0, a.forward(); });
  b.add("saved has stride 0", "saved", [](Attempt& a) { a.out.saved.stride[1] = 0, a.forward(); });
  b.add("dWa has stride 0", "dWa", [](Attempt& a) { a.grad.dWa.stride[0] = 0, a.backward(); });
  b.add("out overlaps A", "out", [](Attempt& a) { a.in.A.data = a.out.out.data, a.forward(); });
  b.add("out overlaps Wo", "out",
        [](Attempt& a) { a.in.Wo.data = static_cast<float*>(a.out.out.data) + 5, a.forward(); });
  b.add("out overlaps drive", "out",
        [](Attempt& a) { a.give_all(), a.in.drive.data = a.out.out.data, a.forward(); });
  b.add("out overlaps mask", "out",
        [](Attempt& a) { a.give_all(), a.in.mask.data = a.out.out.data, a.forward(); });
  b.add("h_n is r0: a state cannot be carried on in place", "h_n",
        [](Attempt& a) { a.in.r0.data = a.out.h_n.data, a.forward(); });
  b.add("h_n and out overlap", "h_n",
        [](Attempt& a) { a.out.h_n.data = a.out.out.data, a.forward(); });
  b.add("saved and out overlap", "saved",
        [](Attempt& a) { a.out.saved.data = a.out.out.data, a.forward(); });
  b.add("angle and amplitude overlap", "amplitude",
        [](Attempt& a) { a.out.amplitude.data = a.out.angle.data, a.forward(); });
  b.add("angle overlaps alpha", "angle",
        [](Attempt& a) { a.alpha.data = a.out.angle.data, a.in.alpha = a.alpha, a.forward(); });
  b.add("dA is A", "dA", [](Attempt& a) { a.in.A.data = a.grad.dA.data, a.backward(); });
  b.add("dWa is Wa", "dWa", [](Attempt& a) { a.in.Wa.data = a.grad.dWa.data, a.backward(); });
  b.add("dr0 overlaps dout", "dr0",
        [](Attempt& a) { a.dout.data = a.grad.dr0.data, a.backward(); });
  b.add("dWo overlaps out", "dWo",
        [](Attempt& a) { a.read_out.data = a.grad.dWo.data, a.backward(); });
  b.add("dWa overlaps saved", "dWa",
        [](Attempt& a) { a.read_saved.data = a.grad.dWa.data, a.backward(); });
  b.add("dJ0 and dJ1 overlap", "dJ1",
        [](Attempt& a) { a.grad.dJ1.data = a.grad.dJ0.data, a.backward(); });
  b.add("ddrive overlaps dWa", "ddrive",
        [](Attempt& a) { a.give_all(), a.grad.ddrive.data = a.grad.dWa.data, a.backward(); });
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
  Attempt good(device);
  if (ring_rnn_forward_workspace(good.in, good.out, good.options) > 0) {
    b.add(
        "workspace of the forward too small by one byte", "workspace",
        [](Attempt& a) {
          const std::size_t bytes = ring_rnn_forward_workspace(a.in, a.out, a.options);
          Buffer block(a.in.A.device, bytes);
          BorrowedWorkspace borrowed(block.data(), bytes - 1);
          a.context.allocator = &borrowed;
          a.forward();
        },
        Expect::kDeviceError);
  }
  if (ring_rnn_backward_workspace(good.in, good.grad, good.options) > 0) {
    b.add(
        "workspace of the backward too small by one byte", "workspace",
        [](Attempt& a) {
          const std::size_t bytes = ring_rnn_backward_workspace(a.in, a.grad, a.options);
          Buffer block(a.in.A.device, bytes);
          BorrowedWorkspace borrowed(block.data(), bytes - 1);
          a.context.allocator = &borrowed;
          a.backward();
        },
        Expect::kDeviceError);
  }
  if (device.type == DeviceType::kCPU) {
    b.add(
        "a precision that this device does not have", "precision",
        [](Attempt& a) { a.options.precision = Precision::kTf32, a.forward(); },
        Expect::kNotSupported);
  }
  if (device.type == DeviceType::kCPU && !cuda::built()) {
    b.add(
        "CUDA tensors in a build without CUDA", "CUDA",
        [](Attempt& a) {
          a.out = {.out = a.out.out, .h_n = {}, .angle = {}, .amplitude = {}, .saved = {}};
          for (TensorView* v : {&a.in.A, &a.in.Wa, &a.in.Wo, &a.in.r0, &a.out.out}) {
            v->device = cuda_device(0);
          }
          a.forward();
        },
        Expect::kNotSupported);
  }
  return b.take();
}

}  // namespace annulus::testing
