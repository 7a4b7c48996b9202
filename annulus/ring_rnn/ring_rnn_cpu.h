// What the files of the CPU backend share and Highway does not compile: typed element access to a
// plan's tensors, and the numbers behind J0, J1 and alpha.
#pragma once

#include <cmath>
#include <cstdint>

#include "annulus/core/dispatch.h"
#include "annulus/core/tensor.h"
#include "annulus/ring_rnn/ring_rnn_plan.h"

namespace annulus::ring::cpu {

// Element `offset` of a floating tensor, in the type arithmetic is done in.
template <class Real>
Real read_element(const TensorView& v, std::int64_t offset) {
  switch (v.dtype) {
    case DType::kF64:
      return static_cast<Real>(static_cast<const double*>(v.data)[offset]);
    case DType::kF32:
      return static_cast<Real>(static_cast<const float*>(v.data)[offset]);
    case DType::kF16:
      return static_cast<Real>(static_cast<float>(static_cast<const float16*>(v.data)[offset]));
    default:
      return static_cast<Real>(static_cast<float>(static_cast<const bfloat16*>(v.data)[offset]));
  }
}

template <class Real>
void write_element(const TensorView& v, std::int64_t offset, Real x) {
  switch (v.dtype) {
    case DType::kF64:
      static_cast<double*>(v.data)[offset] = static_cast<double>(x);
      break;
    case DType::kF32:
      static_cast<float*>(v.data)[offset] = static_cast<float>(x);
      break;
    case DType::kF16:
      static_cast<float16*>(v.data)[offset] = float16(static_cast<float>(x));
      break;
    default:
      static_cast<bfloat16*>(v.data)[offset] = bfloat16(static_cast<float>(x));
      break;
  }
}

template <class Real>
Real read_parameter(const RingParameter& p, std::int64_t i = 0) {
  if (!p.tensor.defined()) return static_cast<Real>(p.value);
  return read_element<Real>(p.tensor, p.tensor.rank == 1 ? i * p.tensor.stride[0] : 0);
}

// reset or mask at (b, t); `missing` where the tensor was left out.
inline bool read_flag(const TensorView& v, std::int64_t b, std::int64_t t, bool missing) {
  if (!v.defined()) return missing;
  // Through a byte: a torch bool may hold any bits that are not zero.
  return static_cast<const unsigned char*>(v.data)[b * v.stride[0] + t * v.stride[1]] != 0;
}

template <class Real>
Real activate(RingActivation f, Real y) {
  switch (f) {
    case RingActivation::kRelu:
      return y <= 0 ? Real(0) : y;  // a NaN stays one
    case RingActivation::kGelu:
      return Real(0.5) * y * std::erfc(-y * Real(0.70710678118654752440));
    case RingActivation::kTanh:
      return std::tanh(y);
    case RingActivation::kSilu:
      return y / (Real(1) + std::exp(-y));
  }
  return y;
}

template <class Real>
Real activate_slope(RingActivation f, Real y) {
  switch (f) {
    case RingActivation::kRelu:
      return y <= 0 ? Real(0) : Real(1);
    case RingActivation::kGelu:
      return Real(0.5) * std::erfc(-y * Real(0.70710678118654752440)) +
             y * Real(0.39894228040143267794) * std::exp(Real(-0.5) * y * y);
    case RingActivation::kTanh: {
      const Real r = std::tanh(y);
      return Real(1) - r * r;
    }
    case RingActivation::kSilu: {
      const Real p = Real(1) / (Real(1) + std::exp(-y));
      return p * (Real(1) + y * (Real(1) - p));
    }
  }
  return Real(1);
}

}  // namespace annulus::ring::cpu
