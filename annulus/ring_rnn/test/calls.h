// A ring RNN with all its tensors on one device, for tests that call the library by hand.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <vector>

#include "annulus/ring_rnn/ring_rnn.h"
#include "testing/dense.h"

namespace annulus::testing {

// Steps first .. first + count - 1 of a tensor (B, T, ...).
inline TensorView steps(TensorView v, std::int64_t first, std::int64_t count) {
  v.data = static_cast<std::byte*>(v.data) + first * v.stride[1] * size_of(v.dtype);
  v.shape[1] = count;
  return v;
}

inline DType wide(DType dtype) { return dtype == DType::kF64 ? dtype : DType::kF32; }

// Live dynamics: weights of gain 1 in all, one action in three exactly zero.
struct RingNetwork {
  RingNetwork(Device device, DType dtype, std::int64_t B, std::int64_t T, std::int64_t K,
              std::int64_t N, std::uint64_t seed = 1)
      : device(device),
        dtype(dtype),
        B(B),
        T(T),
        K(K),
        N(N),
        A(device, dtype, {B, T, K}),
        Wa(device, dtype, {K, N, N}),
        Wo(device, dtype, {N, N}),
        r0(device, wide(dtype), {B, N}),
        drive(device, dtype, {B, T, N}),
        reset(device, DType::kBool, {B, T}),
        reset_state(device, wide(dtype), {B, N}),
        mask(device, DType::kBool, {B, T}),
        dout(device, dtype, {B, T, N}),
        dh_n(device, wide(dtype), {B, N}),
        J0(-0.5 / static_cast<double>(std::max<std::int64_t>(N, 1))) {
    Rng rng(seed);
    const auto draw = [&](Dense& to, std::int64_t count, auto value) {
      std::vector<double> v(static_cast<std::size_t>(count));
      for (double& x : v) x = value();
      to.write(v);
    };
    const double size = 1 / std::sqrt(static_cast<double>(std::max<std::int64_t>(1, N * (K + 1))));
    draw(A, B * T * K, [&] { return rng.below(3) == 0 ? 0 : rng.normal(); });
    draw(Wa, K * N * N, [&] { return size * rng.normal(); });
    draw(Wo, N * N, [&] { return size * rng.normal(); });
    draw(r0, B * N, [&] { return rng.normal(); });
    draw(drive, B * T * N, [&] { return 0.5 * rng.normal(); });
    draw(reset, B * T, [&] { return rng.below(5) == 0; });
    draw(reset_state, B * N, [&] { return rng.normal(); });
    draw(mask, B * T, [&] { return rng.below(6) != 0; });
    draw(dout, B * T * N, [&] { return rng.normal(); });
    draw(dh_n, B * N, [&] { return rng.normal(); });
  }

  // Without the optional ones.
  RingRnnInputs inputs() const {
    RingRnnInputs in;
    in.A = A.view(), in.Wa = Wa.view(), in.Wo = Wo.view(), in.r0 = r0.view();
    in.J0 = J0, in.J1 = J1, in.alpha = alpha;
    return in;
  }
  RingRnnInputs all_inputs() const {
    RingRnnInputs in = inputs();
    in.drive = drive.view();
    in.reset = reset.view();
    in.reset_state = reset_state.view();
    in.mask = mask.view();
    return in;
  }
  // Takes the values of some tensors from another network.
  void copy(const RingNetwork& from, std::initializer_list<Dense RingNetwork::*> tensors) {
    for (const auto t : tensors) (this->*t).write((from.*t).values());
  }
  // The same network in f64 on the CPU, for the reference.
  RingNetwork exact() const {
    using R = RingNetwork;
    R x(kCPU, DType::kF64, B, T, K, N);
    x.copy(*this, {&R::A, &R::Wa, &R::Wo, &R::r0, &R::drive, &R::reset, &R::reset_state, &R::mask,
                   &R::dout, &R::dh_n});
    x.J0 = J0, x.J1 = J1, x.alpha = alpha;
    return x;
  }

