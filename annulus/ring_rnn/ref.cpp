// The definition (ref.h) in double.
#include "annulus/ring_rnn/ref.h"

#include <cmath>
#include <cstdint>
#include <numbers>

namespace annulus::reference {

namespace {

struct Double {
  using Number = double;
  using Operand = double;
  static double operand(double v) { return v; }
  static void add_product(double& sum, double a, double b) { sum += a * b; }

  // By erfc, so that it does not cancel for y far below 0.
  static double normal_distribution(double y) { return 0.5 * std::erfc(-y / std::numbers::sqrt2); }
  // Without the difference of 1 and nearly 1.
  static double tanh_slope(double y) { return 1 / (std::cosh(y) * std::cosh(y)); }
  // Exact at the quarter turns: the angle is brought into the first eighth of the circle in whole numbers
  // before it is rounded.
  static ring_rnn::Direction<double> direction(std::int64_t i, std::int64_t N) {
    // i / N = quarter / 4 + rest / (4 N) with -N / 2 <= rest <= N / 2.
    const std::int64_t quarter = (8 * i + N) / (2 * N);
    const double angle =
        std::numbers::pi / 2 * static_cast<double>(4 * i - quarter * N) / static_cast<double>(N);
    const double c = std::cos(angle), s = std::sin(angle);
    switch (quarter % 4) {
      case 0:
        return {c, s};
      case 1:
        return {-s, c};
      case 2:
        return {-c, -s};
      default:
        return {s, -c};
    }
  }
};

}  // namespace

void ring_rnn_forward(const RingRnnInputs& inputs, const RingRnnOutputs& outputs,
                      const RingRnnOptions& options) {
  ring_rnn::Definition<Double>(inputs, options).forward(outputs);
}

void ring_rnn_backward(const RingRnnInputs& inputs, const TensorView& dout, const TensorView& dh_n,
                       const RingRnnGradients& gradients, const RingRnnOptions& options) {
  ring_rnn::Definition<Double>(inputs, options).backward(dout, dh_n, gradients);
}

void ring_readout_forward(const TensorView& states, const TensorView& angle,
                          const TensorView& amplitude) {
  ring_rnn::define_readout_forward<Double>(states, angle, amplitude);
}

void ring_readout_backward(const TensorView& states, const TensorView& dangle,
                           const TensorView& damplitude, const TensorView& dstates) {
  ring_rnn::define_readout_backward<Double>(states, dangle, damplitude, dstates);
}

}  // namespace annulus::reference
