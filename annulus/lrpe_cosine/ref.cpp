// The definition (ref.h) in double, its phases exact.
#include "annulus/lrpe_cosine/ref.h"

namespace annulus::reference {

using lrpe_cosine::Exact;

void lrpe_cosine_forward(const TensorView& x, const TensorView& theta, const TensorView& y,
                         const LrpeCosineOptions& options) {
  lrpe_cosine::define_forward<Exact>(x, theta, y, options);
}

void lrpe_cosine_backward(const TensorView& dy, const TensorView& x, const TensorView& theta,
                          const TensorView& dx, const TensorView& dtheta,
                          const LrpeCosineOptions& options) {
  lrpe_cosine::define_backward<Exact>(dy, x, theta, dx, dtheta, options);
}

void lrpe_rotate_forward(const TensorView& x, const TensorView& theta, const TensorView& y,
                         const LrpeRotateOptions& options) {
  lrpe_cosine::define_forward<Exact>(x, theta, y, options);
}

void lrpe_rotate_backward(const TensorView& dy, const TensorView& x, const TensorView& theta,
                          const TensorView& dx, const TensorView& dtheta,
                          const LrpeRotateOptions& options) {
  lrpe_cosine::define_backward<Exact>(dy, x, theta, dx, dtheta, options);
}

}  // namespace annulus::reference
