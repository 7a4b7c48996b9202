// What the installed package can do here, one encoded token, and an error caught by its type.
#include <cstdio>

#include "annulus/annulus.h"

int main() {
  std::printf("annulus %s, %s\n", annulus::build_info().version.c_str(),
              annulus::build_info().simd.c_str());
  const float x[] = {1, 2}, theta[] = {0.5F, 0.25F};
  float y[4];
  // The token stands at position 4: phases 2 and 1.
  const annulus::LrpeCosineOptions options{.shape = {1}, .offset = 4};
  annulus::Context context;
  const auto x_view = annulus::contiguous(x, {1, 1, 1, 2});
  const auto theta_view = annulus::contiguous(theta, {1, 2});
  annulus::lrpe_cosine_forward(x_view, theta_view, annulus::contiguous(y, {1, 1, 1, 4}), options,
                               context);
  std::printf("%.6f %.6f %.6f %.6f\n", static_cast<double>(y[0]), static_cast<double>(y[1]),
              static_cast<double>(y[2]), static_cast<double>(y[3]));
  try {
    annulus::lrpe_cosine_forward(x_view, theta_view, annulus::contiguous(y, {1, 1, 1, 3}), options,
                                 context);
  } catch (const annulus::InvalidArgument& error) {
    std::printf("%s\n", error.what());
    return 0;
  }
  return 1;
}
