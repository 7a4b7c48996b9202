// What the CUDA kernels of ring RNN share: the argument block, loads that know the call's types, the
// activations, and the epilogue of a forward step.
//
// A step is a matrix product and an epilogue. The product differs from kernel to kernel (SIMT,
// tensor cores); the epilogue is the same everywhere and lies here, one element at a time: what is
// saved, the leak, masks, resets. Products and sums that decide bits are written as explicit fma, so
// that a step gives the same bits in whichever kernel it was inlined.
//
// s_t is the state that step t begins with, after its reset; r_t the state it ends with.
#pragma once

#include <algorithm>
#include <cstdint>

#include "annulus/core/dtype.h"
#include "annulus/cuda/math.cuh"
#include "annulus/ring_rnn/plan.h"

namespace annulus::ring_rnn::cuda {

using namespace annulus::cuda;

// ---------------------------------------------------------------------------------------------------
// Arguments

// A tensor of a checked call, any strides; an optional one without elements counts as left out. `wide`: it
// is f32, not of A's dtype; only r0, reset_state, J0, J1, alpha and their gradients have that choice.
template <int Rank>
struct Ref {
  void* data = nullptr;  // nullptr: left out
  std::int64_t stride[Rank == 0 ? 1 : Rank] = {};
  bool wide = false;

  Ref() = default;
  Ref(const TensorView& v) : data(v.data), wide(v.dtype == DType::kF32) {  // NOLINT: how it is read
    for (int i = 0; i < std::min(Rank, v.rank); ++i)
      stride[i] = v.stride[static_cast<std::size_t>(i)];
  }
  ANNULUS_HD explicit operator bool() const { return data != nullptr; }
};

// A number or a tensor on the device; a tensor of rank 0 has stride 0.
struct Parameter {
  const void* data = nullptr;
  std::int64_t stride = 0;
  double value = 0;
  bool wide = false;

  Parameter(const RingRnnParameter& p)  // NOLINT: likewise
      : data(p.tensor.data),
        stride(p.tensor.rank == 1 ? p.tensor.stride[0] : 0),
        value(p.value),
        wide(p.tensor.dtype == DType::kF32) {}
  Parameter() = default;
};

struct Args {
  std::int64_t B = 0, T = 0, K = 0, N = 0;
  std::int64_t checkpoint = 0;
  RingRnnActivation activation = RingRnnActivation::kRelu;

  Ref<3> A, Wa;
  Ref<2> Wo, r0;
  Parameter J0, J1, alpha;
  Ref<3> drive;
  Ref<2> reset, reset_state, mask;  // reset_state is r0 where the call has none

  // The forward's outputs, which the backward reads.
  Ref<3> out, saved;
  Ref<2> h_n, angle, amplitude;

