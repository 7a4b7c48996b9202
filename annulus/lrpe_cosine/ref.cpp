// The definition (ref.h) in double, its phases exact.
#include "annulus/lrpe_cosine/ref.h"

#include <cmath>
#include <cstdint>

namespace annulus::reference {

namespace {

struct Double {
  using Number = double;
  struct Frequency {
    double theta;
    lrpe_cosine::Turn step;
  };
  static Frequency frequency(double theta) {
    return {theta, lrpe_cosine::turn_step(std::isfinite(theta) ? theta : 0)};
  }
  static lrpe_cosine::SinCos<double> turned(const Frequency& f, std::int64_t position) {
    if (!std::isfinite(f.theta)) return {f.theta - f.theta, f.theta - f.theta};
    lrpe_cosine::SinCos<double> r;
    lrpe_cosine::sincos_turn(lrpe_cosine::turn_at(f.step, position), r.sin, r.cos);
    return r;
  }
};

}  // namespace

void lrpe_cosine_forward(const TensorView& x, const TensorView& theta, const TensorView& y,
                         const LrpeCosineOptions& options) {
  lrpe_cosine::define_cosine_forward<Double>(x, theta, y, options);
}

void lrpe_cosine_backward(const TensorView& dy, const TensorView& x, const TensorView& theta,
                          const TensorView& dx, const TensorView& dtheta,
                          const LrpeCosineOptions& options) {
  lrpe_cosine::define_cosine_backward<Double>(dy, x, theta, dx, dtheta, options);
}

void lrpe_rotate_forward(const TensorView& x, const TensorView& theta, const TensorView& y,
                         const LrpeRotateOptions& options) {
  lrpe_cosine::define_rotate_forward<Double>(x, theta, y, options);
}

void lrpe_rotate_backward(const TensorView& dy, const TensorView& x, const TensorView& theta,
                          const TensorView& dx, const TensorView& dtheta,
                          const LrpeRotateOptions& options) {
  lrpe_cosine::define_rotate_backward<Double>(dy, x, theta, dx, dtheta, options);
}

}  // namespace annulus::reference
