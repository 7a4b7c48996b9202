// The population vector and its gradient on the CPU, in double: two dot products a state.

#include <cmath>

#include "annulus/cpu/parallel.h"
#include "annulus/ring_rnn/ring_rnn_cpu.h"

namespace annulus::ring::cpu {

namespace {

constexpr double kTurn = 6.283185307179586476925;

// cos and sin of the preferred angle of neuron i, with the reduction exact in integers: the four
// corners of the ring are exactly 0 and +-1.
void preferred(std::int64_t i, std::int64_t n, double& c, double& s) {
  const std::int64_t eighth = (8 * i) / n;          // 0..7
  const std::int64_t quarter = ((eighth + 1) / 2);  // nearest multiple of pi/2, 0..4
  const double rest =
      kTurn * static_cast<double>(4 * i - quarter * n) / (4.0 * static_cast<double>(n));
  const double rc = std::cos(rest);
  const double rs = std::sin(rest);
  switch (quarter % 4) {
    case 0:
      c = rc;
      s = rs;
      break;
    case 1:
      c = -rs;
      s = rc;
      break;
    case 2:
      c = -rc;
      s = -rs;
      break;
    default:
      c = rs;
      s = -rc;
      break;
  }
}

struct Vector {
  double x = 0, y = 0;
};

template <class T>
Vector population(const Strided<T, 3>& states, std::int64_t b, std::int64_t t) {
  Vector v;
  for (std::int64_t i = 0; i < states.size[2]; ++i) {
    double c = 0, s = 0;
    preferred(i, states.size[2], c, s);
    const auto r = static_cast<double>(static_cast<compute_t<T>>(states(b, t, i)));
    v.x += r * c;
    v.y += r * s;
  }
  return v;
}

}  // namespace

void readout_forward(const ReadoutPlan& plan, Context& context) {
  visit_floating(plan.states.dtype, [&]<class T>() {
    const auto states = as_strided<T, 3>(plan.states);
    const auto angle = as_strided<compute_t<T>, 2>(plan.angle);
    const auto amplitude = as_strided<compute_t<T>, 2>(plan.amplitude);
    annulus::cpu::parallel_for(plan.B * plan.T, context.threads, [&](std::int64_t row) {
      const std::int64_t b = row / plan.T;
      const std::int64_t t = row % plan.T;
      const Vector v = population(states, b, t);
      const bool none = v.x == 0 && v.y == 0;
      angle(b, t) = static_cast<compute_t<T>>(none ? 0.0 : std::atan2(v.y, v.x));
      amplitude(b, t) = static_cast<compute_t<T>>(std::sqrt(v.x * v.x + v.y * v.y));
    });
  });
}

void readout_backward(const ReadoutPlan& plan, Context& context) {
  visit_floating(plan.states.dtype, [&]<class T>() {
    const auto states = as_strided<T, 3>(plan.states);
    const auto dstates = as_strided<T, 3>(plan.dstates);
    annulus::cpu::parallel_for(plan.B * plan.T, context.threads, [&](std::int64_t row) {
      const std::int64_t b = row / plan.T;
      const std::int64_t t = row % plan.T;
      const auto gradient = [&](const TensorView& v) {
        return v.defined() ? read_element<double>(v, b * v.stride[0] + t * v.stride[1]) : 0.0;
      };
      const Vector v = population(states, b, t);
      const double square = v.x * v.x + v.y * v.y;
      double dx = 0, dy = 0;
      if (square != 0) {
        const double da = gradient(plan.dangle) / square;
        const double dm = gradient(plan.damplitude) / std::sqrt(square);
        dx = dm * v.x - da * v.y;
        dy = dm * v.y + da * v.x;
      }
      for (std::int64_t i = 0; i < plan.N; ++i) {
        double c = 0, s = 0;
        preferred(i, plan.N, c, s);
        dstates(b, t, i) = T(static_cast<compute_t<T>>(dx * c + dy * s));
      }
    });
  });
}

}  // namespace annulus::ring::cpu