  Device device;
  DType dtype;
  std::int64_t B, T, K, N;
  Dense A, Wa, Wo, r0, drive, reset, reset_state, mask, dout, dh_n;
  double J0, J1 = 0.8, alpha = 0.3;
};

// Everything that calls return, alpha being a number.
struct RingResults {
  explicit RingResults(const RingNetwork& n)
      : out(n.device, n.dtype, {n.B, n.T, n.N}),
        h_n(n.device, wide(n.dtype), {n.B, n.N}),
        angle(n.device, wide(n.dtype), {n.B, n.T}),
        amplitude(n.device, wide(n.dtype), {n.B, n.T}),
        dA(n.device, n.dtype, {n.B, n.T, n.K}),
        dWa(n.device, n.dtype, {n.K, n.N, n.N}),
        dWo(n.device, n.dtype, {n.N, n.N}),
        dr0(n.device, wide(n.dtype), {n.B, n.N}),
        dJ0(n.device, wide(n.dtype), {}),
        dJ1(n.device, wide(n.dtype), {}),
        dalpha(n.device, wide(n.dtype), {}),
        ddrive(n.device, n.dtype, {n.B, n.T, n.N}),
        dreset_state(n.device, wide(n.dtype), {n.B, n.N}) {}
  RingRnnOutputs outputs() const {
    RingRnnOutputs some;
    some.out = out.view();
    some.h_n = h_n.view();
    return some;
  }
  RingRnnOutputs outputs_and_readout() const {
    RingRnnOutputs all = outputs();
    all.angle = angle.view();
    all.amplitude = amplitude.view();
    return all;
  }
  RingRnnGradients gradients(const RingRnnInputs& in) const {
    return {.dA = dA.view(),
            .dWa = dWa.view(),
            .dWo = dWo.view(),
            .dr0 = dr0.view(),
            .dJ0 = dJ0.view(),
            .dJ1 = dJ1.view(),
            .dalpha = dalpha.view(),
            .ddrive = in.drive.defined() ? ddrive.view() : TensorView(),
            .dreset_state = in.reset_state.defined() ? dreset_state.view() : TensorView()};
  }
  bool same_states(const RingResults& other) const {
    return out.bytes() == other.out.bytes() && h_n.bytes() == other.h_n.bytes();
  }
  bool same_bits(const RingResults& other) const {
    using R = RingResults;
    for (const auto t : {&R::dA, &R::dWa, &R::dWo, &R::dr0, &R::dJ0, &R::dJ1, &R::dalpha,
                         &R::ddrive, &R::dreset_state}) {
      if ((this->*t).bytes() != (other.*t).bytes()) return false;
    }
    return same_states(other);
  }

  Dense out, h_n, angle, amplitude;
  Dense dA, dWa, dWo, dr0, dJ0, dJ1, dalpha, ddrive, dreset_state;
};

inline RingResults run_forward(const RingNetwork& n, const RingRnnInputs& in,
                               const RingRnnOptions& options, Context& context) {
  RingResults r(n);
  ring_rnn_forward(in, r.outputs(), options, context);
  return r;
}

// Forward with `saved`, then backward of dout and dh_n.
inline RingResults run_both(const RingNetwork& n, const RingRnnInputs& in,
                            const RingRnnOptions& options, Context& context) {
  RingResults r(n);
  const auto shape = ring_rnn_saved_shape(in, options);
  const Dense saved(n.device, wide(n.dtype), {shape[0], shape[1], shape[2]});
  RingRnnOutputs out = r.outputs();
  out.saved = saved.view();
  ring_rnn_forward(in, out, options, context);
  ring_rnn_backward(in, n.dout.view(), n.dh_n.view(), out.out, out.saved, r.gradients(in), options,
                    context);
  synchronize(n.device);
  return r;
}

// The same by the definition, of an exact() network.
inline RingResults define_both(const RingNetwork& n, const RingRnnInputs& in,
                               const RingRnnOptions& options) {
  RingResults r(n);
  reference::ring_rnn_forward(in, r.outputs(), options);
  reference::ring_rnn_backward(in, n.dout.view(), n.dh_n.view(), r.gradients(in), options);
  return r;
}

// sqrt(|a - b|^2 / |b|^2).
inline double relative_error(const Dense& a, const Dense& b) {
  const std::vector<double> x = a.values(), y = b.values();
  double error = 0, size = 0;
  for (std::size_t i = 0; i < x.size(); ++i) {
    error += (x[i] - y[i]) * (x[i] - y[i]);
    size += y[i] * y[i];
  }
  return std::sqrt(error / size);
}

// Every precision a device has.
inline std::vector<Precision> precisions_of(Device device, DType dtype) {
  if (dtype == DType::kF64) return {Precision::kAuto};
  std::vector<Precision> all = {Precision::kAuto, Precision::kFp32, Precision::kBf16x6,
                                Precision::kBf16x3, Precision::kBf16};
  if (device.type == DeviceType::kCUDA) {
    all.push_back(Precision::kTf32);
    if (dtype == DType::kF16) all.push_back(Precision::kF16);
  }
  return all;
}

}  // namespace annulus::testing
