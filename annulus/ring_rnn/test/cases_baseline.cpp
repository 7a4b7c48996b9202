// The naive program the numeric policy compares us with: the definition (ref.h) with sums in f32 (f64 for
// f64 tensors), the operands of every matrix product rounded as the precision says.
#include <bit>
#include <cmath>
#include <cstdint>
#include <numbers>

#include "annulus/ring_rnn/ref.h"
#include "annulus/ring_rnn/test/cases.h"

namespace annulus::testing {

namespace {

// What a straightforward programmer writes in type C.
template <class C>
struct Naive {
  using Number = C;
  using Operand = C;
  static C operand(C v) { return v; }
  static void add_product(C& sum, C a, C b) { sum += a * b; }

  static C normal_distribution(C y) {
    return C(0.5) * (1 + std::erf(y / std::numbers::sqrt2_v<C>));
  }
  static C tanh_slope(C y) { return 1 - std::tanh(y) * std::tanh(y); }
  static ring_rnn::Direction<C> direction(std::int64_t i, std::int64_t N) {
    const C phase = 2 * std::numbers::pi_v<C> * static_cast<C>(i) / static_cast<C>(N);
    return {std::cos(phase), std::sin(phase)};
  }
};

// Ten bits of mantissa; f16 has as many, and its range is kept by scales.
struct Tf32 : Naive<float> {
  static float operand(float v) {
    if (!std::isfinite(v)) return v;
    std::uint32_t bits = std::bit_cast<std::uint32_t>(v);
    bits += 0xfffu + (bits >> 13 & 1u);  // to nearest even at bit 13
    return std::bit_cast<float>(bits & ~0x1fffu);
  }
};

struct Bf16 : Naive<float> {
  static float operand(float v) { return static_cast<float>(bfloat16(v)); }
};

struct Bf16x3 : Naive<float> {
  struct Operand {
    float high, low;
  };
  static Operand operand(float v) {
    const float high = static_cast<float>(bfloat16(v));
    return {high, static_cast<float>(bfloat16(v - high))};
  }
  static void add_product(float& sum, Operand a, Operand b) {
    sum += a.high * b.high;
    sum += a.high * b.low;
    sum += a.low * b.high;
  }
};

template <class F>
void with_naive(const RingRnnInputs& in, const RingRnnOptions& options, F&& f) {
  using ring_rnn::Definition;
  if (in.A.dtype == DType::kF64) return f(Definition<Naive<double>>(in, options));
  switch (options.precision) {
    case Precision::kTf32:
    case Precision::kF16:
      return f(Definition<Tf32>(in, options));
    case Precision::kBf16:
      return f(Definition<Bf16>(in, options));
    case Precision::kBf16x3:
      return f(Definition<Bf16x3>(in, options));
    default:
      return f(Definition<Naive<float>>(in, options));
  }
}

}  // namespace

void ring_rnn_baseline_forward(const RingRnnInputs& in, const RingRnnOutputs& out,
                               const RingRnnOptions& options) {
  with_naive(in, options, [&](const auto& naive) { naive.forward(out); });
}

void ring_rnn_baseline_backward(const RingRnnInputs& in, const TensorView& dout,
                                const TensorView& dh_n, const RingRnnGradients& gradients,
                                const RingRnnOptions& options) {
  with_naive(in, options, [&](const auto& naive) { naive.backward(dout, dh_n, gradients); });
}

void ring_readout_baseline_forward(const TensorView& states, const TensorView& angle,
                                   const TensorView& amplitude) {
  visit_bool(states.dtype == DType::kF64, [&]<bool Double>() {
    using C = std::conditional_t<Double, double, float>;
    ring_rnn::define_readout_forward<Naive<C>>(states, angle, amplitude);
  });
}

void ring_readout_baseline_backward(const TensorView& states, const TensorView& dangle,
                                    const TensorView& damplitude, const TensorView& dstates) {
  visit_bool(states.dtype == DType::kF64, [&]<bool Double>() {
    using C = std::conditional_t<Double, double, float>;
    ring_rnn::define_readout_backward<Naive<C>>(states, dangle, damplitude, dstates);
  });
}

}  // namespace annulus::testing
