// The naive program the numeric policy compares us with: the definition (ref.h) in f32 (f64 for f64
// tensors), with float(position) * theta and std::cos.
#include <cmath>
#include <cstdint>
#include <type_traits>

#include "annulus/lrpe_cosine/ref.h"
#include "annulus/lrpe_cosine/test/cases.h"

namespace annulus::testing::baseline {

namespace {

template <class C>
struct Naive {
  using Number = C;
  using Frequency = C;
  static C frequency(C theta) { return theta; }
  static lrpe_cosine::SinCos<C> turned(C theta, std::int64_t position) {
    const C phi = static_cast<C>(position) * theta;
    return {std::sin(phi), std::cos(phi)};
  }
};

template <class F>
void with_naive(DType dtype, F&& f) {
  visit_bool(dtype == DType::kF64, [&]<bool Double>() {
    f.template operator()<Naive<std::conditional_t<Double, double, float>>>();
  });
}

}  // namespace

void lrpe_cosine_forward(const TensorView& x, const TensorView& theta, const TensorView& y,
                         const LrpeCosineOptions& options) {
  with_naive(x.dtype,
             [&]<class A>() { lrpe_cosine::define_cosine_forward<A>(x, theta, y, options); });
}

void lrpe_cosine_backward(const TensorView& dy, const TensorView& x, const TensorView& theta,
                          const TensorView& dx, const TensorView& dtheta,
                          const LrpeCosineOptions& options) {
  with_naive(dy.dtype, [&]<class A>() {
    lrpe_cosine::define_cosine_backward<A>(dy, x, theta, dx, dtheta, options);
  });
}

void lrpe_rotate_forward(const TensorView& x, const TensorView& theta, const TensorView& y,
                         const LrpeRotateOptions& options) {
  with_naive(x.dtype,
             [&]<class A>() { lrpe_cosine::define_rotate_forward<A>(x, theta, y, options); });
}

void lrpe_rotate_backward(const TensorView& dy, const TensorView& x, const TensorView& theta,
                          const TensorView& dx, const TensorView& dtheta,
                          const LrpeRotateOptions& options) {
  with_naive(dy.dtype, [&]<class A>() {
    lrpe_cosine::define_rotate_backward<A>(dy, x, theta, dx, dtheta, options);
  });
}

}  // namespace annulus::testing::baseline