  // Backward.
  Ref<3> dout;
  Ref<2> dh_n;
  Ref<3> dA, dWa, ddrive;
  Ref<2> dWo, dr0, dreset_state;
  Ref<1> dalpha;
  Ref<0> dJ0, dJ1;
  bool alpha_per_neuron = false;
};

Args make_args(const Plan& plan);

// Are the rows of all weights, of numbers of `size` bytes, dense, and does each begin at a multiple of `bytes`?
inline bool aligned_weights(const Args& a, std::size_t size, std::size_t bytes) {
  const auto aligned = [&](const void* data, std::int64_t stride) {
    return (reinterpret_cast<std::uintptr_t>(data) | static_cast<std::size_t>(stride) * size) %
               bytes ==
           0;
  };
  return a.Wo.stride[1] == 1 && aligned(a.Wo.data, a.Wo.stride[0]) &&
         (a.K == 0 || (a.Wa.stride[2] == 1 && aligned(a.Wa.data, a.Wa.stride[1]) &&
                       aligned(a.Wa.data, a.Wa.stride[0])));
}

// ---------------------------------------------------------------------------------------------------
// Loads and stores. T is the dtype of A, Real the type arithmetic is done in.

template <class T, int Rank, class... I>
__device__ __forceinline__ std::int64_t offset(const Ref<Rank>& r, I... i) {
  static_assert(sizeof...(I) == Rank, "one index a dimension");
  const std::int64_t index[] = {static_cast<std::int64_t>(i)...};
  std::int64_t o = 0;
#pragma unroll
  for (int k = 0; k < Rank; ++k) o += index[k] * r.stride[k];
  return o;
}

// Element of a tensor of type T.
template <class T, int Rank, class... I>
__device__ __forceinline__ compute_t<T> get(const Ref<Rank>& r, I... i) {
  return static_cast<compute_t<T>>(static_cast<const T*>(r.data)[offset<T>(r, i...)]);
}
template <class T, int Rank, class... I>
__device__ __forceinline__ void put(const Ref<Rank>& r, compute_t<T> value, I... i) {
  static_cast<T*>(r.data)[offset<T>(r, i...)] = T(value);
}

// Element of a tensor that is f32 or of A's type.
template <class T, int Rank, class... I>
__device__ __forceinline__ compute_t<T> get_either(const Ref<Rank>& r, I... i) {
  return r.wide ? static_cast<compute_t<T>>(get<float>(r, i...)) : get<T>(r, i...);
}
template <class T>
__device__ __forceinline__ void put_at(void* data, bool wide, std::int64_t i, compute_t<T> value) {
  if (wide) {
    static_cast<float*>(data)[i] = static_cast<float>(value);
  } else {
    static_cast<T*>(data)[i] = T(value);
  }
}
template <class T, int Rank, class... I>
__device__ __forceinline__ void put_either(const Ref<Rank>& r, compute_t<T> value, I... i) {
  put_at<T>(r.data, r.wide, offset<T>(r, i...), value);
}

template <class T>
__device__ __forceinline__ compute_t<T> get(const Parameter& p, std::int64_t i = 0) {
  using Real = compute_t<T>;
  if (p.data == nullptr) return static_cast<Real>(p.value);
  const std::int64_t o = i * p.stride;
  return p.wide ? static_cast<Real>(static_cast<const float*>(p.data)[o])
                : static_cast<Real>(static_cast<const T*>(p.data)[o]);
}

__device__ __forceinline__ bool flag(const Ref<2>& r, std::int64_t b, std::int64_t t, bool absent) {
  return r ? static_cast<const std::uint8_t*>(r.data)[b * r.stride[0] + t * r.stride[1]] != 0
           : absent;
}
// Does step t count for sample b? Does it begin with a reset?
__device__ __forceinline__ bool live(const Args& a, std::int64_t b, std::int64_t t) {
  return flag(a.mask, b, t, true);
}
__device__ __forceinline__ bool resets(const Args& a, std::int64_t b, std::int64_t t) {
  return flag(a.reset, b, t, false);
}

// c of channel k (0: J1 with Wo, k: A_{k-1} with Wa_{k-1}) of sample b at step t. A step that is
// masked has coefficients 0, whatever lies in A there.
template <class T>
__device__ __forceinline__ compute_t<T> coefficient(const Args& a, std::int64_t b, std::int64_t t,
                                                    std::int64_t k) {
  if (!live(a, b, t)) return 0;
  return k == 0 ? get<T>(a.J1) : get<T>(a.A, b, t, k - 1);
}

// s_t of sample b as the forward's tensors have it (the backward's view: from `out`, which is rounded
// where A has 16 bits).
struct StateRow {
  const void* data;
  std::int64_t step;
  bool wide;
};
template <class T>
__device__ __forceinline__ StateRow state_row(const Args& a, std::int64_t b, std::int64_t t) {
  const auto row = [&](const Ref<2>& r) -> StateRow {
    const std::int64_t o = b * r.stride[0];
    return {r.wide ? static_cast<const void*>(static_cast<const float*>(r.data) + o)
                   : static_cast<const void*>(static_cast<const T*>(r.data) + o),
            r.stride[1], r.wide};
  };
  if (resets(a, b, t)) return row(a.reset_state);
  if (t == 0) return row(a.r0);
  return {static_cast<const T*>(a.out.data) + b * a.out.stride[0] + (t - 1) * a.out.stride[1],
          a.out.stride[2], false};
}
template <class T>
__device__ __forceinline__ compute_t<T> get(const StateRow& r, std::int64_t i) {
  using Real = compute_t<T>;
  return r.wide ? static_cast<Real>(static_cast<const float*>(r.data)[i * r.step])
                : static_cast<Real>(static_cast<const T*>(r.data)[i * r.step]);
}
template <class T>
__device__ __forceinline__ compute_t<T> state_before(const Args& a, std::int64_t b, std::int64_t t,
                                                     std::int64_t i) {
  return get<T>(state_row<T>(a, b, t), i);
}

// ---------------------------------------------------------------------------------------------------
// Activations

template <RingRnnActivation F, class Real>
__device__ __forceinline__ Real activate(Real y) {
  if constexpr (F == RingRnnActivation::kRelu) {
    return y <= Real(0) ? Real(0) : y;  // NaN stays
  } else if constexpr (F == RingRnnActivation::kGelu) {
    const Real half = mul_of(Real(0.5), y);  // y Phi(y) = y/2 (1 + erf(y / sqrt 2))
    return fma_of(half, erf(mul_of(y, Real(0.70710678118654752440))), half);
  } else if constexpr (F == RingRnnActivation::kTanh) {
    return tanh(y);
  } else {
    return mul_of(y, sigmoid_of(y));
  }
}

template <class Real>
struct Activated {
  Real value, slope;
};

// F(y) and F'(y).
template <RingRnnActivation F, class Real>
__device__ __forceinline__ Activated<Real> activate_and_slope(Real y) {
  if constexpr (F == RingRnnActivation::kRelu) {
    return {activate<F>(y), y > Real(0) ? Real(1) : Real(0)};
  } else if constexpr (F == RingRnnActivation::kGelu) {
    // Phi(y) + y phi(y), phi(y) = exp(-y^2 / 2) / sqrt(2 pi)
    const Real erf_y = erf(mul_of(y, Real(0.70710678118654752440)));
    const Real phi = mul_of(Real(0.39894228040143267794), exp(mul_of(mul_of(Real(-0.5), y), y)));
    const Real half = mul_of(Real(0.5), y);
    const Real finite_y = phi == Real(0) ? Real(0) : y;  // y phi(y) is 0 at infinity, not NaN
    return {fma_of(half, erf_y, half), fma_of(finite_y, phi, fma_of(Real(0.5), erf_y, Real(0.5)))};
  } else if constexpr (F == RingRnnActivation::kTanh) {
    const Real v = tanh(y);
    return {v, fma_of(-v, v, Real(1))};
  } else {
    const Real s = sigmoid_of(y);
    const Real v = mul_of(y, s);
    return {v, fma_of(v, Real(1) - s, s)};
  }
}

// The same with F known at run time only.
template <class Each>
__device__ __forceinline__ auto with_activation(RingRnnActivation f, Each&& each) {
  switch (f) {
    case RingRnnActivation::kRelu:
      return each.template operator()<RingRnnActivation::kRelu>();
    case RingRnnActivation::kGelu:
      return each.template operator()<RingRnnActivation::kGelu>();
    case RingRnnActivation::kTanh:
      return each.template operator()<RingRnnActivation::kTanh>();
    default:
      return each.template operator()<RingRnnActivation::kSilu>();
  }
}
template <class Real>
__device__ __forceinline__ Real activate(RingRnnActivation f, Real y) {
  return with_activation(f, [&]<RingRnnActivation F>() { return activate<F>(y); });
}
template <class Real>
__device__ __forceinline__ Activated<Real> activate_and_slope(RingRnnActivation f, Real y) {
  return with_activation(f, [&]<RingRnnActivation F>() { return activate_and_slope<F>(y); });
}
// Of several numbers: the question which F comes once.
template <int Count, class Real>
__device__ __forceinline__ void activate(RingRnnActivation f, const Real (&y)[Count],
                                         Real (&value)[Count]) {
  with_activation(f, [&]<RingRnnActivation F>() {
#pragma unroll
    for (int i = 0; i < Count; ++i) value[i] = activate<F>(y[i]);
  });
}
template <int Count, class Real>
__device__ __forceinline__ void activate_and_slope(RingRnnActivation f, const Real (&y)[Count],
                                                   Activated<Real> (&value)[Count]) {
  with_activation(f, [&]<RingRnnActivation F>() {
#pragma unroll
    for (int i = 0; i < Count; ++i) value[i] = activate_and_slope<F>(y[i]);
  });
}

// ---------------------------------------------------------------------------------------------------
// The epilogue of a forward step

// kRecompute, here and below: nothing is written; a backward computes a segment of steps again.

// s_t of a sample whose state is r before the step, and before its reset; keeps r where a
// checkpoint falls.
template <class T, bool kRecompute = false>
__device__ __forceinline__ compute_t<T> begin_step(const Args& a, std::int64_t b, std::int64_t i,
                                                   std::int64_t t, compute_t<T> r, bool is_reset) {
  if (t >= a.T) return r;
  if (!kRecompute && a.checkpoint > 0 && a.saved && t % a.checkpoint == 0) {
    put<compute_t<T>>(a.saved, r, t / a.checkpoint, b, i);
  }
  return is_reset ? get_either<T>(a.reset_state, b, i) : r;
}

// s_0. A call without steps ends here.
template <class T>
__device__ __forceinline__ compute_t<T> first_state(const Args& a, std::int64_t b, std::int64_t i) {
  const compute_t<T> r = get_either<T>(a.r0, b, i);
  if (a.T == 0 && a.h_n) put<compute_t<T>>(a.h_n, r, b, i);
  return begin_step<T>(a, b, i, 0, r, a.T > 0 && resets(a, b, 0));
}

template <class Real>
struct Stepped {
  Real y;     // 0 where the step is masked
  Real r;     // the state after the step, before it is rounded to A's type (for the readout)
  Real next;  // the state the next step begins with
};

// What element (b, i) of step t is made of beside the product: loaded ahead, for several elements
// at once, where a kernel would else wait for each.
template <class Real>
struct StepInputs {
  Real s;  // s_t
  Real drive = 0, alpha = 0;
  bool live = false, resets_next = false;
};
template <class T>
__device__ __forceinline__ StepInputs<compute_t<T>> load_step(const Args& a, std::int64_t b,
                                                              std::int64_t i, std::int64_t t,
                                                              compute_t<T> s) {
  StepInputs<compute_t<T>> in{s};
  in.live = live(a, b, t);
  in.alpha = get<T>(a.alpha, i);
  if (a.drive) in.drive = get<T>(a.drive, b, t, i);
  if (t + 1 < a.T) in.resets_next = resets(a, b, t + 1);
  return in;
}

// y of a step that counts, with `acc` = sum_k c_k sum_j W_k[i,j] s_j and `sum` = sum_j s_j, and the
// state after it.
template <class Real>
__device__ __forceinline__ Real mixed_input(const Args& a, const StepInputs<Real>& in, Real acc,
                                            Real sum, Real J0) {
  const Real y = fma_of(J0, sum, acc);
  return a.drive ? y + in.drive : y;
}
template <class Real>
__device__ __forceinline__ Real leaked(const StepInputs<Real>& in, Real activated) {
  return fma_of(in.alpha, activated, mul_of(Real(1) - in.alpha, in.s));
}

// Element (b, i) of step t. Writes out, saved and h_n.
template <class T, bool kRecompute = false>
__device__ __forceinline__ Stepped<compute_t<T>> finish_step(const Args& a, std::int64_t b,
                                                             std::int64_t i, std::int64_t t,
                                                             const StepInputs<compute_t<T>>& in,
                                                             compute_t<T> acc, compute_t<T> sum,
                                                             compute_t<T> J0) {
  using Real = compute_t<T>;
  Real r = in.s;
  Real y = 0;
  if (in.live) {
    y = mixed_input(a, in, acc, sum, J0);
    r = leaked(in, activate(a.activation, y));
  }
  if constexpr (!kRecompute) {
    put<T>(a.out, r, b, t, i);
    if (a.checkpoint == 0 && a.saved) put<Real>(a.saved, y, t, b, i);
    if (t == a.T - 1 && a.h_n) put<Real>(a.h_n, r, b, i);
  }
  return {y, r, begin_step<T, kRecompute>(a, b, i, t + 1, r, in.resets_next)};
}

// ---------------------------------------------------------------------------------------------------
// Host side. The general path: any shape and strides, f64, and f32 products for the narrower types.

namespace general {
// Bytes of scratch of a call; packed bytes of the weights.
std::size_t forward_workspace(const Plan& plan);
std::size_t backward_workspace(const Plan& plan);
std::size_t pack_bytes(const Plan& plan);

void forward(const Plan& plan, Context& context);
void backward(const Plan& plan, Context& context);
void pack(const Plan& plan, Context& context);
Support support();
}  // namespace general

}  // namespace annulus::ring_rnn::cuda
